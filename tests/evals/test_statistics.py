"""Test intervals, paired tests and calibration against published values and exact computations."""

import itertools
import math

import numpy as np
import pytest

from lmx_lab.results import statistics
from lmx_lab.results.statistics import (
    BOOTSTRAP,
    MCNEMAR,
    PERMUTATION,
    WILSON,
    calibration,
    mcnemar,
    paired_test,
    score_of,
    sign_flips,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # R: prop.test(successes, n, correct = FALSE)$conf.int
    [(5, 10, 0.2366, 0.7634), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_intervals_are_those_of_r(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_a_proportion_has_wilson_s_interval_and_another_mean_a_bootstrap_interval():
    share = score_of([1.0, 0, 1, 1])
    assert (share.mean, share.n, share.method) == (0.75, 4, WILSON)
    values = np.random.default_rng(1).normal(0.5, 0.1, 400).tolist()
    mean = score_of(values)
    assert mean.method == BOOTSTRAP
    # The standard error is 0.005, so that the normal interval has this half-width.
    assert (mean.high - mean.low) / 2 == pytest.approx(1.96 * 0.005, rel=0.15)
    assert score_of(values) == mean
    none = score_of([])
    assert math.isnan(none.mean)
    assert none.n == 0


def test_mcnemar_is_the_binomial_test_of_the_rows_that_differ():
    assert mcnemar(2, 8) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert mcnemar(5, 5) == mcnemar(0, 0) == 1.0
    assert 0 <= mcnemar(1500, 1000) < 1e-20
    test = paired_test([1, 1, 0, 1, 0], [0, 1, 0, 0, 1])
    assert (test.method, test.n, test.better, test.worse) == (MCNEMAR, 5, 2, 1)
    assert test.difference == pytest.approx(0.2)
    assert test.low <= test.difference <= test.high
    assert "p = 1" in str(test)


def test_sign_flips_approximate_all_permutations():
    differences = [0.1, -0.3, 0.45, 0.2, 0.05, 0.6, 0.25, -0.1]
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=8)
    ]
    exact = sum(each >= abs(sum(differences)) - 1e-9 for each in sums) / len(sums)
    assert sign_flips(np.array(differences)) == pytest.approx(exact, abs=0.01)
    test = paired_test(differences, [0.0] * 8)
    assert test.method == PERMUTATION
    assert paired_test([0.5, 0.5], [0.5, 0.5]).p_value == 1.0
    assert math.isnan(paired_test([], []).p_value)


def test_many_values_are_drawn_in_parts(monkeypatch):
    monkeypatch.setattr(statistics, "NUMBERS_PER_CHUNK", 1000)
    assert sign_flips(np.ones(6)) == pytest.approx(2 / 64, abs=0.01)


def test_calibration_has_bins_of_equal_width_and_the_expected_error():
    bins, error = calibration([0.95, 1.0, 0.55, 0.05], [1, 0, 1, 0])
    assert [(each.low, each.n, each.accuracy) for each in bins] == [(0.0, 1, 0.0), (0.5, 1, 1.0), (0.9, 2, 0.5)]
    assert error == pytest.approx((0.05 + 0.45 + 2 * 0.475) / 4)
    assert math.isnan(calibration([], [])[1])
