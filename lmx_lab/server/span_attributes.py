"""Describe requests and answers by the attributes of OpenTelemetry's GenAI conventions.

The conventions are in development (github.com/open-telemetry/semantic-conventions-genai), so the SDK has no stable
constants for the names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.util.types import AttributeValue

from lmx_lab.engine import ChatPrompt, EmbeddingRequest, GenerationRequest, InfillPrompt, TextPrompt
from lmx_lab.engine.model_lookup import public_id
from lmx_lab.http.guard import Scope
from lmx_lab.server.generation import RequestEnd
from lmx_lab.values.generation import GenerationReport, merge_deltas

PROVIDER = "lmx-lab"
MODEL_CHARACTERS = 200
"""Maximum length of a model name in a request."""
CONTENT_CHARACTERS = 16_384
"""Maximum number of characters of the messages in one attribute."""
OPERATIONS = {"embedding": "embeddings", "rerank": "rerank"}
"""Values of ``gen_ai.operation.name`` by kind, for requests that are not generations."""
TEXTS = ("content", "response", "arguments")
"""Fields of a message part that contain text."""
Attributes = dict[str, AttributeValue]


def call_attributes(end: RequestEnd) -> Attributes:
    """Return the attributes that a sampler can use to decide whether a request is exported."""
    attributes: Attributes = {"gen_ai.operation.name": operation_name(end), "gen_ai.provider.name": PROVIDER}
    if end.request is not None and end.request.model is not None:
        attributes["gen_ai.request.model"] = public_id(end.request.model, local=False)[:MODEL_CHARACTERS]
    return attributes


def operation_name(end: RequestEnd) -> str:
    """Return the value of ``gen_ai.operation.name``."""
    is_chat = not isinstance(end.request, GenerationRequest) or isinstance(end.request.prompt, ChatPrompt)
    return OPERATIONS.get(end.kind, "chat" if is_chat else "text_completion")


def http_attributes(scope: Scope, status: int | None) -> Attributes:
    """Return the HTTP attributes of a request over HTTP or a WebSocket. The status is None if there was no response."""
    attributes: Attributes = {"url.path": scope["path"]}
    if scope.get("method"):
        attributes["http.request.method"] = scope["method"]
    if status is not None:
        attributes["http.response.status_code"] = status
    address, port = scope.get("server") or (None, None)
    if address is not None:
        attributes["server.address"] = address
        if port is not None:
            attributes["server.port"] = port
    return attributes


def request_attributes(end: RequestEnd) -> Attributes:
    """Return the parameters of a request."""
    request = end.request
    if isinstance(request, EmbeddingRequest) and request.dimensions is not None:
        return {"gen_ai.embeddings.dimension.count": request.dimensions}
    if not isinstance(request, GenerationRequest):
        return {}
    sampling = request.sampling
    attributes: Attributes = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    # OTLP integers have 64 bits.
    if sampling.seed is not None and -(2**63) <= sampling.seed < 2**63:
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes


def answer_attributes(ends: Sequence[RequestEnd]) -> Attributes:
    """Return the token counts and times of all answers to a request. A prompt is computed once, so it counts once."""
    first = ends[0]
    attributes: Attributes = {}
    if first.request_id:
        attributes["gen_ai.response.id"] = first.request_id
    if first.model:
        attributes["gen_ai.response.model"] = public_id(first.model, local=False)
    prompts: dict[int, list[RequestEnd]] = {}
    for end in ends:
        prompts.setdefault(id(end.request), []).append(end)
    attributes["gen_ai.usage.input_tokens"] = sum(group[0].event().prompt_tokens for group in prompts.values())
    if first.kind != "chat":
        return attributes
    if len(prompts) == 1 and len(ends) > 1:
        attributes["gen_ai.request.choice.count"] = len(ends)
    attributes["gen_ai.response.finish_reasons"] = [end.outcome for end in ends]
    attributes["gen_ai.usage.output_tokens"] = sum(end.event().completion_tokens for end in ends)
    reports = [end.report for end in ends if isinstance(end.report, GenerationReport)]
    if reports:
        # All choices except the first one read the whole prompt from the cache.
        cached = sum(min(map(_cached_tokens, group)) for group in prompts.values())
        attributes["gen_ai.usage.cache_read.input_tokens"] = cached
        if reasoning := sum(report.reasoning_tokens for report in reports):
            attributes["gen_ai.usage.reasoning.output_tokens"] = reasoning
    if any(report.output_tokens for report in reports):
        first_token_s = min(report.ttft_s for report in reports if report.output_tokens)
        attributes["gen_ai.response.time_to_first_chunk"] = first_token_s
    return attributes


def _cached_tokens(end: RequestEnd) -> int:
    return end.report.cached_tokens if isinstance(end.report, GenerationReport) else 0


# Texts


def content_attributes(ends: Sequence[RequestEnd]) -> Attributes:
    """Return the prompt and the answers as JSON in the form of the GenAI conventions."""
    first = ends[0]
    attributes: Attributes = {}
    if isinstance(first.request, GenerationRequest) and (messages := _input_messages(first.request)):
        attributes["gen_ai.input.messages"] = _to_json(messages)
    if first.kind == "chat":
        attributes["gen_ai.output.messages"] = _to_json([_output_message(end) for end in ends])
    return attributes


def _input_messages(request: GenerationRequest) -> list[dict[str, Any]]:
    """Return the messages of a prompt; an empty list for token ids, which have no text."""
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt):
        return [_input_message(message) for message in prompt.messages]
    if isinstance(prompt, TextPrompt):
        return [_message("user", [_text_part(prompt.text)])]
    if isinstance(prompt, InfillPrompt):
        return [_message("user", [_text_part(prompt.prefix), _text_part(prompt.suffix)])]
    return []


def _input_message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = str(message.get("role")), message.get("content")
    parts = [content] if isinstance(content, str) else content or []
    texts = [part if isinstance(part, str) else str(part.get("text", "")) for part in parts]
    if role == "tool":
        response = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": "".join(texts)}
        return _message(role, [response])
    calls = [(call.get("id"), call.get("function") or {}) for call in message.get("tool_calls") or []]
    called = [_call_part(id_, it.get("name"), it.get("arguments")) for id_, it in calls]
    return _message(role, [*(_text_part(text) for text in texts if text), *called])


def _output_message(end: RequestEnd) -> dict[str, Any]:
    answer = merge_deltas(end.deltas)
    parts = [{"type": "reasoning", "content": answer.reasoning}] if answer.reasoning else []
    if answer.text:
        parts.append(_text_part(answer.text))
    parts += [_call_part(call.id, call.name, call.arguments) for call in answer.tool_calls]
    return _message("assistant", parts) | {"finish_reason": end.outcome}


def _message(role: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": role, "parts": parts}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _call_part(id_: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_call", "id": id_, "name": name, "arguments": arguments}


def _to_json(messages: Sequence[dict[str, Any]]) -> str:
    """Return messages as JSON. If they are too long, only the last ones are kept, the first of which is truncated."""
    left, kept = CONTENT_CHARACTERS, []
    for message in reversed(messages):
        text = json.dumps(message, ensure_ascii=False, default=str)
        if len(text) > left:
            kept.append(json.dumps(_shortened(message, left), ensure_ascii=False, default=str))
            break
        kept.append(text)
        left -= len(text)
    # A lone surrogate cannot be encoded.
    return f"[{', '.join(reversed(kept))}]".encode(errors="replace").decode()


def _shortened(message: dict[str, Any], most: int) -> dict[str, Any]:
    """Return a message whose texts are truncated to ``most`` characters in total."""
    parts = []
    for part in message["parts"]:
        texts = {
            key: part[key] if isinstance(part[key], str) else json.dumps(part[key]) for key in TEXTS if key in part
        }
        for key, text in texts.items():
            texts[key] = text if len(text) <= most else f"{text[:most]}…"
            most = max(0, most - len(text))
        parts.append(part | texts)
    return message | {"parts": parts}
