"""Medians with bootstrap intervals, and what a table of requests says about each case.

The bootstrap is the percentile one, in two stages where values come in groups: groups are drawn first, then values
within each, because requests of one repeat went through the same minute of the machine (Davison and Hinkley,
*Bootstrap Methods and their Application*, 1997, 3.8).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lmx_lab.bench.sample import Sample, frame
from lmx_lab.errors import InvalidRequestError

if TYPE_CHECKING:
    import pandas as pd

Floats: TypeAlias = npt.NDArray[np.float64]
Samples: TypeAlias = "pd.DataFrame | Iterable[Sample]"
LEVEL = 0.95
DRAWS = 2000
CHUNK_NUMBERS = 2_000_000
"""Drawn at a time: 16 MB."""
MEASURED = ("target", "engine", "model", "quantization", "device", "threads", "blas")
"""What is measured."""
CASE = ("prompt_tokens_wanted", "output_tokens_wanted", "concurrency", "arrival", "cache")
"""How."""
CLIENT_METRICS = ("ttft_ms", "itl_ms_p50", "itl_ms_p95", "itl_ms_p99", "prefill_tok_s", "decode_tok_s", "e2e_ms")
SERVER_METRICS = ("queue_ms", "server_ttft_ms", "server_prefill_tok_s", "server_decode_tok_s")
METRICS = CLIENT_METRICS + SERVER_METRICS
TOTAL = "total_tok_s"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median, or a ratio of medians, and where it may as well lie."""

    median: float
    """NaN where there is no value."""
    low: float
    high: float
    n: int
    """Values, or pairs of values, behind it; of two unpaired sides the smaller's."""

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}]" if self.n else "-"


NOTHING = Interval(median=math.nan, low=math.nan, high=math.nan, n=0)


def median_interval(
    values: Iterable[float | None],
    *,
    groups: Iterable[Hashable] | None = None,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """The median of the values that are numbers, and its bootstrap interval; the same for the same seed.

    Args:
        groups: Of each value, which group it belongs to, such as the repeat; values of one vary together.
        level: The share of intervals that hold the true median, for many values. Of fewer than 6 it is less.

    Raises:
        InvalidRequestError: a level that is not between 0 and 1, no draws, or not a group for each value.
    """
    _check(level, draws)
    table, members = _members(_floats(values)[:, None], groups)
    if not len(table):
        return NOTHING
    drawn = _bootstrap(table, members, draws, seed)[:, 0]
    return _interval(float(np.median(table)), drawn, level, len(table))


def ratio_interval(
    a: Iterable[float | None],
    b: Iterable[float | None],
    paired: bool,
    *,
    groups: Iterable[Hashable] | None = None,
    groups_b: Iterable[Hashable] | None = None,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """How many times the median of ``b`` that of ``a`` is, and the bootstrap interval of this ratio.

    Args:
        paired: Whether values at the same place belong together, such as the same request of two servers: they are
            then drawn together, and what is missing on one side counts on neither.
        groups: Of each value of ``a`` (or pair), as in ``median_interval``.
        groups_b: The same for ``b``, unless paired.

    Returns:
        NaN where a side has no value, or its median is not above 0.

    Raises:
        InvalidRequestError: as ``median_interval``; or pairs, and not as many values on both sides.
    """
    _check(level, draws)
    left, right = _floats(a), _floats(b)
    if paired:
        if len(left) != len(right):
            raise InvalidRequestError(
                f"a has {len(left)} values and b {len(right)}; pairs need as many, or give paired=False"
            )
        table, members = _members(np.stack([left, right], axis=1), groups)
        medians = _bootstrap(table, members, draws, seed) if len(table) else np.empty((0, 2))
        return _ratio(table[:, 0], table[:, 1], medians[:, 0], medians[:, 1], level)
    (first, first_members), (second, second_members) = (
        _members(left[:, None], groups),
        _members(right[:, None], groups_b),
    )
    if not (len(first) and len(second)):
        return NOTHING
    above = _bootstrap(first, first_members, draws, seed)[:, 0]
    below = _bootstrap(second, second_members, draws, seed + 1)[:, 0]
    return _ratio(first[:, 0], second[:, 0], above, below, level)


def as_frame(samples: Samples) -> pd.DataFrame:
    """Samples as their table; a table as it is.

    Raises:
        ImportError: pandas is not installed.
    """
    if hasattr(samples, "columns"):
        return samples
    return frame(samples)


def measured(samples: Samples) -> pd.DataFrame:
    """The rows that count: warm-up is left out."""
    table = as_frame(samples)
    return table[~table["warm_up"].astype(bool)]


def summary(samples: Samples, by: Sequence[str] | None = None, *, level: float = LEVEL) -> pd.DataFrame:
    """One row for each case: requests, errors, tokens, and each figure's median with its interval.

    A figure ``ttft_ms`` has its interval in ``ttft_ms_low`` and ``ttft_ms_high``. Medians are over requests that ended
    well, warm-up left out. ``total_tok_s`` is all their tokens over the time in which any request of the case was under
    way, failed ones included; its interval is of the repeats, and missing where there was one.

    Args:
        by: Columns that tell cases apart; by default what was measured and how, and in kept runs which.

    Raises:
        InvalidRequestError: a column that the table has not.
        ImportError: pandas is not installed.
    """
    import pandas as pd

    table = measured(samples)
    keys = [*(["run"] if "run" in table else []), *MEASURED, *CASE] if by is None else list(by)
    if unknown := [name for name in keys if name not in table]:
        raise InvalidRequestError(
            f"by: no column {', '.join(unknown)}; there are {', '.join(table.columns)}", param="by"
        )
    rows = [
        dict(zip(keys, key, strict=True)) | _summed_up(group, level)
        for key, group in table.groupby(keys, sort=False, dropna=False)
    ]
    figures = _summed_up(table.iloc[:0], level)
    # Of no rows pandas would not know them.
    kinds = {name: table[name].dtype for name in keys} | {name: type(value) for name, value in figures.items()}
    result = pd.DataFrame(rows, columns=[*keys, *figures]).astype(kinds)
    result.attrs.update(table.attrs)
    return result


def _summed_up(group: pd.DataFrame, level: float) -> dict[str, Any]:
    ended = group[group["error"].isna()]
    groups = repeats(ended)
    cells: dict[str, Any] = {
        "requests": len(group),
        "errors": int(group["error"].notna().sum()),
        "prompt_tokens": _median(ended["prompt_tokens"]),
        "cached_tokens": _median(ended["cached_tokens"]),
        "output_tokens": _median(ended["output_tokens"]),
    }
    for metric in METRICS:
        cells |= _cells(metric, median_interval(numbers(ended[metric]), groups=groups, level=level))
    cells |= _cells(TOTAL, total_interval(group, level=level))
    peak = numbers(group["peak_memory_gb"])
    return cells | {"peak_memory_gb": float(np.nanmax(peak)) if np.isfinite(peak).any() else math.nan}


def _cells(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.median, f"{name}_low": interval.low, f"{name}_high": interval.high}


def total_interval(group: pd.DataFrame, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Tokens per second of all requests of a case together, and its interval over the repeats; ``n`` counts these."""
    sums = _sums(group)
    total = _total(sums)
    if math.isnan(total) or len(sums) == 1:
        return Interval(median=total, low=math.nan, high=math.nan, n=0 if math.isnan(total) else 1)
    return _interval(total, _drawn_totals(sums, draws, seed), level, len(sums))


def total_ratio_interval(
    a: pd.DataFrame, b: pd.DataFrame, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """How many times ``b``'s total ``a``'s is; ``n`` counts the repeats of the side that has fewer."""
    left, right = _sums(a), _sums(b)
    ratio, n = _total(left) / _total(right), min(len(left), len(right))
    if math.isnan(ratio) or n == 1:
        return Interval(median=ratio, low=math.nan, high=math.nan, n=0 if math.isnan(ratio) else 1)
    return _interval(ratio, _drawn_totals(left, draws, seed) / _drawn_totals(right, draws, seed + 1), level, n)


def _sums(group: pd.DataFrame) -> Floats:
    """Tokens and seconds of each repeat; a repeat without a token is left out."""
    sums = [_tokens_and_seconds(part) for _, part in group.groupby(repeats(group), sort=False)]
    return np.array([(tokens, seconds) for tokens, seconds in sums if tokens > 0 and seconds > 0]).reshape(-1, 2)


def _total(sums: Floats) -> float:
    return float(sums[:, 0].sum() / sums[:, 1].sum()) if len(sums) else math.nan


def _drawn_totals(sums: Floats, draws: int, seed: int) -> Floats:
    drawn = sums[np.random.default_rng(seed).integers(len(sums), size=(draws, len(sums)))].sum(axis=1)
    return np.asarray(drawn[:, 0] / drawn[:, 1])


def _tokens_and_seconds(part: pd.DataFrame) -> tuple[float, float]:
    """What fails delivers nothing, and takes its time."""
    tokens = numbers(part["output_tokens"][part["error"].isna()])
    starts = part["started_at"].astype("int64").to_numpy() / 1e6
    return float(np.nansum(tokens)), busy_s(starts, starts + np.nan_to_num(numbers(part["e2e_ms"])) / 1000)


def busy_s(starts: Floats, ends: Floats) -> float:
    """The length of the time in which at least one of the spans is under way."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    # A span that begins before all earlier ones have ended adds only what it goes on longer.
    covered_to = np.concatenate([[-np.inf], ends[:-1]])
    return float(np.sum(np.maximum(ends - np.maximum(starts, covered_to), 0.0)))


def repeats(table: pd.DataFrame) -> pd.Series[Any]:
    """Which repeat of which run each row is of: what was measured in one go."""
    number = table["repeat"].astype(str)
    return number if "run" not in table else table["run"].astype(str) + " " + number


def numbers(column: pd.Series[Any]) -> Floats:
    return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)


def _median(column: pd.Series[Any]) -> float:
    values = numbers(column)
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def _floats(values: Iterable[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _members(table: Floats, groups: Iterable[Hashable] | None) -> tuple[Floats, list[npt.NDArray[np.intp]]]:
    """The rows without a gap, and for each group which of them are its own."""
    labels = [None] * len(table) if groups is None else list(groups)
    if len(labels) != len(table):
        raise InvalidRequestError(f"there are {len(labels)} groups for {len(table)} values; give one for each")
    kept = np.flatnonzero(np.isfinite(table).all(axis=1))
    members: dict[Hashable, list[int]] = {}
    for at, old in enumerate(kept):
        members.setdefault(labels[old], []).append(at)
    return table[kept], [np.array(one) for one in members.values()]


def _bootstrap(table: Floats, members: list[npt.NDArray[np.intp]], draws: int, seed: int) -> Floats:
    """The medians of each column in every draw: draws x columns."""
    generator = np.random.default_rng(seed)
    sizes = np.array([len(one) for one in members])
    longest = int(sizes.max())
    # Shorter groups are filled up with a row of NaN, which sorts to the end and is not counted.
    padded = np.full((len(members), longest), len(table))
    for at, one in enumerate(members):
        padded[at, : len(one)] = one
    source = np.concatenate([table, np.full((1, table.shape[1]), np.nan)])
    medians = []
    chunk = max(1, CHUNK_NUMBERS // (padded.size * table.shape[1]))
    for start in range(0, draws, chunk):
        count = min(chunk, draws - start)
        chosen = generator.integers(len(members), size=(count, len(members), 1))
        within = (generator.random((count, len(members), longest)) * sizes[chosen]).astype(np.intp)
        rows = padded[chosen, within]
        rows[np.arange(longest) >= sizes[chosen]] = len(table)
        medians.append(_medians(source[rows.reshape(count, -1)]))
    return np.concatenate(medians)


def _medians(drawn: Floats) -> Floats:
    """Over the second axis, of what is not NaN."""
    ordered = np.sort(drawn, axis=1)
    counts = np.sum(~np.isnan(ordered), axis=1, keepdims=True)
    below = np.take_along_axis(ordered, (counts - 1) // 2, axis=1)
    above = np.take_along_axis(ordered, counts // 2, axis=1)
    # Not their sum halved: that may overflow, and miss the value where both are the same.
    return np.asarray(below + (above - below) / 2)[:, 0]


def _interval(point: float, drawn: Floats, level: float, n: int) -> Interval:
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(median=point, low=min(float(low), point), high=max(float(high), point), n=n)


def _ratio(a: Floats, b: Floats, drawn_a: Floats, drawn_b: Floats, level: float) -> Interval:
    if not len(a) or not (np.median(a) > 0 and np.median(b) > 0 and (drawn_b > 0).all()):
        return Interval(median=math.nan, low=math.nan, high=math.nan, n=min(len(a), len(b)))
    return _interval(float(np.median(a) / np.median(b)), drawn_a / drawn_b, level, min(len(a), len(b)))


def _check(level: float, draws: int) -> None:
    if not 0 < level < 1:
        raise InvalidRequestError(f"level is {level!r}; give a share between 0 and 1, such as 0.95", param="level")
    if draws < 1:
        raise InvalidRequestError(f"draws is {draws!r}; give 1 or more, {DRAWS} by default", param="draws")
