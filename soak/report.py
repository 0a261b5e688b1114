"""Define the settings of a run and the rows of its results, print them as a table, and store them as a JSON file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.paths import ROOT

BUILD = ROOT / "build" / "soak"
SHOWN_WRONG = 20
"""Problems printed for one row; the file has all."""
SHOWN_CHARACTERS = 400
TITLES = {
    "leaked_mb": "RSS MB",
    "leaked_descriptors": "descriptors",
    "leaked_threads": "threads",
    "leaked_processes": "processes",
    "slowest_s": "slowest s",
}
# Lines are wrapped only in a terminal.
console = Console(width=None if sys.stdout.isatty() else 220)


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The settings of a run, the same for every part."""

    folder: Path
    """Folder of the tiny model: a two-layer llama with random weights and a real tokenizer."""
    quick: bool = False
    """Whether to run a small version, which takes a minute or two."""
    seed: int = 0
    """Seed of all random choices, to repeat a failure."""
    kills: int | None = None
    """Number of kills of the daemon. If given, the part ``kills`` kills nothing else."""
    seconds: float | None = None
    """Duration of the part ``memory``; None for the default."""
    count: int | None = None
    """Number of models in the part ``mutations``, or of requests in the part ``fuzz``; None for the default."""


class SoakError(Exception):
    """A part could not be run; the programs under test did not fail."""


@dataclass(kw_only=True)
class Row:
    """The result of one part of a run. Every count after ``faults`` is zero if the part has passed."""

    part: str
    """Name of the part and of what it did, such as ``fuzz: chat``."""
    requests: int = 0
    """Number of requests, WebSockets, connections, loads and unloads."""
    faults: int = 0
    """Number of injected faults: kills, disconnects, invalid bodies."""
    lost: int = 0
    """Number of accepted requests that did not end, and of incorrect answers."""
    doubled: int = 0
    """Number of things that were done or reported twice."""
    hung: int = 0
    """Number of requests and programs that were not answered, or did not end, in time."""
    leaked_mb: float = 0.0
    """Growth of resident memory beyond what the part allows, in 10^6 bytes; ``notes`` has the allowance."""
    leaked_descriptors: int = 0
    leaked_threads: int = 0
    leaked_processes: int = 0
    """Number of processes left after their program had ended, or in addition to those before."""
    slowest_s: float = 0.0
    """Duration of the slowest correct answer, in seconds."""
    wrong: list[str] = field(default_factory=list)
    """A sentence for each problem, including those without a column, such as an undeclared status."""
    notes: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """Data for the JSON file only: what is needed to repeat a failure, and figures without a column."""

    @property
    def passed(self) -> bool:
        """Whether there was no problem."""
        counts = (self.lost, self.doubled, self.hung, self.leaked_mb, self.leaked_descriptors)
        return not any((*counts, self.leaked_threads, self.leaked_processes, self.wrong))


COLUMNS = tuple(each.name for each in fields(Row) if each.name not in ("wrong", "notes", "detail"))
ZERO = frozenset(COLUMNS) - {"part", "requests", "faults", "slowest_s"}


def print_line(text: str) -> None:
    console.print(text, markup=False, highlight=False)


def print_table(rows: Sequence[Row]) -> None:
    """Print the table, then a line for each problem."""
    table = Table(*(TITLES.get(name, name) for name in COLUMNS), "notes", box=None)
    for row in rows:
        cells = []
        for name in COLUMNS:
            value: Any = getattr(row, name)
            text = f"{value:.2f}" if isinstance(value, float) and value else str(value or 0)
            cells.append(f"[bold red]{text}[/]" if value and name in ZERO else escape(text))
        table.add_row(*cells, escape(row.notes))
    console.print(table, highlight=False)
    for row in rows:
        for text in row.wrong[:SHOWN_WRONG]:
            print_line(f"WRONG {row.part}: {text[:SHOWN_CHARACTERS]}")
        if (more := len(row.wrong) - SHOWN_WRONG) > 0:
            print_line(f"WRONG {row.part}: and {more} more, in the file")
        if not row.passed and not row.wrong:
            print_line(f"WRONG {row.part}: see the columns that are not zero")


def print_columns(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table whose columns are the keys of the rows, which are the same in each."""
    table = Table(*(rows[0] if rows else ()), box=None)
    for row in rows:
        table.add_row(*map(escape, row.values()))
    console.print(table, highlight=False)


def store(rows: Iterable[Row], facts: dict[str, Any], folder: Path = BUILD) -> Path:
    """Write everything to ``<time>.json`` in the folder, and return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    content = facts | {"rows": [asdict(row) | {"passed": row.passed} for row in rows]}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path
