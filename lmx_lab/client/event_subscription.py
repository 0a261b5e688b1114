"""A subscription to the daemon's events, over lost connections, restarts and sleep."""

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

    ``async with client.events(after=0) as events: async for event in events``. Without the ``async with``, leaving the
    loop closes the subscription. A ``ResetFrame`` and a ``SnapshotFrame`` of each session replace events that are no
    longer available; a reset that was interrupted is repeated as a whole.

    The subscription ends only if the token is refused and the state file has no other, if another program answers at
    the address, or if the daemon refuses the filter. The reader receives the error after all events.

    A cursor store is loaded once at the start, where it takes precedence over ``after``, and saved whenever the reader
    waits. An event counts as read when the next one is requested, or when the ``async with`` is left without an error.

    Args:
        routes: The daemon; the subscription does not close it.
        after: Return events after this cursor; 0 for all that are kept; None for new events only.
        session_ids: Return events of these sessions only; empty for all.
        types: Kinds of events, ``turn.*`` for a group; empty for all.
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
        self._given: Cursor | None = None
        """The cursor after the event that the reader has now; it counts as read with the next request."""
        events = {"session_id": _listed(session_ids), "types": _listed(types)}
        self._receiver = EventReceiver(routes, events, EventPosition(self._cursor, after), wall)
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
        """The current state, then each change, until the subscription is closed. Any number of readers."""
        return self._receiver.states.changes()

    @property
    def cursor(self) -> Cursor | None:
        """The cursor after the last event that was read; None before the first answer of the daemon."""
        return self._cursor

    @property
    def reconnects(self) -> int:
        """Number of reconnects so far."""
        return max(0, self._receiver.greetings - 1)

    async def opened(self) -> Cursor | None:
        """Connect, and wait for the result of the first attempt.

        Returns:
            The cursor after which all events are received; None if the attempt has failed and will be repeated.

        Raises:
            LabError: the attempt has failed and will not be repeated.
        """
        self._start()
        await self._receiver.tried.wait()
        if self._receiver.error is not None:
            raise self._receiver.error
        return self._receiver.position.cursor if self._receiver.greetings else None

    async def aclose(self) -> None:
        """Close the connection and end the iteration. Idempotent."""
        self._receiver.is_closing = True
        if self._task is None:
            self._receiver.close()
        else:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)
            if not self._receiver.has_ended:
                # The task was cancelled before its first step, or does not end.
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
        return self if self._is_entered else self._until_left()

    async def _until_left(self) -> AsyncGenerator[DaemonEvent, None]:
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
            raise RuntimeError("two tasks read one subscription; make one for each")
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
            while (taken := buffer.take()) is not None:
                if taken.event is not None:
                    self._given = taken.cursor
                    return taken.event
                self._cursor = taken.cursor or self._cursor
            self._save()
            if self._receiver.has_ended:
                raise self._receiver.error or StopAsyncIteration
            await buffer.filled()
        raise StopAsyncIteration

    def _start(self) -> None:
        if self._task is None and not self._receiver.is_closing:
            self._task = asyncio.create_task(self._receiver.run(), name="lmx-lab subscription")

    def _mark_read(self) -> None:
        self._cursor, self._given = self._given or self._cursor, None

    def _save(self) -> None:
        if self._store is not None and self._cursor is not None and self._cursor != self._saved:
            self._store.save(self._cursor)
            self._saved = self._cursor


def _listed(names: Sequence[str]) -> list[str]:
    # A single string is accepted as well.
    return [names] if isinstance(names, str) else list(names)
