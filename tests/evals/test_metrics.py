"""Test which answers each metric counts as right, and which options are refused."""

import decimal
import fractions
import math
import re

import numpy as np
import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.evals import Choice, Contains, ExactMatch, Judge, Numeric, Regex
from lmx_lab.evals.metrics import FunctionMetric, read_metric


@pytest.mark.parametrize(
    ("metric", "answer", "expected", "score"),
    [
        (ExactMatch(), " Paris\n", "Paris", 1),
        (ExactMatch(), "paris", "Paris", 0),
        (ExactMatch(ignore_case=True), "PARIS", "Paris", 1),
        (ExactMatch(), "7", 7, 1),
        (ExactMatch(), "7", 7.0, 1),
        (ExactMatch(), "7.0", np.float32(7), 1),
        (ExactMatch(), "7", 7.5, 0),
        (Contains(), "It is Paris.", "Paris", 1),
        (Contains(), "It is paris.", "Paris", 0),
        (Contains(ignore_case=True), "It is paris.", "Paris", 1),
        (Regex(), "in 1789", r"\b17\d\d\b", 1),
        (Regex(), "in 1889", r"\b17\d\d\b", 0),
        (Regex(r"#### (\S+)"), "6 * 7\n#### 42", 42, 1),
        (Regex(r"#### (\S+)"), "42", 42, 0),
        (Regex(r"\d+"), "It is 42, not 43", "42", 1),
        (Regex(r"is (\d+)|\((\w)\)"), "It is (B).", "B", 1),
        (Numeric(), "first 3, then 1,234.5.", 1234.5, 1),
        (Numeric(), "-7", 7, 0),
        (Numeric(absolute=0.5), "about 3.4", "3", 1),
        (Numeric(relative=0.1), "2e3", 1900, 1),
        (Numeric(), "no number", 1, 0),
        (Numeric(), "50%", 50, 1),
        (Numeric(), "50%", 0.5, 1),
        (Numeric(), "50%", "50%", 1),
        (Numeric(), "0.5%", "50%", 0),
        (Numeric(absolute=0.5), "48%", "50%", 0),
        (Numeric(), "0.5", "50%", 1),
        (Numeric(), "5K", "5M", 0),
        (Numeric(), "2 million", 2, 0),
        (Numeric(), "about 1,500", "$1.5k", 1),
        (Numeric(), "0.75", fractions.Fraction(3, 4), 1),
        (Numeric(), "1e-7", np.float64(1e-7), 1),
        (Numeric(), "1.10", decimal.Decimal("1.1"), 1),
    ],
)
def test_scores(metric, answer, expected, score):
    assert metric.score(answer, expected) == score


async def answer_later(answer, expected):
    return 1


def test_functions_return_numbers_from_0_to_1():
    assert read_metric(lambda answer, expected: len(answer) / expected).checked_score("abc", 6) == 0.5
    for returned, score in ((True, 1), (np.False_, 0), (np.float32(0.5), 0.5), (1 + 1e-9, 1), (-1e-9, 0)):
        assert FunctionMetric(lambda answer, expected, returned=returned: returned).checked_score("a", "b") == score
    for value in ("many", "1", None, math.nan, math.inf, 7, -0.1, 1.01, [1, 0], np.ones(2), 1j):
        shown = re.escape(repr(value))
        with pytest.raises(InvalidRequestError, match=f"the metric returned {shown}; .* from 0 .* scale"):
            FunctionMetric(lambda answer, expected, value=value: value).checked_score("a", "b")
    with pytest.raises(InvalidRequestError, match="the metric raised TypeError"):
        read_metric(lambda answer: 1).checked_score("a", "b")


def test_choices_are_compared_by_log_probability_or_by_log_probability_per_character():
    choices = ("no", "certainly")
    plain, normalized = Choice(list(choices)), Choice(list(choices), normalize=True)
    assert (plain.best(choices, [-3, -4]), normalized.best(choices, [-3, -4])) == (0, 1)
    assert plain.best(choices, [-3, -3]) == 0
    # As in lm-evaluation-harness, the space between the prompt and the choice is not counted.
    assert normalized.best((" ab", " abc"), [-2.0, -2.8]) == 1
    assert normalized.best(("ab", "abc"), [-2.0, -2.8]) == 1
    assert [plain.right(choices, expected) for expected in ("certainly", 1, np.int64(0), " no")] == [1, 1, 0, 0]
    assert [plain.right(choices, expected) for expected in (1.0, np.float32(0))] == [1, 0]
    for expected in ("perhaps", 2, -1, True, 0.5, np.array([0, 1]), np.array(["no", "yes"]), [0], None):
        with pytest.raises(InvalidRequestError, match="one of the choices"):
            plain.right(choices, expected)
    # A number that is also a text is refused unless both are the same choice.
    assert plain.right(("0", "1", "2"), 1) == 1
    with pytest.raises(InvalidRequestError, match=r"1 is the index of the choice '2', and also the text"):
        plain.right(("1", "2"), 1)
    by_row = Choice("options")
    assert by_row.of_row({"options": np.array(["a", "b", "c"])}) == ("a", "b", "c")
    for wrong in (None, "ab", ["a"], ["a", "a"], ["a", 1], ["a", ""]):
        with pytest.raises(InvalidRequestError, match="column options"):
            by_row.of_row({"options": wrong})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: read_metric("exact_mach"), "did you mean 'exact_match'"),
        (lambda: read_metric("accuracy of it"), "the metrics are exact_match"),
        (lambda: read_metric("choice"), r"Choice\(\["),
        (lambda: read_metric(3), "pass one of"),
        (lambda: read_metric(ExactMatch), r"create one, such as ExactMatch\(\)"),
        (lambda: read_metric(answer_later), "is async; pass a plain function"),
        (lambda: Regex(3), "malformed"),
        (lambda: Regex("("), "malformed"),
        (lambda: Regex().score("a", "("), "malformed"),
        (lambda: Numeric(absolute=-1), "absolute is -1"),
        (lambda: Numeric().score("1", "one"), "not a number"),
        (lambda: Numeric().score("7", "5-7"), "not a number"),
        (lambda: Numeric().score("7", "7 apples"), "not a number"),
        (lambda: Numeric().score("4", "GPT-4"), "not a number"),
        (lambda: Numeric().score("1", True), "not a number"),
        (lambda: Numeric().score("1", float("inf")), "not a number"),
        (lambda: Choice(["a", "a"]), "different, non-empty texts"),
        (lambda: Choice("options").check(["text"]), "columns are text"),
        (lambda: Judge("{answer}", verdicts={"good": 1}), "verdicts"),
        (lambda: Judge("{answer}", verdicts={"good": 1, "bad": "no"}), "'bad': 'no'"),
        (lambda: Judge("{answer}", verdicts={"good": 5, "bad": 1}), "'good': 5; .* from 0 to 1; divide"),
        (lambda: ExactMatch().score("a", ["a", "b"]), "not a single value"),
        (lambda: Contains().score("a", " "), "is empty"),
        (lambda: Regex().score("a", ""), "must be a regular expression"),
        (lambda: Regex().score("17", 17), "must be a regular expression"),
    ],
)
def test_wrong_options_are_refused(make, message):
    with pytest.raises(InvalidRequestError, match=message):
        make()
