"""Summarize a table of requests by medians and totals with intervals, and compare two tables by ratios with intervals.

The speed of a machine drifts, which affects all requests of a repeat. Therefore only repeats count as independent in a
comparison: each repeat gives one ratio, and with three or more repeats there is an interval, whatever the number of
requests.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lmx_lab.bench.sample import Metric, RequestSample, frame
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.extras import import_optional
from lmx_lab.results.frames import make_table, utc_time
from lmx_lab.results.statistics import (
    LEVEL,
    NOTHING,
    Floats,
    Interval,
    half_width,
    median_interval,
    positions_of,
    ratio_interval,
)

if TYPE_CHECKING:
    import pandas as pd

Samples: TypeAlias = "pd.DataFrame | Iterable[RequestSample]"
MEASURED = ("target", "engine", "model", "quantization", "device", "threads", "blas")
"""Columns that describe the target."""
CASE = ("prompt_tokens_wanted", "output_tokens_wanted", "concurrency", "arrival", "cache")
"""Columns that describe the case."""
TOTAL = "total_tok_s"


METRICS: Mapping[str, Metric] = {
    **{each.name: each.metadata["metric"] for each in fields(RequestSample) if "metric" in each.metadata},
    TOTAL: Metric(label="all requests together, tok/s", heading="total\ntok/s", of_tokens=True, of_length=True),
}
COMPARED = tuple(name for name, metric in METRICS.items() if metric.by_client)
COMPARISON = {
    "metric": "str",
    **dict.fromkeys(("a", "a_low", "a_high", "b", "b_low", "b_high", "ratio", "low", "high"), "float64"),
    **{"n_a": "int64", "n_b": "int64", "repeats": "int64", "paired": "bool"},
    **{"output_tokens_a": "float64", "output_tokens_b": "float64", "better": "str"},
}
"""Columns of a comparison, and their types, after those that identify a case."""


def measured_rows(samples: Samples) -> pd.DataFrame:
    """Return the rows without those of warm-up requests.

    Raises:
        InvalidRequestError: they are not the rows of a benchmark.
    """
    try:
        table: pd.DataFrame = samples if hasattr(samples, "columns") else frame(samples)
        if not hasattr(table["started_at"], "dt"):
            # Texts, such as those of a CSV file.
            table = table.assign(started_at=list(map(utc_time, table["started_at"])))
        return table[~table["warm_up"].astype(bool)]
    except (TypeError, ValueError, AttributeError, KeyError):
        raise InvalidRequestError(
            f"the rows have the type {type(samples).__name__}, or lack columns of a benchmark; pass the table of "
            "lab.bench, lmx_lab.bench.run or load",
            param="samples",
        ) from None


def summary(samples: Samples, by: Sequence[str] | None = None, *, level: float = LEVEL) -> pd.DataFrame:
    """Summarize each case in a row: the median of each metric with its interval, requests, errors and tokens.

    The columns of ``by`` are on the left, then the medians, then intervals and everything else. Without ``by``, most
    columns that are equal in all rows are on the right.

    For example, ``ttft_ms`` has its interval in ``ttft_ms_low`` and ``ttft_ms_high``, which are missing with fewer than
    6 values, and the number of values in ``ttft_ms_n``. Medians are over successful requests without warm-up; that of
    ``itl_ms_p99`` is over the 99th percentiles of the requests. The time between tokens is that between pieces of the
    stream, which is longer if a server sends several tokens in a piece. ``late_ms`` (and ``late_ms_max``) is the time
    from the due time of Poisson arrivals to sending.

    ``total_tok_s`` is the number of all tokens divided by the time in which any request of the case was running, failed
    ones included. ``total_tok_s_n`` is the number of repeats; with 3 or more there is an interval.

    Args:
        by: Columns that identify a case; by default the run and the columns that describe target and case.
        level: The share of intervals that contain the true value.

    Raises:
        InvalidRequestError: a column does not exist.
        MissingPackageError: pandas is not installed.
    """
    table = measured_rows(samples)
    keys = ["run", *MEASURED, *CASE] if by is None else list(by)
    if unknown := [name for name in keys if name not in table]:
        raise InvalidRequestError(
            f"by: there is no column {', '.join(unknown)}; available are {', '.join(table.columns)}", param="by"
        )
    rows = [
        _summarize(group, level) | dict(zip(keys, key, strict=True))
        for key, group in table.groupby(keys, sort=False, dropna=False)
    ]
    figures = {name: value for name, value in _summarize(table.iloc[:0], level).items() if name not in keys}
    # The types are given explicitly, because pandas cannot infer them without rows.
    dtypes = {name: table[name].dtype for name in keys} | {name: type(value) for name, value in figures.items()}
    result = make_table(rows, dtypes, needed_by="a summary")
    left = keys
    if by is None:
        always = ("target", "prompt_tokens_wanted", "concurrency")
        left = [name for name in keys if name in always or result[name].nunique(dropna=False) > 1]
    shown = [*left, "errors", TOTAL, "decode_tok_s", "ttft_ms", "itl_ms_p99", "prefill_tok_s", "e2e_ms"]
    result = result[[*shown, *(name for name in (*figures, *keys) if name not in shown)]]
    result.attrs.update(table.attrs)
    return result


def show_as_summary(table: pd.DataFrame) -> None:
    """Let notebooks show a table of requests as the first columns of its summary. ``table.df``, copies and selections
    of the table are plain data frames, which notebooks show with all columns.
    """
    plain = table.copy(deep=False)

    def shown() -> str:
        cases: Any = summary(plain).loc[:, :"e2e_ms"].round(3)
        return f"{cases._repr_html_()}<div>Summary of {counted(len(plain), 'request')}, which .df lists.</div>"

    # Assigned in this way, because pandas takes a data frame for a new column and warns.
    for name, value in (("df", plain), ("_repr_html_", shown)):
        object.__setattr__(table, name, value)


def _summarize(group: pd.DataFrame, level: float) -> dict[str, Any]:
    good = successful(group)
    cells: dict[str, Any] = {
        "requests": len(group),
        "errors": len(group) - len(good),
        "prompt_tokens": median(good["prompt_tokens"]),
        "cached_tokens": median(good["cached_tokens"]),
        "output_tokens": median(good["output_tokens"]),
    }
    for name in METRICS:
        found = metric_interval(name, group, level=level)
        cells |= {name: found.median, f"{name}_low": found.low, f"{name}_high": found.high, f"{name}_n": found.n}
    return cells | {"late_ms_max": _maximum(good["late_ms"]), "peak_memory_gb": _maximum(group["peak_memory_gb"])}


def metric_interval(metric: str, group: pd.DataFrame, *, level: float = LEVEL) -> Interval:
    """Return the median of a metric over the successful requests of a case, or the tokens per second of all requests
    together, whose ``n`` is the number of repeats.
    """
    if metric != TOTAL:
        good = successful(group)
        return median_interval(numbers(good[metric]), groups=repeats(good), level=level)
    works = list(_work_of_repeats(group).values())
    if not works:
        return NOTHING
    total = sum(tokens for tokens, _ in works) / sum(seconds for _, seconds in works)
    factor = math.exp(half_width([np.log([tokens / seconds for tokens, seconds in works])], level))
    return Interval(median=total, low=total / factor, high=total * factor, n=len(works))


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
    sides = {"a": _measured_cases("a", a, metrics, by), "b": _measured_cases("b", b, metrics, by)}
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
    dtypes = {name: sides["a"][common[0]][name].dtype for name in by} | COMPARISON
    table = make_table(compared, dtypes, needed_by="a comparison")
    table.attrs["only_a"] = [key for key in sides["a"] if key not in sides["b"]]
    table.attrs["only_b"] = [key for key in sides["b"] if key not in sides["a"]]
    return table


def _measured_cases(
    side: str, samples: Samples, metrics: Sequence[str], by: Sequence[str]
) -> dict[tuple[Any, ...], pd.DataFrame]:
    """Return the measured rows of each case of a side, which must be those of one target."""
    table = measured_rows(samples)
    if missing := [name for name in (*metrics, *by) if name not in table and name != TOTAL]:
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
    isna = import_optional("pandas", "a comparison").isna
    # Missing values are replaced by None, because they are not equal to themselves.
    return {
        tuple(None if isna(value) else value for value in key): group
        for key, group in table.groupby(list(by), sort=False, dropna=False)
    }


def _compare_metric(metric: str, a: pd.DataFrame, b: pd.DataFrame, level: float) -> dict[str, Any]:
    left, right = metric_interval(metric, a, level=level), metric_interval(metric, b, level=level)
    answer_a, answer_b = median(successful(a)["output_tokens"]), median(successful(b)["output_tokens"])
    repeats_a, repeats_b = by_repeat(metric, a), by_repeat(metric, b)
    common = [repeat for repeat in repeats_a if repeat in repeats_b]
    ratio = (
        ratio_interval((repeats_a[at] for at in common), (repeats_b[at] for at in common), True, level=level)
        if common
        else ratio_interval(repeats_a.values(), repeats_b.values(), False, level=level)
    )
    kind = METRICS.get(metric, Metric())
    lengths_differ = kind.of_length and token_counts_differ(answer_a, answer_b)
    if lengths_differ or (kind.of_tokens and (counts_pieces(a) or counts_pieces(b))):
        ratio = Interval(median=math.nan, low=math.nan, high=math.nan, n=ratio.n)
    more, less = ("a", "b") if metric.endswith("_tok_s") else ("b", "a")
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
        "paired": bool(common),
        "output_tokens_a": answer_a,
        "output_tokens_b": answer_b,
        "better": more if ratio.low > 1 else less if ratio.high < 1 else "-",
    }


def _names(cases: dict[tuple[Any, ...], Any]) -> str:
    shown = [" ".join(map(str, key)) for key in list(cases)[:3]]
    return "; ".join(shown) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "") if shown else "none"


def by_repeat(metric: str, group: pd.DataFrame) -> Mapping[Hashable, float]:
    """Return the median or total of each repeat that has one."""
    if metric == TOTAL:
        return {repeat: tokens / seconds for repeat, (tokens, seconds) in _work_of_repeats(group).items()}
    good = successful(group)
    values = numbers(good[metric])
    finite = np.isfinite(values)
    positions = positions_of(repeat for repeat, is_finite in zip(repeats(good), finite, strict=True) if is_finite)
    return {repeat: float(np.median(values[finite][at])) for repeat, at in positions.items()}


def _work_of_repeats(group: pd.DataFrame) -> dict[Hashable, tuple[float, float]]:
    """Return tokens and seconds of each repeat with tokens. Failed requests have no tokens, but their time counts."""
    tokens = np.where(group["error"].isna(), np.nan_to_num(numbers(group["output_tokens"])), 0.0)
    starts = group["started_at"].dt.as_unit("us").astype("int64").to_numpy() / 1e6
    # e2e_ms starts at the due time.
    took_ms = np.nan_to_num(numbers(group["e2e_ms"])) - np.nan_to_num(numbers(group["late_ms"]))
    ends = starts + took_ms / 1000
    works = {
        repeat: (float(np.sum(tokens[at])), busy_s(starts[at], ends[at]))
        for repeat, at in positions_of(repeats(group)).items()
    }
    return {repeat: work for repeat, work in works.items() if min(work) > 0}


def busy_s(starts: Floats, ends: Floats) -> float:
    """Return the total time that is covered by at least one of the spans."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    # If a span overlaps earlier ones, only the part after their end counts.
    covered_to = np.concatenate([[-np.inf], ends[:-1]])
    return float(np.sum(np.maximum(ends - np.maximum(starts, covered_to), 0.0)))


def repeats(table: pd.DataFrame) -> list[Hashable]:
    """Return the repeat of each row, identified by run, seed and number."""
    return list(zip(table["run"], table["seed"], table["repeat"], strict=True))


def successful(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of successful requests."""
    return table[table["error"].isna()]


def counts_pieces(table: pd.DataFrame) -> bool:
    """Whether pieces of the stream are counted instead of tokens, because the server reports no usage."""
    return bool((successful(table)["counted_by"] == "chunks").any())


def token_counts_differ(one: float, other: float) -> bool:
    """Whether two numbers of tokens differ by more than 5 % of the greater one. False if one is NaN."""
    return min(one, other) < 0.95 * max(one, other)


def numbers(column: pd.Series[Any]) -> Floats:
    """Return the values of a column as floats; missing values are NaN."""
    return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)


def median(column: pd.Series[Any]) -> float:
    """Return the median of the values that are numbers; NaN if there are none."""
    values = numbers(column)
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def _maximum(column: pd.Series[Any]) -> float:
    values = numbers(column)
    return float(np.nanmax(values)) if np.isfinite(values).any() else math.nan
