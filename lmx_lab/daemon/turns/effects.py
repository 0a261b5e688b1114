"""A turn that runs: does what its machine says, and writes all that happens before it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.store import Store
from lmx_lab.daemon.tools.tool import DaemonTool, Toolbox
from lmx_lab.daemon.turns import permissions, records
from lmx_lab.daemon.turns.concurrency import TurnSlots
from lmx_lab.daemon.turns.message_builder import MessageBuilder, TurnUsage
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.daemon.turns.prompt import chat_request, chosen
from lmx_lab.daemon.turns.queue import StartedTurn
from lmx_lab.daemon.turns.recovery import end_from_rows
from lmx_lab.daemon.turns.running_tools import RunningTools
from lmx_lab.daemon.turns.tool_calls import cut, ids_in, named_apart
from lmx_lab.daemon.turns.turn import (
    CallModel,
    EndToolCall,
    EndTurn,
    ModelAnswered,
    ModelFailed,
    PermissionDecided,
    RequestPermission,
    SaveAnswer,
    StartTool,
    StopModel,
    StopRequested,
    StopTimedOut,
    StopTool,
    TurnAction,
    TurnEnding,
    TurnInput,
    TurnMachine,
    TurnPhase,
    WithdrawPermissions,
)
from lmx_lab.daemon.turns.writer import TurnWriter
from lmx_lab.errors import LabError, StoppingError, StorageFullError, TurnError, TurnTimeoutError
from lmx_lab.wire.events import ToolEnd
from lmx_lab.wire.identifiers import new_id
from lmx_lab.wire.sessions import PermissionRecord, ToolCall

log = logging.getLogger(__name__)
Effect = Callable[[], None]
NOTE_CHARACTERS = 4000
NOTES = 100
"""Of tools, in one batch; more are dropped."""
HEEDED_OF_CANCEL = 0.8
"""Of the time that a cancel may take, this is the tools'."""


@dataclass(frozen=True, kw_only=True)
class TurnDependencies:
    """What turns are made with."""

    store: Store
    upstream: ModelClient
    toolbox: Toolbox
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class _Expired:
    permission_id: str
    call_id: str


class ActiveTurn:
    """``run`` it in a task of its own; the other methods are for the same loop.

    Args:
        slots: Of turns that run at once; it has one, lends it while it waits for a permission, and has it or not in
            the end (``has_slot``).
        leave: Is given what does not heed its cancelling, to own it.
    """

    def __init__(
        self,
        begun: StartedTurn,
        parts: TurnDependencies,
        *,
        slots: TurnSlots,
        leave: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.key = begun.key
        self.has_slot = True
        self._begun = begun
        self._parts = parts
        self._limits = limits = parts.limits
        self._slots = slots
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        wished = begun.overrides.max_steps
        self._turn = TurnMachine(
            max_steps=limits.max_steps if wished is None else wished,
            parallel_tools=limits.parallel_tools,
            broken_calls=limits.broken_calls,
        )
        self._inbox: asyncio.Queue[TurnInput | _Expired | None] = asyncio.Queue()
        self._writer = TurnWriter(parts.store, parts.upstream)
        self._history = begun.history
        self._granted = set(begun.granted)
        self._call_ids = ids_in(begun.history)
        self._tally = TurnUsage(started_s=self._loop.time())
        self._draft = MessageBuilder(new_id("msg"))
        self._kept = False
        self._model: asyncio.Task[None] | None = None
        self._tools = RunningTools(
            parts.toolbox, tell=self._inbox.put_nowait, stopped=lambda: self._turn.ending.calls_are
        )
        self._batch: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._notes = 0
        self._remark: str | None = None
        self._stopping = False

    # From outside

    def stop(self, ending: TurnEnding) -> bool:
        """End it soon; False if it is about to end anyway."""
        if self._stopping or self._turn.phase is TurnPhase.ENDED:
            return False
        self._stopping = True
        self._inbox.put_nowait(StopRequested(ending=ending))
        return True

    def decided(self, permission: PermissionRecord) -> None:
        """Somebody has decided, which is in the log."""
        allowed = permission.decision == "allow"
        if allowed and permission.scope == "session":
            self._granted.add(permission.tool)
        said = "the user has denied this call; do not make it again, and go on without it"
        self._inbox.put_nowait(PermissionDecided(call_id=permission.call_id, allowed=allowed, said=said))

    def give_up(self) -> None:
        """What cannot be written now is left to the next start."""
        self._writer.give_up()

    async def run(self) -> None:
        """Until its terminal event is in the log, or that was given up."""
        timeout_s = self._begun.overrides.timeout_s or self._limits.turn_timeout_s
        said = f"the turn took longer than {timeout_s:g} s; raise timeout_s in its overrides, or ask for less"
        self._after(timeout_s, partial(self.stop, TurnEnding(error=TurnTimeoutError(said))))
        try:
            await self._do(self._turn.begin())
            while self._turn.phase is not TurnPhase.ENDED:
                await self._do(await self._heard(await self._inbox.get()))
        except StoppingError:
            log.warning("turn %s is left to the next start: the database is closed", self.key.turn_id)
        except Exception as exc:
            log.exception("turn %s broke", self.key.turn_id)
            await self._end_anyhow(exc)
        finally:
            self._close()

    async def _end_anyhow(self, exc: Exception) -> None:
        """By what the database has: a bug, or a database that fails, must not leave a turn without its end."""
        error = exc if isinstance(exc, LabError) else TurnError("a bug in the daemon ended this turn; its log has more")
        self._turn.phase = TurnPhase.ENDED
        self._writer.due = [partial(end_from_rows, key=self.key, ending=TurnEnding(error=error))]
        try:
            await self._writer.write_end(patient_of=LabError)
        except Exception:
            log.exception("turn %s could not be ended; the next start will do it", self.key.turn_id)

    def _close(self) -> None:
        for timer in [*self._timers, *([self._batch] if self._batch else [])]:
            timer.cancel()
        self._draft.closed = True
        for task in [*self._tools.left(), *([self._model] if self._model else [])]:
            if not task.done():
                task.cancel()
                self._leave(task)

    # The loop

    async def _heard(self, heard: TurnInput | _Expired | None) -> list[TurnAction]:
        if heard is None:
            return []
        if not isinstance(heard, _Expired):
            return self._turn.tell(heard)
        try:
            expired = await self._parts.store.write(lambda tx: permissions.expire(tx, heard.permission_id))
        except StorageFullError as exc:
            return self._turn.tell(StopRequested(ending=TurnEnding(error=exc)))
        if not expired:
            return []
        said = f"nobody allowed this call within {self._limits.permission_timeout_s:g} s; go on without it"
        return self._turn.tell(PermissionDecided(call_id=heard.call_id, allowed=False, said=said))

    async def _do(self, actions: list[TurnAction]) -> None:
        """Write what the actions say, then let them have their effect."""
        if any(isinstance(action, StopModel) for action in actions):
            self._stop_model()
        self._take_text()
        effects = [effect for action in actions if (effect := self._prepared(action)) is not None]
        if self._turn.phase is TurnPhase.ENDED:
            await self._writer.write_end()
            return
        try:
            await self._writer.write(ending=self._turn.phase is TurnPhase.STOPPING)
        except StorageFullError as exc:
            if self._turn.phase is not TurnPhase.STOPPING:
                await self._do(self._turn.tell(StopRequested(ending=TurnEnding(error=exc))))
            return
        for effect in effects:
            effect()
        self._lend_slot()

    def _prepared(self, action: TurnAction) -> Effect | None:
        """Make its changes due; gives what is to be done once they are in the log."""
        match action:
            case CallModel():
                return self._call_model(action)
            case SaveAnswer():
                self._keep(action.calls)
            case RequestPermission():
                return self._ask(action)
            case StartTool():
                return self._start_tool(action)
            case StopTool():
                self._tools.stop(action.call_id)
            case EndToolCall():
                self._end_call(action)
            case WithdrawPermissions():
                self._due(permissions.withdraw, session_id=self.key.session_id, turn_id=self.key.turn_id)
                self._after(self._limits.cancel_s * HEEDED_OF_CANCEL, lambda: self._inbox.put_nowait(StopTimedOut()))
            case EndTurn():
                self._end(action.ending)
        return None

    def _due(self, change: Callable[..., object], **fields: Any) -> None:
        self._writer.due.append(partial(change, **fields))

    def _due_here(self, change: Callable[..., object], **fields: Any) -> None:
        self._due(change, key=self.key, **fields)

    def _after(self, wait_s: float, then: Callable[[], object]) -> None:
        self._timers.append(self._loop.call_later(wait_s, then))

    def _lend_slot(self) -> None:
        """Who waits for a person keeps nobody else waiting."""
        if self._turn.waiting and self.has_slot:
            self.has_slot = False
            self._slots.give()

    # The model

    def _call_model(self, action: CallModel) -> Effect:
        # Of the first step, the turn's beginning has told.
        if action.step > 1:
            self._due_here(records.progress, step=action.step, note="")
        return partial(self._start_model, action.step)

    def _start_model(self, step: int) -> None:
        self._draft, self._kept = MessageBuilder(new_id("msg")), False
        self._tally.steps = step
        self._model = self._loop.create_task(self._ask_model(self._draft, step))

    async def _ask_model(self, draft: MessageBuilder, step: int) -> None:
        told: TurnInput
        try:
            if not self.has_slot:
                await self._slots.take(back=True)
                self.has_slot = True
            await self._stream(draft, step)
            calls = named_apart(draft.calls, self._call_ids)
            tools = {tool.name: tool.asks and tool.name not in self._granted for tool in self._tools_now()}
            told = ModelAnswered(calls=calls, tools=tools, cut=draft.cut)
        except LabError as exc:
            told = ModelFailed(error=exc)
        except Exception:
            log.exception("the model's answer could not be read")
            told = ModelFailed(
                error=TurnError("a bug in the daemon, while it read the model's answer; its log has more")
            )
        if not draft.closed:
            self._inbox.put_nowait(told)

    async def _stream(self, draft: MessageBuilder, step: int) -> None:
        session, overrides = self._begun.session, self._begun.overrides
        body = chat_request(
            system_prompt=session.system_prompt,
            history=self._history,
            tools=self._tools_now(),
            overrides=overrides,
            first=step == 1,
            absence=await self._parts.toolbox.absence(overrides.tool_choice or ""),
        )
        async with aclosing(self._parts.upstream.call(body, model=overrides.model or session.model)) as pieces:
            async for piece in pieces:
                self._remark = piece.remark or self._remark
                if draft.add(piece, self._loop.time()) or piece.remark:
                    self._write_soon()
                if draft.full:
                    return

    def _tools_now(self) -> list[DaemonTool]:
        names = self._begun.session.tools if self._begun.overrides.tools is None else self._begun.overrides.tools
        return chosen(self._parts.toolbox.tools(), names)

    def _stop_model(self) -> None:
        self._draft.closed = True
        if self._model is not None:
            self._model.cancel()

    def _write_soon(self) -> None:
        """At the end of the batch that begins now, or with what is written before."""
        if self._batch is None:
            self._batch = self._loop.call_later(self._limits.batch_s, self._inbox.put_nowait, None)

    def _take_text(self) -> None:
        if self._batch is not None:
            self._batch.cancel()
            self._batch = None
        self._notes = 0
        if self._remark is not None and self._turn.phase is TurnPhase.MODEL:
            self._due_here(records.progress, step=self._turn.step, note=self._remark[:NOTE_CHARACTERS])
        self._remark = None
        for kind, text in self._draft.take():
            self._due_here(records.text, kind=kind, message_id=self._draft.message_id, text=text)

    def _keep(self, calls: tuple[ToolCall, ...]) -> None:
        """Make the draft a message, unless it is empty."""
        self._kept = True
        self._draft.closed = True
        self._tally.add(self._draft)
        self._tally.tool_calls += len(calls)
        text, thinking = self._draft.text, self._draft.thinking
        if not (text or thinking or calls):
            return
        said = records.answer(
            self.key, message_id=self._draft.message_id, text=text, thinking=thinking, tool_calls=calls
        )
        self._history.append(said)
        self._due_here(records.message, said=said)

    # Calls

    def _ask(self, action: RequestPermission) -> Effect:
        permission_id = new_id("prm")
        timeout_s = self._limits.permission_timeout_s
        self._due(
            permissions.ask,
            permission_id=permission_id,
            session_id=self.key.session_id,
            turn_id=self.key.turn_id,
            call_id=action.call.call_id,
            tool=action.call.name,
            arguments=action.arguments,
            timeout_s=timeout_s,
        )
        expired = _Expired(permission_id=permission_id, call_id=action.call.call_id)
        return lambda: self._after(timeout_s, lambda: self._inbox.put_nowait(expired))

    def _start_tool(self, action: StartTool) -> Effect:
        self._due_here(records.tool_start, call=action.call, arguments=action.arguments)
        note = partial(self._note, action.call.call_id)
        return lambda: self._tools.start(action.call, action.arguments, note)

    def _note(self, call_id: str, text: str) -> None:
        if self._turn.phase not in (TurnPhase.ENDED, TurnPhase.STOPPING) and self._notes < NOTES:
            self._notes += 1
            self._due_here(records.tool_output, call_id=call_id, text=text[:NOTE_CHARACTERS])
            self._write_soon()

    def _end_call(self, action: EndToolCall) -> None:
        call_id = action.call.call_id
        text, truncated = cut(action.text, self._limits.tool_result_bytes)
        ended = ToolEnd(
            call_id=call_id,
            name=action.call.name,
            status=action.status,
            text=text,
            truncated=truncated,
            elapsed_s=self._tools.elapsed_s(call_id),
        )
        said = records.tool_message(self.key, call_id=call_id, text=text)
        self._history.append(said)
        self._due_here(records.tool_end, ended=ended, said=said)

    # The end

    def _end(self, ending: TurnEnding) -> None:
        if not self._kept:
            self._keep(())
        stats = self._tally.stats(self._loop.time())
        self._due_here(records.end, ending=ending, text=self._draft.text, stats=stats)
