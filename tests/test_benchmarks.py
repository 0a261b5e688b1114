"""What the benchmarks compute with; the measurements themselves are ``make bench``."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench import BenchError
from benchmarks.client import Dechunker
from benchmarks.rates import Timeline, decode_window, quantile
from benchmarks.rows import Limit, Row


@given(chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6), cuts=st.lists(st.integers(1, 20), min_size=1))
def test_chunked_bodies_are_put_together_wherever_the_network_cuts_them(chunks: list[bytes], cuts: list[int]) -> None:
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
    dechunker, out, at = Dechunker(), b"", 0
    while at < len(coded):
        step = cuts[at % len(cuts)]
        out += dechunker.feed(coded[at : at + step])
        at += step
    assert out == b"".join(chunks)


def test_the_rate_of_one_stream_is_its_tokens_after_the_first_over_their_time() -> None:
    assert decode_window([Timeline(times=[1.0, 1.5, 2.0, 2.5, 3.0], tokens=5)]).rate == pytest.approx(2.0)


def test_the_rate_of_several_counts_only_while_all_decode() -> None:
    early = Timeline(times=[0.0, 0.1, 1.0, 2.0, 3.0], tokens=5)
    late = Timeline(times=[1.0, 2.0, 3.0, 3.1, 3.2], tokens=5)
    assert decode_window([early, late]).rate == pytest.approx(2.0)


def test_pieces_that_hold_two_tokens_count_two() -> None:
    assert decode_window([Timeline(times=[1.0, 2.0, 3.0], tokens=6)]).rate == pytest.approx(2.0)


def test_streams_that_did_not_decode_together_have_no_rate() -> None:
    with pytest.raises(BenchError):
        decode_window([Timeline(times=[0.0, 1.0], tokens=2), Timeline(times=[2.0, 3.0], tokens=2)])


@pytest.mark.parametrize(("q", "value"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_one_of_the_values(q: float, value: float) -> None:
    assert quantile([float(i) for i in range(100, 0, -1)], q) == value


@pytest.mark.parametrize(
    ("value", "binding", "verdict"),
    [
        (0.9, True, "pass"),
        (1.1, True, "FAIL"),
        (0.9, False, "(pass)"),
        (1.1, False, "(miss)"),
        (math.nan, True, "ERROR"),
    ],
)
def test_only_a_binding_limit_can_fail(value: float, binding: bool, verdict: str) -> None:
    limit = Limit(sign="≤", bound=1)
    row = Row(figure="f", case="c", model="tiny", value=value, limit=limit, binding=binding)
    assert row.verdict == verdict
