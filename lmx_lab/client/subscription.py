"""Subscribe to the daemon's events: each exactly once, in order, over any number of connections."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from httpx2.websockets import AsyncWebSocketSession, WebSocketDisconnect

from lmx_lab.broadcast import Feed
from lmx_lab.client.credentials import DaemonEndpoint
from lmx_lab.client.cursors import Cursor, CursorStore
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.errors import CallerError, ConnectionLostError, LabError, UnauthorizedError, WrongServerError
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

CLOSE_S = 2.0
"""Maximum wait for closing a connection whose other end does not respond."""


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
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._routes = routes
        self._store = cursor
        self._cursor = cursor.load() if cursor is not None else None
        self._saved = self._cursor
        self._delivered: Cursor | None = None
        """The cursor after the event that was returned last; that event counts as read with the next request."""
        filters = {"session_id": _as_list(session_ids), "types": _as_list(types)}
        self._receiver = EventReceiver(routes, filters, EventPosition(self._cursor, after), wall)
        self._task: asyncio.Task[None] | None = None
        self._is_entered = False
        self._is_reading = False

    def __repr__(self) -> str:
        return f"<Subscription to {self._routes.url}: {self.state.state}>"

    @property
    def state(self) -> ConnectionState:
        """The current state of the connection."""
        return self._receiver.state

    async def states(self) -> AsyncGenerator[ConnectionState, None]:
        """Yield the current state, then each change until the subscription is closed.

        There may be any number of readers. A slow one misses old changes, but never the newest.
        """
        with self._receiver.changes.subscribe(MAX_UNREAD) as changes:
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
        return max(0, self._receiver.connections - 1)

    async def opened(self) -> Cursor | None:
        """Connect, and wait for the result of the first attempt.

        Returns:
            The cursor after which all events will be received; None if the attempt has failed and will be repeated.

        Raises:
            LabError: the attempt has failed and will not be repeated.
        """
        self._start()
        await self._receiver.tried.wait()
        if self._receiver.error is not None:
            raise self._receiver.error
        return self._receiver.position.cursor if self._receiver.connections else None

    async def aclose(self) -> None:
        """Close the connection and end the iteration. Idempotent."""
        self._receiver.is_closing = True
        if self._task is None:
            self._receiver.close()
        else:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)
            if not self._receiver.has_ended:
                # The task was cancelled before its first step, or has not ended in time.
                self._receiver.close()

    async def __aenter__(self) -> Self:
        self._is_entered = True
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            buffer = self._receiver.buffer
            while not self._receiver.is_closing:
                while (delivery := buffer.take()) is not None:
                    if delivery.event is not None:
                        self._delivered = delivery.cursor
                        return delivery.event
                    self._cursor = delivery.cursor or self._cursor
                self._save()
                if self._receiver.has_ended:
                    raise self._receiver.error or StopAsyncIteration
                await buffer.filled()
            raise StopAsyncIteration
        finally:
            self._is_reading = False

    def _start(self) -> None:
        if self._task is None and not self._receiver.is_closing:
            self._task = asyncio.create_task(self._receiver.run(), name="lmx-lab subscription")

    def _mark_read(self) -> None:
        self._cursor, self._delivered = self._delivered or self._cursor, None

    def _save(self) -> None:
        if self._store is not None and self._cursor is not None and self._cursor != self._saved:
            self._store.save(self._cursor)
            self._saved = self._cursor


def _as_list(names: Sequence[str]) -> list[str]:
    """Return the names as a list. A single string is accepted as one name."""
    return [names] if isinstance(names, str) else list(names)


EVENTS_PATH = "/v3/events"
OPEN_S = 15.0
"""Maximum time from the start of an attempt to the hello frame."""
SILENT_HEARTBEATS = 2.5
"""A connection without data for this many heartbeat intervals is closed."""
HEARTBEAT_S, MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 15.0, 0.05, 60.0
"""The default heartbeat interval, and the smallest and the largest one that is accepted."""
STABLE_S = 1.0
"""A connection older than this, or one that has delivered an event, resets the backoff."""
MAX_REFUSALS, MIN_REFUSAL_INTERVAL_S = 2, 1.0
"""Number of consecutive refusals, and the minimum time between them, after which a refusal is final, unless the state
file has changed."""
MAX_SHOWN_CHARACTERS = 80


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


class EventReceiver:
    """Keeps a connection to the daemon open in a task, and puts what it receives into the buffer.

    Args:
        filters: Query parameters that select events; an empty list omits its parameter.
        wall: A clock that continues while the machine sleeps, in seconds.
    """

    def __init__(
        self,
        routes: DaemonRoutes,
        filters: Mapping[str, list[str]],
        position: EventPosition,
        wall: Callable[[], float],
    ) -> None:
        self._routes = routes
        self._credentials = routes.credentials
        self._filters = filters
        self._wall = wall
        self.position = position
        self.buffer = EventBuffer()
        self.state = ConnectionState(state="connecting")
        self.changes: Feed[ConnectionState] = Feed()
        """Feed of the states that follow."""
        self.tried = asyncio.Event()
        """Set when the first attempt has succeeded or failed."""
        self.connections = 0
        """Number of connections that were established."""
        self.error: Exception | None = None
        """The error after which the receiver does not reconnect."""
        self.is_closing = False
        self.has_ended = False
        self._backoff = Backoff()
        self._refusals = 0
        self._woken = asyncio.Event()
        self._deadline: asyncio.Timeout | None = None
        self._silence_s = OPEN_S
        self._connected_at: float | None = None
        self._has_delivered = False

    async def run(self) -> None:
        """Connect and reconnect until cancelled, or until an error that another attempt cannot fix."""
        watch = SleepWatch(self._on_wake, wall=self._wall)
        try:
            # A library may swallow the cancellation while it cleans up.
            while not self.is_closing:
                endpoint = self._credentials.endpoint
                self._set_state(ConnectionState(state="connecting", attempts=self._backoff.attempts))
                error = await self._attempt()
                self.tried.set()
                await self._recover(error, endpoint)
        except Exception as exc:
            # Exceptions other than LabError are bugs; the reader gets them.
            self.error = exc
        finally:
            watch.close()
            self.close()

    def close(self) -> None:
        """Mark the end for the reader: set the state, and end the buffer. Idempotent."""
        self.has_ended = True
        self.tried.set()
        error = self.error if isinstance(self.error, LabError) else None
        self._set_state(ConnectionState(state="closed", attempts=self._backoff.attempts, error=error))
        self.changes.close()
        self.buffer.end()

    # One connection

    async def _attempt(self) -> LabError:
        """Connect and receive events; return the reason why the connection has ended."""
        self._woken.clear()
        self._connected_at, self._has_delivered, self._silence_s = None, False, OPEN_S
        try:
            async with asyncio.timeout(OPEN_S) as self._deadline:
                connection = await self._routes.connection()
                async with connection.websocket(EVENTS_PATH, {**self.position.begin(), **self._filters}) as socket:
                    try:
                        ended: Exception = await self._read(socket)
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

    async def _read(self, socket: AsyncWebSocketSession) -> LabError:
        assert self._deadline is not None
        now = asyncio.get_running_loop().time
        while True:
            if not self.buffer.has_room:
                # Time in which the reader processes events does not count as silence of the daemon.
                self._deadline.reschedule(None)
                await self.buffer.room()
            self._deadline.reschedule(now() + self._silence_s)
            try:
                message = await socket.receive()
            except WebSocketDisconnect as exc:
                reason = f"{exc.code} {exc.reason:.{MAX_SHOWN_CHARACTERS}}".rstrip()
                return self._lost_error(f"closed the stream ({reason})")
            except Exception as exc:
                return self._lost_error(f"broke the connection ({type(exc).__name__})")
            text = getattr(message, "data", None)
            try:
                frame = daemon_event(text if isinstance(text, str) else "")
                delivery = self.position.process(frame)
            except ValueError:
                return self._lost_error(f"sent {text!r:.{MAX_SHOWN_CHARACTERS}}, which is not an event")
            if delivery.event is not None or delivery.cursor is not None:
                self.buffer.put(delivery, len(text or ""))
                self._has_delivered = self._has_delivered or frame.seq is not None
            if isinstance(frame, HelloFrame):
                interval_s = frame.data.heartbeat_s
                is_plausible = MIN_HEARTBEAT_S <= interval_s <= MAX_HEARTBEAT_S
                self._silence_s = SILENT_HEARTBEATS * (interval_s if is_plausible else HEARTBEAT_S)
                self._connected_at = now()
                self.connections += 1
                self.tried.set()
                self._set_state(ConnectionState(state="catching-up", attempts=self._backoff.attempts))
            elif isinstance(frame, SyncedFrame):
                self._set_state(ConnectionState(state="live", attempts=self._backoff.attempts))

    def _lost_error(self, what: str) -> ConnectionLostError:
        return ConnectionLostError(f"{self._credentials.url} {what}; the events continue with the next connection")

    # Between connections

    def _has_moved(self, endpoint: DaemonEndpoint) -> bool:
        # Another task may have refreshed the credentials.
        return self._credentials.refresh() or self._credentials.endpoint != endpoint

    async def _recover(self, error: LabError, endpoint: DaemonEndpoint) -> None:
        """Wait until it is time for the next attempt.

        Raises:
            LabError: another attempt cannot succeed.
        """
        now = asyncio.get_running_loop().time
        if self._connected_at is not None and (self._has_delivered or now() - self._connected_at > STABLE_S):
            self._backoff.reset()
        if self._has_moved(endpoint):
            self._refusals = 0
            return
        is_refusal = isinstance(error, UnauthorizedError | WrongServerError)
        self._refusals = self._refusals + 1 if is_refusal else 0
        if self._refusals >= MAX_REFUSALS or (isinstance(error, CallerError) and not is_refusal):
            raise error
        # After a refusal the delay has a minimum: a daemon that is starting has not yet written its state file.
        delay_s = max(self._backoff.next_delay_s(error.retry_after_s), MIN_REFUSAL_INTERVAL_S if is_refusal else 0.0)
        self._set_state(
            ConnectionState(state="waiting", attempts=self._backoff.attempts, retry_in_s=delay_s, error=error)
        )
        # Wait until the delay has passed, the machine wakes up, or the daemon's endpoint changes.
        until = now() + delay_s
        while (left_s := until - now()) > 0 and not self._woken.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, CHECK_INTERVAL_S)):
                    await self._woken.wait()
            if self._has_moved(endpoint):
                return

    def _on_wake(self) -> None:
        self._backoff.reset()
        self._woken.set()
        if self._deadline is not None:
            # A connection from before the sleep is probably dead.
            with suppress(RuntimeError):
                self._deadline.reschedule(asyncio.get_running_loop().time())

    def _set_state(self, state: ConnectionState) -> None:
        if state != self.state:
            self.state = state
            self.changes.publish(state)


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
                # If ``after`` is not in the log, the hello frame has another cursor.
                seq = frame.data.cursor if self._after is None else self._after
                return NOTHING if self.cursor is not None else self._move(frame.stream_id, seq)
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


MAX_ITEMS, MAX_CHARACTERS = 1000, 4_000_000
"""Limits of a buffer, which is full when it has reached one of them."""
MAX_UNREAD = 64
"""Number of changes of the state that are kept for a slow reader."""


class EventBuffer:
    """A queue of deliveries between two tasks. The producer waits until there is room; nothing is dropped."""

    def __init__(self) -> None:
        self._items: deque[tuple[Delivery, int]] = deque()
        self._characters = 0
        self._filled, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()
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
        self._filled.set()
        if len(self._items) >= MAX_ITEMS or self._characters >= MAX_CHARACTERS:
            self._room.clear()

    def take(self) -> Delivery | None:
        """Remove and return the oldest item; None if the buffer is empty."""
        if not self._items:
            return None
        item, characters = self._items.popleft()
        self._characters -= characters
        if len(self._items) <= MAX_ITEMS // 2 and self._characters < MAX_CHARACTERS:
            self._room.set()
        if not self._items and not self._ended:
            self._filled.clear()
        return item

    @property
    def has_room(self) -> bool:
        """Whether the buffer is not full. A full buffer has room again when half of its items were taken."""
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until there is room."""
        await self._room.wait()

    async def filled(self) -> None:
        """Wait until there is an item, or until the end is marked."""
        await self._filled.wait()

    def end(self) -> None:
        """Mark the end. Items in the buffer can still be taken."""
        self._ended = True
        self._filled.set()


MIN_DELAY_S, MAX_DELAY_S = 0.25, 10.0
"""Upper limits of the random delay after the first failure, and after many."""
MAX_ADVISED_S = 60.0
"""Maximum delay that a server can request."""
CHECK_INTERVAL_S = 1.0
SLEEP_THRESHOLD_S = 5.0
"""Time by which the wall clock has to be ahead of the loop's clock since the last check to count as sleep."""


class Backoff:
    """Random delays between attempts, up to 0.25 s, 0.5 s … 10 s, so that many clients do not reconnect together."""

    def __init__(self, chance: Callable[[float, float], float] = random.uniform) -> None:
        self._chance = chance
        self.attempts = 0
        """Failed attempts since the last ``reset``."""

    def next_delay_s(self, advised_s: float | None = None) -> float:
        """Count a failed attempt and return the delay before the next one, in seconds.

        Args:
            advised_s: The minimum delay that the server requested, if any; at most ``MAX_ADVISED_S`` is used.
        """
        # 2**6 exceeds the maximum; a larger power could overflow.
        longest_s = min(MAX_DELAY_S, MIN_DELAY_S * 2 ** min(self.attempts, 6))
        self.attempts += 1
        return max(self._chance(0.0, longest_s), min(advised_s or 0.0, MAX_ADVISED_S))

    def reset(self) -> None:
        """Start again with short delays, after a successful attempt."""
        self.attempts = 0


class SleepWatch:
    """Calls ``on_wake`` on the running loop after the machine has slept: the wall clock advanced, the loop's did not.

    Setting the wall clock forward looks the same and costs one reconnect; setting it back has no effect. On systems
    whose monotonic clock includes sleep, sleep is not detected, and dead connections end by their timeout.
    """

    def __init__(self, on_wake: Callable[[], None], *, wall: Callable[[], float] = time.time) -> None:
        self._on_wake = on_wake
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._last_difference_s = self._clock_difference_s()
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()

    def _clock_difference_s(self) -> float:
        return self._wall() - self._loop.time()

    def _check(self) -> None:
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)
        before_s, self._last_difference_s = self._last_difference_s, self._clock_difference_s()
        if self._last_difference_s - before_s > SLEEP_THRESHOLD_S:
            self._on_wake()
