"""Events in words: what a row of the events panel says, to which group it belongs, and how bad it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lmx_lab.client.daemon_events import (
    ControlFrame,
    DaemonEvent,
    DaemonStartedEvent,
    DaemonStoppingEvent,
    McpStatusEvent,
    MessageDoneEvent,
    ModelStatusEvent,
    PermissionRequestEvent,
    PermissionResolvedEvent,
    ResetFrame,
    SessionCreatedEvent,
    SessionUpdatedEvent,
    SnapshotFrame,
    ToolEndEvent,
    ToolOutputEvent,
    ToolStartEvent,
    TurnDoneEvent,
    TurnErrorEvent,
    TurnProgressEvent,
    TurnQueuedEvent,
    TurnStartedEvent,
    UnknownEvent,
)
from lmx_lab.wire.sessions import SessionMessage, SessionRecord

Tone = Literal["", "good", "warn", "bad"]
MARKS = "marks"
"""The group of what is about the connection and not from the log; no filter hides it."""
GROUPS = ("turns", "text", "tools", "permissions", "sessions", "daemon", "other")
OF_TEXT = ("turn.token", "turn.thinking")
_BY_PREFIX = {
    "turn": "turns",
    "message": "turns",
    "tool": "tools",
    "permission": "permissions",
    "session": "sessions",
    "daemon": "daemon",
    "mcp": "daemon",
    "model": "daemon",
    "stream": MARKS,
    "connection": MARKS,
}
MISSING = {
    "pruned": "the daemon no longer keeps them",
    "ahead": "the daemon's log is older than what was read",
    "other-stream": "the daemon has another log now",
}
CHARACTERS = 2000
"""Of a row's words: that much of them can be searched."""


def group_of(kind: str) -> str:
    """One of ``GROUPS``, or ``MARKS``."""
    return "text" if kind in OF_TEXT else _BY_PREFIX.get(kind.partition(".")[0], "other")


def words_of(event: DaemonEvent | ControlFrame) -> str:
    """What the event says, in at most ``CHARACTERS`` characters; nothing of what is a piece of a text."""
    words = _WORDS.get(type(event))
    return words(event)[:CHARACTERS] if words is not None else ""


def tone_of(event: DaemonEvent) -> Tone:
    """How bad it is, or how good."""
    tone: Tone = ""
    match event:
        case TurnErrorEvent() | ResetFrame():
            tone = "bad"
        case ToolEndEvent():
            tone = "" if event.data.status == "ok" else "bad"
        case McpStatusEvent():
            tone = "bad" if event.data.error else ""
        case ModelStatusEvent():
            tone = "" if event.data.reachable else "bad"
        case PermissionRequestEvent() | SnapshotFrame() | DaemonStoppingEvent():
            tone = "warn"
        case PermissionResolvedEvent():
            tone = "good" if event.data.permission.decision == "allow" else "bad"
        case TurnDoneEvent():
            tone = "good" if event.data.stop_reason == "end" else "warn"
    return tone


def compact(value: object) -> str:
    """As JSON in one line."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def arguments_of(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={compact(value)}" for name, value in arguments.items())


def message_words(message: SessionMessage) -> str:
    calls = " ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
    return f"{message.role}: {' '.join(filter(None, (message.content, calls)))}"


def _ended(event: TurnDoneEvent) -> str:
    stats = event.stats
    cost = f"{stats.completion_tokens} tokens · {stats.tokens_per_second:.1f} tokens/s · {stats.elapsed_s:.1f} s"
    return f"{event.data.stop_reason} · {cost} · {event.data.text}"


def _resolved(event: PermissionResolvedEvent) -> str:
    it = event.data.permission
    return f"{it.tool}: {it.decision}, {it.scope or 'once'}, by {it.resolved_by}"


def _session(session: SessionRecord) -> str:
    return f"{session.title or session.session_id} · {session.model or 'any model'} · {session.status}"


def _tool_end(event: ToolEndEvent) -> str:
    it = event.data
    return f"{it.name}: {it.status} in {it.elapsed_s:.2f} s · {it.text}"


def _mcp(event: McpStatusEvent) -> str:
    it = event.data
    return " · ".join(filter(None, (f"{it.name}: {it.state}", f"{it.tools} tools", it.error)))


def _model(event: ModelStatusEvent) -> str:
    it = event.data
    return f"{it.model or 'no model'} at {it.url}" if it.reachable else f"{it.url} does not answer: {it.error}"


_WORDS: Mapping[type, Callable[[Any], str]] = {
    DaemonStartedEvent: lambda event: f"version {event.data.version}",
    DaemonStoppingEvent: lambda event: f"mode {event.data.mode}",
    SessionCreatedEvent: lambda event: _session(event.data.session),
    SessionUpdatedEvent: lambda event: _session(event.data.session),
    TurnQueuedEvent: lambda event: f"{message_words(event.data.message)} · {event.data.ahead} ahead of it",
    TurnStartedEvent: lambda event: f"model {event.data.model or 'of the server'}",
    TurnProgressEvent: lambda event: f"step {event.data.step} · {event.data.note}".removesuffix(" · "),
    MessageDoneEvent: lambda event: message_words(event.data.message),
    ToolStartEvent: lambda event: f"{event.data.name}({arguments_of(event.data.arguments)})",
    ToolOutputEvent: lambda event: event.data.text,
    ToolEndEvent: _tool_end,
    PermissionRequestEvent: lambda event: (
        f"{event.data.permission.tool}({arguments_of(event.data.permission.arguments)})"
    ),
    PermissionResolvedEvent: _resolved,
    TurnDoneEvent: _ended,
    TurnErrorEvent: lambda event: f"{event.data.error.code}: {event.data.error.message}",
    McpStatusEvent: _mcp,
    ModelStatusEvent: _model,
    ResetFrame: lambda event: f"events are missing here: {MISSING[event.data.reason]}; sessions as they are now follow",
    SnapshotFrame: lambda event: f"as it is now: {_session(event.data.session)}",
    UnknownEvent: lambda event: compact(event.data),
}
