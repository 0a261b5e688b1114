"""The state machine of one turn. It does no I/O: its methods are the inputs, and return actions.

::

    NEW ──start──▶ MODEL ──answered──▶ CALLS ──all ended──▶ MODEL …
                     │                   │
                     ▼                   ▼ stop, while tools run
                   ENDED ◀──────────── STOPPING

The caller performs the actions of one input in their order, after writing all of them to the log in one transaction.
After ``stop`` nothing new starts: the turn ends when the running tools have ended, or at ``stop_without_tools``.
``EndTurn`` is the last action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lmx_lab.daemon.turns.prompt import EXCERPT_CHARACTERS, LISTED_TOOLS, parse_arguments
from lmx_lab.errors import LabError, TurnError, first_names
from lmx_lab.wire.sessions import StopReason, ToolCall, ToolStatus


class TurnPhase(Enum):
    """The activity of a turn."""

    NEW = "new"
    MODEL = "model"
    """The model is answering."""
    CALLS = "calls"
    """Calls wait for permissions, wait for other calls, or run."""
    STOPPING = "stopping"
    """The turn was stopped, and tools are still running."""
    ENDED = "ended"


class CallState(Enum):
    """The state of one call of the model's last answer."""

    WAITING = "waiting"
    """The call waits for a permission."""
    READY = "ready"
    """The call runs as soon as the number of running calls allows it."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class TurnEnding:
    """How a turn ends: with a reason or with an error."""

    reason: StopReason = "end"
    error: LabError | None = None
    open_call_status: ToolStatus = "cancelled"
    """Status of the calls that have not ended before."""


# Actions


@dataclass(frozen=True, kw_only=True)
class CallModel:
    """Call the model."""

    step: int
    """Number of model calls in this turn, starting at 1."""


@dataclass(frozen=True, kw_only=True)
class StopModel:
    """Close the model's stream. Output that arrives later is ignored."""


@dataclass(frozen=True, kw_only=True)
class SaveAnswer:
    """Save the model's message, which is complete."""

    calls: tuple[ToolCall, ...]
    """The message's calls, without those that are ignored."""


@dataclass(frozen=True, kw_only=True)
class RequestPermission:
    """Request a permission for one call with exactly these arguments."""

    call: ToolCall
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StartTool:
    """Start a tool, but only after this action is in the log."""

    call: ToolCall
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StopTool:
    """Cancel a running call."""

    call_id: str


@dataclass(frozen=True, kw_only=True)
class EndToolCall:
    """Write the end of a call."""

    call: ToolCall
    status: ToolStatus
    text: str
    """The result, for the model."""


@dataclass(frozen=True, kw_only=True)
class WithdrawPermissions:
    """Deny all pending permissions, since the turn is stopped."""


@dataclass(frozen=True, kw_only=True)
class EndTurn:
    """Write the end of the turn."""

    ending: TurnEnding


TurnAction = (
    CallModel
    | StopModel
    | SaveAnswer
    | RequestPermission
    | StartTool
    | StopTool
    | EndToolCall
    | WithdrawPermissions
    | EndTurn
)


class InvalidTransitionError(RuntimeError):
    """An input is impossible in the current phase. This is a bug in the caller."""


@dataclass(kw_only=True)
class _OpenCall:
    call: ToolCall
    arguments: dict[str, Any]
    state: CallState


class TurnMachine:
    """The state of one turn.

    A method raises ``InvalidTransitionError`` if the input is impossible in the current phase.
    """

    def __init__(self, *, max_steps: int, parallel_tools: int, broken_calls: int) -> None:
        """
        Args:
            max_steps: Maximum number of model calls.
            parallel_tools: Maximum number of tools that run at the same time.
            broken_calls: Maximum number of calls with invalid arguments or of unknown tools. The next one ends the
                turn.
        """
        self.phase = TurnPhase.NEW
        self.step = 0
        """Number of model calls so far."""
        self._max_steps = max_steps
        self._parallel_tools = parallel_tools
        self._broken_calls_left = broken_calls
        self._calls: dict[str, _OpenCall] = {}
        """The calls of the model's last answer, by id."""
        self.ending = TurnEnding()
        """The ending that ``stop`` has set."""

    @property
    def is_waiting(self) -> bool:
        """Whether the turn waits for permissions, and for nothing else."""
        states = {call.state for call in self._calls.values()} - {CallState.ENDED}
        return self.phase is TurnPhase.CALLS and states == {CallState.WAITING}

    def start(self) -> list[TurnAction]:
        """Start the turn."""
        self._expect(TurnPhase.NEW, "start")
        return self._call_model()

    # The model

    def _call_model(self) -> list[TurnAction]:
        self.phase = TurnPhase.MODEL
        self.step += 1
        self._calls = {}
        return [CallModel(step=self.step)]

    def fail(self, error: LabError) -> list[TurnAction]:
        """End the turn, because the model call failed before the answer was complete."""
        self._expect(TurnPhase.MODEL, "the failure of the model")
        return self._end(TurnEnding(error=error))

    def take_answer(
        self, calls: tuple[ToolCall, ...], tools: Mapping[str, bool], *, is_truncated: bool = False
    ) -> list[TurnAction]:
        """Continue with the model's complete answer.

        Args:
            tools: The tools that exist at the moment, and whether a call of each needs a permission.
            is_truncated: Whether the answer ended at the length limit. Its calls may be incomplete and are ignored.
        """
        self._expect(TurnPhase.MODEL, "the model's answer")
        if is_truncated or not calls:
            ending = TurnEnding(reason="length" if is_truncated else "end")
            return [SaveAnswer(calls=()), *self._end(ending)]
        self.phase = TurnPhase.CALLS
        refused = [action for call in calls for action in self._add_call(call, tools)]
        if self._broken_calls_left < 0:
            ended = self._end_open_calls("cancelled", "the turn ended before this call started")
            error = TurnError(
                "the model called unknown tools, or wrote arguments that are not JSON objects, too many times; try "
                "another model or fewer tools"
            )
            return [SaveAnswer(calls=calls), *refused, *ended, *self._end(TurnEnding(error=error))]
        requests: list[TurnAction] = [
            RequestPermission(call=open_call.call, arguments=open_call.arguments)
            for open_call in self._calls.values()
            if open_call.state is CallState.WAITING
        ]
        return [SaveAnswer(calls=calls), *refused, *requests, *self._continue()]

    def _add_call(self, call: ToolCall, tools: Mapping[str, bool]) -> list[TurnAction]:
        """Add a call of the model. A call that cannot be made ends immediately."""
        if call.call_id in self._calls:
            raise InvalidTransitionError(f"two calls have the id {call.call_id!r}; make the ids unique first")
        parsed = parse_arguments(call.arguments)
        needs_permission = tools.get(call.name)
        state = CallState.WAITING if needs_permission else CallState.READY
        if needs_permission is None or isinstance(parsed, str):
            state, self._broken_calls_left = CallState.ENDED, self._broken_calls_left - 1
        arguments = {} if isinstance(parsed, str) else parsed
        self._calls[call.call_id] = _OpenCall(call=call, arguments=arguments, state=state)
        if needs_permission is None:
            names, others = sorted(tools), "there are no others; answer without tools"
            if names:
                others = f"the tools are {first_names(names, LISTED_TOOLS)}"
            separator = ";" if names else ", and"
            text = f"the tool {call.name[:EXCERPT_CHARACTERS]!r} does not exist{separator} {others}"
            return [EndToolCall(call=call, status="error", text=text)]
        if isinstance(parsed, str):
            text = f"{parsed}; call {call.name} again with arguments that are one JSON object and match its schema"
            return [EndToolCall(call=call, status="error", text=text)]
        return []

    # Calls

    def _continue(self) -> list[TurnAction]:
        """Start the calls that may run. When all calls have ended, call the model again."""
        if all(call.state is CallState.ENDED for call in self._calls.values()):
            return self._end(TurnEnding(reason="max_steps")) if self.step >= self._max_steps else self._call_model()
        ready = [call for call in self._calls.values() if call.state is CallState.READY]
        starting = ready[: max(0, self._parallel_tools - len(self._running_calls()))]
        for call in starting:
            call.state = CallState.RUNNING
        return [StartTool(call=call.call, arguments=call.arguments) for call in starting]

    def decide(self, call_id: str, *, allowed: bool, message: str) -> list[TurnAction]:
        """Continue with the decision on a permission.

        Args:
            message: For the model, if the permission was denied.
        """
        self._expect((TurnPhase.CALLS, TurnPhase.STOPPING, TurnPhase.ENDED), "a decision")
        call = self._calls.get(call_id)
        if self.phase is not TurnPhase.CALLS:
            return []  # The turn was stopped while the decision was made.
        if call is None or call.state is not CallState.WAITING:
            raise InvalidTransitionError(f"a decision on {call_id!r}, which does not wait for one")
        if allowed:
            call.state = CallState.READY
            return self._continue()
        call.state = CallState.ENDED
        return [EndToolCall(call=call.call, status="denied", text=message), *self._continue()]

    def end_tool(self, call_id: str, status: ToolStatus, text: str) -> list[TurnAction]:
        """Continue after the end of a running call, whose result for the model is ``text``."""
        self._expect((TurnPhase.CALLS, TurnPhase.STOPPING, TurnPhase.ENDED), "the end of a tool")
        if self.phase is TurnPhase.ENDED:
            return []  # The turn has ended without this tool.
        call = self._calls.get(call_id)
        if call is None or call.state is not CallState.RUNNING:
            raise InvalidTransitionError(f"the end of the call {call_id!r}, which is not running")
        call.state = CallState.ENDED
        ended = EndToolCall(call=call.call, status=status, text=text)
        if self.phase is TurnPhase.CALLS:
            return [ended, *self._continue()]
        return [ended, *([] if self._running_calls() else self._end(self.ending))]

    # The end

    def stop(self, ending: TurnEnding) -> list[TurnAction]:
        """Stop the turn, because it was cancelled, has timed out, or the daemon is stopping."""
        if self.phase in (TurnPhase.STOPPING, TurnPhase.ENDED):
            return []  # The first request determines the ending.
        if self.phase is not TurnPhase.CALLS:
            stop: list[TurnAction] = [StopModel()] if self.phase is TurnPhase.MODEL else []
            return [*stop, *self._end(ending)]
        running = self._running_calls()
        self.phase, self.ending = TurnPhase.STOPPING, ending
        actions: list[TurnAction] = [
            WithdrawPermissions(),
            *(StopTool(call_id=call.call.call_id) for call in running),
        ]
        actions += self._end_open_calls(
            ending.open_call_status, "the turn was stopped before this call started", keep=CallState.RUNNING
        )
        return actions if running else [*actions, *self._end(ending)]

    def stop_without_tools(self) -> list[TurnAction]:
        """End the turn without running tools, which did not end in time after ``stop``."""
        self._expect((TurnPhase.STOPPING, TurnPhase.ENDED), "the end without tools")
        if self.phase is TurnPhase.ENDED:
            return []
        text = "the turn was stopped, but the tool did not end in time and may still be running"
        return [*self._end_open_calls(self.ending.open_call_status, text), *self._end(self.ending)]

    def _end(self, ending: TurnEnding) -> list[TurnAction]:
        self.phase = TurnPhase.ENDED
        return [EndTurn(ending=ending)]

    def _end_open_calls(self, status: ToolStatus, text: str, *, keep: CallState = CallState.ENDED) -> list[TurnAction]:
        """End all calls, except those in the state ``keep``."""
        ended: list[TurnAction] = []
        for call in self._calls.values():
            if call.state not in (CallState.ENDED, keep):
                call.state = CallState.ENDED
                ended.append(EndToolCall(call=call.call, status=status, text=text))
        return ended

    def _running_calls(self) -> list[_OpenCall]:
        return [call for call in self._calls.values() if call.state is CallState.RUNNING]

    def _expect(self, phases: TurnPhase | tuple[TurnPhase, ...], received: str) -> None:
        allowed = (phases,) if isinstance(phases, TurnPhase) else phases
        if self.phase not in allowed:
            expected = " or ".join(phase.value for phase in allowed)
            raise InvalidTransitionError(
                f"{received} requires the phase {expected}, but the turn is in the phase {self.phase.value}, at step "
                f"{self.step}"
            )
