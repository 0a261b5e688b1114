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
from benchmarks.report import Row

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
    paths.IMAGES.mkdir(parents=True, exist_ok=True)
    charts = ""
    for figure, name in CHARTS.items():
        if points := [row for row in rows if row.figure == figure]:
            image = paths.IMAGES / name
            with mpl.rc_context(STYLE):
                chart(figure, points).savefig(image, metadata={"Date": None, "Title": figure})
            charts += f"![{image.stem}]({image.relative_to(path.parent).as_posix()})\n\n"
    binding = [row for row in rows if row.verdict in {"pass", *report.BAD}]
    summary = f"{sum(row.verdict == 'pass' for row in binding)} of {len(binding)} binding limits hold."
    page = f"{HEAD}\n{_facts(facts)}\n\n{charts}{_table(rows)}\n\n{summary}\n"
    path.write_text(page + heading + sections, encoding="utf-8")


def _facts(facts: dict[str, Any]) -> str:
    machine, packages = facts["machine"], facts["packages"]
    commit = (facts["commit"] or "unknown")[:12] + (", with changes" if facts["dirty"] else "")
    versions = ", ".join(f"{name} {packages[name]}" for name in VERSIONS if packages.get(name))
    computer = f"{machine['cpu'] or machine['architecture']}, {machine['threads']} threads"
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    lines = [
        f"- date: {facts['started_at']}",
        f"- commit: {commit}",
        f"- machine: {computer}, {memory}, {machine['system']} {machine['architecture']}, {facts['mlx_device']}",
        f"- software: Python {facts['python']}, {versions}",
    ]
    for again in facts.get("again", ()):
        figures = ", ".join(f"`{name}`" for name in again["only"] or ["all figures"])
        models = f" with {', '.join(again['models'])}" if again["models"] else ""
        commit = (again["commit"] or "unknown")[:12]
        lines.append(f"- measured again: {figures}{models}; {again['started_at']}, commit {commit}")
    return "\n".join(lines)


def _table(rows: Iterable[Row]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS)]
    for row in rows:
        verdict = f"**{row.verdict}**" if row.verdict in report.BAD else row.verdict
        named = (row.figure, row.case, row.model, report.value_of(row), report.limit_of(row), verdict)
        cells = (*named, f"{row.others_cores:.1f}", row.summary)
        lines.append(tuple(" ".join(cell.split()).replace("|", r"\|") for cell in cells))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
