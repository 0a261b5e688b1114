"""Compare two measurements of the same cases by ratios with intervals.

The speed of a machine drifts, which affects all requests of a repeat. Therefore only repeats count as independent: each
repeat gives one ratio, and with three or more repeats there is an interval, whatever the number of requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from lmx_lab.bench.statistics import (
    CASE,
    CLIENT_METRICS,
    MEASURED,
    TOTAL,
    Samples,
    by_repeat,
    counts_pieces,
    measured_rows,
    median,
    numbers,
    repeats,
    successful,
    token_counts_differ,
    total_interval,
)
from lmx_lab.errors import InvalidRequestError
from lmx_lab.extras import import_optional
from lmx_lab.results.frames import make_table
from lmx_lab.results.statistics import LEVEL, Interval, median_interval, ratio_interval

if TYPE_CHECKING:
    import pandas as pd

Better = Literal["a", "b", "-"]
COLUMNS = {
    "metric": "str",
    **dict.fromkeys(("a", "a_low", "a_high", "b", "b_low", "b_high", "ratio", "low", "high"), "float64"),
    **{"n_a": "int64", "n_b": "int64", "repeats": "int64", "paired": "bool"},
    **{"output_tokens_a": "float64", "output_tokens_b": "float64", "better": "str"},
}
"""Columns of the result, and their types, after those that identify a case."""
COMPARED = (*CLIENT_METRICS, TOTAL)
LENGTH_DEPENDENT = ("e2e_ms", TOTAL)
"""Metrics that depend on the length of the answers."""
TOKEN_METRICS = ("itl_ms_p50", "itl_ms_p95", "itl_ms_p99", "decode_tok_s", TOTAL)
"""Metrics that count pieces instead of tokens if the server does not report usage."""


def compare(
    a: Samples, b: Samples, *, metrics: Sequence[str] = COMPARED, by: Sequence[str] = CASE, level: float = LEVEL
) -> pd.DataFrame:
    """Compare two sides: both medians, and the ratio a / b with an interval, for each common case and each metric.

    ``ratio`` is the geometric mean of the ratios of the repeats' medians (totals for ``total_tok_s``), and ``low`` to
    ``high`` is its interval. With fewer than 3 repeats on a side there is no interval and ``better`` is ``-``, so
    measure with ``repeats=3`` or more. Repeats of the same run are ``paired``, because they ran at the same time; if
    there are any, only these count. Repeats of different runs are not paired. ``repeats`` is the number of pairs, or of
    repeats on the side with fewer.

    ``better`` is the side that has more tokens per second or takes less time, if the complete interval shows it. ``-``
    means that the difference is not significant. If both sides are equally fast, ``better`` is ``-`` in 95 % of the
    comparisons at the default level.

    ``e2e_ms`` and ``total_tok_s`` have no ratio if the lengths of the answers (medians, ``output_tokens_a`` and
    ``output_tokens_b``) differ by more than 5 %. Metrics of single tokens have no ratio if a side reports no usage,
    because pieces of its stream are counted instead of tokens. ``a`` and ``b`` are medians over all requests, with
    intervals as in ``summary``.

    Args:
        a, b: Samples or tables, each of one target. Several runs are combined.
        by: Columns that identify a case.

    Returns:
        A table with a row for each case and metric. ``.attrs["only_a"]`` and ``["only_b"]`` list the cases that only
        one side has.

    Raises:
        InvalidRequestError: a side has several targets, there is no common case, or a column does not exist.
        MissingPackageError: pandas is not installed.
    """
    sides = {name: _cases(name, samples, metrics, by) for name, samples in (("a", a), ("b", b))}
    common = [key for key in sides["a"] if key in sides["b"]]
    if not common:
        raise InvalidRequestError(
            f"a and b have no case in common: a has {_names(sides['a'])}, b has {_names(sides['b'])}; use the same "
            f"sweep for both, or give fewer columns than by={tuple(by)}"
        )
    compared = [
        dict(zip(by, key, strict=True))
        | {"metric": metric}
        | _compare_metric(metric, sides["a"][key], sides["b"][key], level)
        for key in common
        for metric in metrics
    ]
    dtypes = {name: sides["a"][common[0]][name].dtype for name in by} | COLUMNS
    table: pd.DataFrame = make_table(compared, dtypes, needed_by="a comparison")
    table.attrs["only_a"] = [key for key in sides["a"] if key not in sides["b"]]
    table.attrs["only_b"] = [key for key in sides["b"] if key not in sides["a"]]
    return table


def _cases(
    side: str, samples: Samples, metrics: Sequence[str], by: Sequence[str]
) -> dict[tuple[Any, ...], pd.DataFrame]:
    """Return the measured rows of each case of a side."""
    rows = measured_rows(samples)
    _check(side, rows, [*metrics, *by])
    isna = import_optional("pandas", "a comparison").isna
    # Missing values are replaced by None, because they are not equal to themselves.
    return {
        tuple(None if isna(value) else value for value in key): group
        for key, group in rows.groupby(list(by), sort=False, dropna=False)
    }


def _check(side: str, table: pd.DataFrame, columns: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in table and name != TOTAL]:
        raise InvalidRequestError(
            f"there is no column {', '.join(missing)}; available are {', '.join(table.columns)}, {TOTAL}"
        )
    # A request that did not reach its target has no facts except the target's name.
    good = successful(table)
    for name in MEASURED:
        if len(several := good[name].dropna().unique()) > 1:
            raise InvalidRequestError(
                f"{side} has several values of {name}: {', '.join(map(str, several))}; choose the rows of one, as in "
                f"{side}[{side}.{name} == {several[0]!r}]"
            )


def _compare_metric(metric: str, a: pd.DataFrame, b: pd.DataFrame, level: float) -> dict[str, Any]:
    left, right = _interval(metric, a, level), _interval(metric, b, level)
    answer_a, answer_b = median(successful(a)["output_tokens"]), median(successful(b)["output_tokens"])
    ratio, paired = _ratio(metric, a, b, level)
    lengths_differ = metric in LENGTH_DEPENDENT and token_counts_differ(answer_a, answer_b)
    if lengths_differ or (metric in TOKEN_METRICS and (counts_pieces(a) or counts_pieces(b))):
        ratio = Interval(median=math.nan, low=math.nan, high=math.nan, n=ratio.n)
    return {
        "a": left.median,
        "a_low": left.low,
        "a_high": left.high,
        "b": right.median,
        "b_low": right.low,
        "b_high": right.high,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "n_a": left.n,
        "n_b": right.n,
        "repeats": ratio.n,
        "paired": paired,
        "output_tokens_a": answer_a,
        "output_tokens_b": answer_b,
        "better": _better(metric, ratio),
    }


def _interval(metric: str, side: pd.DataFrame, level: float) -> Interval:
    if metric == TOTAL:
        return total_interval(side, level=level)
    good = successful(side)
    return median_interval(numbers(good[metric]), groups=repeats(good), level=level)


def _ratio(metric: str, a: pd.DataFrame, b: pd.DataFrame, level: float) -> tuple[Interval, bool]:
    """Return the ratio, and whether it is computed from pairs."""
    left, right = by_repeat(metric, a), by_repeat(metric, b)
    if common := [repeat for repeat in left if repeat in right]:
        pairs = [left[repeat] for repeat in common], [right[repeat] for repeat in common]
        return ratio_interval(*pairs, True, level=level), True
    return ratio_interval(left.values(), right.values(), False, level=level), False


def _better(metric: str, ratio: Interval) -> Better:
    more_is_better = metric.endswith("_tok_s")
    if ratio.low > 1:
        return "a" if more_is_better else "b"
    if ratio.high < 1:
        return "b" if more_is_better else "a"
    return "-"


def _names(cases: dict[tuple[Any, ...], Any]) -> str:
    shown = [" ".join(map(str, key)) for key in list(cases)[:3]]
    return "; ".join(shown) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "") if shown else "none"
