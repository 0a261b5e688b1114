"""Test summaries (which requests and which time count) and comparisons of two sides."""

import math

import numpy as np
import pandas as pd
import pytest

from lmx_lab.bench import compare, frame, summary
from lmx_lab.bench.summaries import token_counts_differ
from lmx_lab.errors import InvalidRequestError
from tests.support.samples import run_of, sample

SPREAD = list(np.random.default_rng(0).uniform(50, 150, 12))


@pytest.mark.parametrize(
    ("spans", "busy_s"),
    [
        pytest.param([(0, 1), (1, 2)], 2, id="consecutive"),
        pytest.param([(0, 10), (2, 3), (4, 5)], 10, id="within another"),
        pytest.param([(5, 6), (0, 1)], 2, id="gap"),
        pytest.param([(0, 4), (1, 6), (8, 9), (8.5, 8.6)], 7, id="overlapping"),
    ],
)
def test_overlapping_time_counts_once_and_gaps_do_not_count(spans, busy_s):
    rows = [
        sample(at_s=start, request=at, e2e_ms=1000 * (end - start), output_tokens=8)
        for at, (start, end) in enumerate(spans)
    ]
    assert summary(rows).iloc[0]["total_tok_s"] == pytest.approx(8 * len(spans) / busy_s)


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


def test_a_total_is_that_of_all_repeats_and_has_an_interval_with_three_or_more():
    # 24 tokens in 3 s. The mean of the three rates would be 8.05.
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


def side(factor, *, per_repeat=4, jitter=1, **fields):
    noise = np.random.default_rng(jitter).normal(1, 0.005, len(SPREAD))
    values = [float(factor * value * moved) for value, moved in zip(SPREAD, noise, strict=True)]
    return run_of(values, per_repeat=per_repeat, e2e_ms=1000 * factor, **fields)


def row(a, b, metric):
    table = compare(a, b)
    return table.set_index("metric").loc[metric]


@pytest.mark.slow
def test_the_faster_side_is_better_in_time_and_in_tokens_per_second():
    quick, slow = side(1.0, target="quick"), side(1.1, target="slow", jitter=2)
    for metric in ("ttft_ms", "decode_tok_s", "total_tok_s"):
        assert row(quick, slow, metric)["better"] == "a"
        assert row(slow, quick, metric)["better"] == "b"
    first = row(quick, slow, "ttft_ms")
    assert first["paired"]
    assert first["high"] < 1
    assert first["ratio"] == pytest.approx(1 / 1.1, rel=0.02)
    assert first["repeats"] == 3
    assert row(quick, slow, "total_tok_s")["ratio"] == pytest.approx(1.1)


def test_neither_of_two_equal_sides_is_better():
    table = compare(side(1.0), side(1.0, jitter=2))
    assert set(table["better"]) == {"-"}


def test_the_values_of_a_case_are_exact_although_others_are_missing():
    rows = [*side(1.0, cached_tokens=2**60 + 1), *side(1.0)]
    table = compare(rows, rows, by=("cached_tokens",), metrics=("ttft_ms",))
    assert table["cached_tokens"].tolist() == [2**60 + 1, pd.NA]


@pytest.mark.parametrize("per_repeat", [12, 6])
def test_with_fewer_than_three_repeats_there_is_a_ratio_but_no_better_side(per_repeat):
    table = compare(side(1.0, per_repeat=per_repeat), side(9.0, per_repeat=per_repeat))
    assert set(table["better"]) == {"-"}
    assert table[["low", "high"]].isna().all(axis=None)
    assert table.set_index("metric").loc["ttft_ms", "ratio"] == pytest.approx(1 / 9, rel=0.02)


def test_a_failed_request_does_not_remove_its_repeat_from_the_pairs():
    failed = [sample(at_s=50, repeat=0, request=0, error="lmx-timeout: late", e2e_ms=1.0), *side(1.1)[1:]]
    first = row(side(1.0), failed, "ttft_ms")
    assert (first["paired"], first["repeats"], first["n_a"], first["n_b"]) == (True, 3, 12, 11)


def test_a_repeat_that_failed_on_one_side_is_ignored_on_both():
    first = row(side(1.0, per_repeat=3), side(1.1, per_repeat=3)[3:], "ttft_ms")
    assert (first["paired"], first["repeats"]) == (True, 3)
    assert first["better"] == "a"


@pytest.mark.slow
def test_repeats_of_several_common_runs_are_paired():
    # The machine is three times as slow in the second run.
    a, b = (
        pd.concat([frame(side(factor * slow, jitter=jitter)).assign(run=day) for day, slow in (("mon", 1), ("tue", 3))])
        for factor, jitter in ((1.0, 1), (1.1, 2))
    )
    first = row(a, b, "ttft_ms")
    assert (first["paired"], first["repeats"], first["better"]) == (True, 6, "a")
    assert first["ratio"] == pytest.approx(1 / 1.1, rel=0.02)


@pytest.mark.slow
def test_times_of_whole_answers_have_no_ratio_if_their_lengths_differ():
    for tokens, compared in ((96, True), (90, False)):
        table = compare(side(1.0, tokens=100), side(1.1, tokens=tokens)).set_index("metric")
        assert set(table["output_tokens_b"]) == {tokens}
        for metric in ("e2e_ms", "total_tok_s"):
            assert bool(table.loc[metric, "ratio"] > 0) is compared
            assert (table.loc[metric, "better"] == "a") is compared
        assert table.loc["ttft_ms", "better"] == "a"


def test_pieces_of_a_stream_are_not_compared_with_tokens():
    table = compare(side(1.0, counted_by="usage"), side(4.0, counted_by="chunks")).set_index("metric")
    for metric in ("decode_tok_s", "itl_ms_p50", "total_tok_s"):
        assert np.isnan(table.loc[metric, "ratio"])
        assert table.loc[metric, "better"] == "-"
    assert table.loc["ttft_ms", "better"] == "a"


def test_several_runs_of_a_side_are_combined():
    days = [frame(side(1.0, jitter=day)).assign(run=f"day {day}") for day in range(3)]
    first = row(pd.concat(days), side(1.1), "ttft_ms")
    assert (first["n_a"], first["n_b"], first["repeats"], first["paired"]) == (36, 12, 3, False)
    assert first["ratio"] == pytest.approx(1 / 1.1, rel=0.05)


@pytest.mark.slow
def test_cases_that_only_one_side_has_are_listed():
    small, large = side(1.0), side(1.0, prompt_tokens_wanted=64)
    table = compare([*small, *large], small)
    assert set(table["prompt_tokens_wanted"]) == {16}
    assert table.attrs["only_a"] == [(64, 8, 1, "closed", "cold")]
    assert table.attrs["only_b"] == []
    with pytest.raises(InvalidRequestError, match=r"no case in common.*64.*16"):
        compare(large, small)


def test_models_can_be_compared():
    table = compare(side(1.0, model="small", threads=2), side(2.0, model="large"), by=("concurrency",))
    assert table.set_index("metric").loc["ttft_ms", "ratio"] == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        pytest.param([], side(1.0), {}, "a has none", id="no samples"),
        pytest.param(side(1.0), side(1.0, cache="warm"), {}, r"cold.*warm", id="cold and warm"),
        pytest.param(
            side(1.0),
            [*side(1.0, target="one"), *side(1.0, target="two")],
            {},
            "b has several values of target: one, two",
            id="two targets",
        ),
        pytest.param(side(1.0), side(1.0), {"metrics": ("speed",)}, "no column speed", id="metric"),
        pytest.param(side(1.0), side(1.0), {"by": ("colour",)}, "no column colour", id="column"),
    ],
)
def test_sides_that_cannot_be_compared_are_refused(a, b, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        compare(a, b, **options)


def test_a_side_with_failed_requests_only_has_no_ratio():
    down = [sample(request=at, error="unreachable: no server", e2e_ms=1.0) for at in range(12)]
    table = compare(side(1.0), down)
    assert table["ratio"].isna().all()
    assert set(table["better"]) == {"-"}
