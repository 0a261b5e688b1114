"""Submit one turn and follow it to its end, over lost connections and restarts of the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from lmx_lab.client.backoff import Backoff
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.errors import was_sent
from lmx_lab.client.event_subscription import Subscription
from lmx_lab.client.turn_permissions import OnPermission, TurnPermissions
from lmx_lab.client.turn_result import TurnAccumulator, TurnResult
from lmx_lab.errors import LabError, StoppingError, UnavailableError, UnreachableError, WrongServerError
from lmx_lab.wire.events import (
    DaemonEvent,
    PermissionRequestEvent,
    PermissionResolvedEvent,
    ResetFrame,
    SessionDeletedEvent,
    SnapshotFrame,
    TurnDoneEvent,
    TurnErrorEvent,
)
from lmx_lab.wire.sessions import CancelTurns, SubmitTurn, TurnAccepted, TurnRecord

CHECK_S = 15.0
"""Time without an event of the turn after which the turn's record is read."""
CHECK_ENDED_S = 1.0
"""The same time if the record shows that the turn has ended: its last event will arrive soon, or is no longer in the
log."""
MISSED_EVENTS_S = 20.0
"""Time to wait for missed events after the end of the turn if there is no connection. An attempt to connect takes up
to 15 s."""
MIN_EVENT_WAIT_S = 0.05
"""Minimum wait for an event, so that events that have arrived are processed before the record is read."""
SUBMIT_S = 30.0
"""Time for which a submission is repeated if its response was lost."""
CANCEL_S = 2.0
"""Maximum time to wait until the daemon has confirmed a cancellation."""
RECORD_WAIT_S, RECORD_WAIT_DECIDING_S = 20.0, 1.0
"""Time for which a request waits for the turn's end if events are not available. It is shorter if permissions may need
a decision here, because only another request shows them."""
_CANCELLATIONS: set[asyncio.Task[None]] = set()
"""Cancellations in progress. The set keeps them alive after their callers have been cancelled."""


class ActiveTurns:
    """The turns that a client follows. Closing the client cancels them."""

    def __init__(self) -> None:
        self._turns: set[TurnFollower] = set()

    def add(self, turn: TurnFollower) -> None:
        self._turns.add(turn)

    def discard(self, turn: TurnFollower) -> None:
        self._turns.discard(turn)

    async def cancel_all(self) -> None:
        """Cancel all turns, and wait up to ``CANCEL_S`` until the daemon has confirmed it."""
        await asyncio.gather(*[turn.cancel() for turn in list(self._turns)], return_exceptions=True)


class TurnFollower:
    """Submits one turn and follows it. Closing ``events`` before the turn's end cancels the turn.

    The submission has a turn id, so that it can be repeated until there is a response. If events are not available, the
    turn's record is read instead.
    """

    def __init__(
        self,
        client: DaemonRoutes,
        session_id: str,
        submit: SubmitTurn,
        on_permission: OnPermission | None,
        turns: ActiveTurns,
    ) -> None:
        assert submit.turn_id is not None
        self._client = client
        self._turns = turns
        self._session_id = session_id
        self._submit = submit
        self._turn_id = submit.turn_id
        self._accumulator = TurnAccumulator(session_id, submit.turn_id)
        self._permissions = TurnPermissions(client, submit.turn_id, on_permission)
        self._submitting: asyncio.Task[TurnAccepted] | None = None
        self._end: TurnDoneEvent | TurnErrorEvent | TurnRecord | None = None
        self._reconnects = 0
        self._has_ended = False
        self._ended_record: TurnRecord | None = None
        """The turn's record, if it was read after the turn's end."""
        self._silent_since_s = self._check_at_s = 0.0
        """On the loop's clock: when something of the turn was received last, and when to read its record."""

    def result(self) -> TurnResult:
        """Return the result, after ``events`` has ended.

        Raises:
            LabError: the turn has failed.
        """
        assert self._end is not None
        return self._accumulator.result(self._end, reconnects=self._reconnects)

    async def events(self) -> AsyncGenerator[DaemonEvent, None]:
        """Yield the turn's events up to its last one, and resets with snapshots where events are missing.

        Raises:
            LabError: the turn was not accepted, or its events and record are no longer available.
        """
        subscription = Subscription(self._client, session_ids=[self._session_id])
        self._turns.add(self)
        try:
            opened = await subscription.opened()
            accepted = await self._submit_shielded()
            if opened is None or accepted.cursor < opened.seq:
                # The turn was submitted before, or the connection is not open yet.
                await subscription.aclose()
                subscription = Subscription(self._client, session_ids=[self._session_id], after=accepted.cursor)
            self._has_ended = accepted.status in ("done", "error")
            self._note_activity()
            async for event in self._follow(subscription):
                yield event
        except BaseException:
            await self.cancel()
            raise
        finally:
            self._turns.discard(self)
            await self._permissions.aclose()
            await subscription.aclose()

    async def cancel(self) -> None:
        """Cancel the turn, unless it was never submitted or has ended. Cancelling this ends only the waiting."""
        if self._end is None and self._submitting is not None:
            task = asyncio.create_task(self._cancel_turn(self._submitting), name="lmx-lab cancel of a turn")
            _CANCELLATIONS.add(task)
            task.add_done_callback(_CANCELLATIONS.discard)
            await asyncio.shield(task)

    # Submitting and cancelling

    async def _submit_shielded(self) -> TurnAccepted:
        # Shielded: a submission that is cancelled could arrive at the daemon after the request that cancels its turn.
        self._submitting = asyncio.create_task(self._submit_repeatedly(), name="lmx-lab submit of a turn")
        return await asyncio.shield(self._submitting)

    async def _submit_repeatedly(self) -> TurnAccepted:
        backoff, now = Backoff(), asyncio.get_running_loop().time
        until, may_have_arrived = now() + SUBMIT_S, False
        while True:
            try:
                return await self._client.submit_turn(self._session_id, self._submit)
            except (UnreachableError, StoppingError) as exc:
                may_have_arrived = may_have_arrived or (isinstance(exc, UnreachableError) and was_sent(exc))
                if not may_have_arrived or isinstance(exc, WrongServerError) or now() > until:
                    raise
                await asyncio.sleep(backoff.next_delay_s(exc.retry_after_s))

    async def _cancel_turn(self, submitting: asyncio.Task[TurnAccepted]) -> None:
        with suppress(TimeoutError, LabError):
            async with asyncio.timeout(CANCEL_S):
                await asyncio.wait([submitting], timeout=CANCEL_S / 2)
                if not submitting.cancel():
                    submitting.result()
                await self._client.cancel_turns(self._session_id, CancelTurns(turn_id=self._turn_id))

    # Following

    async def _follow(self, subscription: Subscription) -> AsyncGenerator[DaemonEvent, None]:
        now = asyncio.get_running_loop().time
        while self._end is None:
            state = subscription.state
            try:
                wait_s = max(self._check_at_s - now(), MIN_EVENT_WAIT_S)
                event = await self._permissions.run_while_deciding(anext(subscription), wait_s)
            except UnavailableError:
                # The events are not available, for example because a proxy does not support WebSockets.
                await self._poll_record()
                continue
            if event is None:
                # If the connection was live all the time, no event was missed.
                has_all = state.state == "live" and subscription.state is state
                await self._check_record(has_all_events=has_all)
                continue
            self._reconnects = subscription.reconnects
            if event.turn_id == self._turn_id or isinstance(event, ResetFrame | SnapshotFrame):
                await self._process(event)
                yield event
                # After the yield, so that the time in which the reader processes the event does not count as silence.
                self._note_activity()
            elif isinstance(event, SessionDeletedEvent):
                await self._read_and_note_end()

    async def _process(self, event: DaemonEvent) -> None:
        self._accumulator.add(event)
        match event:
            case PermissionRequestEvent():
                self._permissions.decide_on(event.data.permission)
            case PermissionResolvedEvent():
                self._permissions.withdraw(event.data.permission.permission_id)
            case SnapshotFrame():
                self._permissions.decide_on(*event.data.session.permissions)
            case ResetFrame():
                self._note_end(await self._read_record())
            case TurnDoneEvent() | TurnErrorEvent():
                self._end = event

    # Reading the record

    def _note_activity(self) -> None:
        """Note that something of the turn was received now."""
        self._silent_since_s = asyncio.get_running_loop().time()
        self._schedule_check()

    def _schedule_check(self) -> None:
        self._check_at_s = asyncio.get_running_loop().time() + (CHECK_ENDED_S if self._has_ended else CHECK_S)

    def _note_end(self, record: TurnRecord) -> None:
        """Note the end of the turn if its record has one."""
        if record.ended_at is not None:
            self._ended_record, self._has_ended = record, True
            self._note_activity()

    async def _check_record(self, *, has_all_events: bool) -> None:
        """Read the turn's record after a time without events. The end in the record is accepted when no further event
        of the turn can arrive."""
        if self._ended_record is None:
            await self._read_and_note_end()
        elif has_all_events or asyncio.get_running_loop().time() - self._silent_since_s > MISSED_EVENTS_S:
            # The record is not read again: events could arrive in the meantime.
            self._end = self._ended_record
        self._schedule_check()

    async def _read_and_note_end(self) -> None:
        record = await self._read_record()
        self._note_end(record)
        await self._decide_missed(record)

    async def _poll_record(self) -> None:
        """Follow the turn by its record only, without events."""
        while self._end is None:
            work = self._read_record(RECORD_WAIT_DECIDING_S if self._permissions.has_policy else RECORD_WAIT_S)
            if (record := await self._permissions.run_while_deciding(work, 2 * RECORD_WAIT_S)) is None:
                continue
            if record.ended_at is not None:
                self._end = record
            await self._decide_missed(record)

    async def _decide_missed(self, record: TurnRecord) -> None:
        """Decide on permissions whose events were missed."""
        if record.status == "waiting" and self._permissions.has_policy:
            with suppress(UnavailableError):
                self._permissions.decide_on(*await self._client.permissions())

    async def _read_record(self, wait_s: float = 0.0) -> TurnRecord:
        backoff = Backoff()
        while True:
            try:
                return await self._client.read_turn(self._session_id, self._turn_id, wait_s=wait_s)
            except UnreachableError as exc:
                if isinstance(exc, WrongServerError):
                    raise
                await asyncio.sleep(backoff.next_delay_s(exc.retry_after_s))
