"""Compute medians and ratios with intervals.

Intervals of medians over requests are computed by the percentile bootstrap. If the values are grouped, it has two
stages: groups are drawn first, then values within each, because requests of one repeat ran at the same time (Davison
and Hinkley, *Bootstrap Methods and their Application*, 1997, 3.8). Totals and ratios have one value per repeat; their
intervals are Student's on a log scale, because a bootstrap of three values would be far too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lmx_lab.errors import InvalidRequestError

Floats: TypeAlias = npt.NDArray[np.float64]
LEVEL = 0.95
DRAWS = 2000
NUMBERS_PER_CHUNK = 2_000_000
"""Random numbers that are drawn at once, 16 MB."""
MIN_REPEATS = 3
"""Minimum number of repeats for an interval. With two, it would be tens of times as wide as the value."""
BISECTIONS = 60
"""Number of bisection steps, which is enough for the precision of a float."""


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
    reach = half_width([left - right] if paired else [left, right], level)
    return Interval(median=math.exp(centre), low=math.exp(centre - reach), high=math.exp(centre + reach), n=n)


def half_width(sides: Sequence[Floats], level: float) -> float:
    """Return half the width of the interval of a mean, or of a difference of means (Welch's). NaN if there are too few
    values."""
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
    return table[kept], list(positions_of(labels[at] for at in kept).values())


def positions_of(labels: Iterable[Hashable]) -> dict[Hashable, npt.NDArray[np.intp]]:
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
