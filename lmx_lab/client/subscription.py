"""Subscribe to the daemon's events: each exactly once, in order, over any number of connections."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import stat
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from httpx2.websockets import AsyncWebSocketSession, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmx_lab.broadcast import Feed
from lmx_lab.client.connection import CLOSE_S
from lmx_lab.client.credentials import DaemonEndpoint
from lmx_lab.client.daemon_routes import ClientTimes, DaemonRoutes
from lmx_lab.errors import CallerError, ConnectionLostError, HostingError, LabError, UnauthorizedError, WrongServerError
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
    daemon_event,
)


class Subscription:
    """Events of one daemon, each exactly once and in order, for one reader, over any number of connections.

    Use it as ``async with client.events(after=0) as events: async for event in events``. Without ``async with``,
    leaving the loop closes the subscription. Events that are no longer available are replaced by a ``ResetFrame`` and a
    ``SnapshotFrame`` of each session; a reset that was interrupted is repeated as a whole.

    The subscription ends only if the token is refused and the state file has no other one, if another program answers
    at the address, or if the daemon refuses the filter. The reader receives the error after all events.

    A cursor store is loaded once at the start, where it takes precedence over ``after``, and saved whenever the reader
    waits. An event counts as read when the next one is requested, or when the ``async with`` is left without an error.

    Args:
        routes: The client of the daemon; the subscription does not close it.
        after: Return events after this cursor; 0 for all events in the log, None for new events only.
        session_ids: Return events of these sessions only; empty for all sessions.
        types: Return events of these types only, such as ``turn.done``, or ``turn.*`` for a group; empty for all types.
        cursor: Stores the last event that was read.
        buffer: Events that were received and not read. The connection is not read while it is full.
        wall: A clock that continues while the machine sleeps, in seconds.
    """

    def __init__(
        self,
        routes: DaemonRoutes,
        *,
        after: int | None = None,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
        cursor: CursorStore | None = None,
        buffer: EventBuffer | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._routes = routes
        self._credentials = routes.credentials
        self._times = routes.times
        self._filters = {"session_id": _as_list(session_ids), "types": _as_list(types)}
        """Query parameters that select events; an empty list omits its parameter."""
        self._wall = wall
        self._store = cursor
        self._cursor = cursor.load() if cursor is not None else None
        self._saved = self._cursor
        self._delivered: Cursor | None = None
        """The cursor after the event that was returned last; that event counts as read with the next request."""
        self._position = EventPosition(self._cursor, after)
        self._buffer = EventBuffer() if buffer is None else buffer
        self._task: asyncio.Task[None] | None = None
        """Keeps a connection to the daemon open, and puts what it receives into the buffer."""
        self._is_entered = self._is_reading = self._is_closing = self._has_ended = False
        self._state = ConnectionState(state="connecting")
        self._changes: Feed[ConnectionState] = Feed()
        """Feed of the states that follow."""
        self._tried = asyncio.Event()
        """Set when the first attempt has succeeded or failed."""
        self._connections = 0
        """Number of connections that were established."""
        self._error: Exception | None = None
        """The error after which there is no other attempt."""
        self._backoff = Backoff(routes.times)
        self._refusals = 0
        self._woken = asyncio.Event()
        self._deadline: asyncio.Timeout | None = None
        self._silence_s = OPEN_S
        self._connected_at: float | None = None
        self._has_delivered = False

    def __repr__(self) -> str:
        return f"<Subscription to {self._routes.url}: {self.state.state}>"

    @property
    def state(self) -> ConnectionState:
        """The current state of the connection."""
        return self._state

    async def states(self) -> AsyncGenerator[ConnectionState, None]:
        """Yield the current state, then each change until the subscription is closed.

        There may be any number of readers. A slow one misses old changes, but never the newest.
        """
        with self._changes.subscribe(64) as changes:
            yield self.state
            async for state in changes:
                yield state

    @property
    def cursor(self) -> Cursor | None:
        """The cursor after the last event that was read; None before the daemon has answered for the first time."""
        return self._cursor

    @property
    def reconnects(self) -> int:
        """Number of reconnects so far."""
        return max(0, self._connections - 1)

    async def opened(self) -> Cursor | None:
        """Connect, and wait for the result of the first attempt.

        Returns:
            The cursor after which all events will be received; None if the attempt has failed and will be repeated.

        Raises:
            LabError: the attempt has failed and will not be repeated.
        """
        self._start()
        await self._tried.wait()
        if self._error is not None:
            raise self._error
        return self._position.cursor if self._connections else None

    async def aclose(self) -> None:
        """Close the connection and end the iteration. Idempotent."""
        self._is_closing = True
        if self._task is None:
            self._end()
        else:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)
            if not self._has_ended:
                # The task was cancelled before its first step, or has not ended in time.
                self._end()

    async def __aenter__(self) -> Self:
        self._is_entered = True
        self._start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        await self.aclose()
        if kind is None:
            self._mark_read()
            self._save()

    def __aiter__(self) -> AsyncIterator[DaemonEvent]:
        return self if self._is_entered else self._iterate()

    async def _iterate(self) -> AsyncGenerator[DaemonEvent, None]:
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield await self.__anext__()
        finally:
            await self.aclose()

    async def __anext__(self) -> DaemonEvent:
        """Return the next event. Cancelling the wait loses no event.

        Raises:
            StopAsyncIteration: the subscription was closed.
            LabError: the subscription has failed and does not reconnect.
        """
        if self._is_reading:
            raise RuntimeError("two tasks read the same subscription; create one for each task")
        self._is_reading = True
        try:
            self._start()
            self._mark_read()
            while not self._is_closing:
                while (delivery := self._buffer.take()) is not None:
                    if delivery.event is not None:
                        self._delivered = delivery.cursor
                        return delivery.event
                    self._cursor = delivery.cursor or self._cursor
                self._save()
                if self._has_ended:
                    raise self._error or StopAsyncIteration
                await self._buffer.filled.wait()
            raise StopAsyncIteration
        finally:
            self._is_reading = False

    def _start(self) -> None:
        if self._task is None and not self._is_closing:
            self._task = asyncio.create_task(self._run(), name="lmx-lab subscription")

    def _mark_read(self) -> None:
        self._cursor, self._delivered = self._delivered or self._cursor, None

    def _save(self) -> None:
        if self._store is not None and self._cursor is not None and self._cursor != self._saved:
            self._store.save(self._cursor)
            self._saved = self._cursor

    # The task that receives events

    async def _run(self) -> None:
        """Connect and reconnect until cancelled, or until an error that another attempt cannot fix."""
        watch = SleepWatch(self._on_wake, wall=self._wall, interval_s=self._times.watch_s)
        try:
            # A library may swallow the cancellation while it cleans up.
            while not self._is_closing:
                endpoint = self._credentials.endpoint
                self._set_state(state="connecting")
                error = await self._attempt()
                self._tried.set()
                await self._recover(error, endpoint)
        except Exception as exc:
            # Exceptions other than LabError are bugs; the reader gets them.
            self._error = exc
        finally:
            watch.close()
            self._end()

    def _end(self) -> None:
        """Mark the end for the reader: set the state, and end the buffer. Idempotent."""
        self._has_ended = True
        self._tried.set()
        error = self._error if isinstance(self._error, LabError) else None
        self._set_state(state="closed", error=error)
        self._changes.close()
        self._buffer.end()

    # One connection

    async def _attempt(self) -> LabError:
        """Connect and receive events; return the reason why the connection has ended."""
        self._woken.clear()
        self._connected_at, self._has_delivered, self._silence_s = None, False, OPEN_S
        try:
            async with asyncio.timeout(OPEN_S) as self._deadline:
                connection = await self._routes.connection()
                async with connection.websocket("/v3/events", {**self._position.begin(), **self._filters}) as socket:
                    try:
                        ended: Exception = await self._receive(socket)
                    except Exception as exc:
                        # Raised after the block, because there an exception that is a bug could not be distinguished
                        # from a broken connection.
                        ended = exc
            if not isinstance(ended, LabError):
                raise ended
            return ended
        except LabError as exc:
            return exc
        except TimeoutError:
            return self._lost_error(f"has sent nothing for {self._silence_s:g} s")
        except ExceptionGroup as exc:
            # Raised by the library's own tasks: invalid frames, or a close while it was writing.
            cause: Exception = exc
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            return self._lost_error(f"broke the connection ({type(cause).__name__})")
        finally:
            self._deadline = None

    async def _receive(self, socket: AsyncWebSocketSession) -> LabError:
        assert self._deadline is not None
        now = asyncio.get_running_loop().time
        while True:
            if not self._buffer.room.is_set():
                # Time in which the reader processes events does not count as silence of the daemon.
                self._deadline.reschedule(None)
                await self._buffer.room.wait()
            self._deadline.reschedule(now() + self._silence_s)
            try:
                message = await socket.receive()
            except WebSocketDisconnect as exc:
                reason = f"{exc.code} {exc.reason:.80}".rstrip()
                return self._lost_error(f"closed the stream ({reason})")
            except Exception as exc:
                return self._lost_error(f"broke the connection ({type(exc).__name__})")
            text = getattr(message, "data", None)
            try:
                frame = daemon_event(text if isinstance(text, str) else "")
                delivery = self._position.process(frame)
            except ValueError:
                return self._lost_error(f"sent {text!r:.80}, which is not an event")
            if delivery.event is not None or delivery.cursor is not None:
                self._buffer.put(delivery, len(text or ""))
                self._has_delivered = self._has_delivered or frame.seq is not None
            if isinstance(frame, HelloFrame):
                self._silence_s = max_silence_s(frame.data.heartbeat_s)
                self._connected_at = now()
                self._connections += 1
                self._tried.set()
                self._set_state(state="catching-up")
            elif isinstance(frame, SyncedFrame):
                self._set_state(state="live")

    def _lost_error(self, what: str) -> ConnectionLostError:
        return ConnectionLostError(f"{self._credentials.url} {what}; the events continue with the next connection")

    # Between connections

    async def _recover(self, error: LabError, endpoint: DaemonEndpoint) -> None:
        """Wait until it is time for the next attempt.

        Raises:
            LabError: another attempt cannot succeed.
        """
        now = asyncio.get_running_loop().time
        # A connection that has delivered an event, or was open for a second, was good.
        if self._connected_at is not None and (self._has_delivered or now() - self._connected_at > 1.0):
            self._backoff.reset()
        if self._credentials.has_moved(endpoint):
            self._refusals = 0
            return
        is_refusal = isinstance(error, UnauthorizedError | WrongServerError)
        self._refusals = self._refusals + 1 if is_refusal else 0
        # The second refusal in a row is final, unless the state file has changed.
        if self._refusals >= 2 or (isinstance(error, CallerError) and not is_refusal):
            raise error
        delay_s = max(self._backoff.next_delay_s(error.retry_after_s), self._times.refusal_s if is_refusal else 0.0)
        self._set_state(state="waiting", retry_in_s=delay_s, error=error)
        # Wait until the delay has passed, the machine wakes up, or the daemon's endpoint changes.
        until = now() + delay_s
        while (left_s := until - now()) > 0 and not self._woken.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._times.watch_s)):
                    await self._woken.wait()
            if self._credentials.has_moved(endpoint):
                return

    def _on_wake(self) -> None:
        self._backoff.reset()
        self._woken.set()
        if self._deadline is not None:
            # A connection from before the sleep is probably dead.
            with suppress(RuntimeError):
                self._deadline.reschedule(asyncio.get_running_loop().time())

    def _set_state(self, **fields: Any) -> None:
        state = ConnectionState(attempts=self._backoff.attempts, **fields)
        if state != self._state:
            self._state = state
            self._changes.publish(state)


def _as_list(names: Sequence[str]) -> list[str]:
    """Return the names as a list. A single string is accepted as one name."""
    return [names] if isinstance(names, str) else list(names)


OPEN_S = 15.0
"""Maximum time from the start of an attempt to the hello frame."""


def max_silence_s(heartbeat_s: float) -> float:
    """Return the time without data after which a connection is closed: 2.5 of the daemon's heartbeat intervals.

    An implausible interval is replaced by 15 s, the default.
    """
    return 2.5 * (heartbeat_s if 0.05 <= heartbeat_s <= 60.0 else 15.0)


@dataclass(frozen=True, kw_only=True)
class ConnectionState:
    """The state of a subscription's connection to the daemon."""

    state: Literal["connecting", "catching-up", "live", "waiting", "closed"]
    attempts: int = 0
    """Failed attempts to connect since the last working connection."""
    retry_in_s: float | None = None
    """In state ``waiting``, the time in seconds from the start of this state to the next attempt."""
    error: LabError | None = None
    """In state ``waiting``, why the last attempt failed. In state ``closed``, the final error, or None if the reader
    has closed the subscription."""


Frame = LogEvent | ControlFrame | UnknownEvent


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The data that a frame delivers to the reader."""

    event: DaemonEvent | None = None
    """The event in the frame; None if the reader has received it before, or if the frame is about the connection."""
    cursor: Cursor | None = None
    """The reader's cursor after everything that was delivered; None if the frame does not move it."""


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
                # If ``after`` is not in the log, the hello frame has another cursor.
                seq = frame.data.cursor if self._after is None else self._after
                return Delivery() if self.cursor is not None else self._move(frame.stream_id, seq)
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
                return Delivery() if self._resetting else self._move(frame.stream_id, frame.data.cursor)
            case _:
                return self._process_event(frame)

    def _process_event(self, event: LogEvent | UnknownEvent) -> Delivery:
        if event.seq is None:
            return Delivery(event=event)
        if event.seq <= self._last:
            return Delivery()
        self._resetting = False
        moved = self._move(event.stream_id, event.seq)
        is_in_snapshot = event.seq <= self._in_snapshots.get(event.session_id or "", -1)
        return moved if is_in_snapshot else Delivery(event=event, cursor=moved.cursor)

    def _move(self, stream_id: str, seq: int) -> Delivery:
        # Never backwards: a heartbeat may have an older cursor than the last event.
        self._last = max(self._last, seq)
        self.cursor = Cursor(stream_id=stream_id, seq=self._last)
        return Delivery(cursor=self.cursor)


class EventBuffer:
    """A queue of deliveries between two tasks. The producer waits until there is room; nothing is dropped.

    Args:
        max_items, max_characters: The buffer is full when it has reached one of them.
    """

    def __init__(self, *, max_items: int = 1000, max_characters: int = 4_000_000) -> None:
        self._max_items, self._max_characters = max_items, max_characters
        self._items: deque[tuple[Delivery, int]] = deque()
        self._characters = 0
        self.filled = asyncio.Event()
        """Set while there is an item, and after the end."""
        self.room = asyncio.Event()
        """Set while the buffer is not full. A full buffer has room again when half of its items were taken."""
        self.room.set()
        self._ended = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Delivery, characters: int) -> None:
        """Add an item, even if the buffer is full; the producer waits for room before it adds the next one.

        Args:
            characters: Size of the item.
        """
        self._items.append((item, characters))
        self._characters += characters
        self.filled.set()
        if len(self._items) >= self._max_items or self._characters >= self._max_characters:
            self.room.clear()

    def take(self) -> Delivery | None:
        """Remove and return the oldest item; None if the buffer is empty."""
        if not self._items:
            return None
        item, characters = self._items.popleft()
        self._characters -= characters
        if len(self._items) <= self._max_items // 2 and self._characters < self._max_characters:
            self.room.set()
        if not self._items and not self._ended:
            self.filled.clear()
        return item

    def end(self) -> None:
        """Mark the end. Items in the buffer can still be taken."""
        self._ended = True
        self.filled.set()


class Backoff:
    """Random delays between attempts, up to 0.25 s, 0.5 s … 10 s, so that many clients do not reconnect together."""

    def __init__(self, times: ClientTimes, chance: Callable[[float, float], float] = random.uniform) -> None:
        self._times = times
        self._chance = chance
        self.attempts = 0
        """Failed attempts since the last ``reset``."""

    def next_delay_s(self, advised_s: float | None = None) -> float:
        """Count a failed attempt and return the delay before the next one, in seconds.

        Args:
            advised_s: The minimum delay that the server requested, if any; at most 60 s are used.
        """
        # 2**6 exceeds the maximum; a larger power could overflow.
        longest_s = min(self._times.max_delay_s, self._times.min_delay_s * 2 ** min(self.attempts, 6))
        self.attempts += 1
        return max(self._chance(0.0, longest_s), min(advised_s or 0.0, 60.0))

    def reset(self) -> None:
        """Start again with short delays, after a successful attempt."""
        self.attempts = 0


class SleepWatch:
    """Calls ``on_wake`` on the running loop after the machine has slept: the wall clock advanced, the loop's did not.

    Setting the wall clock forward looks the same and costs one reconnect; setting it back has no effect. On systems
    whose monotonic clock includes sleep, sleep is not detected, and dead connections end by their timeout.
    """

    def __init__(
        self, on_wake: Callable[[], None], *, wall: Callable[[], float] = time.time, interval_s: float = 1.0
    ) -> None:
        self._interval_s = interval_s
        self._on_wake = on_wake
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._last_difference_s = self._clock_difference_s()
        self._timer = self._loop.call_later(self._interval_s, self._check)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()

    def _clock_difference_s(self) -> float:
        return self._wall() - self._loop.time()

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._check)
        before_s, self._last_difference_s = self._last_difference_s, self._clock_difference_s()
        # Smaller differences come from a busy loop, or from small corrections of the clock.
        if self._last_difference_s - before_s > 5.0:
            self._on_wake()


# Cursors


class Cursor(BaseModel):
    """The position of a reader in the event log: all events up to ``seq`` have been read."""

    model_config = ConfigDict(frozen=True)

    stream_id: str = Field(min_length=1, max_length=200)
    """Id of the daemon's database, in which ``seq`` counts."""
    seq: int = Field(ge=0, le=10**15)
    """Number of the last event that was read."""


class CursorStore(Protocol):
    """Stores one reader's cursor between subscriptions."""

    def load(self) -> Cursor | None:
        """Return the cursor that was saved last; None if there is none yet."""

    def save(self, cursor: Cursor) -> None:
        """Save a cursor. It is called on the reader's event loop, so it must not block for long."""


class MemoryCursor:
    """A cursor store in memory: the cursor lives as long as this object."""

    def __init__(self, cursor: Cursor | None = None) -> None:
        self._cursor = cursor

    def load(self) -> Cursor | None:
        """Return the cursor; None if there is none yet."""
        return self._cursor

    def save(self, cursor: Cursor) -> None:
        """Keep a cursor."""
        self._cursor = cursor


class FileCursor:
    """A cursor store in a file, for one subscription at a time.

    If the file has other content, loading raises an error: the path may be wrong, and saving would overwrite the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    def load(self) -> Cursor | None:
        """Read the cursor; None if the file does not exist.

        Raises:
            HostingError: the file does not contain a cursor, or cannot be read.
        """
        try:
            # Non-blocking: opening a pipe of that name would wait for its writer.
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                is_file = stat.S_ISREG(os.fstat(file).st_mode)
                text = os.read(file, 4096) if is_file else b"not a regular file"
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise HostingError(
                f"the cursor in {self.path} cannot be read: {exc.strerror}; give the path of another file"
            ) from exc
        try:
            return Cursor.model_validate_json(text)
        except ValidationError as exc:
            raise HostingError(
                f"{self.path} does not contain a cursor: {text[:80]!r}; remove the file to start without one, or give "
                "the path of another file"
            ) from exc

    def save(self, cursor: Cursor) -> None:
        """Write the file atomically, readable by this user only.

        Raises:
            HostingError: the file cannot be written.
        """
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}")
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as stream:
                stream.write(cursor.model_dump_json())
            draft.replace(self.path)
        except OSError as exc:
            with suppress(OSError):
                draft.unlink()
            raise HostingError(
                f"the cursor cannot be written to {self.path}: {exc.strerror}; give the path of another file"
            ) from exc
