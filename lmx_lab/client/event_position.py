"""Where in the log a stream of events is, and what of it is new. Pure: told each frame, it says what to hand on."""

from __future__ import annotations

from dataclasses import dataclass

from lmx_lab.client.cursors import Cursor
from lmx_lab.wire.event_stream import (
    ClosingFrame,
    ControlFrame,
    HeartbeatFrame,
    HelloFrame,
    ResetFrame,
    SnapshotFrame,
    SyncedFrame,
)
from lmx_lab.wire.events import DaemonEvent, LogEvent, UnknownEvent

Frame = LogEvent | ControlFrame | UnknownEvent


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What a frame comes to."""

    event: DaemonEvent | None = None
    """For the reader; None if it has seen it, or if it is none of its business."""
    cursor: Cursor | None = None
    """Where the reader is once it has seen all that was handed on; None if the frame does not move it."""


NOTHING = Delivery()


class EventPosition:
    """Of one subscription, over all of its connections.

    Args:
        cursor: What has been seen before.
        after: The same, in whatever database the daemon has; only without a cursor. With neither, what is new.
    """

    def __init__(self, cursor: Cursor | None = None, after: int | None = None) -> None:
        self.cursor = cursor
        """From where a next connection goes on."""
        self._after = after
        self._last = -1
        """Of this connection: what is not after it was there before."""
        self._resetting = False
        self._in_snapshots: dict[str, int] = {}
        """Up to where a session's events are in the snapshot that was handed on."""

    def begin(self) -> dict[str, str]:
        """A new connection: the query that goes on from here."""
        self._resetting = False
        if self.cursor is not None:
            self._last = self.cursor.seq
            return {"after": str(self.cursor.seq), "stream_id": self.cursor.stream_id}
        if self._after is not None:
            self._last = self._after
            return {"after": str(self._after)}
        self._last = -1
        return {}

    def take(self, frame: Frame) -> Delivery:
        """
        Raises:
            ValueError: a cursor in it is none.
        """
        match frame:
            case HelloFrame():
                return self._greeted(frame)
            case ResetFrame():
                # The cursor stays where it was until the last snapshot is there: a reset that breaks off comes again.
                self._resetting, self._last = True, frame.data.cursor
                self._in_snapshots.clear()
                return Delivery(event=frame)
            case SnapshotFrame():
                self._in_snapshots[frame.data.session.session_id] = frame.data.session.cursor
                return Delivery(event=frame)
            case SyncedFrame():
                self._resetting = False
                return self._moved(frame.stream_id, frame.data.cursor)
            case HeartbeatFrame() | ClosingFrame():
                return NOTHING if self._resetting else self._moved(frame.stream_id, frame.data.cursor)
            case _:
                return self._event(frame)

    def _greeted(self, hello: HelloFrame) -> Delivery:
        if self.cursor is not None:
            return NOTHING
        # With ``after`` the greeting may have another cursor, where that one cannot be resumed.
        seq = hello.data.cursor if self._after is None else self._after
        return self._moved(hello.stream_id, seq)

    def _event(self, event: LogEvent | UnknownEvent) -> Delivery:
        if event.seq is None:
            return Delivery(event=event)
        if event.seq <= self._last:
            return NOTHING
        self._resetting = False
        moved = self._moved(event.stream_id, event.seq)
        is_in_snapshot = event.seq <= self._in_snapshots.get(event.session_id or "", -1)
        return moved if is_in_snapshot else Delivery(event=event, cursor=moved.cursor)

    def _moved(self, stream_id: str, seq: int) -> Delivery:
        # No step back: a heartbeat may be of a moment ago.
        self._last = max(self._last, seq)
        self.cursor = Cursor(stream_id=stream_id, seq=self._last)
        return Delivery(cursor=self.cursor)
