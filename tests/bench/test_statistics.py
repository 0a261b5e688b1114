"""Intervals hold what they say, and a summary is of the requests that count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.bench import frame, median_interval, ratio_interval, summary
from lmx_lab.bench.statistics import CHUNK_NUMBERS, NOTHING, Interval, busy_s
from lmx_lab.errors import InvalidRequestError
from tests.bench.rows import run_of, sample

VALUES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40)
DRAWS = 200


@given(values=VALUES, level=st.floats(0.01, 0.999), groups=st.integers(1, 5))
def test_an_interval_has_its_median_in_it_and_lies_within_the_values(
    values: list[float], level: float, groups: int
) -> None:
    of = [at % groups for at in range(len(values))]
    interval = median_interval(values, groups=of, level=level, draws=DRAWS)
    assert interval.median == pytest.approx(float(np.median(values)))
    assert min(values) <= interval.low <= interval.median <= interval.high <= max(values)
    assert interval.n == len(values)


@given(values=VALUES, factor=st.floats(0.01, 100))
def test_a_pair_by_pair_ratio_of_multiples_is_the_factor_exactly(values: list[float], factor: float) -> None:
    interval = ratio_interval([factor * value for value in values], values, True, draws=DRAWS)
    assert [interval.low, interval.median, interval.high] == pytest.approx([factor] * 3)


@given(values=st.lists(st.floats(1, 100), min_size=1, max_size=40), paired=st.booleans())
def test_the_ratio_of_equal_runs_is_1_and_1_is_in_its_interval(values: list[float], paired: bool) -> None:
    interval = ratio_interval(values, values, paired, draws=DRAWS)
    assert interval.median == 1
    assert 1 in interval


def test_intervals_hold_the_true_median_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(1)
    held = sum(1.0 in median_interval(generator.normal(1, 0.1, 30), draws=DRAWS) for _ in range(300))
    assert 270 <= held <= 298


def test_repeats_that_differ_widen_the_interval_and_nothing_else_tells_of_them() -> None:
    generator = np.random.default_rng(2)
    drift = np.repeat([1.0, 1.3, 0.8, 1.1, 0.9], 20)
    values, repeats = drift + generator.normal(0, 0.01, 100), np.repeat(range(5), 20)
    blind, knowing = median_interval(values), median_interval(values, groups=repeats)
    assert blind.median == knowing.median
    assert knowing.high - knowing.low > 1.3 * (blind.high - blind.low)


def test_pairs_see_a_difference_that_the_spread_of_requests_hides() -> None:
    generator = np.random.default_rng(3)
    requests = generator.uniform(1, 100, 20)
    slower = requests * generator.normal(1.05, 0.005, 20)
    assert ratio_interval(slower, requests, True).low > 1
    assert 1 in ratio_interval(slower, requests, False)


def test_groups_of_different_sizes_count_for_what_they_have() -> None:
    # A quarter of the draws has the small group alone. Filled up, it would be half of another half of them.
    interval = median_interval([1.0] * 99 + [50.0], groups=[0] * 99 + [1], level=0.4)
    assert (interval.low, interval.high) == (1.0, 1.0)


def test_what_is_missing_does_not_count() -> None:
    assert median_interval([None, 3.0, math.nan, 1.0, 2.0, math.inf]).n == 3
    assert median_interval([]) is NOTHING
    assert median_interval([None]) is NOTHING
    pairs = ratio_interval([2.0, None, 4.0], [1.0, 5.0, 2.0], True)
    assert (pairs.median, pairs.n) == (2.0, 2)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("b", [[0.0, 0.0], [-1.0, -2.0], [None, None]])
def test_there_is_no_ratio_to_nothing(b: list[float | None], paired: bool) -> None:
    assert math.isnan(ratio_interval([1.0, 2.0], b, paired).median)


def test_the_same_seed_draws_the_same() -> None:
    values = np.random.default_rng(4).normal(1, 0.2, 25)
    assert median_interval(values) == median_interval(values)
    assert {median_interval(values, seed=seed).high for seed in range(5)} != {median_interval(values).high}


def test_many_values_are_drawn_a_piece_at_a_time() -> None:
    values = np.random.default_rng(5).normal(1, 0.2, CHUNK_NUMBERS // 100)
    interval = median_interval(values, draws=250)
    assert interval.low < 1 < interval.high
    assert interval.high - interval.low < 0.02


@pytest.mark.parametrize("wrong", [{"level": 0}, {"level": 1}, {"level": math.nan}, {"draws": 0}, {"groups": [1]}])
def test_what_is_no_interval_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        median_interval([1.0, 2.0], **wrong)


def test_pairs_need_two_sides_of_a_size() -> None:
    with pytest.raises(InvalidRequestError, match="paired=False"):
        ratio_interval([1.0], [1.0, 2.0], True)


def test_intervals_overlap_where_they_share_a_value() -> None:
    one, other = (Interval(median=at, low=at - 1, high=at + 1, n=9) for at in (1.0, 3.0))
    assert one.overlaps(other)
    assert not one.overlaps(Interval(median=4, low=2.5, high=5, n=9))


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], 0),
        ([(0, 1), (1, 2)], 2),
        ([(0, 10), (2, 3), (4, 5)], 10),
        ([(5, 6), (0, 1)], 2),
        ([(0, 4), (1, 6), (8, 9), (8.5, 8.6)], 7),
    ],
)
def test_time_that_several_share_counts_once_and_gaps_not_at_all(spans: list[tuple[float, float]], busy: float) -> None:
    starts, ends = (np.array([span[at] for span in spans], dtype=float) for at in (0, 1))
    assert busy_s(starts, ends) == pytest.approx(busy)


def test_a_summary_leaves_out_warm_up_and_counts_errors() -> None:
    rows = [
        sample(warm_up=True, ttft_ms=9999.0, output_tokens=8),
        *run_of([10.0, 30.0, 20.0]),
        sample(at_s=3, request=3, error="lmx-timeout: too late", ttft_ms=5.0, e2e_ms=1000.0, output_tokens=5),
    ]
    line = summary(rows).iloc[0]
    assert (line["requests"], line["errors"], line["ttft_ms"]) == (4, 1, 20.0)
    assert 10 <= line["ttft_ms_low"] <= 20 <= line["ttft_ms_high"] <= 30
    # 24 tokens of those that ended, in the 4 seconds that all took.
    assert line["total_tok_s"] == pytest.approx(6)
    assert math.isnan(line["total_tok_s_low"])
    assert math.isnan(line["queue_ms"])


def test_requests_at_once_are_added_up_and_their_time_is_not() -> None:
    rows = [sample(at_s=0.1 * at, request=at, e2e_ms=1000.0, output_tokens=11, concurrency=2) for at in range(2)]
    assert summary(rows).iloc[0]["total_tok_s"] == pytest.approx(20)


def test_the_time_of_another_target_between_the_requests_does_not_count() -> None:
    rows = [
        sample(at_s=at, request=at // 2, target=name, e2e_ms=1000.0, output_tokens=8)
        for at in range(8)
        for name in [("one", "two")[at % 2]]
    ]
    assert summary(rows).set_index("target")["total_tok_s"].to_dict() == pytest.approx({"one": 8, "two": 8})


def test_the_total_is_no_mean_of_the_repeats_rates() -> None:
    # 8 tokens in 1 s and 8 in 3 s are 16 in 4, whose mean of rates would be 5.33.
    rows = [
        sample(e2e_ms=1000.0, output_tokens=8),
        sample(at_s=10, repeat=1, e2e_ms=3000.0, output_tokens=8),
    ]
    line = summary(rows).iloc[0]
    assert line["total_tok_s"] == pytest.approx(4)
    assert line["total_tok_s_low"] == pytest.approx(8 / 3)
    assert line["total_tok_s_high"] == pytest.approx(8)


def test_cold_and_warm_are_two_cases() -> None:
    table = summary([*run_of([10.0, 11.0]), *run_of([1.0, 2.0], cache="warm")])
    assert table.set_index("cache")["ttft_ms"].to_dict() == {"cold": 10.5, "warm": 1.5}


def test_a_case_where_everything_failed_is_a_row_without_figures() -> None:
    rows = [sample(request=at, error="unreachable: nobody listens", e2e_ms=1.0) for at in range(3)]
    line = summary(rows).iloc[0]
    assert (line["requests"], line["errors"]) == (3, 3)
    assert line[["ttft_ms", "total_tok_s", "output_tokens", "peak_memory_gb"]].isna().all()


def test_a_summary_of_nothing_has_all_columns_and_no_rows() -> None:
    empty, full = summary([]), summary(run_of([1.0, 2.0], peak_memory_gb=1.5))
    assert len(empty) == 0
    assert empty.dtypes.to_dict() == full.dtypes.to_dict()


def test_a_table_can_be_summed_up_by_other_columns() -> None:
    table = frame([*run_of([10.0, 12.0], model="small"), *run_of([20.0, 22.0], model="large")], {"commit": "abc"})
    summed = summary(table, by=("model",))
    assert summed["ttft_ms"].tolist() == [11.0, 21.0]
    assert summed.attrs["provenance"] == {"commit": "abc"}
    with pytest.raises(InvalidRequestError, match="no column colour"):
        summary(table, by=("colour",))
