"""Print the table of results, and store them as a JSON file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.paths import ROOT
from soak.row import COLUMNS, Row

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


def print_line(text: str) -> None:
    console.print(text, markup=False, highlight=False)


def print_table(rows: Sequence[Row]) -> None:
    """Print the table, then a line for each problem."""
    table = Table(*(TITLES.get(name, name) for name in COLUMNS), "notes", box=None)
    for row in rows:
        table.add_row(*(_cell(name, getattr(row, name)) for name in COLUMNS), escape(row.notes))
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


def _cell(name: str, value: Any) -> str:
    bad = value and name in ZERO
    text = f"{value:.2f}" if isinstance(value, float) and value else f"{value:g}" if value != str(value) else value
    return f"[bold red]{text}[/]" if bad else escape(text)


ZERO = frozenset(COLUMNS) - {"part", "requests", "faults", "slowest_s"}


def store(rows: Iterable[Row], facts: dict[str, Any], folder: Path = BUILD) -> Path:
    """Write everything to ``<time>.json`` in the folder, and return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    content = facts | {"rows": [asdict(row) | {"passed": row.passed} for row in rows]}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path
