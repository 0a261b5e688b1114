"""Build the result of a turn from its events or from its record."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass

import pydantic_core
from pydantic import JsonValue, TypeAdapter, ValidationError

from lmx_lab.errors import ERROR_CLASSES, LabError, TurnError
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.events import (
    DaemonEvent,
    MessageDoneEvent,
    ToolEnd,
    ToolEndEvent,
    ToolStartEvent,
    TurnDoneEvent,
    TurnErrorEvent,
    TurnThinkingEvent,
)
from lmx_lab.wire.sessions import StopReason, ToolStatus, TurnRecord, TurnStats

Arguments = dict[str, JsonValue]
_ARGUMENTS: TypeAdapter[Arguments] = TypeAdapter(Arguments)


SHOWN_CHARACTERS = 500
"""Maximum number of characters of a tool's result in the display of a call."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TurnToolCall:
    """A tool call of the turn with its result."""

    call_id: str
    name: str
    arguments: Arguments | None
    """The parsed arguments; None if the model has not written valid JSON."""
    status: ToolStatus
    text: str
    """The result that was given to the model."""
    elapsed_s: float

    def __repr__(self) -> str:
        arguments = "invalid arguments" if self.arguments is None else json.dumps(self.arguments, ensure_ascii=False)
        text = self.text if len(self.text) <= SHOWN_CHARACTERS else f"{self.text[:SHOWN_CHARACTERS]}…"
        return f"→ {self.name}({arguments}) {self.status} in {self.elapsed_s:.2f} s: {text}"


@dataclass(frozen=True, kw_only=True, repr=False)
class TurnResult:
    """The result of a turn that has completed or was cancelled.

    Thoughts and tool calls are taken from the turn's events, and are missing if the events are no longer available.
    """

    turn_id: str
    session_id: str
    text: str
    """The text of the last message. It may be incomplete if the turn was cancelled."""
    thinking: str
    """The thoughts of the last message."""
    stop_reason: StopReason
    stats: TurnStats | None
    """None if the turn was cancelled before it started."""
    tool_calls: tuple[TurnToolCall, ...] = ()
    """The tool calls, in the order in which they ended."""
    reconnects: int = 0
    """How often the stream of events was reconnected during the turn."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        cost = f" · {self.stats.tokens} tokens, {self.stats.elapsed_s:.1f} s" if self.stats is not None else ""
        return "\n\n".join([*map(repr, self.tool_calls), self.text, f"turn {self.turn_id} · {self.stop_reason}{cost}"])

    def _repr_html_(self) -> str:
        # Notebooks break lines of plain text within words; this style breaks them between words.
        return f'<div style="white-space: pre-wrap; word-break: normal">{html.escape(repr(self))}</div>'


class TurnAccumulator:
    """Accumulates the result of a turn from its events."""

    def __init__(self, session_id: str, turn_id: str) -> None:
        self._session_id = session_id
        self._turn_id = turn_id
        self._thinking: tuple[str, str] = ("", "")
        """The id of the current message, and its thoughts."""
        self._arguments: dict[str, Arguments | None] = {}
        self._calls: list[TurnToolCall] = []

    def add(self, event: DaemonEvent) -> None:
        """Add an event of the turn."""
        match event:
            case TurnThinkingEvent():
                message_id, before = self._thinking
                is_same = message_id == event.data.message_id
                self._thinking = (event.data.message_id, (before if is_same else "") + event.data.text)
            case MessageDoneEvent() if event.data.message.role == "assistant":
                message = event.data.message
                self._thinking = (message.message_id or "", message.reasoning_content or "")
                self._arguments |= {call.call_id: _parse_arguments(call.arguments) for call in message.tool_calls}
            case ToolStartEvent():
                self._arguments[event.data.call_id] = event.data.arguments
            case ToolEndEvent():
                self._calls.append(_tool_call(event.data, self._arguments.get(event.data.call_id)))

    def result(self, end: TurnDoneEvent | TurnErrorEvent | TurnRecord, *, reconnects: int) -> TurnResult:
        """Return the result.

        Args:
            end: The turn's last event, or its record.
            reconnects: How often the stream of events was reconnected.

        Raises:
            LabError: the turn has failed.
        """
        if isinstance(end, TurnErrorEvent):
            raise turn_error(self._turn_id, end.data.error)
        if isinstance(end, TurnRecord) and end.error is not None:
            raise turn_error(self._turn_id, end.error)
        outcome = end if isinstance(end, TurnRecord) else end.data
        return TurnResult(
            turn_id=self._turn_id,
            session_id=self._session_id,
            text=outcome.text,
            thinking=self._thinking[1],
            stop_reason=outcome.stop_reason or "end",
            stats=outcome.stats,
            tool_calls=tuple(self._calls),
            reconnects=reconnects,
        )


def _tool_call(end: ToolEnd, arguments: Arguments | None) -> TurnToolCall:
    return TurnToolCall(
        call_id=end.call_id,
        name=end.name,
        arguments=arguments,
        status=end.status,
        text=end.text,
        elapsed_s=end.elapsed_s,
    )


def turn_error(turn_id: str, detail: ErrorDetail) -> LabError:
    """Return the error of a failed turn, of the class for its code."""
    kind = ERROR_CLASSES.get(detail.code, TurnError)
    code = "" if detail.code in ERROR_CLASSES else f" ({detail.code:.80})"
    return kind(f"turn {turn_id}: {detail.message}{code}", param=detail.param)


def _parse_arguments(text: str) -> Arguments | None:
    try:
        return _ARGUMENTS.validate_python(pydantic_core.from_json(text or "{}"))
    except (ValueError, ValidationError):
        return None
