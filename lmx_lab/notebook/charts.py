"""Line charts over time as inline SVG: no script, nothing to fetch, readable without colour. Pure functions."""

from __future__ import annotations

import html
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

GAP_S = 2.0
"""Between two points further apart than this nothing was seen, and no line is drawn."""
MOST_LINES = 3
"""As many as the styles below tell apart."""
WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 28
SHORTEST_S = 10.0
LETTER = 7
"""About a letter's width; SVG cannot measure text."""
TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)

CSS = """\
.chart { display: block; width: 100%; max-width: 45rem; height: auto; font: 12px system-ui, sans-serif; }
.chart text { fill: var(--muted); }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .line { fill: none; stroke-width: 2; stroke-linecap: round; stroke-linejoin: round; }
.chart .line-0 { stroke: var(--line-0); }
.chart .line-1 { stroke: var(--line-1); stroke-dasharray: 8 5; }
.chart .line-2 { stroke: var(--line-2); stroke-dasharray: 1 5; stroke-width: 3; }
"""
"""Expects the colours ``--muted``, ``--grid`` and ``--line-0`` to ``--line-2``."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A quantity over time; the values belong to the chart's moments, one each. What is not finite is a gap."""

    name: str
    values: Sequence[float]

    @property
    def figures(self) -> Figures | None:
        """None if there is no finite value."""
        finite = [value for value in self.values if math.isfinite(value)]
        if not finite:
            return None
        busy = [value for value in finite if value > 0]
        return Figures(latest=finite[-1], median=statistics.median(busy or [0.0]), highest=max(finite))


@dataclass(frozen=True, kw_only=True)
class Figures:
    latest: float
    median: float
    """Of the values above 0, since a lab is idle most of the time."""
    highest: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over the same moments (seconds since 1970, ascending), in one unit, from 0 up."""

    key: str
    """For the ids of the text that describes it; one word, another one for each chart of a page."""
    title: str
    unit: str
    at: Sequence[float]
    lines: Sequence[Line]
    whole: bool = False
    """Whether the values are counts, so that the axis has no fractions."""

    def __post_init__(self) -> None:
        assert len(self.lines) <= MOST_LINES
        assert all(len(line.values) == len(self.at) for line in self.lines)

    def svg(self) -> str:
        """The chart as an ``svg`` element, with its title and its figures as text for those who do not see it."""
        if not self.at:
            return "<p>No figures have been recorded.</p>"
        plot = _Plot.of(self)
        label, about = f"chart-{self.key}-title", f"chart-{self.key}-text"
        return "".join(
            [
                f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{label} {about}">',
                f'<title id="{label}">{html.escape(self.title)}</title>',
                f'<desc id="{about}">{html.escape(self.described())}</desc>',
                f'<text x="4" y="16">{html.escape(self.unit)}</text>',
                *_legend(self.lines),
                *plot.value_axis(),
                *plot.time_axis(),
                *(plot.path(number, line) for number, line in enumerate(self.lines)),
                "</svg>",
            ]
        )

    def described(self) -> str:
        """What there is to see, in words."""
        parts = [f"From {clock(self.at[0])} to {clock(self.at[-1])}, in {self.unit}."]
        for line in self.lines:
            figures = line.figures
            if figures is not None:
                parts.append(
                    f"{line.name}: latest {number(figures.latest)}, median above 0 {number(figures.median)}, "
                    f"highest {number(figures.highest)}."
                )
        holes = sum(later - sooner > GAP_S for sooner, later in zip(self.at, self.at[1:], strict=False))
        return " ".join([*parts, *([f"Gaps without figures: {holes}."] if holes else [])])


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """Where values and moments are on the paper."""

    chart: Chart
    first: float
    last: float
    ticks: Sequence[float]

    @classmethod
    def of(cls, chart: Chart) -> _Plot:
        highest = max((figures.highest for line in chart.lines if (figures := line.figures)), default=0.0)
        first, last = chart.at[0], max(chart.at[-1], chart.at[0] + SHORTEST_S)
        return cls(chart=chart, first=first, last=last, ticks=value_ticks(highest, whole=chart.whole))

    def x(self, at: float) -> float:
        return LEFT + (at - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - max(0.0, value) / self.ticks[-1] * (HEIGHT - TOP - BOTTOM)

    def value_axis(self) -> list[str]:
        decimals = _decimals(self.ticks[1])
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,.{decimals}f}</text>')
        return parts

    def time_axis(self) -> list[str]:
        bottom = HEIGHT - BOTTOM
        parts = []
        for tick, label in time_ticks(self.first, self.last):
            x = self.x(tick)
            # A label in the middle of its tick must not leave the paper.
            anchor = "start" if x < LEFT + 20 else "end" if x > WIDTH - RIGHT - 20 else "middle"
            parts.append(f'<path class="grid" d="M{x:.1f} {bottom}v5"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{label}</text>')
        return parts

    def path(self, number: int, line: Line) -> str:
        steps = []
        for run in runs(self.chart.at, line.values):
            points = thinned([(self.x(at), self.y(value)) for at, value in run])
            steps.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points))
            if len(points) == 1:
                # A line of no length, which round ends make a dot.
                steps.append("h0")
        return f'<path class="line line-{number}" d="{"".join(steps)}"/>' if steps else ""


def runs(at: Sequence[float], values: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The points in the pieces that are drawn without a gap."""
    found: list[list[tuple[float, float]]] = []
    before: float | None = None
    for moment, value in zip(at, values, strict=True):
        if not math.isfinite(value):
            before = None
            continue
        if before is None or moment - before > GAP_S:
            found.append([])
        found[-1].append((moment, value))
        before = moment
    return found


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lowest and the highest point of each column of a pixel: more cannot be seen, and no peak is lost."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    kept: list[tuple[float, float]] = []
    for column in columns.values():
        ends = {min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def value_ticks(highest: float, *, whole: bool = False) -> list[float]:
    """From 0 to the highest value or a bit above, in steps of 1, 2 or 5 times a power of ten; at least two."""
    # What is as good as nothing, and counts below 1, get an axis up to 1.
    highest = max(1.0, highest) if whole or highest < 1e-9 else highest
    raw = highest / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    return [index * step for index in range(math.ceil(highest / step - 1e-6) + 1)]


def time_ticks(first: float, last: float, *, most: int = 7) -> list[tuple[float, str]]:
    """Round moments of the local day between two others, and how they are written."""
    step = next((step for step in TIME_STEPS_S if (last - first) / step <= most), None)
    step = step or TIME_STEPS_S[-1] * math.ceil((last - first) / TIME_STEPS_S[-1] / most)
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%Y-%m-%d"
    start = math.ceil(first / step) * step
    moments = [float(start + index * step) for index in range(most + 1) if start + index * step <= last]
    return [(moment, time.strftime(form, time.localtime(moment))) for moment in moments]


def clock(at: float) -> str:
    """The local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def number(value: float) -> str:
    """Three digits or so, as people write them."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2}f}"


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _legend(lines: Sequence[Line]) -> list[str]:
    parts, x = [], WIDTH - RIGHT - sum(len(line.name) * LETTER + 52 for line in lines)
    for index, line in enumerate(lines):
        parts.append(f'<path class="line line-{index}" d="M{x} 12h30"/>')
        parts.append(f'<text x="{x + 36}" y="16">{html.escape(line.name)}</text>')
        x += len(line.name) * LETTER + 52
    return parts
