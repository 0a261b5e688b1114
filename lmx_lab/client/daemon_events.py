"""Events of the daemon, typed: a class for each kind, and one for what a newer daemon says.

``match event: case TurnTokenEvent(): print(event.data.text)``. What each has as ``data`` is in ``lmx_lab.wire.events``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, JsonValue, TypeAdapter, ValidationError

from lmx_lab.wire import events
from lmx_lab.wire.sessions import TurnStats


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True)

    at: str
    """When it was written to the log, or sent."""
    stream_id: str
    """Names the daemon's database, in which ``seq`` counts."""
    session_id: str | None = None
    turn_id: str | None = None


class _LogEvent(_Event):
    """Of the log: it is there again after every break and restart."""

    seq: int
    """The cursor after this event."""


class _ControlFrame(_Event):
    """Of one connection alone; it moves no cursor."""

    seq: None = None


# Sessions and the daemon


class DaemonStartedEvent(_LogEvent):
    event: Literal["daemon.started"]
    data: events.DaemonStarted


class DaemonStoppingEvent(_LogEvent):
    event: Literal["daemon.stopping"]
    data: events.DaemonStopping


class SessionCreatedEvent(_LogEvent):
    event: Literal["session.created"]
    data: events.SessionChanged


class SessionUpdatedEvent(_LogEvent):
    event: Literal["session.updated"]
    data: events.SessionChanged


class SessionDeletedEvent(_LogEvent):
    event: Literal["session.deleted"]
    data: events.SessionDeleted


# Turns


class TurnQueuedEvent(_LogEvent):
    event: Literal["turn.queued"]
    data: events.TurnQueued


class TurnStartedEvent(_LogEvent):
    event: Literal["turn.started"]
    data: events.TurnStarted


class TurnProgressEvent(_LogEvent):
    event: Literal["turn.progress"]
    data: events.TurnProgress


class TurnTokenEvent(_LogEvent):
    event: Literal["turn.token"]
    data: events.TurnText


class TurnThinkingEvent(_LogEvent):
    event: Literal["turn.thinking"]
    data: events.TurnText


class MessageDoneEvent(_LogEvent):
    event: Literal["message.done"]
    data: events.MessageDone


class ToolStartEvent(_LogEvent):
    event: Literal["tool.start"]
    data: events.ToolStart


class ToolOutputEvent(_LogEvent):
    event: Literal["tool.output"]
    data: events.ToolOutput


class ToolEndEvent(_LogEvent):
    event: Literal["tool.end"]
    data: events.ToolEnd


class PermissionRequestEvent(_LogEvent):
    event: Literal["permission.request"]
    data: events.PermissionRequest


class PermissionResolvedEvent(_LogEvent):
    event: Literal["permission.resolved"]
    data: events.PermissionResolved


class TurnDoneEvent(_LogEvent):
    event: Literal["turn.done"]
    data: events.TurnDone
    stats: TurnStats


class TurnErrorEvent(_LogEvent):
    event: Literal["turn.error"]
    data: events.TurnFailed
    stats: TurnStats | None = None


# Beside turns


class McpStatusEvent(_LogEvent):
    event: Literal["mcp.status"]
    data: events.McpStatus


class ModelStatusEvent(_LogEvent):
    event: Literal["model.status"]
    data: events.ModelStatus


# Control frames


class HelloFrame(_ControlFrame):
    event: Literal["stream.hello"]
    data: events.Hello


class SyncedFrame(_ControlFrame):
    event: Literal["stream.synced"]
    data: events.Synced


class HeartbeatFrame(_ControlFrame):
    event: Literal["stream.heartbeat"]
    data: events.Heartbeat


class ClosingFrame(_ControlFrame):
    event: Literal["stream.closing"]
    data: events.Closing


class ResetFrame(_ControlFrame):
    """Events are missing here: the cursor could not be resumed. A snapshot of each session follows."""

    event: Literal["stream.reset"]
    data: events.Reset


class SnapshotFrame(_ControlFrame):
    """A session as it is, in the place of events that cannot be had."""

    event: Literal["stream.snapshot"]
    data: events.Snapshot


class UnknownEvent(_Event):
    """An event of a kind, or in a form, that this version does not know. With a ``seq`` it is of the log."""

    event: str
    seq: int | None
    data: JsonValue = None


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
"""Of the kinds that this version knows."""
ControlFrame = HelloFrame | SyncedFrame | HeartbeatFrame | ClosingFrame | ResetFrame | SnapshotFrame
DaemonEvent = LogEvent | UnknownEvent | ResetFrame | SnapshotFrame
"""What a reader of events gets. The other control frames are for the connection."""
_KNOWN: TypeAdapter[LogEvent | ControlFrame] = TypeAdapter(Annotated[LogEvent | ControlFrame, Discriminator("event")])


def daemon_event(text: str) -> LogEvent | ControlFrame | UnknownEvent:
    """The event in a message of the stream.

    Raises:
        ValueError: it is no event of any kind: no JSON, or without ``event``, ``seq``, ``at``, ``stream_id``.
    """
    try:
        return _KNOWN.validate_json(text)
    except ValidationError:
        return UnknownEvent.model_validate_json(text)
