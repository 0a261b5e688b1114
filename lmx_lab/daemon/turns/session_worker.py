"""What a daemon in memory has of each session that turns are run, submitted or cancelled in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from lmx_lab.daemon.turns.effects import ActiveTurn
from lmx_lab.errors import SessionNotFoundError


class SessionWorker:
    """One session's turns, one at a time."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.lock = asyncio.Lock()
        """Of what begins, is submitted and is cancelled, so that each finds the others whole."""
        self.users = 0
        self.task: asyncio.Task[None] | None = None
        self.active: ActiveTurn | None = None
        """From its beginning in the database to its end there."""
        self.deleting = False
        """Nothing begins and nobody comes in any more."""
        self.deletion: asyncio.Task[None] | None = None


class SessionWorkers:
    """Those that somebody needs; the others are forgotten."""

    def __init__(self) -> None:
        self._lanes: dict[str, SessionWorker] = {}

    def __iter__(self) -> Iterator[SessionWorker]:
        return iter(list(self._lanes.values()))

    def active(self) -> list[ActiveTurn]:
        return [lane.active for lane in self if lane.active is not None]

    def tasks(self) -> list[asyncio.Task[None]]:
        return [lane.task for lane in self if lane.task is not None]

    def find(self, session_id: str) -> SessionWorker | None:
        return self._lanes.get(session_id)

    def of(self, session_id: str) -> SessionWorker:
        """The session's lane, made if nobody needed one yet."""
        return self._lanes.setdefault(session_id, SessionWorker(session_id))

    @contextlib.asynccontextmanager
    async def alone(self, session_id: str) -> AsyncIterator[SessionWorker]:
        """The session's lane, for this block alone.

        Raises:
            SessionNotFoundError: the session is being deleted.
        """
        lane = self.of(session_id)
        lane.users += 1
        try:
            async with lane.lock:
                if lane.deleting:
                    raise SessionNotFoundError(f"session {session_id!r:.80} is being deleted")
                yield lane
        finally:
            lane.users -= 1
            self.forget(lane)

    def forget(self, lane: SessionWorker) -> None:
        """Unless it is needed."""
        if lane.users == 0 and lane.task is None and self._lanes.get(lane.session_id) is lane:
            del self._lanes[lane.session_id]
