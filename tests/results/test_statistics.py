"""Test intervals, paired tests and calibration against published values, exact computations and simulations."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.statistics import (
    BOOTSTRAP,
    MCNEMAR,
    NOTHING,
    NUMBERS_PER_CHUNK,
    PAIRED,
    PERMUTATION,
    SCORE_DRAWS,
    WILSON,
    calibration,
    mcnemar,
    median_interval,
    paired_test,
    ratio_interval,
    score_of,
    sign_flips,
    student,
    wilson,
)

DRAWS = 200
SIDE = st.lists(st.floats(1e-3, 1e6), min_size=3, max_size=12)


def bounds(interval):
    return [interval.low, interval.median, interval.high]


@given(values=st.lists(st.floats(1e-3, 1e6), min_size=6, max_size=40), exponent=st.integers(-8, 8))
def test_an_interval_scales_with_its_unit(values, exponent):
    of = [at % 3 for at in range(len(values))]
    interval = median_interval(values, groups=of, draws=DRAWS)
    scaled = median_interval([2.0**exponent * value for value in values], groups=of, draws=DRAWS)
    assert bounds(scaled) == pytest.approx([2.0**exponent * end for end in bounds(interval)])


@pytest.mark.parametrize(("level", "enough"), [(0.95, 6), (0.9, 5), (0.99, 8)])
def test_with_too_few_values_there_is_no_interval(level, enough):
    values = [float(value) for value in range(enough)]
    few, many = (median_interval(values[:count], level=level) for count in (enough - 1, enough))
    assert (few.median, few.n, str(few)) == (values[enough - 1] / 2 - 0.5, enough - 1, f"{few.median:g} [-]")
    assert math.isnan(few.low)
    assert math.isnan(few.high)
    assert few.median < many.high <= values[-1]


@pytest.mark.slow
@given(a=SIDE, b=SIDE, factor=st.floats(0.01, 100), paired=st.booleans())
def test_a_ratio_scales_with_a_side_and_inverts_when_they_are_swapped(a, b, factor, paired):
    if paired:
        a, b = a[: len(b)], b[: len(a)]
    ratio = ratio_interval(a, b, paired)
    assert bounds(ratio_interval([factor * value for value in a], b, paired)) == pytest.approx(
        [factor * end for end in bounds(ratio)], rel=1e-6
    )
    assert bounds(ratio_interval(b, a, paired)) == pytest.approx([1 / end for end in reversed(bounds(ratio))], rel=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "paired", "expected"),
    [
        pytest.param([2.0, 6.0, 4.0], [1.0, 3.0, 2.0], True, [2.0, 2.0, 2.0], id="equal ratios"),
        pytest.param([2.0, 2.0], [1.0, 1.0], True, [math.nan, 2.0, math.nan], id="two pairs"),
        pytest.param([2.0, 2.0], [1.0, 1.0], False, [math.nan, 2.0, math.nan], id="two on each side"),
        *(
            pytest.param([1.0, 2.0], b, paired, [math.nan] * 3, id=f"to {b[0]}, paired={paired}")
            for b in ([0.0, 0.0], [-1.0, -2.0], [None, None])
            for paired in (True, False)
        ),
    ],
)
def test_an_interval_needs_three_positive_ratios(a, b, paired, expected):
    assert bounds(ratio_interval(a, b, paired)) == pytest.approx(expected, nan_ok=True)


def test_intervals_of_ratios_agree_with_textbook_examples():
    logs = [0.1, 0.2, 0.6]
    # Mean 0.3; its standard error is 0.26458 / sqrt(3); t of 2 degrees is 4.3027.
    pairs = ratio_interval(np.exp(logs), [1.0] * 3, True)
    assert bounds(pairs) == pytest.approx(np.exp([0.3 - 0.65724, 0.3, 0.3 + 0.65724]), rel=1e-4)
    # Welch: 0.07 / 3 and 0.02 / 3 / 4 are 0.025, of 2.29 degrees, which count as 2.
    unpaired = ratio_interval(np.exp(logs), np.exp([0.0, 0.1, 0.2, 0.1]), False)
    reach = 4.3027 * math.sqrt(0.025)
    assert bounds(unpaired) == pytest.approx(np.exp([0.2 - reach, 0.2, 0.2 + reach]), rel=1e-4)


@pytest.mark.parametrize(
    ("level", "freedom", "table"),
    [
        # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
        *[(0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 4, 2.776), (0.95, 5, 2.571), (0.95, 9, 2.262), (0.95, 10, 2.228)],
        *[(0.95, 30, 2.042), (0.95, 99, 1.984), (0.95, 100, 1.984), (0.90, 2, 2.920), (0.90, 7, 1.895)],
        *[(0.99, 2, 9.925), (0.99, 5, 4.032), (0.99, 20, 2.845), (0.998, 3, 10.215), (0.998, 8, 4.501)],
        # With so many degrees of freedom, it is nearly the normal distribution.
        *[(0.95, 9_999, 1.960), (0.99, 10_000, 2.576)],
    ],
)
def test_students_t_agrees_with_published_tables(level, freedom, table):
    assert student(level, freedom) == pytest.approx(table, abs=6e-4)


@pytest.mark.slow
def test_intervals_contain_the_true_median_as_often_as_their_level():
    generator = np.random.default_rng(1)
    intervals = [median_interval(generator.normal(1, 0.1, 30), draws=DRAWS) for _ in range(300)]
    held = sum(interval.low <= 1 <= interval.high for interval in intervals)
    assert 270 <= held <= 298


def test_differences_between_repeats_widen_the_interval():
    generator = np.random.default_rng(2)
    drift = np.repeat([1.0, 1.3, 0.8, 1.1, 0.9], 20)
    values, repeats = drift + generator.normal(0, 0.01, 100), np.repeat(range(5), 20)
    blind, knowing = median_interval(values), median_interval(values, groups=repeats)
    assert blind.median == knowing.median
    assert knowing.high - knowing.low > 1.3 * (blind.high - blind.low)


def test_padding_of_shorter_groups_does_not_count():
    # A quarter of the draws has only values of the small group. If padding counted, it would dominate other draws too.
    interval = median_interval([1.0] * 99 + [50.0], groups=[0] * 99 + [1], level=0.4)
    assert (interval.low, interval.high) == (1.0, 1.0)


def test_missing_values_are_ignored():
    assert median_interval([None, 3.0, math.nan, 1.0, 2.0, math.inf]).n == 3
    assert median_interval([]) is NOTHING
    assert median_interval([None]) is NOTHING
    pairs = ratio_interval([2.0, None, 4.0, 9.0], [1.0, 5.0, 2.0, math.nan], True)
    assert (pairs.median, pairs.n) == (pytest.approx(2.0), 2)


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(4).normal(1, 0.2, 25)
    assert median_interval(values) == median_interval(values)
    assert {median_interval(values, seed=seed).high for seed in range(5)} != {median_interval(values).high}


@pytest.mark.slow
def test_many_values_are_drawn_in_chunks():
    values = np.random.default_rng(5).normal(1, 0.2, NUMBERS_PER_CHUNK // 100)
    interval = median_interval(values, draws=250)
    assert interval.low < 1 < interval.high
    assert interval.high - interval.low < 0.02


@pytest.mark.parametrize("wrong", [{"level": 0}, {"level": 1}, {"level": math.nan}, {"draws": 0}, {"groups": [1]}])
def test_invalid_arguments_are_refused(wrong):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        median_interval([1.0, 2.0], **wrong)


def test_pairs_need_sides_of_equal_length():
    with pytest.raises(InvalidRequestError, match="paired=False"):
        ratio_interval([1.0], [1.0, 2.0], True)


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


def test_intervals_contain_the_true_mean_of_few_scores_as_often_as_their_level():
    generator = np.random.default_rng(3)
    samples = [generator.uniform(0, 1, 6).tolist() for _ in range(200)]
    inside = sum((score := score_of(values)).low <= 0.5 <= score.high for values in samples)
    assert inside / len(samples) == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize("values", [[0.5], [0.2, 0.9], [0.2, 0.5, 0.9], [0.5] * 10, [1 / 3, 1 - 2 / 3] * 10])
def test_few_or_equal_scores_have_no_interval_and_say_so(values):
    score = score_of(values)
    reason = "too few" if len(values) < 6 else "are equal"
    assert math.isnan(score.low)
    assert math.isnan(score.high)
    assert reason in score.method
    assert str(score) == f"{score.mean:.3f} [-]"
    test = paired_test(values, [0.0] * len(values))
    assert (math.isnan(test.low), math.isnan(test.high)) == (True, True)
    assert reason in test.interval
    assert reason in str(test)
    assert ("too few rows differ" in str(test)) is (len(values) < 6)


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_evaluations_without_a_difference_do_not_show_which_is_better(value):
    test = paired_test([value] * 20, [value] * 20)
    assert (test.difference, test.p_value) == (0, 1)
    assert "too few rows differ to tell which is better" in str(test)


def test_the_interval_of_paired_proportions_is_that_of_its_authors():
    # The example of Fagerland, Lydersen and Laake, Statistics in Medicine 33 (2014): 1, 1, 7 and 12 of 21 pairs. Theirs
    # ends at -0.013. The p-value is 0.07, and the interval must not say that there is a difference.
    test = paired_test([1] + [1] + [0] * 7 + [0] * 12, [1] + [0] + [1] * 7 + [0] * 12)
    assert (test.interval, test.n, test.better, test.worse) == (PAIRED, 21, 1, 7)
    assert (test.low, test.high) == pytest.approx((-0.508, 0), abs=5e-4)


@pytest.mark.parametrize("scale", [1, 0.5])
@pytest.mark.parametrize("better", range(9))
def test_an_interval_excludes_no_difference_only_if_the_test_does(better, scale):
    test = paired_test([scale] * better + [0] * (20 - better), [0] * better + [scale] * (8 - better) + [0] * 12)
    assert (test.low <= 0 <= test.high) is (test.p_value > 0.05)


@pytest.mark.parametrize(("rows", "reach"), [(1, 0.92), (3, 0.55), (100, 0.027)])
def test_equal_evaluations_of_few_rows_have_a_wide_interval(rows, reach):
    test = paired_test([1] * rows, [1] * rows)
    assert (-test.low, test.high) == pytest.approx((reach, reach), abs=5e-3)


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
    assert (test.method, test.interval) == (PERMUTATION, BOOTSTRAP)
    assert test.low < test.difference < test.high
    assert paired_test([0.5, 0.5], [0.5, 0.5]).p_value == 1.0
    assert math.isnan(paired_test([], []).p_value)


def test_sign_flips_of_many_values_approximate_the_normal_distribution():
    # So many values that their signs are drawn in parts.
    differences = np.random.default_rng(6).normal(0.05, 1, 2 * NUMBERS_PER_CHUNK // SCORE_DRAWS)
    z = abs(differences.sum()) / math.sqrt(np.sum(differences**2))
    assert sign_flips(differences) == pytest.approx(2 * NormalDist().cdf(-z), abs=0.02)


def test_calibration_has_bins_of_equal_width_and_the_expected_error():
    bins, error = calibration([0.95, 1.0, 0.55, 0.05], [1, 0, 1, 0])
    assert [(each.low, each.n, each.accuracy) for each in bins] == [(0.0, 1, 0.0), (0.5, 1, 1.0), (0.9, 2, 0.5)]
    assert error == pytest.approx((0.05 + 0.45 + 2 * 0.475) / 4)
    assert math.isnan(calibration([], [])[1])
