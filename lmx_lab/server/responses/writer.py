"""Write a response in the Responses format: its body, or the events of its stream in their order.

The events are in the order in which openai-python and Codex CLI require them. Pure code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import to_json

from lmx_lab.errors import CallerError, ContextLengthError, LabError, QueueFullError
from lmx_lab.http.streaming import comment, named_event
from lmx_lab.server.answers import AnswerWriter
from lmx_lab.server.responses.convert import CallableTool, ConvertedRequest, custom_input
from lmx_lab.server.translate import chat_logprobs
from lmx_lab.values.outputs import Delta, GenerationReport, TokenLogprob
from lmx_lab.wire.base import new_id
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.responses import InputTokensDetails, OutputTokensDetails, ResponseError, ResponseStatus, ResponseUsage

ItemKind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
PREFIXES: Mapping[ItemKind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
"""Beginnings of the ids of items."""
ERROR_CODES: Mapping[str, str] = {
    ContextLengthError.code: ContextLengthError.code,
    QueueFullError.code: "rate_limit_exceeded",
    CallerError.code: "invalid_prompt",
}
"""Codes of failed responses that clients recognize, by the codes of the chat format; all others are server errors."""
DELTAS: Mapping[ItemKind, str] = {
    "reasoning": "response.reasoning_summary_text.delta",
    "message": "response.output_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
}
"""Events with a piece of an item."""


@dataclass(frozen=True, kw_only=True)
class PartEvents:
    """Events about the only part of an item, and the name of its index."""

    added: str
    done: str
    index: str


PARTS: Mapping[ItemKind, PartEvents] = {
    "reasoning": PartEvents(
        added="response.reasoning_summary_part.added",
        done="response.reasoning_summary_part.done",
        index="summary_index",
    ),
    "message": PartEvents(
        added="response.content_part.added", done="response.content_part.done", index="content_index"
    ),
}


@dataclass
class _Item:
    """An item of the output."""

    kind: ItemKind
    index: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Name and id of a call."""
    pieces: list[str] = field(default_factory=list)
    """Text, arguments or input so far."""
    arguments: list[str] = field(default_factory=list)
    """Arguments of a function that stands for a custom tool. Its input is known when they are complete."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    id: str = ""
    status: str = "in_progress"

    def __post_init__(self) -> None:
        self.id = new_id(PREFIXES[self.kind])

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def described(self) -> dict[str, Any]:
        """Return the item with its content so far."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status, **self.fields}
        match self.kind:
            case "reasoning":
                return item | {"summary": [self.part()] if self.pieces else []}
            case "message":
                is_empty = self.status == "in_progress" and not self.pieces
                return item | {"role": "assistant", "content": [] if is_empty else [self.part()]}
            case "function_call":
                return item | {"arguments": self.text}
            case "custom_tool_call":
                return item | {"input": self.text}

    def part(self) -> dict[str, Any]:
        """Return the only part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "summary_text", "text": self.text}
        logprobs = chat_logprobs(self.logprobs)
        return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": self.text}


class ResponseWriter(AnswerWriter):
    """Writes one response, as a stream or as a whole.

    Args:
        shared: The fields of the response that do not change while it is generated.
        request: The request in the chat format.
        save: Called at the end with this writer and the body of the response.
    """

    def __init__(
        self,
        shared: Mapping[str, Any],
        request: ConvertedRequest,
        *,
        model: str,
        save: Callable[[ResponseWriter, str], None] = lambda writer, body: None,
    ) -> None:
        self.id = new_id("resp")
        self.status: ResponseStatus = "in_progress"
        self._created = int(time.time())
        self._request = request
        self._save = save
        self._logprobs = bool(request.chat.logprobs)
        first = {"id": self.id, "object": "response", "created_at": self._created, "model": model}
        self._head = to_json({**first, **shared})[:-1].decode()
        self._items: list[_Item] = []
        self._open: _Item | None = None
        """The item that has begun and not ended."""
        self._events = 0
        self._usage: ResponseUsage | None = None
        self._error: ResponseError | None = None

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items so far."""
        return [item.described() for item in self._items]

    def body(self) -> str:
        """Return the response in its current state."""
        is_cut = self.status == "incomplete"
        changing = {
            "status": self.status,
            "completed_at": int(time.time()) if self.status in ("completed", "incomplete") else None,
            "output": self.output,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": self._usage,
        }
        return f"{self._head},{to_json(changing)[1:].decode()}"

    # Events

    def begin(self, index: int, prompt_tokens: int) -> Iterator[str]:
        yield self._response("response.created", self.body())
        yield self.keep_alive("")

    def keep_alive(self, status: str) -> str:
        """Return an event that shows that the response is still in progress, or a comment after its end."""
        return self._response("response.in_progress", self.body()) if self.status == "in_progress" else comment("")

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        if not self._request.generates:
            return
        if delta.reasoning:
            yield from self._begin("reasoning")
            yield self._piece(delta.reasoning)
        if delta.text:
            if (tool := self._request.text_is_input_of) is None:
                yield from self._begin("message")
            elif self._open is None or self._open.kind != "custom_tool_call":
                yield from self._begin("custom_tool_call", _call_fields(tool, new_id("call")))
            if self._logprobs and self._open is not None:
                self._open.logprobs += delta.logprobs
            yield self._piece(delta.text, delta.logprobs)
        for call in delta.tool_calls:
            if call.name is not None:
                called = self._request.tools.called(call.name)
                is_custom = called is not None and called.kind == "custom"
                named = {"call_id": call.id or "", "name": call.name}
                fields = named if called is None else _call_fields(called, call.id or "")
                yield from self._begin("custom_tool_call" if is_custom else "function_call", fields)
            if not call.arguments or self._open is None:
                continue
            if self._open.kind == "custom_tool_call":
                self._open.arguments.append(call.arguments)
            else:
                yield self._piece(call.arguments)

    def end(self, index: int, report: GenerationReport) -> Iterator[str]:
        if not self._items and self._request.generates:
            yield from self._begin("message")
        is_cut = report.finish_reason == "length" and self._request.generates
        self.status = "incomplete" if is_cut else "completed"
        yield from self._end_item(self.status)
        self._usage = _usage(report)

    def finish(self, reports: Sequence[Sequence[GenerationReport]]) -> Iterator[str]:
        yield self._last()

    def error(self, error: LabError, detail: ErrorDetail) -> Iterator[str]:
        self.status = "failed"
        self._abandon_item()
        self._error = ResponseError(code=ERROR_CODES.get(detail.code, "server_error"), message=detail.message)
        yield self._last()

    def whole(self, parts: Sequence[Sequence[tuple[Delta, GenerationReport]]]) -> str:
        [[(delta, report)]] = parts
        # The state of this object is used, and not the events.
        for _ in (*self.delta(0, delta), *self.end(0, report)):
            pass
        return self.save()

    def cancel(self) -> None:
        """End a response that was cancelled."""
        self.status = "cancelled"
        self._abandon_item()
        self.save()

    def save(self) -> str:
        """Save the response in its current state, and return its body."""
        body = self.body()
        self._save(self, body)
        return body

    def _last(self) -> str:
        """Save the response, and return the last event, which contains it."""
        return self._response(f"response.{self.status}", self.save())

    def _begin(self, kind: ItemKind, fields: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Begin an item, unless text or reasoning of this type is open."""
        if self._open is not None and self._open.kind == kind and fields is None:
            return
        yield from self._end_item("completed")
        self._open = item = _Item(kind, len(self._items), fields or {})
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=item.index, item=item.described())
        if (part := PARTS.get(kind)) is not None:
            yield self._event(part.added, **self._place(item), part=item.part())

    def _piece(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> str:
        """Return the event of a piece of the open item. It is written as text, because there is one for each token."""
        item = self._open
        assert item is not None
        item.pieces.append(text)
        kind = DELTAS[item.kind]
        shown = ""
        if item.kind == "message":
            shown = f',"logprobs":{to_json(chat_logprobs(logprobs) if self._logprobs else []).decode()}'
        part = PARTS.get(item.kind)
        place = f',"{part.index}":0' if part is not None else ""
        data = (
            f'{{"type":"{kind}","sequence_number":{self._number()},"item_id":"{item.id}",'
            f'"output_index":{item.index}{place},"delta":{to_json(text).decode()}{shown}}}'
        )
        return named_event(kind, data)

    def _end_item(self, status: str) -> Iterator[str]:
        """End the open item."""
        item = self._open
        if item is None:
            return
        if item.arguments:
            yield self._piece(custom_input("".join(item.arguments)))
        place, done = self._place(item), DELTAS[item.kind].removesuffix("delta") + "done"
        match item.kind:
            case "reasoning":
                yield self._event(done, **place, text=item.text)
            case "message":
                yield self._event(done, **place, text=item.text, logprobs=chat_logprobs(item.logprobs))
            case "function_call":
                yield self._event(done, **place, name=item.fields["name"], arguments=item.text)
            case "custom_tool_call":
                yield self._event(done, **place, input=item.text)
        if (part := PARTS.get(item.kind)) is not None:
            yield self._event(part.done, **place, part=item.part())
        item.status, self._open = status, None
        yield self._event("response.output_item.done", output_index=item.index, item=item.described())

    def _abandon_item(self) -> None:
        if self._open is not None:
            self._open.status, self._open = "incomplete", None

    @staticmethod
    def _place(item: _Item) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        part = PARTS.get(item.kind)
        return place if part is None else place | {part.index: 0}

    def _event(self, kind: str, **fields: Any) -> str:
        return named_event(kind, to_json({"type": kind, "sequence_number": self._number(), **fields}).decode())

    def _response(self, kind: str, body: str) -> str:
        return named_event(kind, f'{{"type":"{kind}","sequence_number":{self._number()},"response":{body}}}')

    def _number(self) -> int:
        self._events += 1
        return self._events - 1


def _call_fields(tool: CallableTool, call_id: str) -> dict[str, Any]:
    fields = {"call_id": call_id, "name": tool.name}
    return fields if tool.namespace is None else fields | {"namespace": tool.namespace}


def _usage(report: GenerationReport) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=report.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=report.cached_tokens),
        output_tokens=report.output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=report.reasoning_tokens),
        total_tokens=report.prompt_tokens + report.output_tokens,
    )
