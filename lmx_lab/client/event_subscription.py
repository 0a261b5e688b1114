"""A reader of the daemon's events that outlives connections, restarts and sleep."""

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

__all__ = ["ConnectionState", "Subscription"]
CLOSE_S = 2.0
"""So long one waits for the close of a connection whose other end does not take it."""


class Subscription:
    """Events of one daemon, each once and in order, for one reader, over as many connections as it takes.

    ``async with client.events(after=0) as events: async for event in events``. Without the ``async with``, a loop that
    is left closes the subscription. Where events cannot be had any more there is a ``ResetFrame``, a ``SnapshotFrame``
    of each session, and what came after those; a reset that broke off comes again, whole.

    It goes on for ever. What ends it: a token that is refused, and the state file has no other; another program at the
    address; a filter that the daemon refuses. The reader gets that as an error after all events that there were.

    A cursor store is loaded once at the start, where it goes before ``after``, and saved whenever the reader waits: an
    event counts as seen when the next one is asked for, or when the ``async with`` is left without an error.

    Args:
        routes: The daemon; it is its owner's to close.
        after: Events after this cursor; 0 for all that is kept; None for what comes from now on.
        session_ids: Events of these sessions alone; none for all.
        types: Kinds of events, ``turn.*`` for all that begin so; none for all.
        wall: The clock that goes on while the machine sleeps, in seconds.
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
        """Seen, once the reader asks for more."""
        events = {"session_id": _listed(session_ids), "types": _listed(types)}
        self._connections = EventReceiver(routes, events, EventPosition(self._cursor, after), wall)
        self._task: asyncio.Task[None] | None = None
        self._is_entered = False
        self._is_reading = False

    def __repr__(self) -> str:
        return f"<Subscription to {self._routes.url}: {self.state.state}>"

    @property
    def state(self) -> ConnectionState:
        """How the connection is now."""
        return self._connections.states.value

    def states(self) -> AsyncGenerator[ConnectionState, None]:
        """The state as it is, then each change, until it is closed. Any number of readers."""
        return self._connections.states.changes()

    @property
    def cursor(self) -> Cursor | None:
        """Where the reader is; None before the daemon has answered once."""
        return self._cursor

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and is there again."""
        return max(0, self._connections.greetings - 1)

    async def opened(self) -> Cursor | None:
        """Connect, and wait for what comes of the first attempt.

        Returns:
            The cursor after which every event comes; None if the attempt has failed, and others follow.

        Raises:
            LabError: it has failed for good.
        """
        self._start()
        await self._connections.tried.wait()
        if self._connections.error is not None:
            raise self._connections.error
        return self._connections.position.cursor if self._connections.greetings else None

    async def aclose(self) -> None:
        """Close the connection; who still reads gets no more. Idempotent."""
        self._connections.is_closing = True
        if self._task is None:
            self._connections.close()
        else:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)
            if not self._connections.has_ended:
                # It was cancelled before its first step, or does not end.
                self._connections.close()

    async def __aenter__(self) -> Self:
        self._is_entered = True
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
        if kind is None:
            self._saw()
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
        """The next event. Waiting for it may be given up: nothing is lost by that.

        Raises:
            StopAsyncIteration: it was closed.
            LabError: it has failed for good.
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
        self._saw()
        mailbox = self._connections.mailbox
        while not self._connections.is_closing:
            while (taken := mailbox.take()) is not None:
                if taken.event is not None:
                    self._given = taken.cursor
                    return taken.event
                self._cursor = taken.cursor or self._cursor
            self._save()
            if self._connections.has_ended:
                raise self._connections.error or StopAsyncIteration
            await mailbox.filled()
        raise StopAsyncIteration

    def _start(self) -> None:
        if self._task is None and not self._connections.is_closing:
            self._task = asyncio.create_task(self._connections.run(), name="lmx-lab subscription")

    def _saw(self) -> None:
        self._cursor, self._given = self._given or self._cursor, None

    def _save(self) -> None:
        if self._store is not None and self._cursor is not None and self._cursor != self._saved:
            self._store.save(self._cursor)
            self._saved = self._cursor


def _listed(names: Sequence[str]) -> list[str]:
    # A text is a sequence of texts, too.
    return [names] if isinstance(names, str) else list(names)
