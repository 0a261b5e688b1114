"""Define a row of the results: a figure, its limit, and whether the value meets the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "FAIL", "(pass)", "(miss)", "shown", "ERROR"]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit for the value of a figure."""

    sign: Literal["≥", "≤", ">"]
    bound: float

    def holds(self, value: float) -> bool:
        match self.sign:
            case "≥":
                return value >= self.bound
            case "≤":
                return value <= self.bound
            case ">":
                return value > self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured value."""

    figure: str
    case: str
    model: str
    value: float
    """In ``unit``, or a ratio without unit; NaN if the measurement failed."""
    limit: Limit | None = None
    """``None`` for figures without a limit and for failed measurements."""
    binding: bool = True
    """Whether the limit applies to this model. Otherwise the row is informative only."""
    unit: str = ""
    summary: str = ""
    """The absolute numbers behind the value."""
    others_cores: float = 0.0
    """Number of cores that other programs used during the measurement."""
    detail: dict[str, Any] = field(default_factory=dict)
    """All samples, for the JSON file."""

    @property
    def verdict(self) -> Verdict:
        if math.isnan(self.value):
            return "ERROR"
        if self.limit is None:
            return "shown"
        holds = self.limit.holds(self.value)
        if self.binding:
            return "pass" if holds else "FAIL"
        return "(pass)" if holds else "(miss)"
