"""Submit, run, cancel and recover turns: one at a time in each session, and a limited number in all sessions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Literal
from weakref import WeakValueDictionary

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import permissions, sessions, turns
from lmx_lab.daemon.storage.store import Store, Transaction, TurnKey
from lmx_lab.daemon.storage.turns import StartedTurn, Submitted, end_abandoned
from lmx_lab.daemon.toolbox import Toolbox
from lmx_lab.daemon.turns.active_turn import ActiveTurn, TurnDependencies
from lmx_lab.daemon.turns.concurrency import ShieldedTasks, TurnSlots, give_way, retry_delays, shielded
from lmx_lab.daemon.turns.machine import TurnEnding
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.errors import LabError, SessionNotFoundError, StoppingError
from lmx_lab.wire.sessions import (
    CancelAnswer,
    CancelTurns,
    Decision,
    PermissionList,
    PermissionRecord,
    SubmitTurn,
    TurnAccepted,
    TurnRecord,
)

log = logging.getLogger(__name__)
CANCELLED = TurnEnding(reason="cancelled")
STOPPED = TurnEnding(
    error=StoppingError(
        "the daemon was stopped while this turn was running; its partial answer is kept; submit a new turn"
    ),
    open_call_status="interrupted",
)
STOP_S = 2.0
"""Time for writing the ends of turns, in addition to the time that tools have to end."""


BEHIND_TURN = 10
"""Number of iterations of the event loop in which a turn sends its request to the model, or its last events are sent,
before other work."""


class TurnRunner:
    """Runs the turns of all sessions on the daemon's event loop. Call ``start()`` first and ``stop()`` at the end."""

    def __init__(
        self,
        *,
        store: Store,
        upstream: ModelClient,
        toolbox: Toolbox,
        limits: Limits,
        tools_start_s: float = 10.0,
        retry_s: float = 1.0,
    ) -> None:
        """
        Args:
            tools_start_s: Maximum time that a queued turn waits for MCP servers to start, since after a restart there
                would be no tools.
            retry_s: Delay before the first retry of a change that cannot be written. Later delays are longer.
        """
        self._store = store
        self._upstream = upstream
        self._limits = limits
        self._tools_start_s = tools_start_s
        self._dependencies = TurnDependencies(
            store=store, upstream=upstream, toolbox=toolbox, limits=limits, retry_s=retry_s
        )
        self._slots = TurnSlots(limits.running_turns)
        self._workers: dict[str, SessionWorker] = {}
        """The workers that are in use, by session."""
        self._queued_count = 0
        self._ends: WeakValueDictionary[TurnKey, asyncio.Future[None]] = WeakValueDictionary()
        """Futures of the ends of turns, each as long as a caller waits for it. They are shared: do not cancel them."""
        self._adopted_tasks: set[asyncio.Task[None]] = set()
        """Cancelled tasks of turns that have ended without them."""
        self.shielded_tasks = ShieldedTasks()
        """The requests of clients that are being completed."""
        self._recovery: asyncio.Task[None] | None = None
        self.is_stopping = False
        """Whether turns are no longer accepted or started."""

    # Start and stop

    async def start(self) -> None:
        """End the turns that an earlier process has started, with ``daemon-restarted``, and run the queued ones.

        If the disk is full, this is done in the background once there is space.
        """
        started, queued = await self._store.read(turns.list_unfinished)
        self._queued_count = len(queued)
        abandoned, waiting = (list(dict.fromkeys(key.session_id for key in keys)) for keys in (started, queued))
        try:
            await self._recover(abandoned)
        except LabError as exc:
            log.warning("turns of an earlier process cannot be ended yet: %s", exc)
            self._recovery = asyncio.create_task(self._recover_later(abandoned, waiting), name="lmx-lab recovery")
        else:
            self._start_workers(waiting)

    async def _recover(self, session_ids: list[str]) -> None:
        for session_id in session_ids:
            async with self._locked(session_id) as worker:
                await self._end_inactive(worker, [])

    async def _recover_later(self, abandoned: list[str], waiting: list[str]) -> None:
        for delay_s in retry_delays(self._dependencies.retry_s):
            await asyncio.sleep(delay_s)
            with contextlib.suppress(LabError):
                await self._recover(abandoned)
                break
        self._start_workers(waiting)

    def _start_workers(self, session_ids: list[str]) -> None:
        for session_id in session_ids:
            self._start_worker(self._get_worker(session_id))

    async def stop(self, *, mode: Literal["drain", "now"], grace_s: float) -> None:
        """Accept and start no more turns, and end the running ones. Queued turns run at the next start.

        Idempotent; it can be called with ``now`` while a call with ``drain`` is in progress.

        Args:
            mode: With ``drain``, running turns have ``grace_s`` seconds to end by themselves. Then, or immediately
                with ``now``, they end with ``turn.error``, the code ``daemon-stopping`` and their partial answer.
        """
        self.is_stopping = True
        if self._recovery is not None:
            self._recovery.cancel()
        for worker in list(self._workers.values()):
            # The lock waits for a turn that is being started to become active.
            async with worker.lock:
                if worker.active is None and worker.task is not None:
                    worker.task.cancel()
        if mode == "drain":
            await self._wait_ended(grace_s)
        for active in self._active_turns():
            active.stop(STOPPED)
        await self._wait_ended(self._limits.cancel_s)
        for active in self._active_turns():
            active.abandon()
        await self._wait_ended(STOP_S)
        tasks = [
            *self._adopted_tasks,
            *self.shielded_tasks.tasks,
            *self._worker_tasks(),
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)

    async def _wait_ended(self, timeout_s: float) -> None:
        """Wait until no turn is running and all requests of clients are completed."""
        tasks = [*self.shielded_tasks.tasks, *self._worker_tasks()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def counts(self) -> tuple[int, int]:
        """Return the number of running turns, including those that wait for permissions, and of queued turns."""
        return len(self._active_turns()), self._queued_count

    @property
    def is_idle(self) -> bool:
        """Whether no turn and no request is in progress. Then nothing is kept in memory for any session."""
        is_in_use = self._workers or len(self._ends) or self._adopted_tasks or self.shielded_tasks.tasks
        return not is_in_use and self._slots.free == self._limits.running_turns

    # Turns

    @shielded
    async def submit(self, session_id: str, body: SubmitTurn) -> tuple[TurnAccepted, bool]:
        """Queue a turn, which runs as soon as possible.

        Submitting the same ``turn_id`` and body again changes nothing. ``interrupt`` cancels the session's active turn
        and puts the new turn before the queued ones, which run after it.

        Returns:
            The turn, and whether it is new.

        Raises:
            StoppingError: The daemon is stopping.
            SessionNotFoundError, IdempotencyConflictError, TurnInProgressError, QueueFullError, StorageFullError: See
                ``turns.submit``.
        """
        if self.is_stopping:
            raise StoppingError("the daemon is stopping and accepts no turns; start it again, then repeat the request")
        async with self._locked(session_id) as worker:
            can_start = worker.task is None and not (self.is_stopping or self._dependencies.toolbox.is_starting)
            has_slot = can_start and self._slots.acquire_nowait()
            started: StartedTurn | None = None
            model = self._upstream.state().model

            def submit(tx: Transaction) -> tuple[Submitted, StartedTurn | None]:
                submitted = turns.submit(tx, session_id, body, self._limits)
                if not has_slot or submitted.turn.status != "queued":
                    return submitted, None
                # In the same transaction, because another one would delay the model call by a millisecond.
                if submitted.is_first:
                    return submitted, turns.start_submitted(tx, submitted, body, model=model)
                return submitted, turns.start_next(tx, session_id, model=model)

            try:
                submitted, started = await self._store.write(submit)
            finally:
                if has_slot and started is None:
                    self._slots.release()
            accepted, is_new = submitted.turn, submitted.is_new
            self._queued_count += is_new
            if started is not None:
                self._activate(worker, started)
            elif is_new and body.when_busy == "interrupt" and worker.active is not None:
                worker.active.stop(CANCELLED)
            if accepted.status == "queued":
                self._start_worker(worker)
        # The response takes as long to write as the request to the model, which is sent first.
        await give_way(BEHIND_TURN)
        return accepted, is_new

    async def read(self, session_id: str, turn_id: str, *, wait_s: float = 0) -> TurnRecord:
        """Return a turn when it has ended, or its current state after ``wait_s`` seconds.

        Args:
            wait_s: Maximum time to wait, limited to ``limits.wait_s``.

        Raises:
            SessionNotFoundError, TurnNotFoundError: The session or the turn does not exist.
        """
        key = TurnKey(session_id=session_id, turn_id=turn_id)
        if wait_s <= 0:
            return await self._read(key)
        # Before the turn is read, so that an end in between is noticed.
        ended = self._end_of(key)
        record = await self._read(key)
        if record.ended_at is None:
            await asyncio.wait([ended], timeout=min(wait_s, self._limits.wait_s))
            record = await self._read(key)
        return record

    def _end_of(self, key: TurnKey) -> asyncio.Future[None]:
        return self._ends.setdefault(key, asyncio.get_running_loop().create_future())

    def _notify_end(self, key: TurnKey) -> None:
        """Notify those who wait that a turn has ended. The end must be in the log already."""
        if (ended := self._ends.pop(key, None)) is not None:
            ended.set_result(None)

    async def _read(self, key: TurnKey) -> TurnRecord:
        return await self._store.read(lambda view: turns.read(view, key))

    @shielded
    async def cancel(self, session_id: str, body: CancelTurns) -> CancelAnswer:
        """Cancel the active turn or the named one, and the queued turns if requested. Idempotent.

        Queued turns have ended when this returns. An active turn ends within ``limits.cancel_s``.

        Raises:
            SessionNotFoundError, TurnNotFoundError: The session or the turn does not exist.
            StorageFullError: The disk is full.
        """
        async with self._locked(session_id) as worker:
            if body.turn_id is None:
                await self._store.read(lambda view: sessions.read(view, session_id))
            else:
                await self._read(TurnKey(session_id=session_id, turn_id=body.turn_id))
            active, stopped = worker.active, []
            if active is not None and body.turn_id in (None, active.key.turn_id) and active.stop(CANCELLED):
                stopped = [active.key.turn_id]
            if active is not None and not body.queued and (body.turn_id is None or stopped):
                return CancelAnswer(cancelled=len(stopped), turn_ids=stopped)
            requested = None if body.queued else [body.turn_id or ""]
            abandoned, queued = await self._end_inactive(worker, requested)
            cancelled = [*stopped, *(turn_id for turn_id in abandoned if body.turn_id in (None, turn_id)), *queued]
        return CancelAnswer(cancelled=len(cancelled), turn_ids=cancelled)

    async def _end_inactive(self, worker: SessionWorker, turn_ids: list[str] | None) -> tuple[list[str], list[str]]:
        """Cancel queued turns, and end turns that an earlier process has started.

        Args:
            turn_ids: The queued turns to cancel. None stands for all.

        Returns:
            The ids of the turns of an earlier process, and those of the queued turns.
        """
        session_id, has_no_active_turn = worker.session_id, worker.active is None

        def end(tx: Transaction) -> tuple[list[str], list[str]]:
            abandoned = end_abandoned(tx, session_id) if has_no_active_turn else []
            return abandoned, turns.cancel_queued(tx, session_id, turn_ids)

        abandoned, queued = await self._store.write(end, ending=True)
        self._queued_count -= len(queued)
        for turn_id in (*abandoned, *queued):
            self._notify_end(TurnKey(session_id=session_id, turn_id=turn_id))
        return abandoned, queued

    async def delete_session(self, session_id: str) -> None:
        """End all turns of a session, each with its event, then delete the session. Idempotent."""
        worker = self._get_worker(session_id)
        if worker.deletion is None:
            worker.users += 1
            worker.deletion = self.shielded_tasks.start(self._delete(worker))
        await asyncio.shield(worker.deletion)

    async def _delete(self, worker: SessionWorker) -> None:
        def delete(tx: Transaction) -> None:
            # The end of a turn may not have been written, because it was abandoned.
            end_abandoned(tx, worker.session_id)
            sessions.delete(tx, worker.session_id)

        try:
            async with worker.lock:
                await self._end_inactive(worker, None)
                active, worker.is_deleting = worker.active, True
            if active is not None:
                ended = self._end_of(active.key)
                active.stop(CANCELLED)
                await asyncio.wait([ended])
            await self._store.write(delete, ending=True)
        finally:
            worker.is_deleting, worker.deletion = False, None
            worker.users -= 1
            self._remove_unused(worker)

    # Permissions

    async def list_permissions(self) -> PermissionList:
        """Return the pending permissions, oldest first."""
        return PermissionList(permissions=await self._store.read(permissions.list_pending))

    @shielded
    async def decide(self, permission_id: str, body: Decision) -> PermissionRecord:
        """Allow or deny one call, or allow all later calls of its tool in its session.

        Raises:
            PermissionNotFoundError, AlreadyResolvedError, PermissionExpiredError: See ``permissions.decide``.
        """
        decided = await self._store.write(lambda tx: permissions.decide(tx, permission_id, body))
        worker = self._workers.get(decided.session_id)
        if worker is not None and worker.active is not None and worker.active.key.turn_id == decided.turn_id:
            worker.active.apply_decision(decided)
        return decided

    # Workers

    def _start_worker(self, worker: SessionWorker) -> None:
        if worker.task is None and (worker.active is not None or not self.is_stopping):
            worker.task = asyncio.create_task(self._run_worker(worker), name=f"lmx-lab turns of {worker.session_id}")

    async def _run_worker(self, worker: SessionWorker) -> None:
        """Run the session's turns until none is queued. The slots are shared fairly with the other sessions."""
        delays_s = retry_delays(self._dependencies.retry_s)
        try:
            while True:
                try:
                    active = worker.active or await self._start_next(worker)
                    if active is None:
                        return
                    try:
                        await active.run()
                    finally:
                        if active.has_slot:
                            self._slots.release()
                        worker.active = None
                        self._notify_end(active.key)
                    await give_way(BEHIND_TURN)
                    delays_s = retry_delays(self._dependencies.retry_s)
                except StoppingError:
                    return  # The database is closed: queued turns run at the next start.
                except LabError as exc:
                    log.warning("the next turn of session %s cannot start yet: %s", worker.session_id, exc)
                    await asyncio.sleep(next(delays_s))
        finally:
            # The worker may have another task already.
            if worker.task is asyncio.current_task():
                worker.task = None
            self._remove_unused(worker)

    async def _start_next(self, worker: SessionWorker) -> ActiveTurn | None:
        """Start the next queued turn, which then has a slot. Returns None if none is queued."""
        try:
            async with asyncio.timeout(self._tools_start_s):
                await self._dependencies.toolbox.wait_started()
        except TimeoutError:
            log.warning(
                "some MCP servers have not started within %g s; a turn starts without them", self._tools_start_s
            )
        await self._slots.acquire()
        started: StartedTurn | None = None
        model = self._upstream.state().model
        try:
            async with worker.lock:
                if not (self.is_stopping or worker.is_deleting):
                    started = await self._store.write(lambda tx: turns.start_next(tx, worker.session_id, model=model))
                if started is None:
                    # While the lock is held, so that a turn that is submitted next starts a new task.
                    worker.task = None
                    return None
                return self._activate(worker, started)
        finally:
            if started is None:
                self._slots.release()

    def _activate(self, worker: SessionWorker, started: StartedTurn) -> ActiveTurn:
        self._queued_count -= 1
        worker.active = ActiveTurn(started, self._dependencies, slots=self._slots, adopt_task=self._adopt_task)
        return worker.active

    def _get_worker(self, session_id: str) -> SessionWorker:
        """Return the worker of a session. Creates it if necessary."""
        return self._workers.setdefault(session_id, SessionWorker(session_id))

    def _active_turns(self) -> list[ActiveTurn]:
        return [worker.active for worker in self._workers.values() if worker.active is not None]

    def _worker_tasks(self) -> list[asyncio.Task[None]]:
        return [worker.task for worker in self._workers.values() if worker.task is not None]

    @contextlib.asynccontextmanager
    async def _locked(self, session_id: str) -> AsyncIterator[SessionWorker]:
        """Hold the lock of a session's worker within the block.

        Raises:
            SessionNotFoundError: The session is being deleted.
        """
        worker = self._get_worker(session_id)
        worker.users += 1
        try:
            async with worker.lock:
                if worker.is_deleting:
                    raise SessionNotFoundError(f"session {session_id!r:.80} is being deleted")
                yield worker
        finally:
            worker.users -= 1
            self._remove_unused(worker)

    def _remove_unused(self, worker: SessionWorker) -> None:
        """Remove a worker, unless it is in use."""
        if worker.users == 0 and worker.task is None and self._workers.get(worker.session_id) is worker:
            del self._workers[worker.session_id]

    def _adopt_task(self, task: asyncio.Task[None]) -> None:
        self._adopted_tasks.add(task)
        task.add_done_callback(self._adopted_tasks.discard)


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
