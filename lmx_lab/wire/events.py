"""The daemon's events: envelope, control frames, and one tagged union, with the text that people see for each event.

Every event has the same envelope: ``event`` is the tag, ``seq`` the cursor, ``data`` the content. The event viewer, the
command line and the clients all use these classes, so a new event is added here, where it is emitted, and in
``docs/daemon.md``. A client ignores kinds and fields that it does not know.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, JsonValue, TypeAdapter, ValidationError

from lmx_lab.errors import counted
from lmx_lab.wire.daemon import Upstream
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.mcp import ErrorKind, ServerState
from lmx_lab.wire.sessions import (
    PermissionRecord,
    SessionMessage,
    SessionRecord,
    SessionSnapshot,
    StopReason,
    ToolStatus,
    TurnStats,
)

Tone = Literal["", "good", "warn", "bad"]
"""How an event is emphasized when it is shown."""
MISSING = {
    "pruned": "the daemon no longer keeps them",
    "ahead": "the daemon's log is older than what was read",
    "other-stream": "the daemon has another log now",
}
"""Why events are missing, by the reason of a reset."""
Topic = Literal["turns", "text", "tools", "permissions", "sessions", "daemon", "stream", "other"]
"""Groups of events for filters. ``stream`` is about the connection and is not in the log."""
TOPICS: dict[str, Topic] = {
    "turn.token": "text",
    "turn.thinking": "text",
    "turn": "turns",
    "message": "turns",
    "tool": "tools",
    "permission": "permissions",
    "session": "sessions",
    "daemon": "daemon",
    "mcp": "daemon",
    "model": "daemon",
    "stream": "stream",
}
"""The topic by the event's name, or by the part of the name before the dot."""


class Envelope(BaseModel):
    """Any event, with its data as sent."""

    event: str
    seq: int | None
    """The cursor after this event; null for control frames (``stream.…``), which do not change the cursor."""
    at: str
    """Time at which the event was written to the log, or at which a control frame was sent."""
    stream_id: str
    """Id of the daemon's database. A cursor is valid only there."""
    session_id: str | None = None
    turn_id: str | None = None
    data: dict[str, Any]
    stats: TurnStats | None = None
    """Statistics of the turn, in ``turn.done`` and ``turn.error`` only."""


class EventPage(BaseModel):
    """The answer to a poll for events."""

    events: list[Envelope]
    cursor: int
    """Value of ``after`` for the next poll."""
    more: bool
    """Whether there are more events at the moment."""


class BaseEvent(BaseModel, ABC):
    """The common fields of all events and control frames."""

    model_config = ConfigDict(frozen=True)

    at: str
    """Time at which the event was written to the log, or at which a control frame was sent."""
    stream_id: str
    """Id of the daemon's database. A cursor is valid only there."""
    session_id: str | None = None
    turn_id: str | None = None

    @abstractmethod
    def display_text(self) -> str:
        """Return the event's content as text for display. Output of models and tools is not escaped."""

    @property
    def display_tone(self) -> Tone:
        """How the event is emphasized when it is shown."""
        return ""


class BaseControlFrame(BaseEvent):
    """A message about one connection. It does not change the cursor."""

    seq: None = None


# Control frames


class Hello(BaseModel):
    """The first frame of a connection."""

    daemon_id: str
    cursor: int
    """The cursor after which the events follow."""
    latest_seq: int
    heartbeat_s: float


class HelloFrame(BaseControlFrame):
    event: Literal["stream.hello"]
    data: Hello

    def display_text(self) -> str:
        return f"events after {self.data.cursor}"


class Synced(BaseModel):
    """All stored events have been sent; the following ones are live."""

    cursor: int


class SyncedFrame(BaseControlFrame):
    event: Literal["stream.synced"]
    data: Synced

    def display_text(self) -> str:
        return f"live after {self.data.cursor}"


class StreamHeartbeat(BaseModel):
    cursor: int
    """Every event up to this one was sent or does not match the filter."""


class HeartbeatFrame(BaseControlFrame):
    event: Literal["stream.heartbeat"]
    data: StreamHeartbeat

    def display_text(self) -> str:
        return f"everything up to {self.data.cursor} was sent"


class Reset(BaseModel):
    """The cursor cannot be resumed. A ``stream.snapshot`` of each session that matches the filter follows, then
    ``stream.synced``, then the events after ``cursor``. A session's snapshot includes its events up to the snapshot's
    own cursor."""

    reason: Literal["pruned", "ahead", "other-stream"]
    cursor: int
    oldest_seq: int
    latest_seq: int


class ResetFrame(BaseControlFrame):
    """Events are missing here because the cursor could not be resumed. A snapshot of each session follows."""

    event: Literal["stream.reset"]
    data: Reset

    def display_text(self) -> str:
        missing = MISSING[self.data.reason]
        return f"events are missing here: {missing}; sessions as they are now follow"

    @property
    def display_tone(self) -> Tone:
        return "bad"


class StreamSnapshot(BaseModel):
    session: SessionSnapshot


class SnapshotFrame(BaseControlFrame):
    """The current state of a session, in place of events that are no longer available."""

    event: Literal["stream.snapshot"]
    data: StreamSnapshot

    def display_text(self) -> str:
        return f"as it is now: {session_text(self.data.session)}"

    @property
    def display_tone(self) -> Tone:
        return "warn"


class Closing(BaseModel):
    reason: Literal["stopping"]
    cursor: int


class ClosingFrame(BaseControlFrame):
    event: Literal["stream.closing"]
    data: Closing

    def display_text(self) -> str:
        return f"the daemon is {self.data.reason}"


ControlFrame = HelloFrame | SyncedFrame | HeartbeatFrame | ClosingFrame | ResetFrame | SnapshotFrame


def session_text(session: SessionRecord) -> str:
    """Return a session as one line of text."""
    return f"{session.title or session.session_id} · {session.model or 'any model'} · {session.status}"


# Events of the log


def topic_of(event: str) -> Topic:
    """Return the topic of an event by its name; ``other`` for names that this version does not know."""
    return TOPICS.get(event) or TOPICS.get(event.partition(".")[0], "other")


class _LogEvent(BaseEvent):
    """An event of the log, which can be read again after a lost connection or a restart."""

    seq: int
    """The cursor after this event."""


# The daemon


class DaemonStarted(BaseModel):
    daemon_id: str
    version: str


class DaemonStartedEvent(_LogEvent):
    event: Literal["daemon.started"]
    data: DaemonStarted

    def display_text(self) -> str:
        return f"version {self.data.version}"


class DaemonStopping(BaseModel):
    mode: Literal["drain", "now"]


class DaemonStoppingEvent(_LogEvent):
    event: Literal["daemon.stopping"]
    data: DaemonStopping

    def display_text(self) -> str:
        return f"mode {self.data.mode}"

    @property
    def display_tone(self) -> Tone:
        return "warn"


class McpStatus(BaseModel):
    name: str
    state: ServerState | Literal["removed"]
    tools: int
    restarts: int
    error: str | None
    error_kind: ErrorKind | None


class McpStatusEvent(_LogEvent):
    event: Literal["mcp.status"]
    data: McpStatus

    def display_text(self) -> str:
        data = self.data
        return " · ".join(filter(None, (f"{data.name}: {data.state}", counted(data.tools, "tool"), data.error)))

    @property
    def display_tone(self) -> Tone:
        return "bad" if self.data.error else ""


class ModelStatus(Upstream):
    reachable: bool


class ModelStatusEvent(_LogEvent):
    event: Literal["model.status"]
    data: ModelStatus

    def display_text(self) -> str:
        data = self.data
        if data.reachable:
            return f"{data.model or 'no model'} at {data.url}"
        return f"{data.url} does not answer: {data.error}"

    @property
    def display_tone(self) -> Tone:
        return "" if self.data.reachable else "bad"


# Sessions


class SessionChanged(BaseModel):
    """Data of ``session.created`` and ``session.updated``."""

    session: SessionRecord


class SessionCreatedEvent(_LogEvent):
    event: Literal["session.created"]
    data: SessionChanged

    def display_text(self) -> str:
        return session_text(self.data.session)


class SessionUpdatedEvent(_LogEvent):
    event: Literal["session.updated"]
    data: SessionChanged

    def display_text(self) -> str:
        return session_text(self.data.session)


class SessionDeleted(BaseModel):
    session_id: str


class SessionDeletedEvent(_LogEvent):
    event: Literal["session.deleted"]
    data: SessionDeleted

    def display_text(self) -> str:
        return "deleted"


# Turns


class TurnQueued(BaseModel):
    message: SessionMessage
    """The user's message."""
    ahead: int
    """Number of turns of the session that run before this one, including the active turn."""


class TurnQueuedEvent(_LogEvent):
    event: Literal["turn.queued"]
    data: TurnQueued

    def display_text(self) -> str:
        return f"{_message_text(self.data.message)} · {self.data.ahead} ahead of it"


class TurnStarted(BaseModel):
    model: str | None


class TurnStartedEvent(_LogEvent):
    event: Literal["turn.started"]
    data: TurnStarted

    def display_text(self) -> str:
        return f"model {self.data.model or 'of the server'}"


class TurnProgress(BaseModel):
    step: int
    """Number of model calls in this turn, starting at 1."""
    note: str
    """State of the request at the model server, such as ``prompt 512/7000 tokens``; may be empty."""


class TurnProgressEvent(_LogEvent):
    event: Literal["turn.progress"]
    data: TurnProgress

    def display_text(self) -> str:
        return f"step {self.data.step} · {self.data.note}".removesuffix(" · ")


class TurnText(BaseModel):
    """Data of ``turn.token`` and ``turn.thinking``: the text of at most 40 ms."""

    message_id: str
    text: str


class TurnTokenEvent(_LogEvent):
    event: Literal["turn.token"]
    data: TurnText

    def display_text(self) -> str:
        return self.data.text


class TurnThinkingEvent(_LogEvent):
    event: Literal["turn.thinking"]
    data: TurnText

    def display_text(self) -> str:
        return self.data.text


class MessageDone(BaseModel):
    """A complete message; it replaces the text that was streamed under its ``message_id``."""

    message: SessionMessage


class MessageDoneEvent(_LogEvent):
    event: Literal["message.done"]
    data: MessageDone

    def display_text(self) -> str:
        return _message_text(self.data.message)


class TurnDone(BaseModel):
    stop_reason: StopReason
    text: str
    stats: TurnStats


class TurnDoneEvent(_LogEvent):
    event: Literal["turn.done"]
    data: TurnDone
    stats: TurnStats

    def display_text(self) -> str:
        stats = self.stats
        cost = (
            f"{counted(stats.completion_tokens, 'token')} · {stats.tokens_per_second:.1f} tok/s · "
            f"{stats.elapsed_s:.1f} s"
        )
        return f"{self.data.stop_reason} · {cost} · {self.data.text}"

    @property
    def display_tone(self) -> Tone:
        return "good" if self.data.stop_reason == "end" else "warn"


class TurnFailed(BaseModel):
    """Data of ``turn.error``."""

    error: ErrorDetail
    text: str
    """The part of the answer that was written before the error."""
    stats: TurnStats | None


class TurnErrorEvent(_LogEvent):
    event: Literal["turn.error"]
    data: TurnFailed
    stats: TurnStats | None = None

    def display_text(self) -> str:
        return f"{self.data.error.code}: {self.data.error.message}"

    @property
    def display_tone(self) -> Tone:
        return "bad"


# Tools and permissions


class ToolStart(BaseModel):
    call_id: str
    name: str
    arguments: dict[str, Any]


class ToolStartEvent(_LogEvent):
    event: Literal["tool.start"]
    data: ToolStart

    def display_text(self) -> str:
        return _call_text(self.data.name, self.data.arguments)


class ToolOutput(BaseModel):
    """Progress that a tool reports before its end."""

    call_id: str
    text: str


class ToolOutputEvent(_LogEvent):
    event: Literal["tool.output"]
    data: ToolOutput

    def display_text(self) -> str:
        return self.data.text


class ToolEnd(BaseModel):
    """The end of a call. Each call has exactly one, even if it did not start because it was denied, unknown or
    invalid."""

    call_id: str
    name: str
    status: ToolStatus
    text: str
    """The result as it is given to the model."""
    truncated: bool
    elapsed_s: float


class ToolEndEvent(_LogEvent):
    event: Literal["tool.end"]
    data: ToolEnd

    def display_text(self) -> str:
        data = self.data
        return f"{data.name}: {data.status} in {data.elapsed_s:.2f} s · {data.text}"

    @property
    def display_tone(self) -> Tone:
        return "" if self.data.status == "ok" else "bad"


class PermissionRequest(BaseModel):
    permission: PermissionRecord


class PermissionRequestEvent(_LogEvent):
    event: Literal["permission.request"]
    data: PermissionRequest

    def display_text(self) -> str:
        return _call_text(self.data.permission.tool, self.data.permission.arguments)

    @property
    def display_tone(self) -> Tone:
        return "warn"


class PermissionResolved(BaseModel):
    permission: PermissionRecord


class PermissionResolvedEvent(_LogEvent):
    event: Literal["permission.resolved"]
    data: PermissionResolved

    def display_text(self) -> str:
        permission = self.data.permission
        scope = permission.scope or "once"
        return f"{permission.tool}: {permission.decision}, {scope}, by {permission.resolved_by}"

    @property
    def display_tone(self) -> Tone:
        return "good" if self.data.permission.decision == "allow" else "bad"


# The union


class UnknownEvent(BaseEvent):
    """An event of a kind or with data that this version does not know. An event with a ``seq`` is in the log."""

    event: str
    seq: int | None
    data: JsonValue = None

    def display_text(self) -> str:
        return _compact_json(self.data)


LogEvent = (
    DaemonStartedEvent
    | DaemonStoppingEvent
    | SessionCreatedEvent
    | SessionUpdatedEvent
    | SessionDeletedEvent
    | TurnQueuedEvent
    | TurnStartedEvent
    | TurnProgressEvent
    | TurnTokenEvent
    | TurnThinkingEvent
    | MessageDoneEvent
    | ToolStartEvent
    | ToolOutputEvent
    | ToolEndEvent
    | PermissionRequestEvent
    | PermissionResolvedEvent
    | TurnDoneEvent
    | TurnErrorEvent
    | McpStatusEvent
    | ModelStatusEvent
)
"""The events of the log that this version knows."""
DaemonEvent = LogEvent | UnknownEvent | ResetFrame | SnapshotFrame
"""The events that a reader receives. The client handles the other control frames."""
_UNION: TypeAdapter[LogEvent | ControlFrame] = TypeAdapter(Annotated[LogEvent | ControlFrame, Discriminator("event")])
EVENT_CLASSES: dict[str, type[BaseEvent]] = {
    get_args(member.model_fields["event"].annotation)[0]: member for member in get_args(LogEvent | ControlFrame)
}
"""The class of each event and control frame, by its name."""
LOG_EVENTS = frozenset(name for name, member in EVENT_CLASSES.items() if issubclass(member, _LogEvent))
"""The names of the events in the log."""
EVENT_DATA: tuple[type[BaseModel], ...] = tuple(
    dict.fromkeys(member.model_fields["data"].annotation for member in get_args(LogEvent | ControlFrame))
)
"""The classes of ``data``."""


def daemon_event(text: str) -> LogEvent | ControlFrame | UnknownEvent:
    """Parse one message of the WebSocket.

    Raises:
        ValueError: it is not an event of any kind: not JSON, or without ``event``, ``seq``, ``at`` or ``stream_id``.
    """
    try:
        return _UNION.validate_json(text)
    except ValidationError:
        return UnknownEvent.model_validate_json(text)


# Text for people


def _compact_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _call_text(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_compact_json(value)}' for key, value in arguments.items())})"


def _message_text(message: SessionMessage) -> str:
    calls = " ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
    return f"{message.role}: {' '.join(filter(None, (message.content, calls)))}"
