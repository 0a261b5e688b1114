"""Compute medians and ratios with intervals, and the summary of a table of requests.

Intervals of medians over requests are computed by the percentile bootstrap. If the values are grouped, it has two
stages: groups are drawn first, then values within each, because requests of one repeat ran at the same time (Davison
and Hinkley, *Bootstrap Methods and their Application*, 1997, 3.8). Totals and ratios have one value per repeat; their
intervals are Student's on a log scale, because a bootstrap of three values would be far too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lmx_lab.bench.sample import RequestSample, frame
from lmx_lab.errors import InvalidRequestError
from lmx_lab.frames import pandas_for

if TYPE_CHECKING:
    import pandas as pd

Floats: TypeAlias = npt.NDArray[np.float64]
Samples: TypeAlias = "pd.DataFrame | Iterable[RequestSample]"
LEVEL = 0.95
DRAWS = 2000
NUMBERS_PER_CHUNK = 2_000_000
"""Random numbers that are drawn at once, 16 MB."""
MEASURED = ("target", "engine", "model", "quantization", "device", "threads", "blas")
"""Columns that describe the target."""
CASE = ("prompt_tokens_wanted", "output_tokens_wanted", "concurrency", "arrival", "cache")
"""Columns that describe the case."""
CLIENT_METRICS = ("ttft_ms", "itl_ms_p50", "itl_ms_p95", "itl_ms_p99", "prefill_tok_s", "decode_tok_s", "e2e_ms")
SERVER_METRICS = ("queue_ms", "server_ttft_ms", "server_prefill_tok_s", "server_decode_tok_s")
METRICS = (*CLIENT_METRICS, *SERVER_METRICS, "late_ms")
TOTAL = "total_tok_s"
MIN_REPEATS = 3
"""Minimum number of repeats for an interval. With two, it would be tens of times as wide as the value."""
MAX_LENGTH_DIFFERENCE = 0.05
"""Relative difference of token counts above which two measurements are not comparable."""
BISECTIONS = 60
"""Enough for the precision of a float."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median, total or ratio with its interval."""

    median: float
    """NaN if there is no value."""
    low: float
    """NaN, like ``high``, if there are too few values."""
    high: float
    n: int
    """Number of values. For a total, these are the repeats; for a ratio, the pairs or the repeats of the side with
    fewer repeats."""

    def overlaps(self, other: Interval) -> bool:
        """Whether both intervals have bounds and overlap."""
        return self.low <= other.high and other.low <= self.high

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if math.isnan(self.median):
            return "-"
        return f"{self.median:.4g} [{'-' if math.isnan(self.low) else f'{self.low:.4g}, {self.high:.4g}'}]"


NOTHING = Interval(median=math.nan, low=math.nan, high=math.nan, n=0)


def median_interval(
    values: Iterable[float | None],
    *,
    groups: Iterable[Hashable] | None = None,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Return the median of the values that are numbers, with its bootstrap interval. It is deterministic for a seed.

    There is no interval if even the range of all values would contain the true median less often than ``level``. For
    95 %, this is the case with fewer than 6 values.

    Args:
        groups: The group of each value, such as its repeat. Values of a group may be correlated. With few groups, an
            interval contains the true median less often than ``level``.
        level: The share of intervals that contain the true median.
        draws: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Raises:
        InvalidRequestError: the level is not between 0 and 1, draws is below 1, or the number of groups is wrong.
    """
    _check_level(level)
    if draws < 1:
        raise InvalidRequestError(f"draws is {draws!r}; give 1 or more, {DRAWS} by default", param="draws")
    table, members = _members(_floats(values), groups)
    if not len(table):
        return NOTHING
    middle, n = float(np.median(table)), len(table)
    if 1 - 2 * 0.5**n < level:
        return Interval(median=middle, low=math.nan, high=math.nan, n=n)
    low, high = np.quantile(_bootstrap(table, members, draws, seed), [(1 - level) / 2, (1 + level) / 2])
    return Interval(median=middle, low=min(float(low), middle), high=max(float(high), middle), n=n)


def ratio_interval(
    a: Iterable[float | None], b: Iterable[float | None], paired: bool, *, level: float = LEVEL
) -> Interval:
    """Return the ratio a / b as geometric mean with its interval, from one value per repeat.

    The interval is Student's for the logarithms (Welch's if unpaired), and needs at least 3 repeats of each side. The
    values must be independent. Those of single requests are not, and would make the interval too narrow.

    Args:
        paired: Whether values at the same position belong together, such as the same repeat of two servers in one run.
            A pair with a missing value is ignored.

    Returns:
        An interval of NaN if a side has no value, or a value that is not above 0.

    Raises:
        InvalidRequestError: the level is not between 0 and 1, or paired sides have different lengths.
    """
    _check_level(level)
    left, right = _floats(a), _floats(b)
    if paired:
        if len(left) != len(right):
            raise InvalidRequestError(
                f"a has {len(left)} values and b has {len(right)}; give equal numbers of values, or paired=False"
            )
        left, right = np.where(np.isfinite(right), left, math.nan), np.where(np.isfinite(left), right, math.nan)
    left, right = left[np.isfinite(left)], right[np.isfinite(right)]
    n = min(len(left), len(right))
    if not n or min(left.min(), right.min()) <= 0:
        return Interval(median=math.nan, low=math.nan, high=math.nan, n=n)
    left, right = np.log(left), np.log(right)
    centre = float(np.mean(left) - np.mean(right))
    reach = _half_width([left - right] if paired else [left, right], level)
    return Interval(median=math.exp(centre), low=math.exp(centre - reach), high=math.exp(centre + reach), n=n)


def _half_width(sides: Sequence[Floats], level: float) -> float:
    """Return half the width of the interval of a mean, or of the difference of two means (Welch's).

    NaN if there are too few values.
    """
    if min(map(len, sides)) < MIN_REPEATS:
        return math.nan
    parts = [float(np.var(side, ddof=1)) / len(side) for side in sides]
    if (whole := sum(parts)) == 0:
        return 0.0
    freedom = 1 / sum((part / whole) ** 2 / (len(side) - 1) for part, side in zip(parts, sides, strict=True))
    # Rounded down, which makes the interval wider; 1e-6 compensates for floating-point errors.
    return student(level, math.floor(freedom + 1e-6)) * math.sqrt(whole)


def student(level: float, freedom: int) -> float:
    """Return Student's t: half the width of an interval of this level, in standard errors.

    Args:
        freedom: Degrees of freedom, 2 or more.

    The probability within t is a finite series of the angle whose tangent is t over the square root of the degrees of
    freedom (Abramowitz and Stegun, *Handbook of Mathematical Functions*, 1964, 26.7.3 and 26.7.4). The angle is found
    by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(high)


def _share_within(angle: float, freedom: int) -> float:
    """Return the probability that Student's t is within the t of this angle."""
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= (power - 1) / power * math.cos(angle) ** 2
        total += term
    within = math.sin(angle) * total
    return 2 / math.pi * (angle + within) if odd else within


def as_frame(samples: Samples) -> pd.DataFrame:
    """Convert samples to a table; a table is returned unchanged.

    Raises:
        ImportError: pandas is not installed.
    """
    if hasattr(samples, "columns"):
        return samples
    return frame(samples)


def measured_rows(samples: Samples) -> pd.DataFrame:
    """Return the rows without those of warm-up requests."""
    table = as_frame(samples)
    return table[~table["warm_up"].astype(bool)]


def summary(samples: Samples, by: Sequence[str] | None = None, *, level: float = LEVEL) -> pd.DataFrame:
    """Summarize each case in a row: requests, errors, tokens, and the median of each metric with its interval.

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
        ImportError: pandas is not installed.
    """
    pandas = pandas_for("a summary")
    table = measured_rows(samples)
    keys = ["run", *MEASURED, *CASE] if by is None else list(by)
    if unknown := [name for name in keys if name not in table]:
        raise InvalidRequestError(
            f"by: there is no column {', '.join(unknown)}; available are {', '.join(table.columns)}", param="by"
        )
    rows = [
        dict(zip(keys, key, strict=True)) | _summarize(group, level)
        for key, group in table.groupby(keys, sort=False, dropna=False)
    ]
    figures = _summarize(table.iloc[:0], level)
    # The types are given explicitly, because pandas cannot infer them without rows.
    kinds = {name: table[name].dtype for name in keys} | {name: type(value) for name, value in figures.items()}
    result: pd.DataFrame = pandas.DataFrame(rows, columns=[*keys, *figures]).astype(kinds)
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
    factor = math.exp(_half_width([np.log([tokens / seconds for tokens, seconds in works])], level))
    return Interval(median=total, low=total / factor, high=total * factor, n=len(works))


def by_repeat(metric: str, group: pd.DataFrame) -> Mapping[Hashable, float]:
    """Return the median or total of each repeat that has one."""
    if metric == TOTAL:
        return {repeat: tokens / seconds for repeat, (tokens, seconds) in _work_of_repeats(group).items()}
    good = successful(group)
    values = numbers(good[metric])
    finite = np.isfinite(values)
    positions = _positions(repeat for repeat, is_finite in zip(repeats(good), finite, strict=True) if is_finite)
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
        for repeat, at in _positions(repeats(group)).items()
    }
    return {repeat: work for repeat, work in works.items() if min(work) > 0}


def busy_s(starts: Floats, ends: Floats) -> float:
    """Return the total time that is covered by at least one of the spans."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    # Of a span that overlaps earlier ones, only the part after their end counts.
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


def _floats(values: Iterable[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _members(table: Floats, groups: Iterable[Hashable] | None) -> tuple[Floats, list[npt.NDArray[np.intp]]]:
    """Return the values that are numbers, and the indices of each group's values among them."""
    labels = [None] * len(table) if groups is None else list(groups)
    if len(labels) != len(table):
        raise InvalidRequestError(
            f"there are {len(labels)} groups for {len(table)} values; give one group for each value"
        )
    kept = np.flatnonzero(np.isfinite(table))
    return table[kept], list(_positions(labels[at] for at in kept).values())


def _positions(labels: Iterable[Hashable]) -> dict[Hashable, npt.NDArray[np.intp]]:
    """Return the positions of each label."""
    positions: dict[Hashable, list[int]] = {}
    for at, label in enumerate(labels):
        positions.setdefault(label, []).append(at)
    return {label: np.array(one) for label, one in positions.items()}


def _bootstrap(table: Floats, members: list[npt.NDArray[np.intp]], draws: int, seed: int) -> Floats:
    """Return the median of each bootstrap sample."""
    generator = np.random.default_rng(seed)
    sizes = np.array([len(one) for one in members])
    longest = int(sizes.max())
    # Shorter groups are padded with NaN, which is sorted to the end and not counted.
    padded = np.full((len(members), longest), len(table))
    for at, one in enumerate(members):
        padded[at, : len(one)] = one
    source = np.append(table, math.nan)
    medians = []
    chunk = max(1, NUMBERS_PER_CHUNK // padded.size)
    for start in range(0, draws, chunk):
        count = min(chunk, draws - start)
        chosen = generator.integers(len(members), size=(count, len(members), 1))
        within = (generator.random((count, len(members), longest)) * sizes[chosen]).astype(np.intp)
        rows = padded[chosen, within]
        rows[np.arange(longest) >= sizes[chosen]] = len(table)
        medians.append(_medians(source[rows.reshape(count, -1)]))
    return np.concatenate(medians)


def _medians(drawn: Floats) -> Floats:
    """Return the median of each row, without NaN."""
    ordered = np.sort(drawn, axis=1)
    counts = np.sum(~np.isnan(ordered), axis=1, keepdims=True)
    below = np.take_along_axis(ordered, (counts - 1) // 2, axis=1)
    above = np.take_along_axis(ordered, counts // 2, axis=1)
    # Not half the sum, which could overflow, or differ from two equal values.
    return np.asarray(below + (above - below) / 2)[:, 0]


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InvalidRequestError(f"level is {level!r}; give a number between 0 and 1, such as 0.95", param="level")
