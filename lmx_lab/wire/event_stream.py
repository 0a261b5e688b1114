"""The envelope of the daemon's events, pages of events for polling, and control frames of the WebSocket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lmx_lab.wire.sessions import SessionRecord, SessionSnapshot, TurnStats

Tone = Literal["", "good", "warn", "bad"]
"""How an event is emphasized when it is shown."""
MISSING = {
    "pruned": "the daemon no longer keeps them",
    "ahead": "the daemon's log is older than what was read",
    "other-stream": "the daemon has another log now",
}
"""Why events are missing, by the reason of a reset."""


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
