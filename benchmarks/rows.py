"""One line of the result: a figure, what it must be, and whether it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "FAIL", "(pass)", "(miss)", "shown", "ERROR"]


@dataclass(frozen=True, kw_only=True)
class Limit:
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
    figure: str
    case: str
    model: str
    value: float
    """A ratio, or seconds; NaN when it could not be measured."""
    limit: Limit | None = None
    """None for what nobody promised, and for what could not be measured."""
    binding: bool = True
    """Whether the limit was set for this model; otherwise the row is for information."""
    unit: str = ""
    summary: str = ""
    """The absolute numbers behind the value, in a few words."""
    others_cores: float = 0.0
    """Cores that other programs kept busy meanwhile."""
    detail: dict[str, Any] = field(default_factory=dict)
    """Every sample, for the JSON file."""

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
