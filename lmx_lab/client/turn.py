"""Run one turn: submit it, follow it to its end, decide on the permissions of its tool calls, and build its result."""

from __future__ import annotations

import asyncio
import html
import inspect
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pydantic_core
from pydantic import JsonValue, TypeAdapter, ValidationError

from lmx_lab.client.connection import was_sent
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.subscription import Backoff, Subscription
from lmx_lab.errors import (
    ERROR_CLASSES,
    AlreadyResolvedError,
    GoneError,
    InvalidRequestError,
    LabError,
    NotFoundError,
    StoppingError,
    TurnError,
    UnavailableError,
    UnreachableError,
    WrongServerError,
    counted,
)
from lmx_lab.results.pages import Displayed
from lmx_lab.sanitize import shorten
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.events import (
    DaemonEvent,
    MessageDoneEvent,
    PermissionRequestEvent,
    PermissionResolvedEvent,
    ResetFrame,
    SessionDeletedEvent,
    SnapshotFrame,
    ToolEndEvent,
    ToolStartEvent,
    TurnDoneEvent,
    TurnErrorEvent,
    TurnThinkingEvent,
)
from lmx_lab.wire.sessions import (
    CancelTurns,
    Decision,
    PermissionRecord,
    StopReason,
    SubmitTurn,
    ToolStatus,
    TurnAccepted,
    TurnRecord,
    TurnStats,
)

_CANCELLATIONS: set[asyncio.Task[None]] = set()
"""Cancellations in progress. The set keeps them alive after their callers have been cancelled."""


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
        turns: set[TurnFollower],
    ) -> None:
        assert submit.turn_id is not None
        self._client = client
        self._times = client.times
        self._turns = turns
        self._session_id = session_id
        self._submit = submit
        self._turn_id = submit.turn_id
        self._thinking: tuple[str, str] = ("", "")
        """The id of the current message, and its thoughts."""
        self._arguments: dict[str, Arguments | None] = {}
        self._calls: list[TurnToolCall] = []
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
        end = self._end
        assert end is not None
        if isinstance(end, TurnErrorEvent):
            raise turn_error(self._turn_id, end.data.error)
        if isinstance(end, TurnRecord) and end.error is not None:
            raise turn_error(self._turn_id, end.error)
        outcome = end if isinstance(end, TurnRecord) else end.data
        return TurnResult(
            turn_id=self._turn_id,
            session_id=self._session_id,
            text=outcome.text,
            thinking=self._thinking[1],
            stop_reason=outcome.stop_reason or "end",
            stats=outcome.stats,
            tool_calls=tuple(self._calls),
            reconnects=self._reconnects,
        )

    async def events(self) -> AsyncGenerator[DaemonEvent, None]:
        """Yield the turn's events up to its last one, and resets with snapshots where events are missing.

        Raises:
            LabError: the turn was not accepted, or its events and record are no longer available.
        """
        subscription = Subscription(self._client, session_ids=[self._session_id])
        self._turns.add(self)
        try:
            opened = await subscription.opened()
            # Shielded: a submission that is cancelled could arrive at the daemon after the request that cancels the
            # turn.
            self._submitting = asyncio.create_task(self._submit_repeatedly(), name="lmx-lab submit of a turn")
            accepted = await asyncio.shield(self._submitting)
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

    async def _submit_repeatedly(self) -> TurnAccepted:
        backoff, now = Backoff(self._times), asyncio.get_running_loop().time
        # If the response was lost, the submission is repeated for 30 s.
        until, may_have_arrived = now() + 30.0, False
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
            # The caller does not wait longer for the daemon's confirmation.
            async with asyncio.timeout(2.0):
                await asyncio.wait([submitting], timeout=1.0)
                if not submitting.cancel():
                    submitting.result()
                await self._client.cancel_turns(self._session_id, CancelTurns(turn_id=self._turn_id))

    # Following

    async def _follow(self, subscription: Subscription) -> AsyncGenerator[DaemonEvent, None]:
        now = asyncio.get_running_loop().time
        while self._end is None:
            state = subscription.state
            try:
                # With a minimum, so that events that have arrived are processed before the record is read.
                wait_s = max(self._check_at_s - now(), 0.05)
                event = await self._permissions.run_while_deciding(anext(subscription), wait_s)
            except UnavailableError:
                # The events are not available, for example because a proxy does not support WebSockets.
                await self._poll_record()
                continue
            if event is None:
                # The end in the record is accepted when no further event of the turn can arrive: if the connection was
                # live all the time, no event was missed.
                has_all = state.state == "live" and subscription.state is state
                if self._ended_record is None:
                    await self._read_and_note_end()
                elif has_all or now() - self._silent_since_s > self._times.missed_s:
                    # The record is not read again: events could arrive in the meantime.
                    self._end = self._ended_record
                self._schedule_check()
                continue
            self._reconnects = subscription.reconnects
            if event.turn_id == self._turn_id or isinstance(event, ResetFrame | SnapshotFrame):
                self._collect(event)
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
                yield event
                # After the yield, so that the time in which the reader processes the event does not count as silence.
                self._note_activity()
            elif isinstance(event, SessionDeletedEvent):
                await self._read_and_note_end()

    def _collect(self, event: DaemonEvent) -> None:
        """Collect the parts of the result that only events contain."""
        match event:
            case TurnThinkingEvent():
                message_id, before = self._thinking
                is_same = message_id == event.data.message_id
                self._thinking = (event.data.message_id, (before if is_same else "") + event.data.text)
            case MessageDoneEvent() if event.data.message.role == "assistant":
                message = event.data.message
                self._thinking = (message.message_id or "", message.reasoning_content or "")
                for call in message.tool_calls:
                    try:
                        arguments = _ARGUMENTS.validate_python(pydantic_core.from_json(call.arguments or "{}"))
                    except (ValueError, ValidationError):
                        arguments = None
                    self._arguments[call.call_id] = arguments
            case ToolStartEvent():
                self._arguments[event.data.call_id] = event.data.arguments
            case ToolEndEvent():
                fields = event.data.model_dump(include={"call_id", "name", "status", "text", "elapsed_s"})
                self._calls.append(TurnToolCall(**fields, arguments=self._arguments.get(event.data.call_id)))

    # Reading the record

    def _note_activity(self) -> None:
        """Note that something of the turn was received now."""
        self._silent_since_s = asyncio.get_running_loop().time()
        self._schedule_check()

    def _schedule_check(self) -> None:
        wait_s = self._times.ended_s if self._has_ended else self._times.record_s
        self._check_at_s = asyncio.get_running_loop().time() + wait_s

    def _note_end(self, record: TurnRecord) -> None:
        """Note the end of the turn if its record has one."""
        if record.ended_at is not None:
            self._ended_record, self._has_ended = record, True
            self._note_activity()

    async def _read_and_note_end(self) -> None:
        record = await self._read_record()
        self._note_end(record)
        await self._decide_missed(record)

    async def _poll_record(self) -> None:
        """Follow the turn by its record only, without events."""
        while self._end is None:
            work = self._read_record(self._times.deciding_s if self._permissions.has_policy else 20.0)
            if (record := await self._permissions.run_while_deciding(work, 40.0)) is None:
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
        backoff = Backoff(self._times)
        while True:
            try:
                return await self._client.read_turn(self._session_id, self._turn_id, wait_s=wait_s)
            except UnreachableError as exc:
                if isinstance(exc, WrongServerError):
                    raise
                await asyncio.sleep(backoff.next_delay_s(exc.retry_after_s))


T = TypeVar("T")
AllowOrDeny = Literal["allow", "deny"]
Verdict = bool | AllowOrDeny | Decision
"""A decision on one permission. Only a ``Decision`` can apply to the whole session."""
OnPermission = AllowOrDeny | Callable[[PermissionRecord], Verdict | Awaitable[Verdict]]
"""One decision for all permissions, or a function or coroutine function that decides on each."""
_ALLOW_OR_DENY: dict[object, AllowOrDeny] = {True: "allow", False: "deny", "allow": "allow", "deny": "deny"}


class TurnPermissions:
    """The permissions of one turn. Each is decided in a separate task, while events continue to arrive.

    If another client decides first, its decision counts.

    Args:
        policy: None leaves all decisions to other clients.

    Raises:
        InvalidRequestError: the policy is not valid.
    """

    def __init__(self, routes: DaemonRoutes, turn_id: str, policy: OnPermission | None) -> None:
        self._routes = routes
        self._turn_id = turn_id
        if not (policy is None or callable(policy) or policy in ("allow", "deny")):
            raise InvalidRequestError(
                f"on_permission is {policy!r:.80}; give 'allow', 'deny', or a function that takes a permission",
                param="on_permission",
            )
        self._policy = policy
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def has_policy(self) -> bool:
        """Whether decisions are made here, and not left to other clients."""
        return self._policy is not None

    def decide_on(self, *permissions: PermissionRecord) -> None:
        """Start to decide on those permissions that belong to this turn and are new."""
        if self._policy is None:
            return
        for permission in permissions:
            if permission.turn_id == self._turn_id and permission.permission_id not in self._tasks:
                work = self._decide(permission, self._policy)
                self._tasks[permission.permission_id] = asyncio.create_task(work, name="lmx-lab permission of a turn")

    def withdraw(self, permission_id: str) -> None:
        """Cancel a decision in progress, because another client has decided."""
        if (task := self._tasks.get(permission_id)) is not None:
            task.cancel()

    async def run_while_deciding(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T | None:
        """Run a coroutine, which is cancelled if a decision fails.

        Returns:
            The coroutine's result, or None after the time limit.
        """
        task = asyncio.ensure_future(work)
        try:
            now = asyncio.get_running_loop().time
            until = now() + timeout_s
            while not task.done():
                if (left_s := until - now()) <= 0:
                    return None
                deciding = {decision for decision in self._tasks.values() if not decision.done()}
                await asyncio.wait({task, *deciding}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for decision in self._tasks.values():
                    # A cancellation that was not requested here comes from the policy, and is raised as well.
                    if decision.done() and not (decision.cancelled() and decision.cancelling()):
                        decision.result()
            return task.result()
        finally:
            if task.cancel():
                await asyncio.wait([task])

    async def aclose(self) -> None:
        """Cancel all decisions in progress. Idempotent."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _decide(self, permission: PermissionRecord, policy: OnPermission) -> None:
        if not isinstance(policy, str):
            # The request may be an old event that is read again.
            with suppress(UnavailableError):
                pending = await self._routes.permissions()
                if all(other.permission_id != permission.permission_id for other in pending):
                    return
        verdict = policy if isinstance(policy, str) else policy(permission)
        if inspect.isawaitable(verdict):
            verdict = await verdict
        if isinstance(verdict, Decision):
            decision = verdict
        elif isinstance(verdict, bool | str) and verdict in _ALLOW_OR_DENY:
            decision = Decision(decision=_ALLOW_OR_DENY[verdict])
        else:
            raise InvalidRequestError(
                f"on_permission returned {verdict!r:.80}; it must return 'allow', 'deny', True, False or a Decision",
                param="on_permission",
            )
        backoff = Backoff(self._routes.times)
        while True:
            try:
                await self._routes.decide(permission.permission_id, decision.decision, scope=decision.scope)
                return
            except (AlreadyResolvedError, GoneError, NotFoundError):
                return
            except UnavailableError as exc:
                if isinstance(exc, WrongServerError):
                    raise
                await asyncio.sleep(backoff.next_delay_s(exc.retry_after_s))


Arguments = dict[str, JsonValue]
_ARGUMENTS: TypeAdapter[Arguments] = TypeAdapter(Arguments)


@dataclass(frozen=True, kw_only=True, repr=False)
class TurnToolCall:
    """A tool call of the turn with its result."""

    call_id: str
    name: str
    arguments: Arguments | None
    """The parsed arguments; None if the model has not written valid JSON."""
    status: ToolStatus
    text: str
    """The result that was given to the model."""
    elapsed_s: float

    def __repr__(self) -> str:
        arguments = "invalid arguments" if self.arguments is None else json.dumps(self.arguments, ensure_ascii=False)
        text = shorten(self.text, 500)
        return f"→ {self.name}({arguments}) {self.status} in {self.elapsed_s:.2f} s: {text}"


@dataclass(frozen=True, kw_only=True, repr=False)
class TurnResult(Displayed):
    """The result of a turn that has completed or was cancelled.

    Thoughts and tool calls are taken from the turn's events, and are missing if the events are no longer available.
    """

    turn_id: str
    session_id: str
    text: str
    """The text of the last message. It may be incomplete if the turn was cancelled."""
    thinking: str
    """The thoughts of the last message."""
    stop_reason: StopReason
    stats: TurnStats | None
    """None if the turn was cancelled before it started."""
    tool_calls: tuple[TurnToolCall, ...] = ()
    """The tool calls, in the order in which they ended."""
    reconnects: int = 0
    """How often the stream of events was reconnected during the turn."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        cost = (
            f" · {counted(self.stats.tokens, 'token')}, {self.stats.elapsed_s:.1f} s" if self.stats is not None else ""
        )
        return "\n\n".join([*map(repr, self.tool_calls), self.text, f"turn {self.turn_id} · {self.stop_reason}{cost}"])

    def _repr_html_(self) -> str:
        # Notebooks break lines of plain text within words; this style breaks them between words.
        return f'<div style="white-space: pre-wrap; word-break: normal">{html.escape(repr(self))}</div>'


def turn_error(turn_id: str, detail: ErrorDetail) -> LabError:
    """Return the error of a failed turn, of the class for its code."""
    kind = ERROR_CLASSES.get(detail.code, TurnError)
    code = "" if detail.code in ERROR_CLASSES else f" ({detail.code:.80})"
    return kind(f"turn {turn_id}: {detail.message}{code}", param=detail.param)
