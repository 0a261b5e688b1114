"""Tests of the summary: which requests and which time count."""

import math

import numpy as np
import pandas as pd
import pytest

from lmx_lab.bench import frame, summary
from lmx_lab.bench.statistics import busy_s, token_counts_differ
from lmx_lab.errors import InvalidRequestError
from tests.support.samples import run_of, sample


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
def test_overlapping_time_counts_once_and_gaps_do_not_count(spans, busy):
    starts, ends = (np.array([span[at] for span in spans], dtype=float) for at in (0, 1))
    assert busy_s(starts, ends) == pytest.approx(busy)


def test_a_summary_excludes_warm_up_and_counts_errors():
    rows = [
        sample(warm_up=True, ttft_ms=9999.0, output_tokens=8),
        *run_of([10.0, 30.0, 20.0, 60.0, 40.0, 50.0]),
        sample(at_s=6, request=6, error="lmx-timeout: too late", ttft_ms=5.0, e2e_ms=2000.0, output_tokens=5),
    ]
    line = summary(rows).iloc[0]
    assert (line["requests"], line["errors"], line["ttft_ms"], line["ttft_ms_n"]) == (7, 1, 35.0, 6)
    assert 10 <= line["ttft_ms_low"] < 35 < line["ttft_ms_high"] <= 60
    # The successful requests have 48 tokens; all requests together took 8 seconds.
    assert line["total_tok_s"] == pytest.approx(6)
    assert line["total_tok_s_n"] == 1
    assert math.isnan(line["total_tok_s_low"])
    assert math.isnan(line["queue_ms"])
    assert line["queue_ms_n"] == 0


def test_tokens_of_concurrent_requests_are_added_but_their_time_counts_once():
    rows = [sample(at_s=0.1 * at, request=at, e2e_ms=1000.0, output_tokens=11, concurrency=2) for at in range(2)]
    assert summary(rows).iloc[0]["total_tok_s"] == pytest.approx(20)


def test_time_between_requests_does_not_count():
    rows = [
        sample(at_s=at, request=at // 2, target=name, e2e_ms=1000.0, output_tokens=8)
        for at in range(8)
        for name in [("one", "two")[at % 2]]
    ]
    assert summary(rows).set_index("target")["total_tok_s"].to_dict() == pytest.approx({"one": 8, "two": 8})


def test_the_total_is_not_the_mean_of_the_rates_of_the_repeats():
    # 8 tokens in 1 s and 8 in 3 s are 16 tokens in 4 s, a rate of 4. The mean of the two rates would be 5.33.
    rows = [
        sample(e2e_ms=1000.0, output_tokens=8),
        sample(at_s=10, repeat=1, e2e_ms=3000.0, output_tokens=8),
    ]
    assert summary(rows).iloc[0]["total_tok_s"] == pytest.approx(4)


def test_a_total_has_an_interval_with_three_or_more_repeats():
    took_ms = [900.0, 1000.0, 1100.0]
    rows = [sample(at_s=10 * at, repeat=at, e2e_ms=took, output_tokens=8) for at, took in enumerate(took_ms)]
    two, three = summary(rows[:2]).iloc[0], summary(rows).iloc[0]
    assert two["total_tok_s_n"] == 2
    assert math.isnan(two["total_tok_s_low"])
    # Half the width for the logarithms: 4.303 (Student's t) times their standard deviation over the root of 3.
    factor = math.exp(4.3027 * float(np.std(np.log(took_ms), ddof=1)) / math.sqrt(3))
    assert three[["total_tok_s_low", "total_tok_s", "total_tok_s_high"]].tolist() == pytest.approx(
        [8 / factor, 8, 8 * factor], rel=1e-4
    )


def test_the_clients_delay_is_reported_and_does_not_count_as_the_servers_time():
    # A request is due each second and answered within half a second. The client sent them late, and the times count
    # from the due time.
    late_ms = [0.0, 100.0, 400.0]
    rows = [
        sample(
            at_s=at + late / 1000, request=at, e2e_ms=late + 500, late_ms=late, output_tokens=8, arrival="poisson(1/s)"
        )
        for at, late in enumerate(late_ms)
    ]
    line = summary(rows).iloc[0]
    assert (line["late_ms"], line["late_ms_max"]) == (100, 400)
    assert line["total_tok_s"] == pytest.approx(16)
    assert math.isnan(summary(run_of([1.0])).iloc[0]["late_ms_max"])


@pytest.mark.parametrize("unit", ["s", "ms", "ns"])
def test_times_of_any_resolution_are_accepted(unit):
    table = frame(run_of([1.0, 2.0, 3.0]))
    table["started_at"] = table["started_at"].dt.as_unit(unit)
    assert summary(table).iloc[0]["total_tok_s"] == pytest.approx(8)


def test_equal_repeats_of_different_runs_or_seeds_are_distinct():
    day = run_of([1.0, 2.0])
    table = pd.concat(
        [frame(day).assign(run="monday"), frame(day).assign(run="tuesday"), frame(day).assign(run="tuesday", seed=1)]
    )
    assert summary(table, by=("concurrency",)).iloc[0]["total_tok_s_n"] == 3


def test_token_counts_differ_if_they_are_more_than_5_percent_apart():
    assert [token_counts_differ(100, other) for other in (95, 94, 105, 106, 0)] == [False, True, False, True, True]
    assert not token_counts_differ(math.nan, 5)
    assert not token_counts_differ(5, math.nan)


def test_cold_and_warm_are_two_cases():
    table = summary([*run_of([10.0, 11.0]), *run_of([1.0, 2.0], cache="warm")])
    assert table.set_index("cache")["ttft_ms"].to_dict() == {"cold": 10.5, "warm": 1.5}


def test_a_case_with_failed_requests_only_is_a_row_without_metrics():
    rows = [sample(request=at, error="unreachable: no server", e2e_ms=1.0) for at in range(3)]
    line = summary(rows).iloc[0]
    assert (line["requests"], line["errors"]) == (3, 3)
    assert line[["ttft_ms", "total_tok_s", "output_tokens", "peak_memory_gb"]].isna().all()


def test_the_summary_of_an_empty_table_has_all_columns():
    empty, full = summary([]), summary(run_of([1.0, 2.0], peak_memory_gb=1.5))
    assert len(empty) == 0
    assert empty.dtypes.to_dict() == full.dtypes.to_dict()


def test_a_table_can_be_summarized_by_other_columns():
    table = frame([*run_of([10.0, 12.0], model="small"), *run_of([20.0, 22.0], model="large")], {"commit": "abc"})
    summed = summary(table, by=("model",))
    assert summed["ttft_ms"].tolist() == [11.0, 21.0]
    assert summed.attrs["provenance"] == {"commit": "abc"}
    with pytest.raises(InvalidRequestError, match="no column colour"):
        summary(table, by=("colour",))


def test_a_summary_shows_what_identifies_a_case_and_its_figures_first():
    rows = [*run_of([10.0] * 6), *run_of([20.0] * 6, concurrency=4)]
    first = list(summary(rows).columns[:9])
    assert first == [
        *("target", "prompt_tokens_wanted", "concurrency", "errors"),
        *("total_tok_s", "decode_tok_s", "ttft_ms", "itl_ms_p99", "prefill_tok_s"),
    ]
    assert list(summary(rows, by=["output_tokens", "case"]).columns[:4]) == [
        *("output_tokens", "case", "errors", "total_tok_s")
    ]
    keyed = [sample(request=at, threads=threads) for at, threads in enumerate([2**60 + 1, None, None])]
    by_threads = summary(keyed, by=["threads"])
    assert by_threads["threads"].tolist() == [2**60 + 1, pd.NA]
    assert by_threads["requests"].tolist() == [1, 2]
    assert summary([], by=["threads"]).dtypes.to_dict() == by_threads.dtypes.to_dict()
    assert list(frame(rows).columns[:4]) == ["case", "decode_tok_s", "ttft_ms", "itl_ms_p99"]
