"""Compute intervals of medians, ratios and scores, paired tests of evaluations, and the calibration of probabilities.

The formulas are short and need only NumPy, so SciPy and statsmodels are not dependencies; the tests compare them with
published values.

Intervals of medians over requests are computed by the percentile bootstrap. If the values are grouped, it has two
stages: groups are drawn first, then values within each, because requests of one repeat ran at the same time (Davison
and Hinkley, *Bootstrap Methods and their Application*, 1997, 3.8). Totals and ratios have one value per repeat; their
intervals are Student's on a log scale, because a bootstrap of three values would be far too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lmx_lab.errors import InvalidRequestError, counted

Floats: TypeAlias = npt.NDArray[np.float64]
LEVEL = 0.95
"""Default level of intervals. The intervals of scores and differences always have this level."""
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
"""Half the width of an interval at this level, in standard errors."""
ROUNDING = 1e-12
"""Maximum difference between scores that are equal except for rounding."""
SEED = 0
"""Default seed of random numbers, which makes results reproducible."""
MEDIAN_DRAWS = 2000
SCORE_DRAWS = 10_000
"""Number of bootstrap samples, and of permutations of a permutation test."""
NUMBERS_PER_CHUNK = 2_000_000
"""Random numbers that are drawn at once, 16 MB."""
BINS = 10
"""Number of bins of a calibration table."""
WILSON = "Wilson score interval"
BOOTSTRAP = f"expanded percentile bootstrap, {SCORE_DRAWS:,} samples"
PAIRED = "Bonett-Price interval"
MCNEMAR = "exact McNemar test"
PERMUTATION = f"sign-flip permutation test, {SCORE_DRAWS:,} permutations"


# The bootstrap


def bootstrap(
    values: Floats,
    statistic: Callable[[Floats], Floats],
    *,
    groups: Iterable[Hashable] | None = None,
    draws: int = SCORE_DRAWS,
    level: float = LEVEL,
    seed: int = SEED,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a statistic (Efron and Tibshirani, *An Introduction to the
    Bootstrap*, 1993, chapter 13). It is deterministic for a seed.

    Args:
        values: One or more numbers.
        statistic: Returns the statistic of each row of a matrix of bootstrap samples. With groups, rows can contain NaN
            in place of values, which it must ignore.
        groups: The group of each value. Groups are drawn first, then values within each.
        draws: Number of bootstrap samples.
    """
    generator = np.random.default_rng(seed)
    n = len(values)
    if groups is None:
        drawn = [statistic(values[generator.integers(n, size=(count, n))]) for count in _chunks(draws, n)]
    else:
        members = list(positions_of(groups).values())
        sizes = np.array([len(one) for one in members])
        longest = int(sizes.max())
        # Shorter groups are padded with NaN.
        padded = np.full((len(members), longest), n)
        for at, one in enumerate(members):
            padded[at, : len(one)] = one
        source = np.append(values, math.nan)
        drawn = []
        for count in _chunks(draws, padded.size):
            chosen = generator.integers(len(members), size=(count, len(members), 1))
            within = (generator.random((count, len(members), longest)) * sizes[chosen]).astype(np.intp)
            rows = padded[chosen, within]
            rows[np.arange(longest) >= sizes[chosen]] = n
            drawn.append(statistic(source[rows.reshape(count, -1)]))
    low, high = np.quantile(np.concatenate(drawn), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _chunks(draws: int, n: int) -> Iterator[int]:
    """Divide ``draws`` samples of ``n`` numbers into parts that fit into memory."""
    chunk = max(1, NUMBERS_PER_CHUNK // n)
    return (min(chunk, draws - start) for start in range(0, draws, chunk))


# Intervals of measurements


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
    draws: int = MEDIAN_DRAWS,
    seed: int = SEED,
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
        raise InvalidRequestError(f"draws is {draws!r}; give 1 or more, {MEDIAN_DRAWS} by default", param="draws")
    table = _floats(values)
    known = np.isfinite(table)
    if groups is not None:
        labels = list(groups)
        if len(labels) != len(table):
            raise InvalidRequestError(
                f"groups has {counted(len(labels), 'label')} for {counted(len(table), 'value')}; give one group for "
                "each value"
            )
        groups = [labels[at] for at in np.flatnonzero(known)]
    table = table[known]
    if not len(table):
        return NOTHING
    middle, n = float(np.median(table)), len(table)
    if _are_too_few(n, level):
        return Interval(median=middle, low=math.nan, high=math.nan, n=n)
    low, high = bootstrap(table, _medians, groups=groups, draws=draws, level=level, seed=seed)
    return Interval(median=middle, low=min(low, middle), high=max(high, middle), n=n)


def _are_too_few(n: int, level: float = LEVEL) -> bool:
    """Return whether ``n`` values cannot support a statement at this level.

    The range of all values contains the true median with the probability 1 - 2 * 0.5**n, and the smallest p-value of a
    paired test is 2 * 0.5**n if ``n`` rows differ. At 95 %, at least 6 are needed.
    """
    return 1 - 2 * 0.5**n < level


def _medians(drawn: Floats) -> Floats:
    """Return the median of each row, without NaN."""
    ordered = np.sort(drawn, axis=1)
    counts = np.sum(~np.isnan(ordered), axis=1, keepdims=True)
    below = np.take_along_axis(ordered, (counts - 1) // 2, axis=1)
    above = np.take_along_axis(ordered, counts // 2, axis=1)
    # Not half the sum, which could overflow, or differ from two equal values.
    return np.asarray(below + (above - below) / 2)[:, 0]


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
                f"a has {counted(len(left), 'value')} and b has {len(right)}; give equal numbers of values, or "
                "paired=False"
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
    # With two repeats, the interval would be tens of times as wide as the value.
    if min(map(len, sides)) < 3:
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
    # 60 steps are enough for the precision of a float.
    for _ in range(60):
        middle, odd = (low + high) / 2, freedom % 2
        term = total = math.cos(middle) if odd else 1.0
        for power in range(2 + odd, freedom - 1, 2):
            term *= (power - 1) / power * math.cos(middle) ** 2
            total += term
        within = math.sin(middle) * total
        share = 2 / math.pi * (middle + within) if odd else within
        low, high = (middle, high) if share < level else (low, middle)
    return math.sqrt(freedom) * math.tan(high)


def _floats(values: Iterable[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def positions_of(labels: Iterable[Hashable]) -> dict[Hashable, npt.NDArray[np.intp]]:
    """Return the positions of each label."""
    positions: dict[Hashable, list[int]] = {}
    for at, label in enumerate(labels):
        positions.setdefault(label, []).append(at)
    return {label: np.array(one) for label, one in positions.items()}


def _check_level(level: float) -> None:
    if not isinstance(level, Real) or not 0 < float(level) < 1:
        raise InvalidRequestError(f"level is {level!r}; give a number between 0 and 1, such as 0.95", param="level")


# Scores


@dataclass(frozen=True, kw_only=True)
class Score:
    """The mean of scores with its interval at ``LEVEL``."""

    mean: float
    """NaN if there are no scores."""
    low: float
    """NaN, like ``high``, if the scores cannot tell how certain their mean is; ``method`` contains the reason."""
    high: float
    n: int
    method: str
    """How the interval was computed, or why there is none."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{'-' if math.isnan(self.low) else f'{self.low:.3f}, {self.high:.3f}'}]"


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """The comparison of two evaluations of the same rows."""

    difference: float
    """Mean score of the first evaluation minus that of the second."""
    low: float
    """NaN, like ``high``, if the rows cannot tell how certain the difference is; ``interval`` contains the reason."""
    high: float
    interval: str
    """How the interval of the difference at ``LEVEL`` was computed, or why there is none."""
    p_value: float
    """Two-sided probability of a difference at least this large if both evaluations were equally good."""
    method: str
    n: int
    """Number of rows with scores in both evaluations."""
    better: int
    """Rows in which the first evaluation has the higher score."""
    worse: int

    def __str__(self) -> str:
        bounds = f"no interval: {self.interval}" if math.isnan(self.low) else f"{self.low:+.3f}, {self.high:+.3f}"
        few = "; too few rows differ to tell which is better" if _are_too_few(self.better + self.worse) else ""
        return (
            f"difference {self.difference:+.3f} [{bounds}], p = {self.p_value:.3g} "
            f"({self.method}); better in {self.better}, worse in {self.worse} of {counted(self.n, 'row')}{few}"
        )


def score_of(values: Sequence[float]) -> Score:
    """Return the mean of scores with Wilson's interval if all are 0 or 1, otherwise with a bootstrap interval."""
    if not values:
        return Score(mean=math.nan, low=math.nan, high=math.nan, n=0, method="no scores")
    mean = math.fsum(values) / len(values)
    if all(value in (0, 1) for value in values):
        low, high = wilson(round(math.fsum(values)), len(values))
        return Score(mean=mean, low=low, high=high, n=len(values), method=WILSON)
    low, high, method = _mean_interval(np.asarray(values, dtype=np.float64), "scores")
    return Score(mean=mean, low=low, high=high, n=len(values), method=method)


def _mean_interval(values: Floats, name: str) -> tuple[float, float, str]:
    """Return the bootstrap interval of the mean and its method; NaN and the reason if it would be too narrow.

    The percentiles are those of Student's t (T. Hesterberg, "What teachers should know about the bootstrap", The
    American Statistician 69, 2015). Of few values, the plain percentiles are too narrow: in simulations with 6 values,
    their intervals contained the true mean in 82 to 90 %, and the expanded ones in 88 to 95 %.
    """
    if _are_too_few(len(values)):
        return math.nan, math.nan, f"too few {name} for an interval, {len(values)}; evaluate more rows"
    if np.ptp(values) < ROUNDING:
        return math.nan, math.nan, f"all {name} are equal, so they do not show how much others would differ"
    n = len(values)
    # With more degrees of freedom, t changes by less than 0.3 %, and its computation takes longer.
    reach = student(LEVEL, min(n - 1, 500)) * math.sqrt(n / (n - 1))
    level = 2 * NormalDist().cdf(reach) - 1
    return *bootstrap(values, lambda drawn: np.asarray(drawn.mean(axis=1), dtype=np.float64), level=level), BOOTSTRAP


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927). Unlike the
    normal approximation it does not leave [0, 1], and its coverage is close to ``LEVEL`` for small samples.
    """
    share = successes / n
    centre = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    reach = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    # Without successes, or with only successes, rounding may move a bound slightly away from 0 or 1.
    return (0.0 if not successes else centre - reach), (1.0 if successes == n else centre + reach)


def pass_at(k: int, right: int, n: int) -> float:
    """Return the probability that at least one of ``k`` answers is right.

    The answers are drawn without replacement from ``n`` answers, of which ``right`` are right.
    """
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Compare the scores of two evaluations of the same rows.

    If all scores are 0 or 1, the test is McNemar's, and the interval of the difference is that of D. G. Bonett and
    R. M. Price, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired data",
    Journal of Educational and Behavioral Statistics 37 (2012), which also describes few rows and equal scores.
    Otherwise, they are a permutation test and a bootstrap interval of the differences. The interval contains 0 if the
    p-value is above 0.05.
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    n, better, worse = len(differences), int((differences > 0).sum()), int((differences < 0).sum())
    if not n:
        low = high = p_value = mean = math.nan
        interval = method = "no common rows"
    else:
        mean = float(differences.mean())
        if all(value in (0, 1) for value in [*first, *second]):
            p_value, method, interval = mcnemar(better, worse), MCNEMAR, PAIRED
            one, other = (better + 1) / (n + 2), (worse + 1) / (n + 2)
            reach = Z * math.sqrt((one + other - (one - other) ** 2) / (n + 2))
            low, high = max(-1.0, one - other - reach), min(1.0, one - other + reach)
        else:
            p_value, method = sign_flips(differences), PERMUTATION
            low, high, interval = _mean_interval(differences, "differences")
        if p_value > 1 - LEVEL:
            # Both are approximations. The interval must not exclude 0 if the test does not reject it. NaN is kept.
            low, high = min(low, 0.0), max(high, 0.0)
    return PairedTest(
        difference=mean,
        low=low,
        high=high,
        interval=interval,
        p_value=p_value,
        method=method,
        n=n,
        better=better,
        worse=worse,
    )


def mcnemar(better: int, worse: int) -> float:
    """Return the two-sided p-value of the exact McNemar test: the binomial test with probability 1/2 of the rows in
    which exactly one evaluation is right (Q. McNemar, Psychometrika 12, 1947).
    """
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    # Integer division, because 2**-n underflows to 0 from n = 1,075.
    return min(1.0, float(2 * tail / 2**n))


def sign_flips(differences: Floats) -> float:
    """Return the two-sided p-value of paired differences under random changes of their signs.

    One is added to both counts, so that the p-value is valid and never 0 (Phipson and Smyth, "Permutation p-values
    should never be zero", 2010). It is deterministic.
    """
    generator = np.random.default_rng(SEED)
    observed = abs(float(differences.sum()))
    # Sums that are equal except for rounding count as equal.
    limit = observed - ROUNDING * max(1.0, float(np.abs(differences).sum()))
    extreme = 0
    for count in _chunks(SCORE_DRAWS, len(differences)):
        signs = generator.integers(2, size=(count, len(differences)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ differences) >= limit).sum())
    return (extreme + 1) / (SCORE_DRAWS + 1)


@dataclass(frozen=True, kw_only=True)
class CalibrationBin:
    """The rows whose answer has a probability in a range."""

    low: float
    high: float
    n: int
    confidence: float
    """Mean probability of the answers."""
    accuracy: float
    """Share of right answers."""


def calibration(probabilities: Sequence[float], right: Sequence[float]) -> tuple[list[CalibrationBin], float]:
    """Return the bins that are not empty, and the expected calibration error.

    The bins have equal widths; the error is the mean distance between confidence and accuracy, weighted by rows (Guo et
    al., "On calibration of modern neural networks", 2017). It is NaN without rows.
    """
    members: list[list[int]] = [[] for _ in range(BINS)]
    for at, probability in enumerate(probabilities):
        members[min(int(probability * BINS), BINS - 1)].append(at)
    bins = [
        CalibrationBin(
            low=number / BINS,
            high=(number + 1) / BINS,
            n=len(rows),
            confidence=math.fsum(probabilities[at] for at in rows) / len(rows),
            accuracy=math.fsum(right[at] for at in rows) / len(rows),
        )
        for number, rows in enumerate(members)
        if rows
    ]
    total = len(probabilities)
    error = math.fsum(each.n * abs(each.confidence - each.accuracy) for each in bins) / total if total else math.nan
    return bins, error
