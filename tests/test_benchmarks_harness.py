"""Tests that the load generator measures a server with a known rate correctly, and is not the bottleneck."""

import pytest

from benchmarks.harness import measure_harness

pytestmark = pytest.mark.long

ATTEMPTS = 4


def is_accurate(found):
    are_rates_accurate = (
        abs(found.decode_share - 1) < 0.1 and abs(found.itl_share - 1) < 0.25 and found.slowest_share > 0.8
    )
    return are_rates_accurate and found.total_share > 0.7 and found.cpu_share < 0.8


def test_64_streams_with_5000_tokens_per_second_are_measured_correctly_with_less_than_a_core():
    """On two idle cores, the rates are within 0.5 %, and a quarter of a core is used, as ``make bench`` shows.

    Other programs may use the cores, so several attempts are made. A harness that is too slow would fail in all of
    them.
    """
    for _ in range(ATTEMPTS):
        found = measure_harness()
        assert found.errors == 0
        if is_accurate(found):
            return
    pytest.fail(f"{found}")


def test_one_stream_is_measured_correctly():
    for _ in range(ATTEMPTS):
        found = measure_harness(streams=1, per_second=100, tokens=60)
        if found.decode_share == pytest.approx(1, abs=0.05):
            return
    pytest.fail(f"{found}")
