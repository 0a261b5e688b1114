"""Run one turn: perform the actions of its state machine, each after it was written to the log, and run its tools."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import permissions, sessions, turns
from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.daemon.storage.turns import StartedTurn, end_from_rows
from lmx_lab.daemon.toolbox import Toolbox
from lmx_lab.daemon.tools import ToolResult
from lmx_lab.daemon.turns.concurrency import TurnSlots, retry_delays
from lmx_lab.daemon.turns.machine import (
    CallModel,
    EndToolCall,
    EndTurn,
    RequestPermission,
    SaveAnswer,
    StartTool,
    StopModel,
    StopTool,
    TurnAction,
    TurnEnding,
    TurnMachine,
    TurnPhase,
    WithdrawPermissions,
)
from lmx_lab.daemon.turns.message import MessageBuilder, TurnUsage
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.daemon.turns.prompt import call_ids, chat_request, normalize_calls, select_tools, truncate_result
from lmx_lab.errors import LabError, StoppingError, StorageFullError, TurnError, TurnTimeoutError
from lmx_lab.wire.base import new_id
from lmx_lab.wire.events import ToolEnd, ToolOutput, TurnProgress, TurnText
from lmx_lab.wire.mcp import ToolRecord
from lmx_lab.wire.sessions import PermissionRecord, SessionMessage, ToolCall

log = logging.getLogger(__name__)
Effect = Callable[[], None]
"""The effect of an action after it was written to the log."""
PROGRESS_CHARACTERS = 4000
"""Maximum length of one message of progress."""
Change = Callable[[Transaction], object]
"""Changes rows and appends events."""
Input = Callable[[], list[TurnAction] | Awaitable[list[TurnAction]]]
"""An input of the state machine, which returns what to do."""


@dataclass(frozen=True, kw_only=True)
class TurnDependencies:
    """The services that all turns use."""

    store: Store
    upstream: ModelClient
    toolbox: Toolbox
    limits: Limits
    retry_s: float
    """Delay before the first retry of a change that cannot be written. Later delays are longer."""


class ActiveTurn:
    """A turn that is running. ``run`` it in a separate task; the other methods are for the same event loop."""

    def __init__(
        self,
        started: StartedTurn,
        dependencies: TurnDependencies,
        *,
        slots: TurnSlots,
        adopt_task: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """
        Args:
            slots: Slots of running turns. The turn has one at the start, releases it while it waits for permissions,
                and may or may not have one at the end (``has_slot``).
            adopt_task: Called with each task that still runs at the end although it was cancelled.
        """
        self.key = started.key
        self.has_slot = True
        """Whether the turn has a slot, which the caller of ``run`` releases at the end."""
        self._started = started
        self._dependencies = dependencies
        self._limits = limits = dependencies.limits
        self._slots = slots
        self._adopt_task = adopt_task
        self._loop = asyncio.get_running_loop()
        max_steps = started.overrides.max_steps
        self._machine = TurnMachine(
            max_steps=limits.max_steps if max_steps is None else max_steps,
            parallel_tools=limits.parallel_tools,
            broken_calls=limits.broken_calls,
        )
        self._inbox: asyncio.Queue[Input] = asyncio.Queue()
        self._pending: list[Change] = []
        """Changes that are not in the log yet, in order."""
        self._abandoned = asyncio.Event()
        self._history: list[SessionMessage] = []
        self._granted = set(started.granted)
        self._call_ids: set[str] = set()
        self._usage = TurnUsage(started_s=self._loop.time())
        self._message = MessageBuilder(new_id("msg"))
        """The message of the current step."""
        self._message_is_saved = False
        self._model_task: asyncio.Task[None] | None = None
        self._tool_tasks: dict[str, asyncio.Task[None]] = {}
        self._tools_started_s: dict[str, float] = {}
        self._batch_timer: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._progress_count = 0
        """Number of messages of progress in the current batch."""
        self._model_progress: str | None = None
        """State of the request at the model server that was not written yet."""
        self._is_stopping = False

    # Called by the runner

    def stop(self, ending: TurnEnding) -> bool:
        """Request that the turn ends. Returns False if it is ending already."""
        if self._is_stopping or self._machine.phase is TurnPhase.ENDED:
            return False
        self._is_stopping = True
        self._inbox.put_nowait(partial(self._machine.stop, ending))
        return True

    def apply_decision(self, permission: PermissionRecord) -> None:
        """Continue with a client's decision, which is in the log already."""
        is_allowed = permission.decision == "allow"
        if is_allowed and permission.scope == "session":
            self._granted.add(permission.tool)
        message = "the user has denied this call; do not repeat it, and continue without it"
        self._inbox.put_nowait(partial(self._machine.decide, permission.call_id, allowed=is_allowed, message=message))

    def abandon(self) -> None:
        """Stop trying to write the end of the turn. The next start of the daemon ends it."""
        self._abandoned.set()

    async def run(self) -> None:
        """Run the turn until its terminal event is in the log, or ``abandon`` was called."""
        timeout_s = self._started.overrides.timeout_s or self._limits.turn_timeout_s
        timed_out = TurnTimeoutError(
            f"the turn did not end within {timeout_s:g} s; increase timeout_s in its overrides, or request less"
        )
        self._call_later(timeout_s, partial(self.stop, TurnEnding(error=timed_out)))
        try:
            parse = partial(sessions.parse_messages, self._started.history)
            # A long history is parsed in a thread: 2,000 messages take 21 to 37 ms, during which all other turns and
            # connections would wait.
            is_long = len(self._started.history) > 100
            self._history = await asyncio.to_thread(parse) if is_long else parse()
            self._call_ids = call_ids(self._history)
            await self._perform(self._machine.start())
            while self._machine.phase is not TurnPhase.ENDED:
                actions = (await self._inbox.get())()
                await self._perform(actions if isinstance(actions, list) else await actions)
        except StoppingError:
            log.warning("turn %s is ended by the next start of the daemon: the database is closed", self.key.turn_id)
        except Exception as exc:
            log.exception("turn %s raised an exception", self.key.turn_id)
            # End the turn from its rows: every turn must end, even after a bug or an error of the database.
            error = (
                exc if isinstance(exc, LabError) else TurnError("a bug in the daemon ended this turn; see daemon.log")
            )
            self._machine.phase = TurnPhase.ENDED
            self._pending = [partial(end_from_rows, key=self.key, ending=TurnEnding(error=error))]
            try:
                await self._write_end(retry_on=LabError)
            except Exception:
                log.exception("turn %s could not be ended; the next start of the daemon ends it", self.key.turn_id)
        finally:
            for timer in [*self._timers, *([self._batch_timer] if self._batch_timer else [])]:
                timer.cancel()
            self._message.is_closed = True
            for task in [*self._tool_tasks.values(), *([self._model_task] if self._model_task else [])]:
                if not task.done():
                    task.cancel()
                    self._adopt_task(task)

    # The loop

    async def _expire_permission(self, permission_id: str, call_id: str) -> list[TurnAction]:
        """Deny a permission without a decision."""
        try:
            is_expired = await self._dependencies.store.write(lambda tx: permissions.expire(tx, permission_id))
        except StorageFullError as exc:
            return self._machine.stop(TurnEnding(error=exc))
        if not is_expired:
            return []
        timeout_s = self._limits.permission_timeout_s
        message = f"this call was not allowed within {timeout_s:g} s; continue without it"
        return self._machine.decide(call_id, allowed=False, message=message)

    async def _perform(self, actions: list[TurnAction]) -> None:
        """Write the actions to the log in one transaction, then perform their effects."""
        if any(isinstance(action, StopModel) for action in actions):
            self._message.is_closed = True
            if self._model_task is not None:
                self._model_task.cancel()
        # Text and progress of the current batch come first.
        if self._batch_timer is not None:
            self._batch_timer.cancel()
            self._batch_timer = None
        self._progress_count = 0
        if self._model_progress is not None and self._machine.phase is TurnPhase.MODEL:
            note = self._model_progress[:PROGRESS_CHARACTERS]
            self._add_event("turn.progress", TurnProgress(step=self._machine.step, note=note))
        self._model_progress = None
        for event, text in self._message.take():
            self._add_event(event, TurnText(message_id=self._message.message_id, text=text))
        effects = [effect for action in actions if (effect := self._prepare(action)) is not None]
        if self._machine.phase is TurnPhase.ENDED:
            await self._write_end()
            return
        try:
            await self._write(ending=self._machine.phase is TurnPhase.STOPPING)
        except StorageFullError as exc:
            if self._machine.phase is not TurnPhase.STOPPING:
                await self._perform(self._machine.stop(TurnEnding(error=exc)))
            return
        for effect in effects:
            effect()
        if self._machine.is_waiting and self.has_slot:
            # Another turn can run while this one waits for permissions only.
            self.has_slot = False
            self._slots.release()

    def _prepare(self, action: TurnAction) -> Effect | None:
        """Add the changes of an action to the pending ones. Returns what to do once they are in the log."""
        match action:
            case CallModel():
                # The progress of the first step was written when the turn was started.
                if action.step > 1:
                    self._add_event("turn.progress", TurnProgress(step=action.step, note=""))
                return partial(self._start_model, action.step)
            case SaveAnswer():
                self._save_message(action.calls)
            case RequestPermission():
                permission_id, timeout_s = new_id("prm"), self._limits.permission_timeout_s
                self._add_change(
                    permissions.request,
                    permission_id=permission_id,
                    call=action.call,
                    arguments=action.arguments,
                    timeout_s=timeout_s,
                )
                expired = partial(self._expire_permission, permission_id, action.call.call_id)
                return partial(self._call_later, timeout_s, partial(self._inbox.put_nowait, expired))
            case StartTool():
                self._add_change(turns.start_tool, call=action.call, arguments=action.arguments)
                return partial(self._start_tool, action)
            case StopTool():
                if (task := self._tool_tasks.get(action.call_id)) is not None:
                    task.cancel()
                else:
                    # The tool was not started because of an error.
                    self._report_stopped(action.call_id)
            case EndToolCall():
                call_id = action.call.call_id
                text, is_truncated = truncate_result(action.text, self._limits.tool_result_bytes)
                started_s = self._tools_started_s.get(call_id)
                end = ToolEnd(
                    call_id=call_id,
                    name=action.call.name,
                    status=action.status,
                    text=text,
                    truncated=is_truncated,
                    elapsed_s=0.0 if started_s is None else round(self._loop.time() - started_s, 6),
                )
                message = turns.tool_message(self.key, call_id=call_id, text=text)
                self._history.append(message)
                self._add_change(turns.end_tool, end=end, message=message)
            case WithdrawPermissions():
                self._add_change(permissions.withdraw)
                # The rest of the time is for writing the end of the turn.
                tools_s = 0.8 * self._limits.cancel_s
                self._call_later(tools_s, partial(self._inbox.put_nowait, self._machine.stop_without_tools))
            case EndTurn():
                if not self._message_is_saved:
                    self._save_message(())
                stats = self._usage.stats(self._loop.time())
                self._add_change(turns.end, ending=action.ending, text=self._message.text, stats=stats)
        return None

    def _add_change(self, change: Callable[..., object], **arguments: Any) -> None:
        self._pending.append(partial(change, key=self.key, **arguments))

    def _add_event(self, event: str, data: BaseModel) -> None:
        self._add_change(Transaction.append_to_turn, event=event, data=data)

    def _call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        self._timers.append(self._loop.call_later(delay_s, callback))

    # Writing

    async def _write(self, *, ending: bool = False) -> None:
        """Write the pending changes, and the state of the model server if it has changed.

        Changes that could not be written stay pending, before later ones.

        Args:
            ending: Whether the changes end something. They are then tried even on a full disk.

        Raises:
            StorageFullError: The disk is full. All changes are still pending.
        """
        upstream = self._dependencies.upstream
        pending, status = list(self._pending), upstream.unreported_status()
        if not pending and status is None:
            return

        def apply(tx: Transaction) -> None:
            if status is not None:
                tx.append("model.status", status)
            for change in pending:
                change(tx)

        await self._dependencies.store.write(apply, ending=ending)
        del self._pending[: len(pending)]
        if status is not None:
            upstream.mark_reported(status)

    async def _write_end(self, retry_on: type[LabError] = StorageFullError) -> None:
        """Write the pending changes, and retry until it succeeds, ``abandon`` is called or the database is closed.

        Args:
            retry_on: Exceptions after which to retry. Others are raised.
        """
        for delay_s in retry_delays(self._dependencies.retry_s):
            if self._abandoned.is_set():
                return
            try:
                await self._write(ending=True)
                return
            except StoppingError:
                return  # The database is closed.
            except retry_on as exc:
                log.warning("the end of a turn cannot be written yet: %s", exc)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._abandoned.wait(), delay_s)

    # The model

    def _start_model(self, step: int) -> None:
        self._message, self._message_is_saved = MessageBuilder(new_id("msg")), False
        self._usage.steps = step
        self._model_task = self._loop.create_task(self._call_model(self._message, step))

    async def _call_model(self, message: MessageBuilder, step: int) -> None:
        """Call the model, add the pieces of its answer to the message, and report the end to the inbox."""
        session, overrides = self._started.session, self._started.overrides
        upstream, toolbox = self._dependencies.upstream, self._dependencies.toolbox
        result: Input
        try:
            if not self.has_slot:
                await self._slots.acquire(continuing=True)
                self.has_slot = True
            body = chat_request(
                system_prompt=session.system_prompt,
                history=self._history,
                tools=self._current_tools(),
                overrides=overrides,
                is_first_step=step == 1,
                absence=await toolbox.explain_absence(overrides.tool_choice) if overrides.tool_choice else None,
            )
            async with aclosing(upstream.call(body, model=overrides.model or session.model)) as pieces:
                async for piece in pieces:
                    self._model_progress = piece.remark or self._model_progress
                    if message.add(piece, self._loop.time()) or piece.remark:
                        self._start_batch()
                    if message.is_full:
                        break
            calls = normalize_calls(message.calls, self._call_ids)
            offered = self._current_tools() if calls else []
            tools = {tool.name: tool.needs_permission and tool.name not in self._granted for tool in offered}
            result = partial(self._machine.take_answer, calls, tools, is_truncated=message.is_truncated)
        except LabError as exc:
            result = partial(self._machine.fail, exc)
        except Exception:
            log.exception("the model's answer could not be read")
            error = TurnError("a bug in the daemon occurred while it read the model's answer; see daemon.log")
            result = partial(self._machine.fail, error)
        if not message.is_closed:
            self._inbox.put_nowait(result)

    def _current_tools(self) -> list[ToolRecord]:
        session, overrides = self._started.session, self._started.overrides
        names = session.tools if overrides.tools is None else overrides.tools
        return select_tools(self._dependencies.toolbox.list_tools(), names)

    def _start_batch(self) -> None:
        """Write what was received after ``limits.batch_s``, or earlier together with an action."""
        if self._batch_timer is None:
            # Text is written before the actions of each input, also if there are none.
            self._batch_timer = self._loop.call_later(self._limits.batch_s, self._inbox.put_nowait, list)

    def _save_message(self, calls: tuple[ToolCall, ...]) -> None:
        """Add the current message to the history, unless it is empty."""
        self._message_is_saved = True
        self._message.is_closed = True
        self._usage.add(self._message)
        self._usage.tool_calls += len(calls)
        text, thinking = self._message.text, self._message.thinking
        if not (text or thinking or calls):
            return
        message = SessionMessage(
            message_id=self._message.message_id,
            role="assistant",
            content=text,
            reasoning_content=thinking or None,
            tool_calls=calls,
            turn_id=self.key.turn_id,
        )
        self._history.append(message)
        self._add_change(turns.add_message, message=message)

    # Calls

    def _start_tool(self, action: StartTool) -> None:
        call_id = action.call.call_id
        self._tools_started_s[call_id] = self._loop.time()
        task = self._loop.create_task(self._run_tool(action))
        # A callback, because a task that is cancelled before its first step does not run any of its own code.
        task.add_done_callback(lambda ended: self._report_stopped(call_id) if ended.cancelled() else None)
        self._tool_tasks[call_id] = task

    async def _run_tool(self, action: StartTool) -> None:
        call = action.call

        def on_progress(text: str) -> None:
            is_running = self._machine.phase not in (TurnPhase.ENDED, TurnPhase.STOPPING)
            # Further messages of this batch are dropped.
            if is_running and self._progress_count < 100:
                self._progress_count += 1
                self._add_event("tool.output", ToolOutput(call_id=call.call_id, text=text[:PROGRESS_CHARACTERS]))
                self._start_batch()

        try:
            result = await self._dependencies.toolbox.call(call.name, action.arguments, on_progress=on_progress)
        except Exception as exc:
            log.exception("tool %s raised an exception", call.name)
            result = ToolResult(status="error", text=f"the tool failed: {type(exc).__name__}")
        self._inbox.put_nowait(partial(self._machine.end_tool, call.call_id, result.status, result.text))

    def _report_stopped(self, call_id: str) -> None:
        if call_id in self._tools_started_s:
            text = "the turn was stopped while this tool was running; it is unknown whether the call had an effect"
        else:
            text = "the turn was stopped before this call started"
        status = self._machine.ending.open_call_status
        self._inbox.put_nowait(partial(self._machine.end_tool, call_id, status, text))
