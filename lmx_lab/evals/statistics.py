"""Compute the intervals of scores, paired tests of two evaluations, and the calibration of probabilities.

The formulas are short and need only NumPy, so SciPy and statsmodels are not dependencies; the tests compare them with
published values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
"""Confidence level of the intervals."""
DRAWS = 10_000
"""Number of bootstrap samples, and of permutations of a permutation test."""
SEED = 0
"""Seed of bootstrap samples and permutations, which makes results reproducible."""
NUMBERS_AT_ONCE = 2_000_000
"""Maximum number of random numbers that are drawn in one call, which take up to 16 MB."""
BINS = 10
"""Number of bins of a calibration table."""
WILSON = "Wilson score interval"
BOOTSTRAP = f"percentile bootstrap, {DRAWS:,} samples"
MCNEMAR = "exact McNemar test"
PERMUTATION = f"sign-flip permutation test, {DRAWS:,} permutations"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Score:
    """The mean of scores with its interval at ``LEVEL``. All three numbers are NaN if there are no scores."""

    mean: float
    low: float
    high: float
    n: int
    method: str
    """How the interval was computed."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """The comparison of two evaluations of the same rows."""

    difference: float
    """Mean score of the first evaluation minus that of the second."""
    low: float
    high: float
    """Percentile bootstrap interval of the difference at ``LEVEL``, which resamples rows."""
    p_value: float
    """Two-sided probability of a difference at least this large if both evaluations were equally good."""
    method: str
    n: int
    """Number of rows with scores in both evaluations."""
    better: int
    """Rows in which the first evaluation has the higher score."""
    worse: int

    def __str__(self) -> str:
        return (
            f"difference {self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p = {self.p_value:.3g} "
            f"({self.method}); better in {self.better}, worse in {self.worse} of {self.n} rows"
        )


def score_of(values: Sequence[float]) -> Score:
    """Return the mean of scores with Wilson's interval if all are 0 or 1, otherwise with a bootstrap interval."""
    if not values:
        return Score(mean=math.nan, low=math.nan, high=math.nan, n=0, method="no scores")
    mean = math.fsum(values) / len(values)
    if all(value in (0, 1) for value in values):
        low, high = wilson(round(math.fsum(values)), len(values))
        return Score(mean=mean, low=low, high=high, n=len(values), method=WILSON)
    low, high = bootstrap(values)
    return Score(mean=mean, low=low, high=high, n=len(values), method=BOOTSTRAP)


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927). Unlike the
    normal approximation it does not leave [0, 1], and its coverage is close to ``LEVEL`` for small samples.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    # Without successes, or with only successes, rounding may move a bound slightly away from 0 or 1.
    return (0.0 if not successes else centre - reach), (1.0 if successes == n else centre + reach)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean (Efron and Tibshirani, *An Introduction to the Bootstrap*,
    1993, chapter 13). It is deterministic.
    """
    table = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(SEED)
    means = [
        table[generator.integers(len(table), size=(count, len(table)))].mean(axis=1) for count in _counts(len(table))
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def pass_at(k: int, right: int, n: int) -> float:
    """Return the probability that at least one of ``k`` answers is right.

    The answers are drawn without replacement from ``n`` answers, of which ``right`` are right.
    """
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Compare the scores of two evaluations of the same rows.

    The test is McNemar's if all scores are 0 or 1, otherwise a permutation test of the differences.
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    n, better, worse = len(differences), int((differences > 0).sum()), int((differences < 0).sum())
    if not n:
        low = high = p_value = mean = math.nan
        method = "no common rows"
    else:
        mean, (low, high) = float(differences.mean()), bootstrap(differences.tolist())
        if all(value in (0, 1) for value in [*first, *second]):
            p_value, method = mcnemar(better, worse), MCNEMAR
        else:
            p_value, method = sign_flips(differences), PERMUTATION
    return PairedTest(
        difference=mean, low=low, high=high, p_value=p_value, method=method, n=n, better=better, worse=worse
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
    limit = observed - 1e-12 * max(1.0, float(np.abs(differences).sum()))
    extreme = 0
    for count in _counts(len(differences)):
        signs = generator.integers(2, size=(count, len(differences)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ differences) >= limit).sum())
    return (extreme + 1) / (DRAWS + 1)


def _counts(n: int) -> list[int]:
    """Divide ``DRAWS`` samples of ``n`` numbers into parts that fit into memory."""
    chunk = max(1, NUMBERS_AT_ONCE // n)
    return [min(chunk, DRAWS - start) for start in range(0, DRAWS, chunk)]


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
