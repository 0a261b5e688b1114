"""Define metrics. A metric compares the answer to a row with the expected value, and returns a score."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar

from lmx_lab.batch.prompts import RowPrompts
from lmx_lab.errors import InvalidRequestError, did_you_mean
from lmx_lab.evals.numbers import read_number
from lmx_lab.evals.rows import to_plain
from lmx_lab.values.integers import integer

ROUNDING = 1e-6
"""Maximum distance of a score from the range 0 to 1 that is a rounding error, such as that of a cosine similarity."""


class Metric:
    """A metric. ``score`` returns 1 for a right answer, 0 for a wrong one, or a number in between."""

    name: ClassVar[str]

    @property
    def settings(self) -> dict[str, Any]:
        """The name of the metric and its options as JSON values, for stored experiments."""
        options = {each.name: to_plain(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]
        return {"name": self.name, **options}

    def check(self, columns: Sequence[str]) -> None:
        """Check the options against the columns of the table.

        Raises:
            InvalidRequestError: an option does not fit the table.
        """

    def score(self, answer: str, expected: Any) -> float:
        """Return the score of an answer.

        Raises:
            InvalidRequestError: the metric cannot use the expected value.
        """
        raise NotImplementedError

    def checked_score(self, answer: str, expected: Any) -> float:
        """Return the score of an answer as a float.

        Raises:
            InvalidRequestError: the metric failed, or its score is not a number from 0 to 1.
        """
        try:
            returned = self.score(answer, expected)
        except InvalidRequestError:
            raise
        except Exception as exc:
            raise InvalidRequestError(f"the metric raised {type(exc).__name__}: {exc}") from exc
        score = _read_score(returned)
        if score is None:
            raise InvalidRequestError(
                f"the metric returned {returned!r:.80}; it must return a number from 0 (wrong) to 1 (right), True or "
                "False; scale other numbers to this range"
            )
        return score


@dataclass(frozen=True, kw_only=True)
class ExactMatch(Metric):
    """The answer equals the expected text, apart from spaces at both ends."""

    name: ClassVar[str] = "exact_match"
    ignore_case: bool = False

    def score(self, answer: str, expected: Any) -> float:
        given = _fold(answer, self.ignore_case)
        return float(any(given == _fold(text, self.ignore_case) for text in _texts(expected)))


@dataclass(frozen=True, kw_only=True)
class Contains(Metric):
    """The answer contains the expected text."""

    name: ClassVar[str] = "contains"
    ignore_case: bool = False

    def score(self, answer: str, expected: Any) -> float:
        given = _fold(answer, self.ignore_case)
        texts = [_fold(text, self.ignore_case) for text in _texts(expected)]
        if "" in texts:
            raise InvalidRequestError("the expected text is empty, which every answer contains; remove the row")
        return float(any(text in given for text in texts))


@dataclass(frozen=True)
class Regex(Metric):
    """The answer matches a regular expression.

    Args:
        pattern: A Python regular expression. Its first match must equal the expected text. If the expression has
            groups, the first group in this match is compared instead: ``Regex(r"answer is (\\w+)")``. With None, the
            expected value is the regular expression, and the answer must contain a match.
    """

    name: ClassVar[str] = "regex"
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.pattern is not None:
            _compile(self.pattern)

    def score(self, answer: str, expected: Any) -> float:
        if self.pattern is None:
            if not isinstance(expected, str) or not expected:
                raise InvalidRequestError(f"the expected value is {expected!r:.80}; it must be a regular expression")
            return float(_compile(expected).search(answer) is not None)
        found = _compile(self.pattern).search(answer)
        parts = () if found is None else found.groups() or (found[0],)
        part = next((each for each in parts if each is not None), None)
        return float(any(part == text.strip() for text in _texts(expected)))


@dataclass(frozen=True, kw_only=True)
class Numeric(Metric):
    """The last number in the answer is close to the expected one.

    Numbers are read as people write them: ``1,234.5``, ``1 234``, ``1.234,5``, ``-$3``, ``1 1/2``, ``3e5``, ``10^5``,
    ``2.5 million``. ``50%`` equals 50 and 0.5. Names such as ``GPT-4`` are left out, and an answer that ends with a
    range, a date or an expression has no number.

    Args:
        relative: Maximum difference as a fraction of the expected number.
        absolute: Maximum difference. The larger of both limits applies.
    """

    name: ClassVar[str] = "numeric"
    relative: float = 1e-6
    absolute: float = 0.0

    def __post_init__(self) -> None:
        for name in ("relative", "absolute"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise InvalidRequestError(f"{name} is {value!r:.40}; it must be a number, 0 or more", param=name)

    def score(self, answer: str, expected: Any) -> float:
        wanted, found = read_number(str(expected), is_whole=True), read_number(answer)
        if not wanted:
            raise InvalidRequestError(f"the expected value is {expected!r:.80}, which is not a number")
        # Of two percentages, or two numbers with a letter, both mean the same unit.
        pairs = [(found[0], wanted[0])] if len(found) == len(wanted) else itertools.product(found, wanted)
        return float(
            any(
                math.isclose(number, right, rel_tol=0, abs_tol=max(self.relative * abs(right), self.absolute))
                for number, right in pairs
            )
        )


@dataclass(frozen=True)
class Choice(Metric):
    """The model assigns the highest probability to the right one of several texts. No text is generated.

    The log-probability of a choice is the sum over its tokens after the prompt. The expected value is the text of the
    right choice, or its index, starting at 0.

    Args:
        choices: The choices for all rows, or the name of a column with a list for each row.
        normalize: Whether to divide log-probabilities by the number of characters of the choice, so that long choices
            are not at a disadvantage, like ``acc_norm`` in lm-evaluation-harness. A space at the beginning, which
            separates the choice from the prompt, is not counted.
        chat_template: Whether the prompt is a chat, and each choice an answer to it. If False, the prompt is plain text
            that the choice continues; begin the choices with a space if the prompt does not end with one.
    """

    name: ClassVar[str] = "choice"
    choices: Sequence[str] | str
    normalize: bool = field(default=False, kw_only=True)
    chat_template: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        named = self.choices if integer(self.choices) is None else str(self.choices)
        object.__setattr__(self, "choices", named if isinstance(named, str) else read_choices(named))

    def check(self, columns: Sequence[str]) -> None:
        if isinstance(self.choices, str) and self.choices not in columns:
            raise InvalidRequestError(
                f"choices names the column {self.choices[:80]!r}, but the columns are {', '.join(columns)}; name one "
                "of them, or pass a list of texts",
                param="choices",
            )

    def of_row(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the choices of a row.

        Raises:
            InvalidRequestError: they are not at least two different, non-empty strings.
        """
        if not isinstance(self.choices, str):
            return tuple(self.choices)
        try:
            return read_choices(row.get(self.choices))
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"the column {self.choices}: {exc.message}") from None

    def best(self, choices: Sequence[str], logprobs: Sequence[float]) -> int:
        """Return the index of the most likely choice, the first one if several are equally likely."""
        lengths = [max(len(choice) - choice[0].isspace(), 1) if self.normalize else 1 for choice in choices]
        values = [logprob / length for logprob, length in zip(logprobs, lengths, strict=True)]
        return values.index(max(values))

    def right(self, choices: Sequence[str], expected: Any) -> int:
        """Return the index of the right choice.

        Raises:
            InvalidRequestError: the expected value is not one of them.
        """
        # An array would be compared with each choice, element by element.
        if isinstance(expected, str) and expected in choices:
            return choices.index(expected)
        # Floats are accepted, because pandas converts a column of integers to floats if a value is missing.
        is_number = isinstance(expected, Real) and not isinstance(expected, bool)
        stripped = [choice.strip() for choice in choices]
        if is_number and expected in range(len(choices)):
            index, text = int(expected), f"{expected:.0f}"
            if text in stripped and stripped[index] != text:
                raise InvalidRequestError(
                    f"the expected value {expected!r} is the index of the choice {choices[index]!r:.80}, and also the "
                    "text of another one; convert the column to the texts of the right choices"
                )
            return index
        if isinstance(expected, str) and stripped.count(expected.strip()) == 1:
            return stripped.index(expected.strip())
        raise InvalidRequestError(
            f"the expected value is {expected!r:.80}; it must be one of the choices {list(choices)!r:.200}, or an "
            f"index from 0 to {len(choices) - 1}"
        )


@dataclass(frozen=True)
class Judge(Metric):
    """A model reads the answer and returns a verdict. Its output is constrained to one of ``verdicts``.

    Args:
        prompt: A template, messages, or a function of a row, as for ``lab.map``. In addition to the columns of the
            table, ``{answer}`` and ``{expected}`` are available.
        verdicts: The score of each verdict, from 0 to 1.
        lab: The lab whose model is the judge; by default the lab that answers.
        system: System prompt of the judge.
    """

    name: ClassVar[str] = "judge"
    prompt: Any
    verdicts: Mapping[str, float] = field(default_factory=lambda: {"correct": 1.0, "incorrect": 0.0}, kw_only=True)
    lab: Any = field(default=None, kw_only=True)
    system: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.verdicts, Mapping) or len(self.verdicts) < 2:
            raise InvalidRequestError(
                f"verdicts is {self.verdicts!r:.80}; pass at least two verdicts with their scores, such as "
                "{'good': 1, 'bad': 0}",
                param="verdicts",
            )
        for verdict, score in self.verdicts.items():
            if not isinstance(verdict, str) or _read_score(score) is None:
                raise InvalidRequestError(
                    f"verdicts contains {verdict!r:.40}: {score!r:.40}; it must map strings to numbers from 0 to 1; "
                    "divide the numbers of another scale by the largest one",
                    param="verdicts",
                )

    def check(self, columns: Sequence[str]) -> None:
        RowPrompts(self.prompt).check(dict.fromkeys([*columns, "answer", "expected"]))

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "prompt": described_prompt(self.prompt),
            "verdicts": dict(self.verdicts),
            "system": self.system,
        }


@dataclass(frozen=True)
class FunctionMetric(Metric):
    """A function of the answer and the expected value. ``checked_score`` checks what it returns."""

    name: ClassVar[str] = "function"
    function: Callable[[str, Any], Any]

    @property
    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "function": getattr(self.function, "__qualname__", repr(self.function)[:80])}

    def score(self, answer: str, expected: Any) -> float:
        returned: float = self.function(answer, expected)
        return returned


NAMED = {each.name: each for each in (ExactMatch, Contains, Regex, Numeric)}
"""The metrics that can be selected by name, without options."""
WITH_OPTIONS: Mapping[str, str] = {
    "choice": "it needs the choices; pass Choice([...]) from lmx_lab.evals",
    "judge": "it needs a prompt; pass Judge(...) from lmx_lab.evals",
}


def read_metric(metric: Any) -> Metric:
    """Return a metric from its name, an object of this module, or a function.

    Raises:
        InvalidRequestError: it is none of these.
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        if metric in NAMED:
            return NAMED[metric]()
        names = [*NAMED, *WITH_OPTIONS]
        if metric in WITH_OPTIONS:
            raise InvalidRequestError(
                f"the metric {metric!r} cannot be selected by name: {WITH_OPTIONS[metric]}", param="metric"
            )
        remedy = did_you_mean(metric, names) or f"; the metrics are {', '.join(names)}"
        raise InvalidRequestError(f"there is no metric {metric[:80]!r}{remedy}", param="metric")
    if inspect.iscoroutinefunction(metric):
        raise InvalidRequestError(f"metric is {metric!r:.80}, which is async; pass a plain function", param="metric")
    if isinstance(metric, type) and issubclass(metric, Metric):
        raise InvalidRequestError(
            f"metric is the class {metric.__name__}; create one, such as {metric.__name__}()", param="metric"
        )
    if callable(metric) and not isinstance(metric, type):
        return FunctionMetric(metric)
    raise InvalidRequestError(
        f"metric is {metric!r:.80}; pass one of {', '.join(NAMED)}, a metric from lmx_lab.evals, or a function of the "
        "answer and the expected value",
        param="metric",
    )


def read_choices(choices: Any) -> tuple[str, ...]:
    """Return choices as a tuple of strings. NumPy arrays are also accepted.

    Raises:
        InvalidRequestError: they are not at least two different, non-empty strings.
    """
    listed = choices.tolist() if hasattr(choices, "tolist") else choices
    valid = isinstance(listed, list | tuple) and all(isinstance(choice, str) and choice for choice in listed)
    if not valid or len(set(listed)) < max(2, len(listed)):
        raise InvalidRequestError(
            f"the choices are {choices!r:.80}; pass at least two different, non-empty texts", param="choices"
        )
    return tuple(listed)


def described_prompt(prompt: Any) -> Any:
    """Return a prompt as it is stored with the settings. A function is represented by its name."""
    return f"function {getattr(prompt, '__qualname__', repr(prompt)[:80])}" if callable(prompt) else prompt


def _read_score(value: Any) -> float | None:
    """Return a score as a float from 0 to 1, without rounding errors; None if it is something else."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return min(max(score, 0.0), 1.0) if -ROUNDING <= score <= 1 + ROUNDING else None


def _texts(expected: Any) -> list[str]:
    """Return the strings of an expected value, one of which the answer must equal or contain.

    A float without a fractional part has two, because pandas converts integer columns with missing values to floats.

    Raises:
        InvalidRequestError: the value is a list or another collection.
    """
    if isinstance(expected, str):
        return [expected]
    if isinstance(expected, Iterable):
        raise InvalidRequestError(
            f"the expected value is {expected!r:.80}, which is not a single value; pass a function as the metric, such "
            "as lambda answer, expected: answer in expected"
        )
    if isinstance(expected, Real) and hasattr(expected, "is_integer") and expected.is_integer():
        return [str(expected), f"{expected:.0f}"]
    return [str(expected)]


def _fold(text: str, ignore_case: bool) -> str:
    text = text.strip()
    return text.casefold() if ignore_case else text


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as exc:
        raise InvalidRequestError(
            f"the regular expression {pattern!r:.80} is malformed: {exc}", param="pattern"
        ) from None
