"""Write ``docs/benchmark-results.md``: the last complete results, with machine, software and charts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks import curves, paths, report
from benchmarks.rows import Row

HEAD = """\
# Benchmarks

Results of the last complete run of `make bench`; `python -m benchmarks --help` describes each figure. A verdict in
brackets is for a limit that applies to another model; rows that are *shown* have no limit. *Others* is the number of
cores that other programs used during the measurement: with more than about half a core, a figure is unreliable.
"""
COLUMNS = ("figure", "case", "model", "value", "limit", "verdict", "others", "values")
VERSIONS = ("mlx", "mlx-lm", "scipy-openblas32", "xllamacpp", "numpy", "uvicorn")
CHARTS = {curves.STREAMS: "speed-streams.svg", curves.PROMPTS: "speed-prompts.svg"}
X_LABELS = {curves.STREAMS: "streams at the same time", curves.PROMPTS: "tokens of the prompt"}
Y_LABELS = {
    curves.STREAMS: "tok/s of all streams, with their prompts",
    curves.PROMPTS: "prompt tokens ÷ time to first token, tok/s",
}
INCHES = (7.2, 4.2)
MARKERS = "osD^v"
# With a fixed salt the same rows give the same bytes.
STYLE: dict[Any, Any] = {"svg.hashsalt": "benchmarks", "font.size": 10}


def write(rows: Sequence[Row], facts: dict[str, Any], path: Path) -> None:
    """Write the page of a run. The sections of the previous page, which are about other machines, are kept.

    Args:
        facts: The provenance of the run.
    """
    previous = path.read_text(encoding="utf-8") if path.exists() else ""
    _, heading, sections = previous.partition("\n## ")
    page = f"{HEAD}\n{_facts(facts)}\n\n{_charts(rows, path)}{_table(rows)}\n\n{_summary(rows)}\n"
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
            *(_again(again) for again in facts.get("again", ())),
        ]
    )


def _again(again: dict[str, Any]) -> str:
    """Describe figures that were measured again after the run."""
    figures = ", ".join(f"`{name}`" for name in again["only"] or ["all figures"])
    models = f" with {', '.join(again['models'])}" if again["models"] else ""
    return f"- measured again: {figures}{models}; {again['started_at']}, commit {(again['commit'] or 'unknown')[:12]}"


def _charts(rows: Sequence[Row], path: Path) -> str:
    """Draw the charts, and return the lines that show them."""
    drawn = _draw(rows, paths.IMAGES)
    return "".join(f"![{image.stem}]({image.relative_to(path.parent).as_posix()})\n\n" for image in drawn)


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


def _draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write an SVG for each figure of ``curves`` that the rows contain, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for figure, name in CHARTS.items():
        if points := [row for row in rows if row.figure == figure]:
            drawn.append(folder / name)
            with mpl.rc_context(STYLE):
                chart(figure, points).savefig(drawn[-1], metadata={"Date": None, "Title": figure})
    return drawn


def chart(name: str, rows: Sequence[Row]) -> Figure:
    """Draw the rows of a figure of ``curves``, with a line for each server."""
    figure = Figure(figsize=INCHES, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.grid(color="#dddddd")
    for marker, server in zip(
        itertools.cycle(MARKERS), dict.fromkeys(row.detail["server"] for row in rows), strict=False
    ):
        points = sorted((row.detail["x"], row.value) for row in rows if row.detail["server"] == server)
        axes.plot(*zip(*points, strict=True), marker=marker, label=server)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row.detail["x"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(X_LABELS[name])
    axes.set_ylabel(Y_LABELS[name])
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
