"""The state machine of a turn, its actions for any inputs in any order, and the arguments of its calls."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmx_lab.daemon.turns.machine import (
    CallModel,
    EndToolCall,
    EndTurn,
    InvalidTransitionError,
    RequestPermission,
    SaveAnswer,
    StartTool,
    StopModel,
    StopTool,
    TurnEnding,
    TurnMachine,
    TurnPhase,
    WithdrawPermissions,
)
from lmx_lab.daemon.turns.prompt import LISTED_TOOLS, parse_arguments
from lmx_lab.errors import EngineError, TurnTimeoutError
from lmx_lab.wire.sessions import ToolCall

TOOLS = {"free": False, "asks": True}
CANCEL = TurnEnding(reason="cancelled")


def started(**limits):
    turn = TurnMachine(**{"max_steps": 5, "parallel_tools": 2, "broken_calls": 3, **limits})
    assert turn.start() == [CallModel(step=1)]
    return turn


def call(name="free", arguments="{}", call_id="a"):
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def answer(turn, *calls, is_truncated=False):
    return turn.take_answer(calls, TOOLS, is_truncated=is_truncated)


def end(turn, call_id="a"):
    return turn.end_tool(call_id, "ok", "done")


def kinds(actions):
    return [type(action) for action in actions]


def ending(actions):
    assert isinstance(actions[-1], EndTurn)
    return actions[-1].ending


def test_a_turn_does_not_wait_while_another_tool_runs():
    turn = started()
    answer(turn, call("asks", call_id="a"), call("free", call_id="b"))
    assert not turn.is_waiting
    end(turn, "b")
    assert turn.is_waiting


@pytest.mark.parametrize(
    "arguments",
    [
        *("{", "[1]", "7", '"x"', "null", "{} {}", "NaN", '{"x": NaN}', "[" * 100_000, "9" * 5000, "nope", "{'x': 1}"),
        *('{"x": 1e999}', '{"x": [-1e999]}', '{"x": -Infinity}'),
    ],
)
def test_arguments_that_are_not_an_object_are_reported_to_the_model(arguments):
    actions = answer(started(), call(arguments=arguments))
    assert kinds(actions) == [SaveAnswer, EndToolCall, CallModel]
    assert isinstance(actions[1], EndToolCall)
    assert (actions[1].status, "JSON" in actions[1].text, len(actions[1].text) < 1000) == ("error", True, True)


MANY = dict.fromkeys(map(str, range(LISTED_TOOLS + 2)), False)


@pytest.mark.parametrize(
    ("tools", "expected"), [(TOOLS, "asks, free"), ({}, "there are no others"), (MANY, " and 2 more")]
)
def test_the_error_of_an_unknown_tool_lists_the_tools(tools, expected):
    actions = started().take_answer((call("nope"),), tools)
    assert isinstance(actions[1], EndToolCall)
    assert expected in actions[1].text


def test_the_calls_of_a_truncated_answer_are_ignored():
    actions = answer(started(), call(), is_truncated=True)
    assert actions == [SaveAnswer(calls=()), EndTurn(ending=TurnEnding(reason="length"))]


def test_a_stop_without_running_tools_ends_the_turn_immediately():
    turn = started()
    answer(turn, call("asks"))
    assert kinds(turn.stop(CANCEL)) == [WithdrawPermissions, EndToolCall, EndTurn]


def test_a_stop_waits_for_running_tools_and_ends_the_other_calls():
    turn = started(parallel_tools=1)
    answer(turn, call(call_id="a"), call(call_id="b"), call("asks", call_id="c"))
    assert kinds(turn.stop(CANCEL)) == [WithdrawPermissions, StopTool, EndToolCall, EndToolCall]
    actions = turn.end_tool("a", "cancelled", "")
    assert kinds(actions) == [EndToolCall, EndTurn]
    assert ending(actions) == CANCEL


def test_the_first_stop_determines_the_ending():
    turn = started()
    answer(turn, call())
    turn.stop(TurnEnding(error=TurnTimeoutError("late"), open_call_status="interrupted"))
    assert turn.stop(CANCEL) == []
    actions = turn.stop_without_tools()
    assert isinstance(ending(actions).error, TurnTimeoutError)
    assert isinstance(actions[0], EndToolCall)
    assert actions[0].status == "interrupted"


FAILED = EngineError("x")
IMPOSSIBLE = (answer, lambda turn: turn.fail(FAILED), end, TurnMachine.stop_without_tools)


@pytest.mark.parametrize("receive", IMPOSSIBLE)
def test_an_impossible_input_is_refused_with_the_expected_and_the_actual_phase(receive):
    turn = TurnMachine(max_steps=1, parallel_tools=1, broken_calls=1)
    with pytest.raises(InvalidTransitionError, match="phase new"):
        receive(turn)


def test_an_input_for_an_unknown_call_is_refused():
    turn = started()
    answer(turn, call())
    with pytest.raises(InvalidTransitionError, match="'b'"):
        end(turn, "b")
    with pytest.raises(InvalidTransitionError, match="does not wait"):
        turn.decide("a", allowed=True, message="")
    with pytest.raises(InvalidTransitionError, match="start requires the phase new"):
        turn.start()


def test_two_calls_with_the_same_id_are_refused():
    with pytest.raises(InvalidTransitionError, match="unique"):
        answer(started(), call(), call())


# --- random inputs


class Watched:
    """Follows the actions of a turn and checks their order."""

    def __init__(self, turn, parallel):
        self.turn = turn
        self.parallel = parallel
        self.calls = {}
        self.asking = set()
        self.allowed = set()
        self.running = set()
        self.ended = Counter()
        self.steps = 0
        self.ends = 0
        self.model = False

    def do(self, actions):
        for action in actions:
            assert not self.ends, f"{action} after the end"
            match action:
                case CallModel():
                    self.steps += 1
                    self.model = True
                    assert action.step == self.steps
                    assert set(self.calls) == set(self.ended), "the model is asked while calls are open"
                case SaveAnswer():
                    self.model = False
                    self.calls.update({call.call_id: call for call in action.calls})
                case RequestPermission():
                    self.asking.add(action.call.call_id)
                case StartTool():
                    call_id = action.call.call_id
                    assert call_id not in self.running | set(self.ended)
                    assert action.call.name == "free" or call_id in self.allowed
                    self.running.add(call_id)
                    assert len(self.running) <= self.parallel
                case EndToolCall():
                    self.ended[action.call.call_id] += 1
                    self.running.discard(action.call.call_id)
                    self.asking.discard(action.call.call_id)
                case StopTool():
                    assert action.call_id in self.running
                case WithdrawPermissions():
                    self.asking.clear()
                case StopModel():
                    assert self.model
                    self.model = False
                case EndTurn():
                    self.ends += 1
                    assert not self.asking
                    assert not self.running
                    assert self.ended == Counter(self.calls.keys())


names = st.sampled_from(["free", "free", "asks", "nope"])
texts = st.sampled_from(["{}", '{"x": 1}', "", "{", "[]"])


@pytest.mark.slow
@settings(max_examples=4 * settings().max_examples)
@given(st.data())
def test_every_turn_ends_once_after_all_of_its_calls_have_ended(data):
    parallel, max_steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    broken = data.draw(st.integers(0, 3))
    turn = TurnMachine(max_steps=max_steps, parallel_tools=parallel, broken_calls=broken)
    watched = Watched(turn, parallel)
    watched.do(turn.start())
    number = 0
    for _ in range(40):
        choices = ["stop"] if turn.phase is not TurnPhase.STOPPING else ["stop", "timed_out"]
        choices += ["answer"] * 4 + ["fail"] if turn.phase is TurnPhase.MODEL else []
        choices += ["tool"] * 4 if watched.running and turn.phase is not TurnPhase.MODEL else []
        choices += ["decide"] * 4 if watched.asking and turn.phase is TurnPhase.CALLS else []
        match data.draw(st.sampled_from(choices)):
            case "stop":
                actions = turn.stop(CANCEL)
            case "timed_out":
                actions = turn.stop_without_tools()
            case "fail":
                actions = turn.fail(FAILED)
            case "answer":
                wanted = data.draw(st.lists(st.tuples(names, texts), max_size=4))
                calls = tuple(call(name, text, str(number + at)) for at, (name, text) in enumerate(wanted))
                number += len(calls)
                actions = answer(turn, *calls, is_truncated=data.draw(st.integers(0, 9)) == 0)
            case "tool":
                actions = end(turn, data.draw(st.sampled_from(sorted(watched.running))))
            case _:
                call_id = data.draw(st.sampled_from(sorted(watched.asking)))
                allowed = data.draw(st.booleans())
                if allowed:
                    watched.allowed.add(call_id)
                    watched.asking.discard(call_id)
                actions = turn.decide(call_id, allowed=allowed, message="no")
        watched.do(actions)
        if turn.phase is TurnPhase.ENDED:
            break
    if turn.phase is not TurnPhase.ENDED:
        watched.do(turn.stop(CANCEL))
    if turn.phase is not TurnPhase.ENDED:
        watched.do(turn.stop_without_tools())
    assert watched.ends == 1
    assert watched.steps <= max_steps
    late = (turn.stop(CANCEL), turn.stop_without_tools(), end(turn, "0"), turn.decide("0", allowed=True, message=""))
    assert late == ([], [], [], [])


@pytest.mark.parametrize(
    ("text", "value"), [("", {}), (" \n", {}), ('{"x": "\\ud83d"}', {"x": "?"}), ('{"x": 1.5}', {"x": 1.5})]
)
def test_valid_arguments_are_parsed(text, value):
    assert parse_arguments(text) == value
