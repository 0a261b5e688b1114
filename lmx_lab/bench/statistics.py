"""Medians and ratios with intervals, and what a table of requests says about each case.

Medians of requests have the percentile bootstrap, in two stages where values come in groups: groups are drawn first,
then values within each, because requests of one repeat went through the same minute of the machine (Davison and
Hinkley, *Bootstrap Methods and their Application*, 1997, 3.8). What is known once a repeat, totals and ratios, has
Student's interval over the repeats, on a log scale: the bootstrap of three values would hold far less than it says.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
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
METRICS = (*CLIENT_METRICS, *SERVER_METRICS, "late_ms")
TOTAL = "total_tok_s"
ENOUGH_REPEATS = 3
"""For an interval over repeats: of two, it would reach over tens of times the value."""
LENGTHS_APART = 0.05
"""Numbers of tokens that differ by more than this share are different work."""
BISECTIONS = 60
"""Of an angle: as exact as a float is."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median, a total or a ratio, and where it may as well lie."""

    median: float
    """NaN where there is no value."""
    low: float
    """NaN, like ``high``, where the values are too few to say."""
    high: float
    n: int
    """Values behind it; of a total its repeats, of a ratio the pairs of them, or those of the side that has fewer."""

    def overlaps(self, other: Interval) -> bool:
        """False where one of them has no bounds."""
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
    """The median of the values that are numbers, and its bootstrap interval; the same for the same seed.

    It has no bounds where not even from the least value to the greatest it would hold the true median as often as
    ``level`` says: below 6 values for 95 %.

    Args:
        groups: Of each value, which group it belongs to, such as the repeat; values of one vary together. Of few
            groups an interval holds less often than ``level`` says.
        level: The share of intervals that hold the true median.

    Raises:
        InvalidRequestError: a level that is not between 0 and 1, no draws, or not a group for each value.
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
    """How many times ``b`` ``a`` is, by one value for each repeat: the geometric mean, and its interval.

    The interval is Student's of the logarithms (Welch's if unpaired), and there from 3 repeats of each side on. It
    takes repeats for independent of each other: values of requests, which are not, make it too narrow.

    Args:
        paired: Whether values at the same place belong together, such as the same repeat of two servers in one run;
            what is missing on one side then counts on neither.

    Returns:
        NaN where a side has no value, or one that is not above 0.

    Raises:
        InvalidRequestError: a level that is not between 0 and 1; or pairs, and not as many values on both sides.
    """
    _check_level(level)
    left, right = _floats(a), _floats(b)
    if paired:
        if len(left) != len(right):
            raise InvalidRequestError(
                f"a has {len(left)} values and b {len(right)}; pairs need as many, or give paired=False"
            )
        left, right = np.where(np.isfinite(right), left, math.nan), np.where(np.isfinite(left), right, math.nan)
    left, right = left[np.isfinite(left)], right[np.isfinite(right)]
    n = min(len(left), len(right))
    if not n or min(left.min(), right.min()) <= 0:
        return Interval(median=math.nan, low=math.nan, high=math.nan, n=n)
    left, right = np.log(left), np.log(right)
    centre = float(np.mean(left) - np.mean(right))
    reach = _reach([left - right] if paired else [left, right], level)
    return Interval(median=math.exp(centre), low=math.exp(centre - reach), high=math.exp(centre + reach), n=n)


def _reach(sides: Sequence[Floats], level: float) -> float:
    """How far the interval of a mean, or of two means' difference (Welch's), goes to each side; NaN of too few."""
    if min(map(len, sides)) < ENOUGH_REPEATS:
        return math.nan
    parts = [float(np.var(side, ddof=1)) / len(side) for side in sides]
    if (whole := sum(parts)) == 0:
        return 0.0
    freedom = 1 / sum((part / whole) ** 2 / (len(side) - 1) for part, side in zip(parts, sides, strict=True))
    # A fraction counts for nothing, which is on the safe side; what rounding took away does count.
    return student(level, math.floor(freedom + 1e-6)) * math.sqrt(whole)


def student(level: float, freedom: int) -> float:
    """Student's t: how many standard errors an interval of this level reaches to each side, from 2 degrees of freedom
    on.

    The share within is a finite series of the angle whose tangent is t over the root of the degrees (Abramowitz and
    Stegun, *Handbook of Mathematical Functions*, 1964, 26.7.3 and 26.7.4); the angle is found by halving.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(high)


def _share_within(angle: float, freedom: int) -> float:
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= (power - 1) / power * math.cos(angle) ** 2
        total += term
    within = math.sin(angle) * total
    return 2 / math.pi * (angle + within) if odd else within


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

    A figure ``ttft_ms`` has its interval in ``ttft_ms_low`` and ``ttft_ms_high``, missing below 6 values, and in
    ``ttft_ms_n`` how many it is of. Medians are over requests that ended well, warm-up left out; that of ``itl_ms_p99``
    is over what 99 % of each request's gaps stay below. Those gaps are between pieces of the stream: where a server
    sends several tokens at once, they are longer than between tokens. ``late_ms`` (and ``late_ms_max``) is by how much
    the client sent its requests later than Poisson arrivals were due.

    ``total_tok_s`` is all tokens over the time in which any request of the case was under way, failed ones included;
    ``total_tok_s_n`` counts repeats, and from 3 of them on it has an interval.

    Args:
        by: Columns that tell cases apart; by default the run, what was measured and how.

    Raises:
        InvalidRequestError: a column that the table has not.
        ImportError: pandas is not installed.
    """
    import pandas as pd

    table = measured(samples)
    keys = ["run", *MEASURED, *CASE] if by is None else list(by)
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
    good = ended(group)
    groups = repeats(good)
    cells: dict[str, Any] = {
        "requests": len(group),
        "errors": len(group) - len(good),
        "prompt_tokens": median(good["prompt_tokens"]),
        "cached_tokens": median(good["cached_tokens"]),
        "output_tokens": median(good["output_tokens"]),
    }
    for metric in METRICS:
        cells |= _cells(metric, median_interval(numbers(good[metric]), groups=groups, level=level))
    cells |= _cells(TOTAL, total_interval(group, level=level))
    return cells | {"late_ms_max": _most(good["late_ms"]), "peak_memory_gb": _most(group["peak_memory_gb"])}


def _cells(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.median, f"{name}_low": interval.low, f"{name}_high": interval.high, f"{name}_n": interval.n}


def total_interval(group: pd.DataFrame, *, level: float = LEVEL) -> Interval:
    """Tokens per second of all requests of a case together, with an interval from 3 repeats on; ``n`` counts these."""
    works = list(_works(group).values())
    if not works:
        return NOTHING
    total = sum(tokens for tokens, _ in works) / sum(seconds for _, seconds in works)
    factor = math.exp(_reach([np.log([tokens / seconds for tokens, seconds in works])], level))
    return Interval(median=total, low=total / factor, high=total * factor, n=len(works))


def by_repeat(metric: str, group: pd.DataFrame) -> Mapping[Hashable, float]:
    """The median, or the total, of each repeat that has one."""
    if metric == TOTAL:
        return {repeat: tokens / seconds for repeat, (tokens, seconds) in _works(group).items()}
    good = ended(group)
    values = numbers(good[metric])
    finite = np.isfinite(values)
    places = _places(repeat for repeat, is_finite in zip(repeats(good), finite, strict=True) if is_finite)
    return {repeat: float(np.median(values[finite][at])) for repeat, at in places.items()}


def _works(group: pd.DataFrame) -> dict[Hashable, tuple[float, float]]:
    """Tokens and seconds of each repeat; one without a token is left out. What fails delivers none, and takes time."""
    tokens = np.where(group["error"].isna(), np.nan_to_num(numbers(group["output_tokens"])), 0.0)
    starts = group["started_at"].dt.as_unit("us").astype("int64").to_numpy() / 1e6
    # Times of late requests count from when they were due.
    took_ms = np.nan_to_num(numbers(group["e2e_ms"])) - np.nan_to_num(numbers(group["late_ms"]))
    ends = starts + took_ms / 1000
    works = {
        repeat: (float(np.sum(tokens[at])), busy_s(starts[at], ends[at]))
        for repeat, at in _places(repeats(group)).items()
    }
    return {repeat: work for repeat, work in works.items() if min(work) > 0}


def busy_s(starts: Floats, ends: Floats) -> float:
    """The length of the time in which at least one of the spans is under way."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    # A span that begins before all earlier ones have ended adds only what it goes on longer.
    covered_to = np.concatenate([[-np.inf], ends[:-1]])
    return float(np.sum(np.maximum(ends - np.maximum(starts, covered_to), 0.0)))


def repeats(table: pd.DataFrame) -> list[Hashable]:
    """Which repeat of which run and seed each row is of: what was measured in one go."""
    return list(zip(table["run"], table["seed"], table["repeat"], strict=True))


def ended(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of requests that did not fail."""
    return table[table["error"].isna()]


def counts_pieces(table: pd.DataFrame) -> bool:
    """Whether tokens of some answer are but the pieces in which it came, as its server has not counted them."""
    return bool((ended(table)["counted_by"] == "chunks").any())


def apart(one: float, other: float) -> bool:
    """Whether two numbers of tokens differ by more than 5 % of the greater; of an unknown one nobody can say."""
    return min(one, other) < (1 - LENGTHS_APART) * max(one, other)


def numbers(column: pd.Series[Any]) -> Floats:
    return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)


def median(column: pd.Series[Any]) -> float:
    values = numbers(column)
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def _most(column: pd.Series[Any]) -> float:
    values = numbers(column)
    return float(np.nanmax(values)) if np.isfinite(values).any() else math.nan


def _floats(values: Iterable[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _members(table: Floats, groups: Iterable[Hashable] | None) -> tuple[Floats, list[npt.NDArray[np.intp]]]:
    """The values that are numbers, and for each group which of them are its own."""
    labels = [None] * len(table) if groups is None else list(groups)
    if len(labels) != len(table):
        raise InvalidRequestError(f"there are {len(labels)} groups for {len(table)} values; give one for each")
    kept = np.flatnonzero(np.isfinite(table))
    return table[kept], list(_places(labels[at] for at in kept).values())


def _places(labels: Iterable[Hashable]) -> dict[Hashable, npt.NDArray[np.intp]]:
    """Where each label stands."""
    places: dict[Hashable, list[int]] = {}
    for at, label in enumerate(labels):
        places.setdefault(label, []).append(at)
    return {label: np.array(one) for label, one in places.items()}


def _bootstrap(table: Floats, members: list[npt.NDArray[np.intp]], draws: int, seed: int) -> Floats:
    """The median of each draw."""
    generator = np.random.default_rng(seed)
    sizes = np.array([len(one) for one in members])
    longest = int(sizes.max())
    # Shorter groups are filled up with NaN, which sorts to the end and is not counted.
    padded = np.full((len(members), longest), len(table))
    for at, one in enumerate(members):
        padded[at, : len(one)] = one
    source = np.append(table, math.nan)
    medians = []
    chunk = max(1, CHUNK_NUMBERS // padded.size)
    for start in range(0, draws, chunk):
        count = min(chunk, draws - start)
        chosen = generator.integers(len(members), size=(count, len(members), 1))
        within = (generator.random((count, len(members), longest)) * sizes[chosen]).astype(np.intp)
        rows = padded[chosen, within]
        rows[np.arange(longest) >= sizes[chosen]] = len(table)
        medians.append(_medians(source[rows.reshape(count, -1)]))
    return np.concatenate(medians)


def _medians(drawn: Floats) -> Floats:
    """Of each row, of what is not NaN."""
    ordered = np.sort(drawn, axis=1)
    counts = np.sum(~np.isnan(ordered), axis=1, keepdims=True)
    below = np.take_along_axis(ordered, (counts - 1) // 2, axis=1)
    above = np.take_along_axis(ordered, counts // 2, axis=1)
    # Not their sum halved: that may overflow, and miss the value where both are the same.
    return np.asarray(below + (above - below) / 2)[:, 0]


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InvalidRequestError(f"level is {level!r}; give a share between 0 and 1, such as 0.95", param="level")
