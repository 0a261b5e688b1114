"""Subscribe to the daemon's events, over lost connections, restarts and sleep of the machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from lmx_lab.client.cursors import Cursor, CursorStore
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.event_position import EventPosition
from lmx_lab.client.event_receiver import ConnectionState, EventReceiver
from lmx_lab.wire.events import DaemonEvent

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
        return self._receiver.states.value

    def states(self) -> AsyncGenerator[ConnectionState, None]:
        """Yield the current state, then each change until the subscription is closed. Any number of readers."""
        return self._receiver.states.changes()

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
            return await self._next()
        finally:
            self._is_reading = False

    async def _next(self) -> DaemonEvent:
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
