"""One turn, decided without I/O: it is told what has happened and says what to do next.

::

    NEW ──begin──▶ MODEL ──answered──▶ CALLS ──all ended──▶ MODEL …
                     │                   │
                     ▼                   ▼ stop, while tools run
                   ENDED ◀──────────── STOPPING

Whoever performs it does the actions of one ``tell`` in their order, and writes all of them to the log at once. From a
``Stop`` on nothing new begins; the turn ends when what runs has ended, or at ``overdue``. ``End`` is the last action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lmx_lab.daemon.turns.arguments import SHOWN, arguments_in
from lmx_lab.errors import LabError, TurnError
from lmx_lab.wire.sessions import StopReason, ToolCall, ToolStatus

NAMES_TOLD = 30


class TurnPhase(Enum):
    NEW = "new"
    MODEL = "model"
    CALLS = "calls"
    STOPPING = "stopping"
    ENDED = "ended"


class CallState(Enum):
    ASKING = "asking"
    """For permission."""
    READY = "ready"
    """To run, as soon as fewer others do."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class TurnEnding:
    """How a turn ends: with a reason, or with an error."""

    reason: StopReason = "end"
    error: LabError | None = None
    calls_are: ToolStatus = "cancelled"
    """What becomes of calls that had not ended."""


# What is told


@dataclass(frozen=True, kw_only=True)
class ModelAnswered:
    """The model has answered in full."""

    calls: tuple[ToolCall, ...] = ()
    tools: Mapping[str, bool]
    """The tools there are now, and whether a call needs a yes."""
    cut: bool = False
    """The answer was cut off by its length; what it calls is not what the model meant."""


@dataclass(frozen=True, kw_only=True)
class ModelFailed:
    """The model has not answered, or not to the end."""

    error: LabError


@dataclass(frozen=True, kw_only=True)
class PermissionDecided:
    """On a permission."""

    call_id: str
    allowed: bool
    said: str
    """For the model, if it is a denial."""


@dataclass(frozen=True, kw_only=True)
class ToolEnded:
    call_id: str
    status: ToolStatus
    text: str


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """Cancelled, or out of time, or the daemon ends."""

    ending: TurnEnding


@dataclass(frozen=True, kw_only=True)
class StopTimedOut:
    """What runs does not heed; it is left alone."""


TurnInput = ModelAnswered | ModelFailed | PermissionDecided | ToolEnded | StopRequested | StopTimedOut


# What to do


@dataclass(frozen=True, kw_only=True)
class CallModel:
    step: int
    """From 1."""


@dataclass(frozen=True, kw_only=True)
class StopModel:
    """Close its stream; what comes after this does not count."""


@dataclass(frozen=True, kw_only=True)
class SaveAnswer:
    """The model's message is whole."""

    calls: tuple[ToolCall, ...]
    """Those that count."""


@dataclass(frozen=True, kw_only=True)
class RequestPermission:
    """For permission, with exactly these arguments."""

    call: ToolCall
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StartTool:
    """Once this is in the log, and not before."""

    call: ToolCall
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StopTool:
    call_id: str


@dataclass(frozen=True, kw_only=True)
class EndToolCall:
    call: ToolCall
    status: ToolStatus
    text: str
    """For the model."""


@dataclass(frozen=True, kw_only=True)
class WithdrawPermissions:
    """Nobody needs to decide any more: the permissions that wait are resolved."""


@dataclass(frozen=True, kw_only=True)
class EndTurn:
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
    """A bug in whoever drives the turn."""


@dataclass(kw_only=True)
class _OpenCall:
    call: ToolCall
    arguments: dict[str, Any]
    state: CallState


class TurnMachine:
    """
    Args:
        max_steps: Calls of the model.
        parallel_tools: Calls that run at once.
        broken_calls: How many may be unreadable, or of tools that are not there, before the turn ends.
    """

    def __init__(self, *, max_steps: int, parallel_tools: int, broken_calls: int) -> None:
        self.phase = TurnPhase.NEW
        self.step = 0
        self.called = 0
        """Calls that the model asked for."""
        self._max_steps = max_steps
        self._parallel_tools = parallel_tools
        self._broken_left = broken_calls
        self._calls: dict[str, _OpenCall] = {}
        self.ending = TurnEnding()
        """What ``Stop`` said, if it was told."""

    @property
    def waiting(self) -> bool:
        """For a permission, and for nothing else."""
        states = {call.state for call in self._calls.values()} - {CallState.ENDED}
        return self.phase is TurnPhase.CALLS and states == {CallState.ASKING}

    def begin(self) -> list[TurnAction]:
        self._expect(TurnPhase.NEW, "begin")
        return self._call_model()

    def tell(self, happening: TurnInput) -> list[TurnAction]:
        """What to do now.

        Raises:
            WrongTransitionError: that cannot have happened.
        """
        match happening:
            case ModelAnswered():
                return self._answered(happening)
            case ModelFailed():
                self._expect(TurnPhase.MODEL, "Failed")
                return self._end(TurnEnding(error=happening.error))
            case PermissionDecided():
                return self._decided(happening)
            case ToolEnded():
                return self._tool_ended(happening)
            case StopRequested():
                return self._stop(happening.ending)
            case StopTimedOut():
                return self._overdue()

    # The model

    def _call_model(self) -> list[TurnAction]:
        self.phase = TurnPhase.MODEL
        self.step += 1
        self._calls = {}
        return [CallModel(step=self.step)]

    def _answered(self, told: ModelAnswered) -> list[TurnAction]:
        self._expect(TurnPhase.MODEL, "Answered")
        if told.cut or not told.calls:
            return [SaveAnswer(calls=()), *self._end(TurnEnding(reason="length" if told.cut else "end"))]
        self.phase = TurnPhase.CALLS
        self.called += len(told.calls)
        refused = [action for call in told.calls for action in self._admit(call, told.tools)]
        if self._broken_left < 0:
            said = "the model asked too often for tools that are not there, or wrote arguments that are no JSON object"
            dropped = self._end_open_calls("cancelled", "the turn ended before this call began")
            ending = TurnEnding(error=TurnError(f"{said}; another model, or fewer tools, may do better"))
            return [SaveAnswer(calls=told.calls), *refused, *dropped, *self._end(ending)]
        asks: list[TurnAction] = [
            RequestPermission(call=open_call.call, arguments=open_call.arguments)
            for open_call in self._calls.values()
            if open_call.state is CallState.ASKING
        ]
        return [SaveAnswer(calls=told.calls), *refused, *asks, *self._go_on()]

    def _admit(self, call: ToolCall, tools: Mapping[str, bool]) -> list[TurnAction]:
        """Take a call up; one that cannot be made is ended at once."""
        if call.call_id in self._calls:
            raise InvalidTransitionError(
                f"two calls have the id {call.call_id!r}; make ids unique before they are told"
            )
        read = arguments_in(call.arguments)
        asks = tools.get(call.name)
        state = CallState.ASKING if asks else CallState.READY
        if asks is None or isinstance(read, str):
            state, self._broken_left = CallState.ENDED, self._broken_left - 1
        arguments = {} if isinstance(read, str) else read
        self._calls[call.call_id] = _OpenCall(call=call, arguments=arguments, state=state)
        if asks is None:
            return [EndToolCall(call=call, status="error", text=_unknown(call.name, tools))]
        if isinstance(read, str):
            said = f"{read}; call {call.name} again, with arguments that are one JSON object and fit its schema"
            return [EndToolCall(call=call, status="error", text=said)]
        return []

    # Calls

    def _go_on(self) -> list[TurnAction]:
        """Start what may run; when all calls have ended, ask the model again."""
        if all(call.state is CallState.ENDED for call in self._calls.values()):
            return self._end(TurnEnding(reason="max_steps")) if self.step >= self._max_steps else self._call_model()
        ready = [call for call in self._calls.values() if call.state is CallState.READY]
        starting = ready[: max(0, self._parallel_tools - len(self._running()))]
        for call in starting:
            call.state = CallState.RUNNING
        return [StartTool(call=call.call, arguments=call.arguments) for call in starting]

    def _decided(self, told: PermissionDecided) -> list[TurnAction]:
        self._expect((TurnPhase.CALLS, TurnPhase.STOPPING, TurnPhase.ENDED), "Decided")
        call = self._calls.get(told.call_id)
        if self.phase is not TurnPhase.CALLS:
            return []  # The decision came while the turn was being stopped.
        if call is None or call.state is not CallState.ASKING:
            raise InvalidTransitionError(f"Decided on {told.call_id!r}, which asks for nothing")
        if told.allowed:
            call.state = CallState.READY
            return self._go_on()
        call.state = CallState.ENDED
        return [EndToolCall(call=call.call, status="denied", text=told.said), *self._go_on()]

    def _tool_ended(self, told: ToolEnded) -> list[TurnAction]:
        self._expect((TurnPhase.CALLS, TurnPhase.STOPPING, TurnPhase.ENDED), "ToolEnded")
        if self.phase is TurnPhase.ENDED:
            return []  # It was left alone, and ends by itself.
        call = self._calls.get(told.call_id)
        if call is None or call.state is not CallState.RUNNING:
            raise InvalidTransitionError(f"ToolEnded of {told.call_id!r}, which does not run")
        call.state = CallState.ENDED
        ended = EndToolCall(call=call.call, status=told.status, text=told.text)
        if self.phase is TurnPhase.CALLS:
            return [ended, *self._go_on()]
        return [ended, *([] if self._running() else self._end(self.ending))]

    # The end

    def _stop(self, ending: TurnEnding) -> list[TurnAction]:
        self._expect(tuple(TurnPhase), "Stop")
        if self.phase in (TurnPhase.STOPPING, TurnPhase.ENDED):
            return []  # Who stops it first says how it ends.
        if self.phase is not TurnPhase.CALLS:
            stop: list[TurnAction] = [StopModel()] if self.phase is TurnPhase.MODEL else []
            return [*stop, *self._end(ending)]
        running = self._running()
        self.phase, self.ending = TurnPhase.STOPPING, ending
        actions: list[TurnAction] = [WithdrawPermissions(), *(StopTool(call_id=call.call.call_id) for call in running)]
        actions += self._end_open_calls(
            ending.calls_are, "the turn was stopped before this call began", keep=CallState.RUNNING
        )
        return actions if running else [*actions, *self._end(ending)]

    def _overdue(self) -> list[TurnAction]:
        self._expect((TurnPhase.STOPPING, TurnPhase.ENDED), "Overdue")
        if self.phase is TurnPhase.ENDED:
            return []
        said = "the turn was stopped; the tool did not heed that in time and was left alone"
        return [*self._end_open_calls(self.ending.calls_are, said), *self._end(self.ending)]

    def _end(self, ending: TurnEnding) -> list[TurnAction]:
        self.phase = TurnPhase.ENDED
        return [EndTurn(ending=ending)]

    def _end_open_calls(self, status: ToolStatus, text: str, *, keep: CallState = CallState.ENDED) -> list[TurnAction]:
        ended: list[TurnAction] = []
        for call in self._calls.values():
            if call.state not in (CallState.ENDED, keep):
                call.state = CallState.ENDED
                ended.append(EndToolCall(call=call.call, status=status, text=text))
        return ended

    def _running(self) -> list[_OpenCall]:
        return [call for call in self._calls.values() if call.state is CallState.RUNNING]

    def _expect(self, phases: TurnPhase | tuple[TurnPhase, ...], told: str) -> None:
        allowed = (phases,) if isinstance(phases, TurnPhase) else phases
        if self.phase not in allowed:
            expected = " or ".join(phase.value for phase in allowed)
            raise InvalidTransitionError(
                f"{told} is for a turn that is {expected}; this one is {self.phase.value}, at step {self.step}"
            )


def _unknown(name: str, tools: Mapping[str, bool]) -> str:
    if not tools:
        return f"there is no tool {name[:SHOWN]!r}, nor any other; answer without tools"
    names = sorted(tools)
    more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
    return f"there is no tool {name[:SHOWN]!r}; there are {', '.join(names[:NAMES_TOLD])}{more}"
