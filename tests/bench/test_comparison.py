"""Two sides: which is better, and by how much, where the samples can say so."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import pytest

from lmx_lab.bench import Sample, compare, frame
from lmx_lab.errors import InvalidRequestError
from tests.bench.rows import run_of, sample

SPREAD = list(np.random.default_rng(0).uniform(50, 150, 12))


def side(factor: float, *, per_repeat: int = 4, jitter: int = 1, **fields: object) -> list[Sample]:
    noise = np.random.default_rng(jitter).normal(1, 0.005, len(SPREAD))
    values = [float(factor * value * moved) for value, moved in zip(SPREAD, noise, strict=True)]
    return run_of(values, per_repeat=per_repeat, e2e_ms=1000 * factor, **fields)


def row(a: Iterable[Sample] | pd.DataFrame, b: Iterable[Sample] | pd.DataFrame, metric: str) -> pd.Series[object]:
    table = compare(a, b)
    return table.set_index("metric").loc[metric]


def test_the_faster_side_is_named_for_time_and_for_tokens_a_second() -> None:
    quick, slow = side(1.0, target="quick"), side(1.1, target="slow", jitter=2)
    for metric in ("ttft_ms", "decode_tok_s", "total_tok_s"):
        assert row(quick, slow, metric)["better"] == "a"
        assert row(slow, quick, metric)["better"] == "b"
    first = row(quick, slow, "ttft_ms")
    assert first["paired"]
    assert first["low"] <= first["ratio"] <= first["high"] < 1
    assert first["ratio"] == pytest.approx(1 / 1.1, rel=0.02)
    assert row(quick, slow, "total_tok_s")["ratio"] == pytest.approx(1.1)


def test_equal_sides_are_not_told_apart() -> None:
    table = compare(side(1.0), side(1.0, jitter=2))
    assert set(table["better"]) == {"-"}


def test_few_samples_say_nothing_however_far_apart() -> None:
    table = compare(run_of([1.0, 1.1, 1.2]), run_of([9.0, 9.1, 9.2]))
    assert set(table["better"]) == {"-"}
    assert table.set_index("metric").loc["ttft_ms", "high"] < 1


def test_a_request_that_failed_on_one_side_is_no_pair() -> None:
    failed = [sample(at_s=50, repeat=0, request=0, error="lmx-timeout: late", e2e_ms=1.0), *side(1.1)[1:]]
    first = row(side(1.0), failed, "ttft_ms")
    assert (first["paired"], first["n_a"], first["n_b"]) == (True, 12, 11)


def test_sides_with_hardly_a_request_in_common_are_not_paired() -> None:
    others = [s for s in side(1.1, per_repeat=12) if s.request > 3]
    first = row(side(1.0), others, "ttft_ms")
    assert not first["paired"]
    assert first["low"] <= first["ratio"] <= first["high"]


def test_several_runs_of_a_side_are_taken_together() -> None:
    days = [frame(side(1.0, jitter=day)).assign(run=f"day {day}") for day in range(3)]
    first = row(pd.concat(days), side(1.1), "ttft_ms")
    assert (first["n_a"], first["n_b"], first["paired"]) == (36, 12, False)
    assert first["ratio"] == pytest.approx(1 / 1.1, rel=0.05)


def test_cases_of_one_side_alone_are_named() -> None:
    small, large = side(1.0), side(1.0, prompt_tokens_wanted=64)
    table = compare([*small, *large], small)
    assert set(table["prompt_tokens_wanted"]) == {16}
    assert table.attrs["only_a"] == [(64, 8, 1, "closed", "cold")]
    assert table.attrs["only_b"] == []
    with pytest.raises(InvalidRequestError, match=r"no case in common.*64.*16"):
        compare(large, small)


def test_cold_is_not_compared_with_warm() -> None:
    with pytest.raises(InvalidRequestError, match=r"cold.*warm"):
        compare(side(1.0), side(1.0, cache="warm"))


def test_a_side_of_two_targets_is_refused_by_their_names() -> None:
    with pytest.raises(InvalidRequestError, match="b has several of target: one, two"):
        compare(side(1.0), [*side(1.0, target="one"), *side(1.0, target="two")])


def test_models_are_compared_where_both_were_named() -> None:
    table = compare(side(1.0, model="small", threads=2), side(2.0, model="large"), by=("concurrency",))
    assert table.set_index("metric").loc["ttft_ms", "ratio"] == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("wrong", [{"metrics": ("speed",)}, {"by": ("colour",)}])
def test_columns_that_are_not_there_are_named(wrong: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(InvalidRequestError, match=r"no column (speed|colour)"):
        compare(side(1.0), side(1.0), **wrong)


def test_a_side_without_samples_has_no_case() -> None:
    with pytest.raises(InvalidRequestError, match="a has none"):
        compare([], side(1.0))


def test_a_side_where_everything_failed_has_no_ratio() -> None:
    down = [sample(request=at, error="unreachable: nobody listens", e2e_ms=1.0) for at in range(12)]
    table = compare(side(1.0), down)
    assert table["ratio"].isna().all()
    assert set(table["better"]) == {"-"}
