"""Tests of the result of a turn."""

import pytest

from lmx_lab.client.turn import TurnAccumulator, TurnResult, TurnToolCall, turn_error
from lmx_lab.errors import ERROR_CLASSES, TurnError
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.sessions import TurnRecord


@pytest.mark.parametrize(("code", "kind"), ERROR_CLASSES.items())
def test_every_code_raises_its_class(code, kind):
    error = turn_error("t1", ErrorDetail(code=code, message="what, the limit, the next step", type="t", param="p"))
    assert type(error) is kind
    assert (str(error), error.param) == ("turn t1: what, the limit, the next step", "p")


def test_an_unknown_code_is_a_turn_error_that_shows_the_code():
    error = turn_error("t1", ErrorDetail(code="too-bored", message="no", type="t"))
    assert type(error) is TurnError
    assert str(error) == "turn t1: no (too-bored)"


def test_a_result_is_shown_with_its_calls_and_its_cost():
    call = TurnToolCall(call_id="c", name="add", arguments={"a": 1}, status="ok", text="<2>" * 500, elapsed_s=0.25)
    result = TurnResult(
        turn_id="t1", session_id="s", text="Two.", thinking="", stop_reason="end", stats=None, tool_calls=(call,)
    )
    assert repr(call).startswith('→ add({"a": 1}) ok in 0.25 s: <2>')
    assert len(repr(call)) < 600
    assert repr(result).splitlines()[2:] == ["Two.", "", "turn t1 · end"]
    assert "<2>" not in result._repr_html_()


def test_the_error_of_a_record_is_raised():
    record = TurnRecord(
        turn_id="t1",
        session_id="s",
        status="error",
        content="go",
        overrides=None,
        stop_reason=None,
        text="half",
        error=ErrorDetail(code="daemon-restarted", message="it ended", type="t"),
        stats=None,
        queued_at="",
        started_at=None,
        ended_at="",
    )
    with pytest.raises(TurnError, match="turn t1: it ended"):
        TurnAccumulator("s", "t1").result(record, reconnects=0)
