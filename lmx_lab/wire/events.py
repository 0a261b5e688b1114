"""Events of the daemon: one envelope for all, and what each kind has as ``data``.

A client ignores kinds and fields that it does not know.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

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


class Envelope(BaseModel):
    event: str
    seq: int | None
    """The cursor after this event; null on control frames (``stream.…``), which move no cursor."""
    at: str
    """When it was written to the log, or sent."""
    stream_id: str
    """Names the database: a cursor means nothing in another one."""
    session_id: str | None = None
    turn_id: str | None = None
    data: dict[str, Any]
    stats: TurnStats | None = None
    """Of ``turn.done`` and ``turn.error``; absent elsewhere."""


class EventPage(BaseModel):
    """Events by polling."""

    events: list[Envelope]
    cursor: int
    """For ``after`` of the next call."""
    more: bool
    """Whether there are more by now."""


# Control frames


class Hello(BaseModel):
    daemon_id: str
    cursor: int
    """Events after it follow."""
    latest_seq: int
    heartbeat_s: float


class Synced(BaseModel):
    """All that was in the log has been sent; what follows is live."""

    cursor: int


class Heartbeat(BaseModel):
    cursor: int
    """Nothing up to here was kept back, though the filter may have left events out."""


class Reset(BaseModel):
    """The cursor cannot be resumed. A ``stream.snapshot`` of each session that the filter lets pass follows, then
    ``stream.synced``, then what came after ``cursor``; a session's events up to its snapshot's own cursor are in it."""

    reason: Literal["pruned", "ahead", "other-stream"]
    cursor: int
    oldest_seq: int
    latest_seq: int


class Snapshot(BaseModel):
    session: SessionSnapshot


class Closing(BaseModel):
    reason: Literal["stopping"]
    cursor: int


# Sessions and the daemon


class DaemonStarted(BaseModel):
    daemon_id: str
    version: str


class DaemonStopping(BaseModel):
    mode: Literal["drain", "now"]


class SessionChanged(BaseModel):
    """Of ``session.created`` and ``session.updated``."""

    session: SessionRecord


class SessionDeleted(BaseModel):
    session_id: str


# Turns


class TurnQueued(BaseModel):
    message: SessionMessage
    """The user's."""
    ahead: int
    """Turns that come before it in its session, the running one included."""


class TurnStarted(BaseModel):
    model: str | None


class TurnProgress(BaseModel):
    step: int
    """The model is called the so-manieth time, from 1."""
    note: str
    """Where the model's server stands, such as ``prompt 512/7000 tokens``; may be empty."""


class TurnText(BaseModel):
    """Of ``turn.token`` and ``turn.thinking``: what came within at most 40 ms."""

    message_id: str
    text: str


class MessageDone(BaseModel):
    """Replaces what was streamed under its ``message_id``."""

    message: SessionMessage


class ToolStart(BaseModel):
    call_id: str
    name: str
    arguments: dict[str, Any]


class ToolOutput(BaseModel):
    """What a tool said before its end: progress notes."""

    call_id: str
    text: str


class ToolEnd(BaseModel):
    """Of each call exactly one, also where none began: denied, unknown, or with broken arguments."""

    call_id: str
    name: str
    status: ToolStatus
    text: str
    """What the model is told."""
    truncated: bool
    elapsed_s: float


class PermissionRequest(BaseModel):
    permission: PermissionRecord


class PermissionResolved(BaseModel):
    permission: PermissionRecord


class TurnDone(BaseModel):
    stop_reason: StopReason
    text: str
    stats: TurnStats


class TurnFailed(BaseModel):
    """Of ``turn.error``."""

    error: ErrorDetail
    text: str
    """What had been written of the answer."""
    stats: TurnStats | None


# Beside turns


class McpStatus(BaseModel):
    name: str
    state: ServerState | Literal["removed"]
    tools: int
    restarts: int
    error: str | None
    error_kind: ErrorKind | None


class ModelStatus(BaseModel):
    url: str
    reachable: bool
    model: str | None
    error: str | None


DATA: dict[str, type[BaseModel]] = {
    "stream.hello": Hello,
    "stream.synced": Synced,
    "stream.heartbeat": Heartbeat,
    "stream.reset": Reset,
    "stream.snapshot": Snapshot,
    "stream.closing": Closing,
    "daemon.started": DaemonStarted,
    "daemon.stopping": DaemonStopping,
    "session.created": SessionChanged,
    "session.updated": SessionChanged,
    "session.deleted": SessionDeleted,
    "turn.queued": TurnQueued,
    "turn.started": TurnStarted,
    "turn.progress": TurnProgress,
    "turn.token": TurnText,
    "turn.thinking": TurnText,
    "message.done": MessageDone,
    "tool.start": ToolStart,
    "tool.output": ToolOutput,
    "tool.end": ToolEnd,
    "permission.request": PermissionRequest,
    "permission.resolved": PermissionResolved,
    "turn.done": TurnDone,
    "turn.error": TurnFailed,
    "mcp.status": McpStatus,
    "model.status": ModelStatus,
}
"""What each event has as ``data``."""
