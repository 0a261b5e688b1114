"""Submits one turn and follows it to its end, over lost connections and restarts of the daemon."""

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
from lmx_lab.wire.event_stream import ResetFrame, SnapshotFrame
from lmx_lab.wire.events import (
    DaemonEvent,
    PermissionRequestEvent,
    PermissionResolvedEvent,
    SessionDeletedEvent,
    TurnDoneEvent,
    TurnErrorEvent,
)
from lmx_lab.wire.sessions import CancelTurns, SubmitTurn, TurnAccepted, TurnRecord

LOOK_S = 15.0
"""Time without an event of the turn after which its record is read."""
ENDED_LOOK_S = 1.0
"""The same after the record has an end: the last event is on its way, or no longer in the log."""
MISSED_S = 20.0
"""Without a connection, time to wait for missed events after that end; an attempt to connect takes up to 15 s."""
MOMENT_S = 0.05
"""Minimum wait for an event, so that received events are processed before the record is read."""
SUBMIT_S = 30.0
"""Time during which a submit whose answer was lost is repeated."""
CANCEL_S = 2.0
RECORD_S, ASKED_S = 20.0, 1.0
"""Interval of reading the record without events, and while permissions may have to be decided."""
_CANCELS: set[asyncio.Task[None]] = set()
"""Cancellations in progress whose callers do not wait for them."""


class FollowedTurns:
    """The turns that a client follows, which it cancels when it is closed."""

    def __init__(self) -> None:
        self._turns: set[TurnFollower] = set()

    def add(self, turn: TurnFollower) -> None:
        self._turns.add(turn)

    def discard(self, turn: TurnFollower) -> None:
        self._turns.discard(turn)

    async def cancel(self) -> None:
        """Cancel all of them, and wait for a short time until the daemon has confirmed it."""
        await asyncio.gather(*[turn.leave() for turn in list(self._turns)], return_exceptions=True)


class TurnFollower:
    """Submits one turn and follows it; closing ``events`` before the turn's end cancels the turn.

    The submit has a turn id, so that it can be repeated until it is answered. If events are not available, the turn's
    record is read instead.
    """

    def __init__(
        self,
        client: DaemonRoutes,
        session_id: str,
        submit: SubmitTurn,
        on_permission: OnPermission | None,
        turns: FollowedTurns,
    ) -> None:
        assert submit.turn_id is not None
        self._client = client
        self._turns = turns
        self._session_id = session_id
        self._submit = submit
        self._turn_id = submit.turn_id
        self._so_far = TurnAccumulator(session_id, submit.turn_id)
        self._permissions = TurnPermissions(client, submit.turn_id, on_permission)
        self._submitting: asyncio.Task[TurnAccepted] | None = None
        self._end: TurnDoneEvent | TurnErrorEvent | TurnRecord | None = None
        self._reconnects = 0
        self._has_ended = False
        self._ended: TurnRecord | None = None
        """The record, once it has an end and was read."""
        self._silent_since = self._look_at = 0.0

    def result(self) -> TurnResult:
        """The result, after ``events`` has ended.

        Raises:
            LabError: the turn has failed.
        """
        assert self._end is not None
        return self._so_far.result(self._end, reconnects=self._reconnects)

    async def events(self) -> AsyncGenerator[DaemonEvent, None]:
        """The turn's events up to its last one, and resets with snapshots where events are missing.

        Raises:
            LabError: the turn was not accepted, or cannot be followed any longer.
        """
        subscription = Subscription(self._client, session_ids=[self._session_id])
        self._turns.add(self)
        try:
            opened = await subscription.opened()
            accepted = await self._accepted()
            if opened is None or accepted.cursor < opened.seq:
                # The turn was submitted before, or no connection is open yet.
                await subscription.aclose()
                subscription = Subscription(self._client, session_ids=[self._session_id], after=accepted.cursor)
            self._has_ended = accepted.status in ("done", "error")
            self._heard()
            async for event in self._of_turn(subscription):
                yield event
        except BaseException:
            await self.leave()
            raise
        finally:
            self._turns.discard(self)
            await self._permissions.aclose()
            await subscription.aclose()

    async def leave(self) -> None:
        """Cancel the turn, unless it has ended."""
        if self._end is None:
            await self._cancel()

    # Submitting, and taking that back

    async def _accepted(self) -> TurnAccepted:
        # Shielded: one that was cancelled on its way could be accepted after its turn's cancel.
        self._submitting = asyncio.create_task(self._submitted(), name="lmx-lab submit of a turn")
        return await asyncio.shield(self._submitting)

    async def _submitted(self) -> TurnAccepted:
        backoff, now = Backoff(), asyncio.get_running_loop().time
        until, may_have_arrived = now() + SUBMIT_S, False
        while True:
            try:
                return await self._client.submit_turn(self._session_id, self._submit)
            except (UnreachableError, StoppingError) as exc:
                may_have_arrived = may_have_arrived or (isinstance(exc, UnreachableError) and was_sent(exc))
                if not may_have_arrived or isinstance(exc, WrongServerError) or now() > until:
                    raise
                await asyncio.sleep(backoff.failed(exc.retry_after_s))

    async def _cancel(self) -> None:
        """Let the daemon end the turn if it has it; one who is cancelled again meanwhile does not wait for that."""
        if self._submitting is not None:
            task = asyncio.create_task(self._cancelled(self._submitting), name="lmx-lab cancel of a turn")
            _CANCELS.add(task)
            task.add_done_callback(_CANCELS.discard)
            await asyncio.shield(task)

    async def _cancelled(self, submitting: asyncio.Task[TurnAccepted]) -> None:
        with suppress(TimeoutError, LabError):
            async with asyncio.timeout(CANCEL_S):
                await asyncio.wait([submitting], timeout=CANCEL_S / 2)
                if not submitting.cancel():
                    submitting.result()
                await self._client.cancel_turns(self._session_id, CancelTurns(turn_id=self._turn_id))

    # Following

    async def _of_turn(self, subscription: Subscription) -> AsyncGenerator[DaemonEvent, None]:
        now = asyncio.get_running_loop().time
        while self._end is None:
            state = subscription.state
            try:
                event = await self._permissions.beside(anext(subscription), max(self._look_at - now(), MOMENT_S))
            except UnavailableError:
                # For example, a proxy that does not support WebSockets.
                await self._poll()
                continue
            if event is None:
                # The connection was live all the time, so no event was missed.
                await self._look(has_all=state.state == "live" and subscription.state is state)
                continue
            self._reconnects = subscription.reconnects
            if event.turn_id == self._turn_id or isinstance(event, ResetFrame | SnapshotFrame):
                await self._take(event)
                yield event
                # After the yield: time that the reader takes does not count as silence.
                self._heard()
            elif isinstance(event, SessionDeletedEvent):
                await self._read()

    async def _take(self, event: DaemonEvent) -> None:
        self._so_far.add(event)
        match event:
            case PermissionRequestEvent():
                self._permissions.ask(event.data.permission)
            case PermissionResolvedEvent():
                self._permissions.drop(event.data.permission.permission_id)
            case SnapshotFrame():
                self._permissions.ask(*event.data.session.permissions)
            case ResetFrame():
                self._learn(await self._record())
            case TurnDoneEvent() | TurnErrorEvent():
                self._end = event

    # Without events

    def _heard(self) -> None:
        """Note that something about the turn was received now."""
        self._silent_since = asyncio.get_running_loop().time()
        self._rest()

    def _rest(self) -> None:
        self._look_at = asyncio.get_running_loop().time() + (ENDED_LOOK_S if self._has_ended else LOOK_S)

    def _learn(self, record: TurnRecord) -> None:
        if record.ended_at is not None:
            self._ended, self._has_ended = record, True
            self._heard()

    async def _look(self, *, has_all: bool) -> None:
        """After silence: accept the end in the turn's record, once no further event of the turn can follow."""
        if self._ended is None:
            await self._read()
        elif has_all or asyncio.get_running_loop().time() - self._silent_since > MISSED_S:
            # The record as it was read then: events could arrive while it is read again.
            self._end = self._ended
        self._rest()

    async def _read(self) -> None:
        record = await self._record()
        self._learn(record)
        await self._ask(record)

    async def _poll(self) -> None:
        """Follow the turn by its record only, without events."""
        while self._end is None:
            work = self._record(ASKED_S if self._permissions.is_asked else RECORD_S)
            if (record := await self._permissions.beside(work, 2 * RECORD_S)) is None:
                continue
            if record.ended_at is not None:
                self._end = record
            await self._ask(record)

    async def _ask(self, record: TurnRecord) -> None:
        """Decide on permissions whose events were missed."""
        if record.status == "waiting" and self._permissions.is_asked:
            with suppress(UnavailableError):
                self._permissions.ask(*await self._client.permissions())

    async def _record(self, wait_s: float = 0.0) -> TurnRecord:
        backoff = Backoff()
        while True:
            try:
                return await self._client.read_turn(self._session_id, self._turn_id, wait_s=wait_s)
            except UnreachableError as exc:
                if isinstance(exc, WrongServerError):
                    raise
                await asyncio.sleep(backoff.failed(exc.retry_after_s))
