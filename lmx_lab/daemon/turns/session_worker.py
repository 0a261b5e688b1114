"""The workers of sessions: in-memory state of each session whose turns are submitted, run or cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from lmx_lab.daemon.turns.effects import ActiveTurn
from lmx_lab.errors import SessionNotFoundError


class SessionWorker:
    """Runs the turns of one session, one at a time."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.lock = asyncio.Lock()
        """Held while a turn is submitted, started or cancelled, so that each sees the others' complete changes."""
        self.users = 0
        """Number of callers that hold or wait for the lock, or delete the session."""
        self.task: asyncio.Task[None] | None = None
        """Runs the turns; None while no turn waits."""
        self.active: ActiveTurn | None = None
        """The running turn, from its start in the database to its end there."""
        self.is_deleting = False
        """Whether the session is being deleted, so that no turn is accepted or started."""
        self.deletion: asyncio.Task[None] | None = None


class SessionWorkers:
    """The workers that are in use. Others are removed."""

    def __init__(self) -> None:
        self._workers: dict[str, SessionWorker] = {}

    def __iter__(self) -> Iterator[SessionWorker]:
        return iter(list(self._workers.values()))

    def active_turns(self) -> list[ActiveTurn]:
        """Return the running turns."""
        return [worker.active for worker in self if worker.active is not None]

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks of all workers."""
        return [worker.task for worker in self if worker.task is not None]

    def find(self, session_id: str) -> SessionWorker | None:
        """Return the worker of a session, if there is one."""
        return self._workers.get(session_id)

    def get_or_create(self, session_id: str) -> SessionWorker:
        """Return the worker of a session. Creates it if necessary."""
        return self._workers.setdefault(session_id, SessionWorker(session_id))

    @contextlib.asynccontextmanager
    async def locked(self, session_id: str) -> AsyncIterator[SessionWorker]:
        """Hold the lock of a session's worker within the block.

        Raises:
            SessionNotFoundError: The session is being deleted.
        """
        worker = self.get_or_create(session_id)
        worker.users += 1
        try:
            async with worker.lock:
                if worker.is_deleting:
                    raise SessionNotFoundError(f"session {session_id!r:.80} is being deleted")
                yield worker
        finally:
            worker.users -= 1
            self.remove_unused(worker)

    def remove_unused(self, worker: SessionWorker) -> None:
        """Remove a worker, unless it is in use."""
        if worker.users == 0 and worker.task is None and self._workers.get(worker.session_id) is worker:
            del self._workers[worker.session_id]
