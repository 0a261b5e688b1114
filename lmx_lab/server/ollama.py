"""Ollama's API for answers and vectors: ``/api/chat``, ``/api/generate``, ``/api/embed`` and ``/api/embeddings``.

A request is converted to one of the chat format, so that both formats have the same limits, tools and answers. A stream
consists of lines of JSON, and the last one has the counters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from lmx_lab.engine import EmbeddingRequest, Embeddings, GenerationRequest, InfillPrompt, ModelManager, TextPrompt
from lmx_lab.engine.lookup import CHAT, public_id
from lmx_lab.errors import InvalidRequestError, LabError, ModelNotFoundError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.errors import status_of
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import JSON_LINES, json_lines
from lmx_lab.http.streaming import while_connected
from lmx_lab.server.admin import check_admin
from lmx_lab.server.answers import AnswerRequest, AnswerWriter, json_response, respond
from lmx_lab.server.convert import FieldNames, call_arguments
from lmx_lab.server.embeddings import NUMBERS_PER_STEP, number_rows
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import OLLAMA_ERRORS
from lmx_lab.server.translate import chat_logprobs, generation_request, json_text
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec
from lmx_lab.values.outputs import Delta, GenerationReport, ToolCallDelta, merge_tool_calls
from lmx_lab.weights.files import in_thread
from lmx_lab.wire.base import ANY_MODEL, UNLIMITED
from lmx_lab.wire.chat import ChatRequest, OtherContent, TextContent
from lmx_lab.wire.errors import ErrorDetail, validated
from lmx_lab.wire.ollama import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaGenerationBody,
    OllamaMessage,
    OllamaOptions,
)

LATEST = ":latest"
"""The tag of a model whose name has none."""
HUB_PREFIXES = ("hf.co/", "huggingface.co/")
"""Prefixes of the names of models on the hub, which are removed."""
DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's defaults. Its repetition penalty is not among them, because it would also change greedy answers."""
OPTIONS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repeat_last_n")
"""Options that have the same name in the chat format."""
NAMES = FieldNames(
    {
        "continue_final_message": "messages",
        "response_format.json_schema.schema": "format",
        "response_format": "format",
        "reasoning_effort": "think",
        "chat_template_kwargs": "think",
        "messages.*.content.*": "messages.*.images",
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        **{name: f"options.{name}" for name in (*OPTIONS, "seed", "stop")},
    }
)
"""Fields of Ollama's format, by the chat format's fields that errors name."""
DESCRIPTION = "An answer or, unless `stream` is false, its parts as lines of JSON. An error is sent as the last line"


def ollama_routes(service: InferenceService) -> APIRouter:
    """Return the router of the routes for answers and vectors."""
    router = APIRouter(prefix="/api", tags=["ollama"], route_class=StrictRoute)

    @router.post(
        "/chat",
        response_model=OllamaChatAnswer,
        responses={200: json_lines(OllamaChatAnswer, OllamaError, description=DESCRIPTION), **OLLAMA_ERRORS},
    )
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation in Ollama's format. Without messages, load the model, or unload it if `keep_alive` is
        0.
        """
        if not body.has_prompt:
            return await _load_or_unload(service.manager, body, request)
        return await _answer(service, body, request)

    @router.post(
        "/generate",
        response_model=OllamaGenerateAnswer,
        responses={200: json_lines(OllamaGenerateAnswer, OllamaError, description=DESCRIPTION), **OLLAMA_ERRORS},
    )
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt in Ollama's format. The chat template is used unless `raw` or `suffix` is given. Without a
        prompt, load the model, or unload it if `keep_alive` is 0.
        """
        if not body.has_prompt:
            return await _load_or_unload(service.manager, body, request)
        return await _answer(service, body, request)

    @router.post("/embed", response_model=OllamaEmbedAnswer, responses=OLLAMA_ERRORS)
    async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
        """Return a vector for each text in Ollama's format."""
        texts = tuple([body.input] if isinstance(body.input, str) else body.input)
        wanted = EmbeddingRequest(
            inputs=texts,
            model=requested_model(body.model),
            dimensions=body.dimensions,
            truncate=body.truncate is not False,
            caller=service.caller_of(request),
        )
        computed = await while_connected(request, service.embed(wanted))
        model = listed_name(public_id(computed.report.model, local=wanted.caller.local))
        if computed.vectors.size > NUMBERS_PER_STEP:
            return json_response(await asyncio.to_thread(_embed_answer, computed, model), body.ignored())
        return json_response(_embed_answer(computed, model), body.ignored())

    @router.post("/embeddings", response_model=OllamaEmbeddingsAnswer, responses=OLLAMA_ERRORS)
    async def embeddings(body: OllamaEmbeddingsRequest, request: Request) -> Response:
        """Return the vector of one text in Ollama's older format."""
        wanted = EmbeddingRequest(
            inputs=(body.prompt,),
            model=requested_model(body.model),
            truncate=True,
            caller=service.caller_of(request),
        )
        [row] = number_rows((await while_connected(request, service.embed(wanted))).vectors)
        return json_response(b'{"embedding":%b}' % row, body.ignored())

    return router


async def _answer(
    service: InferenceService, body: OllamaChatRequest | OllamaGenerateRequest, request: Request
) -> Response:
    with NAMES.in_errors():
        converted = await asyncio.to_thread(engine_request, body)
    logprobs, writer = bool(body.logprobs), ChatWriter if isinstance(body, OllamaChatRequest) else GenerateWriter
    wanted = AnswerRequest(
        prompts=[converted],
        writer=lambda model, _: writer(listed_name(model), logprobs=logprobs),
        stream=body.stream is not False,
        ignored=body.ignored(),
        names=NAMES,
    )
    return await respond(service, request, wanted)


async def _load_or_unload(manager: ModelManager, body: OllamaGenerationBody, request: Request) -> Response:
    """Load the model of a request without a prompt, or unload it."""
    name, local = known_model(body.model, manager.settings), is_local(request.scope)
    resident = manager.model_for(name, CHAT, local=local)
    if body.unloads or resident is None:
        check_admin(manager, local=local)
    if body.unloads and resident is not None:
        await manager.unload(name, local=local)
    elif body.unloads and name is not None and not manager.settings.any_model:
        # As in Ollama, an unknown name is an error even if there is nothing to unload.
        await in_thread(lambda: manager.catalog.resolve(name, local=False))
    elif not body.unloads and resident is None:
        # Treated like a caller on another machine, so that the name can be neither a path nor a model to download.
        try:
            await while_connected(
                request, manager.load(LoadSpec(model=name or ANY_MODEL, ttl_s=body.ttl_s), local=False)
            )
        except ModelNotFoundError:
            # With this setting, the loaded model answers requests for unknown models.
            if not manager.settings.any_model or manager.model_for(None, CHAT) is None:
                raise
    elif resident is not None and body.ttl_s is not None and (local or manager.settings.lan_admin):
        # Other callers may not change this, but get the same answer, because the model is loaded.
        await manager.keep(resident.entry.id, ttl_s=body.ttl_s)
    shared: dict[str, Any] = {
        "model": body.model,
        "created_at": now(),
        "done": True,
        "done_reason": "unload" if body.unloads else "load",
    }
    is_chat = isinstance(body, OllamaChatRequest)
    content = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return json_response(to_json(shared | content), body.ignored())


# Names


def requested_model(name: str) -> str | None:
    """Return the model's id for a name in Ollama's form; None for any model."""
    for prefix in HUB_PREFIXES:
        name = name.removeprefix(prefix)
    name = name.removesuffix(LATEST)
    return None if name in ("", ANY_MODEL) else name


def known_model(name: str, settings: Settings) -> str | None:
    """Return the id that a request means, also by a name in ``Settings.model_aliases``; None for any model."""
    id_ = requested_model(name)
    return None if id_ is None else settings.ids_by_alias.get(id_, id_)


def listed_name(model: str) -> str:
    """Return the name of a model in Ollama's form, which always has a tag."""
    return model if ":" in model else f"{model}{LATEST}"


# Requests


def engine_request(body: OllamaChatRequest | OllamaGenerateRequest) -> GenerationRequest:
    """Convert a request to the engine's request.

    Raises:
        InvalidRequestError: fields do not fit together, or the request is not valid in the chat format.
    """
    if isinstance(body, OllamaChatRequest):
        functions = [tool.function for tool in body.tools or ()]
        tools = [
            {
                "type": "function",
                "function": {"name": each.name, "description": each.description, "parameters": each.parameters},
            }
            for each in functions
        ]
        last = body.messages[-1]
        return _chat_request(
            body,
            messages=[_chat_message(message) for message in body.messages],
            tools=tools or None,
            continue_final_message=last.role == "assistant" and not last.tool_calls,
        )
    system = [{"role": "system", "content": body.system}] if body.system else []
    request = _chat_request(body, messages=[*system, {"role": "user", "content": body.prompt or ""}])
    if not body.raw and not body.suffix:
        return request
    if body.system:
        raise InvalidRequestError(
            "system: has no effect with raw or suffix, which use no chat template; leave one of them out",
            param="system",
        )
    prompt = body.prompt or ""
    is_infill = bool(body.suffix)
    return replace(
        request, prompt=InfillPrompt(prefix=prompt, suffix=body.suffix or "") if is_infill else TextPrompt(text=prompt)
    )


def _chat_request(body: OllamaGenerationBody, **fields: Any) -> GenerationRequest:
    options = body.options or OllamaOptions()
    limit = options.num_predict
    given = {
        **{name: getattr(options, name) for name in OPTIONS},
        "max_tokens": UNLIMITED if limit is not None and limit <= 0 else limit,
        "repetition_penalty": options.repeat_penalty,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop or None,
    }
    fields |= {"model": requested_model(body.model) or ANY_MODEL, **DEFAULTS}
    fields |= {name: value for name, value in given.items() if value is not None}
    if body.think is True:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    elif body.think is not None:
        fields["reasoning_effort"] = body.think or "none"
    if body.format is not None:
        schema = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
        fields["response_format"] = {"type": "json_object"} if body.format == "json" else schema
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return generation_request(validated(ChatRequest, fields))


def _chat_message(message: OllamaMessage) -> dict[str, Any]:
    content: Any = message.content or ""
    if message.images:
        parts = [TextContent(type="text", text=content)] if isinstance(content, str) else content
        content = [*parts, *[OtherContent(type="image") for _ in message.images]]
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "tool":
        fields |= {"tool_call_id": message.tool_call_id, "name": message.tool_name}
    elif message.tool_calls:
        fields["tool_calls"] = message.tool_calls
    if message.thinking and message.role == "assistant":
        fields["reasoning_content"] = message.thinking
    return fields


# Answers


def ollama_error(detail: ErrorDetail, status: int) -> OllamaError:
    """Convert an error to the form of Ollama's API."""
    return OllamaError(error=detail.message, code=detail.code, request_id=detail.request_id)


def now() -> str:
    """Return the time as RFC 3339 writes it."""
    return datetime.now(UTC).isoformat()


class ChatWriter(AnswerWriter):
    """Writes one answer of ``/api/chat``. Each line of a stream is a JSON object.

    Args:
        model: Name of the model in Ollama's form.
        logprobs: Whether the request asks for log-probabilities.
    """

    media_type = JSON_LINES

    def __init__(self, model: str, *, logprobs: bool) -> None:
        self._head = f'{{"model":{json_text(model)},"created_at":"'
        self._logprobs = logprobs
        self._calls: list[ToolCallDelta] = []
        """Parts of tool calls that have not ended. Each call is written as a whole."""

    def whole(self, parts: Sequence[Sequence[tuple[Delta, GenerationReport]]]) -> str:
        [[(delta, report)]] = parts
        calls = merge_tool_calls(delta.tool_calls)
        return self._line(delta, calls, end=_counters(report))

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        ended: tuple[ToolCallDelta, ...] = ()
        for call in delta.tool_calls:
            if call.name is not None:
                ended += self._end_calls()
            self._calls.append(call)
        if delta.text or delta.reasoning or ended or (self._logprobs and delta.logprobs):
            yield self._line(delta, ended) + "\n"

    def end(self, index: int, report: GenerationReport) -> Iterator[str]:
        if calls := self._end_calls():
            yield self._line(NOTHING, calls) + "\n"
        yield self._line(NOTHING, (), end=_counters(report)) + "\n"

    def error(self, error: LabError, detail: ErrorDetail) -> Iterator[str]:
        yield ollama_error(detail, status_of(error)).model_dump_json() + "\n"

    def keep_alive(self, status: str) -> str:
        # Clients parse every line, so it must be a part of an answer.
        return self._line(NOTHING, ()) + "\n"

    def _end_calls(self) -> tuple[ToolCallDelta, ...]:
        calls, self._calls = merge_tool_calls(self._calls), []
        return calls

    def _line(self, delta: Delta, calls: Sequence[ToolCallDelta], end: str = '"done":false') -> str:
        has_logprobs = self._logprobs and delta.logprobs
        logprobs = f'"logprobs":{json_text(chat_logprobs(delta.logprobs))},' if has_logprobs else ""
        return f'{self._head}{now()}",{self._content(delta, calls)},{logprobs}{end}}}'

    def _content(self, delta: Delta, calls: Sequence[ToolCallDelta]) -> str:
        thinking = f',"thinking":{json_text(delta.reasoning)}' if delta.reasoning else ""
        called = [
            {
                "id": call.id or "",
                "function": {"index": call.index, "name": call.name or "", "arguments": call_arguments(call)},
            }
            for call in calls
        ]
        written = f',"tool_calls":{json_text(called)}' if calls else ""
        return f'"message":{{"role":"assistant","content":{json_text(delta.text)}{thinking}{written}}}'


class GenerateWriter(ChatWriter):
    """Writes one answer of ``/api/generate``, which has no tool calls."""

    def _content(self, delta: Delta, calls: Sequence[ToolCallDelta]) -> str:
        thinking = f',"thinking":{json_text(delta.reasoning)}' if delta.reasoning else ""
        return f'"response":{json_text(delta.text)}{thinking}'


NOTHING = Delta(text="", tokens=0)


def _counters(report: GenerationReport) -> str:
    """Return the last members of an answer."""
    ended = {
        "done": True,
        "done_reason": "length" if report.finish_reason == "length" else "stop",
        "total_duration": _nanoseconds(report.total_s),
        "load_duration": _nanoseconds(report.queue_s),
        "prompt_eval_count": report.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(report.prefill_s),
        "eval_count": report.output_tokens,
        "eval_duration": _nanoseconds(report.decode_s),
    }
    return json_text(ended)[1:-1]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _embed_answer(computed: Embeddings, model: str) -> bytes:
    report = computed.report
    counters = {
        "model": model,
        "total_duration": _nanoseconds(report.total_s),
        "load_duration": _nanoseconds(report.queue_s),
        "prompt_eval_count": report.tokens,
    }
    rows = b",".join(number_rows(computed.vectors))
    return b'%b,"embeddings":[%b]}' % (to_json(counters)[:-1], rows)
