"""The table for people, the JSON file for later."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
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
"""Of one row; the file has all."""
SHOWN_CHARACTERS = 400
TITLES = {
    "leaked_mb": "RSS MB",
    "leaked_descriptors": "descriptors",
    "leaked_threads": "threads",
    "leaked_processes": "processes",
    "slowest_s": "slowest s",
}
# Whole lines for files; a terminal's are wrapped to fit.
console = Console(width=None if sys.stdout.isatty() else 220)


def say(text: str) -> None:
    console.print(text, markup=False, highlight=False)


def show(rows: Sequence[Row]) -> None:
    """The table, then a line for each thing that was wrong."""
    table = Table(*(TITLES.get(name, name) for name in COLUMNS), "notes", box=None)
    for row in rows:
        table.add_row(*(_cell(name, getattr(row, name)) for name in COLUMNS), escape(row.notes))
    console.print(table, highlight=False)
    for row in rows:
        for text in row.wrong[:SHOWN_WRONG]:
            say(f"WRONG {row.part}: {text[:SHOWN_CHARACTERS]}")
        if (more := len(row.wrong) - SHOWN_WRONG) > 0:
            say(f"WRONG {row.part}: and {more} more, in the file")
        if not row.holds and not row.wrong:
            say(f"WRONG {row.part}: see the columns that are not zero")


def _cell(name: str, value: Any) -> str:
    bad = value and name in ZERO
    text = f"{value:.2f}" if isinstance(value, float) and value else f"{value:g}" if value != str(value) else value
    return f"[bold red]{text}[/]" if bad else escape(text)


ZERO = frozenset(COLUMNS) - {"part", "requests", "faults", "slowest_s"}


def keep(rows: Iterable[Row], facts: dict[str, Any], folder: Path = BUILD) -> Path:
    """Write everything to ``build/soak/<time>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    content = facts | {"rows": [asdict(row) | {"holds": row.holds} for row in rows]}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path
