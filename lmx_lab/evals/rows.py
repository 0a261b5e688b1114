"""Define the values of an evaluation that are stored: its rows, its settings, and the software that computed it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lmx_lab.batch.answers import RowAnswer
from lmx_lab.batch.prompts import Prompt, is_missing

MEASURED = ("finish_reason", "prompt_tokens", "output_tokens", "total_s", "request_id")
"""Fields of the model's answer that are stored and shown."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedRow:
    """One row of an evaluation: an answer to a row of the table."""

    label: Any
    """Label of the row in the index of the table."""
    sample: int | None = None
    """Index of the answer among those to the same row of the table, starting at 0; None if there is only one."""
    prompt: Prompt | None
    """The prompt; None if it could not be created."""
    expected: Any
    answer: str | None
    """Text of the answer, or the most likely choice; None if there was an error."""
    score: float | None
    """None if the row has an error."""
    error: str | None = None
    choices: Sequence[str] = ()
    verdict: str | None = None
    """Verdict of the judge."""
    answered: RowAnswer = field(default_factory=RowAnswer)
    """The answer of the model, or the log-probabilities of the choices, with token counts and times."""

    @property
    def logprobs(self) -> Sequence[float]:
        """Log-probability of each choice after the prompt."""
        return (self.answered.logprobs or ()) if self.choices else ()

    @property
    def probability(self) -> float | None:
        """Probability of the answer among the choices: the softmax of their log-probabilities. None without choices."""
        if not self.logprobs or self.answer is None:
            return None
        highest = max(self.logprobs)
        weights = [math.exp(logprob - highest) for logprob in self.logprobs]
        return weights[list(self.choices).index(self.answer)] / math.fsum(weights)

    def to_fields(self) -> dict[str, Any]:
        """Return the row as it is stored, as one flat dictionary."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "answered"}
        measured = {name: getattr(self.answered, name) for name in MEASURED}
        return {**own, "logprobs": self.logprobs, **measured}

    @classmethod
    def of_fields(cls, values: Mapping[str, Any]) -> EvaluatedRow:
        """Return the row of ``to_fields`` after it was stored as JSON. Fields of newer versions are ignored.

        Labels of a multi-level index become tuples again.
        """
        own = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        answered = {name: values[name] for name in ("logprobs", *MEASURED) if name in values}
        label = values["label"]
        own["label"] = tuple(label) if isinstance(label, list) else label
        return cls(**{**own, "answered": RowAnswer(**answered)})


def answers_by_row(rows: Sequence[EvaluatedRow]) -> list[list[EvaluatedRow]]:
    """Group the answers by the row of the table."""
    groups: list[list[EvaluatedRow]] = []
    for row in rows:
        if row.sample:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def mean_score(answers: Sequence[EvaluatedRow]) -> float | None:
    """Return the mean score of the answers to a row; None if all of them have errors."""
    scores = [answer.score for answer in answers if answer.score is not None]
    return math.fsum(scores) / len(scores) if scores else None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """How an evaluation was computed: the model, the settings, and the versions of packages."""

    at: float
    """Unix time of the start of the evaluation."""
    name: str
    model: str
    engine: str
    weights: str
    """SHA-256 of the model's files; empty if they are on another machine."""
    settings: Mapping[str, Any]
    """The prompt, the metric, and the parameters of the requests, as JSON values."""
    frame: str
    """SHA-256 of the rows."""
    versions: Mapping[str, str]
    machine: str


def to_json(value: Any) -> str:
    """Return a value as JSON; see ``to_plain``."""
    return json.dumps(to_plain(value))


def comparable(value: Any) -> str:
    """Return a label or an expected value as JSON in which equal values of different types, such as 1 and 1.0, or NaN
    and None, are equal.
    """

    def number(text: str) -> float:
        found = float(text)
        return int(found) if found.is_integer() else found

    missing = {"NaN": None}
    plain = json.loads(to_json(value), parse_float=number, parse_constant=lambda text: missing.get(text, text))
    return json.dumps(plain)


def to_plain(value: Any) -> Any:
    """Convert a value to JSON types: NumPy numbers to numbers, NumPy arrays to lists, ``pandas.NA`` and ``NaT`` to
    None, and other types to strings.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    if hasattr(value, "tolist"):  # NumPy arrays and numbers.
        return to_plain(value.tolist())
    return None if is_missing(value) else str(value)
