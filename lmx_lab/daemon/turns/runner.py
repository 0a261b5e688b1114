"""All turns: submitted, run one after the other in each session and a few at once in all, cancelled, recovered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Literal

from lmx_lab.daemon import sessions
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.daemon.tools.tool import Toolbox
from lmx_lab.daemon.turns import permissions, queue, records
from lmx_lab.daemon.turns.concurrency import TurnSlots
from lmx_lab.daemon.turns.effects import ActiveTurn, TurnDependencies
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.daemon.turns.queue import StartedTurn
from lmx_lab.daemon.turns.records import TurnKey
from lmx_lab.daemon.turns.recovery import end_orphans
from lmx_lab.daemon.turns.session_worker import SessionWorker, SessionWorkers
from lmx_lab.daemon.turns.shielded import ShieldedTasks
from lmx_lab.daemon.turns.turn import TurnEnding
from lmx_lab.daemon.turns.waiters import TurnWaiters
from lmx_lab.daemon.turns.writer import FIRST_PAUSE_S, LONGEST_PAUSE_S
from lmx_lab.errors import LabError, StoppingError
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
    error=StoppingError("the daemon was stopped while this turn ran; what it had written is kept; ask again"),
    calls_are="interrupted",
)
TOOLS_S = 10.0
"""So long a turn waits in the queue for tools that are about to come: after a restart it would find none."""
STOP_S = 2.0
"""For writing the ends, beyond the time that tools have."""


class TurnRunner:
    """On the daemon's loop; ``start()`` it, and ``stop()`` it in the end."""

    def __init__(self, *, store: Store, upstream: ModelClient, toolbox: Toolbox, limits: Limits) -> None:
        self._store = store
        self._upstream = upstream
        self._limits = limits
        self._parts = TurnDependencies(store=store, upstream=upstream, toolbox=toolbox, limits=limits)
        self._slots = TurnSlots(limits.running_turns)
        self._lanes = SessionWorkers()
        self._queued = 0
        self._ends = TurnWaiters()
        self._left: set[asyncio.Task[None]] = set()
        self._finishing = ShieldedTasks()
        self._recovery: asyncio.Task[None] | None = None
        self._stopping = False

    # Life

    async def start(self) -> None:
        """End what a former process had begun, with ``daemon-restarted``, and go on with what waits.

        Where the disk has no room for that, it is done as soon as there is some.
        """
        begun, queued = await self._store.read(queue.unfinished)
        self._queued = len(queued)
        deserted, waiting = (list(dict.fromkeys(key.session_id for key in keys)) for keys in (begun, queued))
        try:
            await self._recover(deserted)
        except LabError as exc:
            log.warning("turns of a former process cannot be ended yet: %s", exc)
            self._recovery = asyncio.create_task(self._recover_later(deserted, waiting), name="lmx-lab recovery")
        else:
            self._wake_all(waiting)

    async def _recover(self, session_ids: list[str]) -> None:
        for session_id in session_ids:
            async with self._lanes.alone(session_id) as lane:
                await self._end_waiting(lane, [])

    async def _recover_later(self, deserted: list[str], waiting: list[str]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            with contextlib.suppress(LabError):
                await self._recover(deserted)
                break
        self._wake_all(waiting)

    def _wake_all(self, session_ids: list[str]) -> None:
        for session_id in session_ids:
            self._wake(self._lanes.of(session_id))

    async def stop(self, *, mode: Literal["drain", "now"], grace_s: float) -> None:
        """Accept no more turns and begin none; those that wait run at the next start. Idempotent; ``now`` may follow
        ``drain`` at any moment.

        ``drain`` lets running turns end for ``grace_s``; after that, as ``now``, they end by ``turn.error`` with
        ``daemon-stopping`` and what they have written.
        """
        self._stopping = True
        if self._recovery is not None:
            self._recovery.cancel()
        await self._settle()
        if mode == "drain":
            await self._ended(grace_s)
        for active in self._lanes.active():
            active.stop(STOPPED)
        await self._ended(self._limits.cancel_s)
        for active in self._lanes.active():
            active.give_up()
        await self._ended(STOP_S)
        tasks = [
            *self._left,
            *self._finishing.tasks,
            *self._lanes.tasks(),
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)

    async def _settle(self) -> None:
        """Afterwards what was just beginning has begun, and lanes that only waited have gone."""
        for lane in self._lanes:
            async with lane.lock:
                if lane.active is None and lane.task is not None:
                    lane.task.cancel()

    async def _ended(self, wait_s: float) -> None:
        """Wait until no turn runs, and what clients asked for is done."""
        tasks = [*self._finishing.tasks, *self._lanes.tasks()]
        if tasks:
            await asyncio.wait(tasks, timeout=wait_s)

    def counts(self) -> tuple[int, int]:
        """Turns that run, those that wait for a permission included, and turns that are queued."""
        return len(self._lanes.active()), self._queued

    # Turns

    async def submit(self, session_id: str, body: SubmitTurn) -> tuple[TurnAccepted, bool]:
        """Queue a turn, which runs as soon as it may; and whether it is new.

        The same ``turn_id`` and body again change nothing. With ``interrupt`` the session's active turn is cancelled,
        and this one goes before those that wait, which still run after it.

        Raises:
            StoppingError, SessionNotFoundError, IdempotencyConflictError, TurnInProgressError, QueueFullError,
            StorageFullError
        """
        if self._stopping:
            raise StoppingError("the daemon is stopping and takes no more turns; start it again, then ask again")
        return await self._finishing.run(self._submit(session_id, body))

    async def _submit(self, session_id: str, body: SubmitTurn) -> tuple[TurnAccepted, bool]:
        async with self._lanes.alone(session_id) as lane:
            idle = lane.task is None and not (self._stopping or self._parts.toolbox.starting)
            at_once = idle and self._slots.take_at_once()
            begin = self._beginning(lane)
            begun: StartedTurn | None = None

            def submit(tx: Transaction) -> tuple[TurnAccepted, bool, StartedTurn | None]:
                accepted, new = queue.submit(tx, session_id, body, self._limits)
                # A transaction of its own would take a millisecond more until the model is asked.
                return accepted, new, begin(tx) if at_once and accepted.status == "queued" else None

            try:
                accepted, new, begun = await self._store.write(submit)
            finally:
                if at_once and begun is None:
                    self._slots.give()
            self._queued += new
            if begun is not None:
                self._activate(lane, begun)
            elif new and body.when_busy == "interrupt" and lane.active is not None:
                lane.active.stop(CANCELLED)
            if accepted.status == "queued":
                self._wake(lane)
        return accepted, new

    async def read(self, session_id: str, turn_id: str, *, wait_s: float = 0) -> TurnRecord:
        """A turn, once it has ended, or as it is after ``wait_s``, of which ``limits.wait_s`` is the most.

        Raises:
            SessionNotFoundError, TurnNotFoundError
        """
        key = TurnKey(session_id=session_id, turn_id=turn_id)
        if wait_s <= 0:
            return await self._record(key)
        # Before the look, or an end in between would be missed.
        with self._ends.of(key) as ended:
            record = await self._record(key)
            if record.ended_at is None:
                await asyncio.wait([ended], timeout=min(wait_s, self._limits.wait_s))
                record = await self._record(key)
        return record

    async def _record(self, key: TurnKey) -> TurnRecord:
        return await self._store.read(lambda reading: records.record(reading, key))

    async def cancel(self, session_id: str, body: CancelTurns) -> CancelAnswer:
        """End the active turn, or the one that is named, and the queued ones if asked to; idempotent.

        Queued turns have ended when this returns, an active one soon, within ``limits.cancel_s``.

        Raises:
            SessionNotFoundError, TurnNotFoundError, StorageFullError
        """
        return await self._finishing.run(self._cancel(session_id, body))

    async def _cancel(self, session_id: str, body: CancelTurns) -> CancelAnswer:
        async with self._lanes.alone(session_id) as lane:
            if body.turn_id is None:
                await self._store.read(lambda reading: sessions.record(reading, session_id))
            else:
                await self._record(TurnKey(session_id=session_id, turn_id=body.turn_id))
            stopped = self._stop_active(lane, body.turn_id)
            if lane.active is not None and not body.queued and (body.turn_id is None or stopped):
                return CancelAnswer(cancelled=len(stopped), turn_ids=stopped)
            wanted = None if body.queued else [body.turn_id or ""]
            orphans, queued = await self._end_waiting(lane, wanted)
            ended = [*stopped, *(turn_id for turn_id in orphans if body.turn_id in (None, turn_id)), *queued]
        return CancelAnswer(cancelled=len(ended), turn_ids=ended)

    def _stop_active(self, lane: SessionWorker, turn_id: str | None) -> list[str]:
        active = lane.active
        if active is None or (turn_id is not None and active.key.turn_id != turn_id) or not active.stop(CANCELLED):
            return []
        return [active.key.turn_id]

    async def _end_waiting(self, lane: SessionWorker, turn_ids: list[str] | None) -> tuple[list[str], list[str]]:
        """End queued turns, None being all, and those that a former process had begun; gives the latter first."""
        session_id, deserted = lane.session_id, lane.active is None

        def end(tx: Transaction) -> tuple[list[str], list[str]]:
            orphans = end_orphans(tx, session_id) if deserted else []
            return orphans, queue.cancel_queued(tx, session_id, turn_ids)

        orphans, queued = await self._store.write(end, ending=True)
        self._queued -= len(queued)
        for turn_id in (*orphans, *queued):
            self._ends.tell(TurnKey(session_id=session_id, turn_id=turn_id))
        return orphans, queued

    async def delete_session(self, session_id: str) -> None:
        """End the session's turns, each with its event, then delete it with all that belongs to it; idempotent."""
        lane = self._lanes.of(session_id)
        if lane.deletion is None:
            lane.users += 1
            lane.deletion = self._finishing.begin(self._delete(lane))
        await asyncio.shield(lane.deletion)

    async def _delete(self, lane: SessionWorker) -> None:
        def delete(tx: Transaction) -> None:
            end_orphans(tx, lane.session_id)  # A turn whose end was given up is one.
            sessions.delete(tx, lane.session_id)

        try:
            async with lane.lock:
                await self._end_waiting(lane, None)
                active, lane.deleting = lane.active, True
            if active is not None:
                with self._ends.of(active.key) as ended:
                    active.stop(CANCELLED)
                    await ended
            await self._store.write(delete, ending=True)
        finally:
            lane.deleting, lane.deletion = False, None
            lane.users -= 1
            self._lanes.forget(lane)

    # Permissions

    async def permissions(self) -> PermissionList:
        """Those that wait, the oldest first."""
        return PermissionList(permissions=await self._store.read(sessions.waiting_permissions))

    async def decide(self, permission_id: str, body: Decision) -> PermissionRecord:
        """Say yes or no to one call, or yes to all later calls of its tool in its session.

        Raises:
            PermissionNotFoundError, AlreadyResolvedError, PermissionExpiredError
        """
        return await self._finishing.run(self._decide(permission_id, body))

    async def _decide(self, permission_id: str, body: Decision) -> PermissionRecord:
        decided = await self._store.write(lambda tx: permissions.decide(tx, permission_id, body))
        lane = self._lanes.find(decided.session_id)
        if lane is not None and lane.active is not None and lane.active.key.turn_id == decided.turn_id:
            lane.active.decided(decided)
        return decided

    # Lanes

    def _wake(self, lane: SessionWorker) -> None:
        if lane.task is None and (lane.active is not None or not self._stopping):
            lane.task = asyncio.create_task(self._run(lane), name=f"lmx-lab turns of {lane.session_id}")

    async def _run(self, lane: SessionWorker) -> None:
        """Run the session's turns until none waits. Between two of them the other sessions have their go."""
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                try:
                    active = lane.active or await self._begin_next(lane)
                    if active is None:
                        return
                    await self._run_to_end(lane, active)
                    pause_s = FIRST_PAUSE_S
                except StoppingError:
                    return  # The database is closed: what waits runs at the next start.
                except LabError as exc:
                    log.warning("the next turn of %s cannot begin yet: %s", lane.session_id, exc)
                    await asyncio.sleep(pause_s)
                    pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            # Another may have been started already.
            if lane.task is asyncio.current_task():
                lane.task = None
            self._lanes.forget(lane)

    async def _begin_next(self, lane: SessionWorker) -> ActiveTurn | None:
        """The next of the lane's turns, begun, which has a slot; None if none waits."""
        await self._tools_come()
        await self._slots.take()
        begun: StartedTurn | None = None
        try:
            async with lane.lock:
                if not (self._stopping or lane.deleting):
                    begun = await self._store.write(self._beginning(lane))
                if begun is None:
                    # Under the lock: whoever submits now finds no task, and starts one.
                    lane.task = None
                    return None
                return self._activate(lane, begun)
        finally:
            if begun is None:
                self._slots.give()

    def _beginning(self, lane: SessionWorker) -> Callable[[Transaction], StartedTurn | None]:
        model = self._upstream.state().model

        def begin(tx: Transaction) -> StartedTurn | None:
            end_orphans(tx, lane.session_id)
            return queue.begin_next(tx, lane.session_id, model=model)

        return begin

    def _activate(self, lane: SessionWorker, begun: StartedTurn) -> ActiveTurn:
        self._queued -= 1
        lane.active = ActiveTurn(begun, self._parts, slots=self._slots, leave=self._keep_left)
        return lane.active

    async def _run_to_end(self, lane: SessionWorker, active: ActiveTurn) -> None:
        try:
            await active.run()
        finally:
            if active.has_slot:
                self._slots.give()
            lane.active = None
            self._ends.tell(active.key)

    async def _tools_come(self) -> None:
        try:
            async with asyncio.timeout(TOOLS_S):
                await self._parts.toolbox.settled()
        except TimeoutError:
            log.warning("some tools are not there after %g s; a turn begins without them", TOOLS_S)

    def _keep_left(self, task: asyncio.Task[None]) -> None:
        self._left.add(task)
        task.add_done_callback(self._left.discard)
