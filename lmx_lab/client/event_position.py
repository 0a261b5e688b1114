"""Track the position of a subscription in the event log, which decides what each frame delivers. Does no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from lmx_lab.client.cursors import Cursor
from lmx_lab.wire.events import (
    ClosingFrame,
    ControlFrame,
    DaemonEvent,
    HeartbeatFrame,
    HelloFrame,
    LogEvent,
    ResetFrame,
    SnapshotFrame,
    SyncedFrame,
    UnknownEvent,
)

Frame = LogEvent | ControlFrame | UnknownEvent


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The data that a frame delivers to the reader."""

    event: DaemonEvent | None = None
    """The event in the frame; None if the reader has received it before, or if the frame is about the connection."""
    cursor: Cursor | None = None
    """The reader's cursor after everything that was delivered; None if the frame does not move it."""


NOTHING = Delivery()


class EventPosition:
    """The position of one subscription, over all of its connections.

    Args:
        cursor: The last event that was read before.
        after: The ``seq`` of the last event that was read, in any database; used only without a cursor. Without both,
            only new events are delivered.
    """

    def __init__(self, cursor: Cursor | None = None, after: int | None = None) -> None:
        self.cursor = cursor
        """The cursor from which the next connection continues."""
        self._after = after
        self._last = -1
        """The last ``seq`` received over this connection; events up to it are duplicates."""
        self._resetting = False
        self._in_snapshots: dict[str, int] = {}
        """For each session with a delivered snapshot, the ``seq`` of the last event that the snapshot includes."""

    def begin(self) -> dict[str, str]:
        """Start a new connection; return the query parameters with which it continues from here."""
        self._resetting = False
        if self.cursor is not None:
            self._last = self.cursor.seq
            return {"after": str(self.cursor.seq), "stream_id": self.cursor.stream_id}
        if self._after is not None:
            self._last = self._after
            return {"after": str(self._after)}
        self._last = -1
        return {}

    def process(self, frame: Frame) -> Delivery:
        """Move the position past a frame, and return what the frame delivers.

        Raises:
            ValueError: a cursor in the frame is invalid.
        """
        match frame:
            case HelloFrame():
                return self._process_hello(frame)
            case ResetFrame():
                # The cursor moves only after the last snapshot, so that an interrupted reset is repeated.
                self._resetting, self._last = True, frame.data.cursor
                self._in_snapshots.clear()
                return Delivery(event=frame)
            case SnapshotFrame():
                self._in_snapshots[frame.data.session.session_id] = frame.data.session.cursor
                return Delivery(event=frame)
            case SyncedFrame():
                self._resetting = False
                return self._move(frame.stream_id, frame.data.cursor)
            case HeartbeatFrame() | ClosingFrame():
                return NOTHING if self._resetting else self._move(frame.stream_id, frame.data.cursor)
            case _:
                return self._process_event(frame)

    def _process_hello(self, hello: HelloFrame) -> Delivery:
        if self.cursor is not None:
            return NOTHING
        # If ``after`` is not in the log, the hello frame has another cursor.
        seq = hello.data.cursor if self._after is None else self._after
        return self._move(hello.stream_id, seq)

    def _process_event(self, event: LogEvent | UnknownEvent) -> Delivery:
        if event.seq is None:
            return Delivery(event=event)
        if event.seq <= self._last:
            return NOTHING
        self._resetting = False
        moved = self._move(event.stream_id, event.seq)
        is_in_snapshot = event.seq <= self._in_snapshots.get(event.session_id or "", -1)
        return moved if is_in_snapshot else Delivery(event=event, cursor=moved.cursor)

    def _move(self, stream_id: str, seq: int) -> Delivery:
        # Never backwards: a heartbeat may have an older cursor than the last event.
        self._last = max(self._last, seq)
        self.cursor = Cursor(stream_id=stream_id, seq=self._last)
        return Delivery(cursor=self.cursor)
