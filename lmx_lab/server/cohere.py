"""The route ``POST /v2/chat``: version 2 of Cohere's chat format.

A request is converted to one of the chat format, so that both formats have the same limits, tools and answers. A stream
consists of server-sent events, or of lines of JSON for clients that accept ``application/json`` only, such as LiteLLM.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from lmx_lab.errors import LabError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.openapi import event_stream
from lmx_lab.http.streaming import named_event
from lmx_lab.server.answers import AnswerRequest, AnswerWriter, respond
from lmx_lab.server.convert import FieldNames
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import INFERENCE_ERRORS
from lmx_lab.server.translate import generation_request
from lmx_lab.values.outputs import Delta, GenerationReport, merge_tool_calls
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.cohere import (
    CohereAnswer,
    CohereEvent,
    CohereRequest,
    CohereTokens,
    CohereUsage,
    FinishReason,
)
from lmx_lab.wire.errors import ErrorBody, ErrorDetail, validated

NAMES = FieldNames(
    {
        "response_format.json_schema.schema": "response_format.json_schema",
        "thinking_token_budget": "thinking.token_budget",
        "top_p": "p",
        "top_k": "k",
        "stop": "stop_sequences",
    }
)
"""Fields of Cohere's format, by the chat format's fields that errors name."""
FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}


def cohere_routes(service: InferenceService) -> APIRouter:
    """Return the router of ``/v2/chat``."""
    description = "An answer or, with `stream: true`, its named events. An error is sent as the event `message-end`"
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post(
        "/v2/chat",
        response_model=CohereAnswer,
        responses={200: event_stream(CohereEvent, ErrorBody, description=description), **INFERENCE_ERRORS},
    )
    async def chat(body: CohereRequest, request: Request) -> Response:
        """Answer a conversation in version 2 of Cohere's format, completely or with `stream: true` as named events."""
        with NAMES.in_errors():
            converted = await asyncio.to_thread(chat_request, body)
            prompt = generation_request(converted)
        wanted = AnswerRequest(
            prompts=[prompt],
            writer=lambda model, _: CohereWriter(model, as_lines=request.headers.get("accept") == "application/json"),
            stream=bool(body.stream),
            ignored=[*body.ignored(), *(name for name in converted.ignored() if name.startswith("tools."))],
            names=NAMES,
        )
        return await respond(service, request, wanted)

    return router


def chat_request(body: CohereRequest) -> ChatRequest:
    """Convert a request to the chat format.

    Raises:
        InvalidRequestError: the request exceeds a limit of the chat format.
    """
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": body.messages,
        "tools": body.functions() or None,
        "tool_choice": None if body.tool_choice is None else body.tool_choice.lower(),
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "stop": body.stop_sequences or None,
        "seed": body.seed,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "top_k": body.k,
        "top_p": body.p,
    }
    if (wanted := body.response_format) is not None and wanted.type == "json_object":
        schema = wanted.schema_ if wanted.json_schema is None else wanted.json_schema
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        fields["response_format"] = {"type": "json_object"} if schema is None else named
    if body.thinking is not None:
        is_off = body.thinking.type == "disabled"
        fields |= {"thinking": {"type": "disabled"}} if is_off else {}
        fields |= {"thinking_token_budget": None if is_off else body.thinking.token_budget}
    return validated(ChatRequest, {name: value for name, value in fields.items() if value is not None})


class CohereWriter(AnswerWriter):
    """Writes one answer in version 2 of Cohere's format."""

    def __init__(self, model: str, *, as_lines: bool) -> None:
        self._model = model
        self._as_lines = as_lines
        self.media_type = "application/x-ndjson" if as_lines else "text/event-stream"
        self._id = str(uuid.uuid4())
        self._parts = -1
        self._calls = -1
        self._open = ""
        """``thinking``, ``text`` or ``tool-call``: what has begun and not ended."""

    def whole(self, parts: Sequence[Sequence[tuple[Delta, GenerationReport]]]) -> str:
        [[(delta, report)]] = parts
        texts = (("thinking", delta.reasoning), ("text", delta.text))
        content = [{"type": kind, kind: text} for kind, text in texts if text]
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in merge_tool_calls(delta.tool_calls)
        ]
        message: dict[str, Any] = {"role": "assistant"}
        if content or not calls:
            message["content"] = content or [{"type": "text", "text": ""}]
        if calls:
            message["tool_calls"] = calls
        return CohereAnswer(
            id=self._id,
            model=self._model,
            finish_reason=_finish_reason(report),
            message=message,
            usage=_usage(report),
        ).model_dump_json()

    def begin(self, index: int, prompt_tokens: int) -> Iterator[str]:
        yield self._event("message-start", id=self._id, model=self._model, delta={"message": {"role": "assistant"}})

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        for kind, text in (("thinking", delta.reasoning), ("text", delta.text)):
            if text:
                yield from self._begin_part(kind)
                yield self._event("content-delta", index=self._parts, delta={"message": {"content": {kind: text}}})
        for call in delta.tool_calls:
            if call.name is not None:
                yield from self._end()
                self._open, self._calls = "tool-call", self._calls + 1
                function = {"name": call.name, "arguments": ""}
                started = {"id": call.id, "type": "function", "function": function}
                yield self._event("tool-call-start", index=self._calls, delta={"message": {"tool_calls": started}})
            if call.arguments:
                piece = {"function": {"arguments": call.arguments}}
                yield self._event("tool-call-delta", index=self._calls, delta={"message": {"tool_calls": piece}})

    def end(self, index: int, report: GenerationReport) -> Iterator[str]:
        if self._parts < 0 and self._calls < 0:
            yield from self._begin_part("text")
        yield from self._end()
        ended = {"usage": _usage(report).model_dump(), "finish_reason": _finish_reason(report)}
        yield self._event("message-end", id=self._id, delta=ended)

    def finish(self, reports: Sequence[Sequence[GenerationReport]]) -> Iterable[str]:
        return ()

    def error(self, error: LabError, detail: ErrorDetail) -> Iterator[str]:
        failed = {"finish_reason": "ERROR", "error": detail.message}
        yield self._event("message-end", delta=failed, error=detail.model_dump(), id=self._id)

    def keep_alive(self, status: str) -> str:
        return self._event("ping") if self._as_lines else super().keep_alive(status)

    def _begin_part(self, kind: str) -> Iterator[str]:
        """Begin a part of the content, unless one of this type is open."""
        if self._open == kind:
            return
        yield from self._end()
        self._parts, self._open = self._parts + 1, kind
        content = {"type": kind, kind: ""}
        yield self._event("content-start", index=self._parts, delta={"message": {"content": content}})

    def _event(self, kind: str, **fields: Any) -> str:
        data = to_json({"type": kind, **fields}).decode()
        return f"{data}\n" if self._as_lines else named_event(kind, data)

    def _end(self) -> Iterator[str]:
        """End what is open."""
        kind, self._open = self._open, ""
        if kind == "tool-call":
            yield self._event("tool-call-end", index=self._calls)
        elif kind:
            yield self._event("content-end", index=self._parts)


def _finish_reason(report: GenerationReport) -> FinishReason:
    return "STOP_SEQUENCE" if report.stop_sequence is not None else FINISH_REASONS[report.finish_reason]


def _usage(report: GenerationReport) -> CohereUsage:
    tokens = CohereTokens(input_tokens=report.prompt_tokens, output_tokens=report.output_tokens)
    return CohereUsage(billed_units=tokens, tokens=tokens, cached_tokens=report.cached_tokens)
