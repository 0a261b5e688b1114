"""Summarize a table of requests: the median of each metric and the total speed of each case, with intervals."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lmx_lab.bench.sample import RequestSample, frame
from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.frames import make_table
from lmx_lab.results.statistics import LEVEL, NOTHING, Floats, Interval, half_width, median_interval, positions_of

if TYPE_CHECKING:
    import pandas as pd

Samples: TypeAlias = "pd.DataFrame | Iterable[RequestSample]"
MEASURED = ("target", "engine", "model", "quantization", "device", "threads", "blas")
"""Columns that describe the target."""
CASE = ("prompt_tokens_wanted", "output_tokens_wanted", "concurrency", "arrival", "cache")
"""Columns that describe the case."""
CLIENT_METRICS = ("ttft_ms", "itl_ms_p50", "itl_ms_p95", "itl_ms_p99", "prefill_tok_s", "decode_tok_s", "e2e_ms")
SERVER_METRICS = ("queue_ms", "server_ttft_ms", "server_prefill_tok_s", "server_decode_tok_s")
METRICS = (*CLIENT_METRICS, *SERVER_METRICS, "late_ms")
TOTAL = "total_tok_s"
LEFT = ("target", "prompt_tokens_wanted", "concurrency")
"""Columns that a summary has on the left even if their values are equal in all rows."""
FIRST = (TOTAL, "decode_tok_s", "ttft_ms", "itl_ms_p99", "prefill_tok_s", "e2e_ms")
"""Metrics that are the first ones in a summary."""
MAX_LENGTH_DIFFERENCE = 0.05
"""Relative difference of token counts above which two measurements are not comparable."""


def as_frame(samples: Samples) -> pd.DataFrame:
    """Convert samples to a table; a table is returned unchanged.

    Raises:
        MissingPackageError: pandas is not installed.
    """
    if hasattr(samples, "columns"):
        return samples
    return frame(samples)


def measured_rows(samples: Samples) -> pd.DataFrame:
    """Return the rows without those of warm-up requests."""
    table = as_frame(samples)
    return table[~table["warm_up"].astype(bool)]


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
    result: pd.DataFrame = make_table(rows, dtypes, needed_by="a summary")
    left = keys if by is not None else [name for name in keys if name in LEFT or result[name].nunique(dropna=False) > 1]
    shown = [*left, "errors", *FIRST]
    result = result[[*shown, *(name for name in (*figures, *keys) if name not in shown)]]
    result.attrs.update(table.attrs)
    return result


def _summarize(group: pd.DataFrame, level: float) -> dict[str, Any]:
    good = successful(group)
    groups = repeats(good)
    cells: dict[str, Any] = {
        "requests": len(group),
        "errors": len(group) - len(good),
        "prompt_tokens": median(good["prompt_tokens"]),
        "cached_tokens": median(good["cached_tokens"]),
        "output_tokens": median(good["output_tokens"]),
    }
    for metric in METRICS:
        cells |= _columns(metric, median_interval(numbers(good[metric]), groups=groups, level=level))
    cells |= _columns(TOTAL, total_interval(group, level=level))
    return cells | {"late_ms_max": _maximum(good["late_ms"]), "peak_memory_gb": _maximum(group["peak_memory_gb"])}


def _columns(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.median, f"{name}_low": interval.low, f"{name}_high": interval.high, f"{name}_n": interval.n}


def total_interval(group: pd.DataFrame, *, level: float = LEVEL) -> Interval:
    """Return the tokens per second of all requests of a case together.

    ``n`` is the number of repeats; an interval needs 3.
    """
    works = list(_work_of_repeats(group).values())
    if not works:
        return NOTHING
    total = sum(tokens for tokens, _ in works) / sum(seconds for _, seconds in works)
    factor = math.exp(half_width([np.log([tokens / seconds for tokens, seconds in works])], level))
    return Interval(median=total, low=total / factor, high=total * factor, n=len(works))


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
    return min(one, other) < (1 - MAX_LENGTH_DIFFERENCE) * max(one, other)


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
