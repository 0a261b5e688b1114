"""Define a row of the results with its limit, print the table of results, and write them to a JSON file."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.paths import BUILD

BAD = frozenset({"FAIL", "ERROR"})
STYLES = {"pass": "green"} | dict.fromkeys(BAD, "bold red")
# Lines in files are not wrapped.
console = Console(width=None if sys.stdout.isatty() else 220)


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


def say(text: str) -> None:
    console.print(text, markup=False, highlight=False)


def print_table(rows: Iterable[Row]) -> None:
    table = Table("figure", "case", "model", "value", "limit", "verdict", "others' cores", "values", box=None)
    for row in rows:
        cells = (row.figure, row.case, row.model, value_of(row), limit_of(row))
        style = STYLES.get(row.verdict)
        verdict = f"[{style}]{row.verdict}[/]" if style else row.verdict
        table.add_row(*cells, verdict, f"{row.others_cores:.1f}", escape(row.summary))
    console.print(table, highlight=False)


def value_of(row: Row) -> str:
    return "-" if math.isnan(row.value) else f"{row.value:.3f}{f' {row.unit}' if row.unit else ''}"


def limit_of(row: Row) -> str:
    return f"{row.limit or ''} {row.unit}".strip()


def new_path() -> Path:
    """Return the path of the results of a run that starts now: ``build/bench/<time>.json``."""
    return BUILD / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"


def store(rows: Iterable[Row], facts: dict[str, Any], path: Path) -> None:
    """Write the results and the provenance, in place of an earlier version of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = []
    for row in rows:
        value = None if math.isnan(row.value) else row.value
        plain.append(asdict(row) | {"value": value, "limit": str(row.limit or ""), "verdict": row.verdict})
    content = facts | {"rows": plain}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Return the results and the provenance of an earlier run."""
    facts: dict[str, Any] = json.loads(path.read_text())
    rows = []
    for plain in facts.pop("rows"):
        sign, _, bound = plain.pop("limit").partition(" ")
        limit = Limit(sign=sign, bound=float(bound)) if bound else None
        value = math.nan if plain["value"] is None else plain["value"]
        del plain["verdict"]
        rows.append(Row(**plain | {"value": value, "limit": limit}))
    return rows, facts


def merge(rows: Iterable[Row], newer: Iterable[Row]) -> list[Row]:
    """Return the rows in which those of the same figure, case and model are replaced by newer ones."""
    found = {(row.figure, row.case, row.model): row for row in newer}
    succeeded = {(row.figure, row.model) for row in found.values()}
    # A failed measurement has no case.
    kept = [row for row in rows if not (row.verdict == "ERROR" and (row.figure, row.model) in succeeded)]
    return [found.pop((row.figure, row.case, row.model), row) for row in kept] + list(found.values())
