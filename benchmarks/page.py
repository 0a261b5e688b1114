"""Write ``BENCHMARKS.md``: the last complete results, with machine and software."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rows import Row

HEAD = """\
# Benchmarks

Results of the last complete run of `make bench`; `benchmarks/__main__.py` describes each figure. A verdict in brackets
is for a limit that applies to another model; rows that are *shown* have no limit. *Others* is the number of cores that
other programs used during the measurement: with more than about half a core, a figure is unreliable.
"""
COLUMNS = ("figure", "case", "model", "value", "limit", "verdict", "others", "values")
VERSIONS = ("mlx", "mlx-lm", "scipy-openblas32", "xllamacpp", "numpy", "uvicorn")


def write(rows: Sequence[Row], facts: dict[str, Any], path: Path) -> None:
    """Write the page of a run. The sections of the previous page, which are about other machines, are kept.

    Args:
        facts: The provenance of the run.
    """
    previous = path.read_text(encoding="utf-8") if path.exists() else ""
    _, heading, sections = previous.partition("\n## ")
    page = f"{HEAD}\n{_facts(facts)}\n\n{_table(rows)}\n\n{_summary(rows)}\n"
    path.write_text(page + heading + sections, encoding="utf-8")


def _facts(facts: dict[str, Any]) -> str:
    machine, packages = facts["machine"], facts["packages"]
    commit = (facts["commit"] or "unknown")[:12] + (", with changes" if facts["dirty"] else "")
    versions = ", ".join(f"{name} {packages[name]}" for name in VERSIONS if packages.get(name))
    computer = f"{machine['cpu'] or machine['architecture']}, {machine['threads']} threads"
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    return "\n".join(
        [
            f"- date: {facts['started_at']}",
            f"- commit: {commit}",
            f"- machine: {computer}, {memory}, {machine['system']} {machine['architecture']}, {facts['mlx_device']}",
            f"- software: Python {facts['python']}, {versions}",
        ]
    )


def _table(rows: Iterable[Row]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(_escaped(cell) for cell in cells)} |" for cells in lines)


def _cells(row: Row) -> tuple[str, ...]:
    verdict = f"**{row.verdict}**" if row.verdict in report.BAD else row.verdict
    named = (row.figure, row.case, row.model, report.value_of(row), report.limit_of(row), verdict)
    return (*named, f"{row.others_cores:.1f}", row.summary)


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", r"\|")


def _summary(rows: Sequence[Row]) -> str:
    binding = [row for row in rows if row.verdict in {"pass", *report.BAD}]
    return f"{sum(row.verdict == 'pass' for row in binding)} of {len(binding)} binding limits hold."
