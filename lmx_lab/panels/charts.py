"""Render line charts over time as inline SVG, without scripts or external files, and readable without colour."""

from __future__ import annotations

import base64
import html
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

GAP_S = 2.0
"""Points that are further apart than this are not connected, because nothing was recorded between them."""
MAX_SERIES = 3
"""Number of line styles in ``CSS``."""
WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 28
MIN_SPAN_S = 10.0
"""Minimum length of the time axis."""
CHARACTER_WIDTH = 7
"""Approximate width of a character, because SVG cannot measure text."""
NO_VALUES = "<p>No measurements have been recorded.</p>"
TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)

CSS = """\
.chart { display: block; width: 100%; max-width: 45rem; height: auto; font: 12px system-ui, sans-serif; }
.chart text { fill: var(--muted); }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .line { fill: none; stroke-width: 2; stroke-linecap: round; stroke-linejoin: round; }
.chart .line-0 { stroke: var(--line-0); }
.chart .line-1 { stroke: var(--line-1); stroke-dasharray: 8 5; }
.chart .line-2 { stroke: var(--line-2); stroke-dasharray: 1 5; stroke-width: 3; }
.chart .dot { stroke-dasharray: none; stroke-width: 6; }
"""
"""Styles of a chart. The page defines the colours ``--muted``, ``--grid`` and ``--line-0`` to ``--line-2``."""


_IMAGE_CSS = f"""\
svg {{ --muted: #555; --grid: #ccc; --line-0: #0b5cad; --line-1: #b34700; --line-2: #2f7d32; background: #fff; }}
{CSS}"""
"""Styles of a chart that is a separate image. It has a background, because it cannot use that of its page."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """The values of one line of a chart."""

    name: str
    values: Sequence[float]
    """One value for each time of the chart; one that is not finite is a gap."""

    def summary(self) -> SeriesSummary | None:
        """Return statistics of the finite values; None if there are none."""
        finite = [value for value in self.values if math.isfinite(value)]
        if not finite:
            return None
        positive = [value for value in finite if value > 0]
        return SeriesSummary(latest=finite[-1], median=statistics.median(positive or [0.0]), highest=max(finite))


@dataclass(frozen=True, kw_only=True)
class SeriesSummary:
    """Statistics of a series."""

    latest: float
    median: float
    """Median of the values above 0, because a lab is idle most of the time."""
    highest: float


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A chart of one or more series in the same unit, with an axis that begins at 0."""

    key: str
    """A word that is unique in the page. It is part of the ids of the chart's description."""
    title: str
    unit: str
    at: Sequence[float]
    """The times of the values in seconds since 1970, ascending."""
    series: Sequence[Series]
    whole: bool = False
    """Whether the values are counts, so that the axis has no fractions."""

    def __post_init__(self) -> None:
        assert len(self.series) <= MAX_SERIES
        assert all(len(series.values) == len(self.at) for series in self.series)

    def svg(self) -> str:
        """Return the chart as an ``svg`` element, with a title and a description for screen readers. A chart without
        values is a sentence that says so.
        """
        if not self._has_values():
            return NO_VALUES
        plot = _Plot.of(self)
        title_id, text_id = f"chart-{self.key}-title", f"chart-{self.key}-text"
        return "".join(
            [
                f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{title_id} {text_id}">',
                f'<title id="{title_id}">{html.escape(self.title)}</title>',
                f'<desc id="{text_id}">{html.escape(self.description())}</desc>',
                f'<text x="4" y="16">{html.escape(self.unit)}</text>',
                *_legend(self.series),
                *plot.value_axis(),
                *plot.time_axis(),
                *(plot.path(index, series) for index, series in enumerate(self.series)),
                "</svg>",
            ]
        )

    def image_html(self) -> str:
        """Return the chart as an ``img`` element with its own styles and the description as text.

        Unlike an ``svg`` element, it is shown in notebooks that are not trusted. A chart without values is a sentence.
        """
        if not self._has_values():
            return NO_VALUES
        tag = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        image = self.svg().replace("<svg", tag, 1).replace("</title>", f"</title><style>{_IMAGE_CSS}</style>", 1)
        encoded = base64.b64encode(image.encode()).decode()
        text = html.escape(f"{self.title}. {self.description()}", quote=True)
        return f'<img width="{WIDTH}" height="{HEIGHT}" alt="{text}" src="data:image/svg+xml;base64,{encoded}">'

    def _has_values(self) -> bool:
        return any(math.isfinite(value) for series in self.series for value in series.values)

    def description(self) -> str:
        """Describe the chart in words."""
        parts = [f"From {format_clock(self.at[0])} to {format_clock(self.at[-1])}, in {self.unit}."]
        for series in self.series:
            summary = series.summary()
            if summary is not None:
                parts.append(
                    f"{series.name}: latest {format_number(summary.latest)}, "
                    f"median above 0 {format_number(summary.median)}, highest {format_number(summary.highest)}."
                )
        gaps = sum(later - sooner > GAP_S for sooner, later in zip(self.at, self.at[1:], strict=False))
        return " ".join([*parts, *([f"Gaps without measurements: {gaps}."] if gaps else [])])


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """The coordinates of values and times."""

    chart: LineChart
    first: float
    last: float
    ticks: Sequence[float]

    @classmethod
    def of(cls, chart: LineChart) -> _Plot:
        highest = max((summary.highest for series in chart.series if (summary := series.summary())), default=0.0)
        first, last = chart.at[0], max(chart.at[-1], chart.at[0] + MIN_SPAN_S)
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
            # A centred label at an end of the axis would extend beyond the chart.
            anchor = "start" if x < LEFT + 20 else "end" if x > WIDTH - RIGHT - 20 else "middle"
            parts.append(f'<path class="grid" d="M{x:.1f} {bottom}v5"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{label}</text>')
        return parts

    def path(self, index: int, series: Series) -> str:
        lines, dots = "", ""
        for segment in segments(self.chart.at, series.values):
            points = [f"{x:.1f} {y:.1f}" for x, y in downsample([(self.x(at), self.y(value)) for at, value in segment])]
            if len(points) == 1:
                # A line of length 0 with round ends is a dot.
                dots += f"M{points[0]}h0"
            else:
                lines += "M" + "L".join(points)
        parts = {f"line line-{index}": lines, f"line line-{index} dot": dots}
        return "".join(f'<path class="{name}" d="{steps}"/>' for name, steps in parts.items() if steps)


def segments(at: Sequence[float], values: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Split the points of a line into the parts that are drawn without a gap."""
    result: list[list[tuple[float, float]]] = []
    previous: float | None = None
    for time_s, value in zip(at, values, strict=True):
        if not math.isfinite(value):
            previous = None
            continue
        if previous is None or time_s - previous > GAP_S:
            result.append([])
        result[-1].append((time_s, value))
        previous = time_s
    return result


def downsample(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the lowest and the highest point of each column of pixels, so that no peak is lost."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    kept: list[tuple[float, float]] = []
    for column in columns.values():
        ends = {min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def value_ticks(highest: float, *, whole: bool = False) -> list[float]:
    """Return at least two ticks, from 0 to the highest value or slightly above, in steps of 1, 2 or 5 times 10^n.

    Args:
        whole: Whether the values are counts.
    """
    # Values of almost 0, and counts below 1, have an axis up to 1.
    highest = max(1.0, highest) if whole or highest < 1e-9 else highest
    raw = highest / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    return [index * step for index in range(math.ceil(highest / step - 1e-6) + 1)]


def time_ticks(first: float, last: float, *, most: int = 7) -> list[tuple[float, str]]:
    """Return round times of the local day between two times, with their labels."""
    step = next((step for step in TIME_STEPS_S if (last - first) / step <= most), None)
    step = step or TIME_STEPS_S[-1] * math.ceil((last - first) / TIME_STEPS_S[-1] / most)
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%Y-%m-%d"
    start = math.ceil(first / step) * step
    moments = [float(start + index * step) for index in range(most + 1) if start + index * step <= last]
    return [(moment, time.strftime(form, time.localtime(moment))) for moment in moments]


def format_clock(at: float) -> str:
    """Format the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def format_number(value: float) -> str:
    """Format a number with about three digits."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2}f}"


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _legend(all_series: Sequence[Series]) -> list[str]:
    parts, x = [], WIDTH - RIGHT - sum(_legend_width(series) for series in all_series)
    for index, series in enumerate(all_series):
        parts.append(f'<path class="line line-{index}" d="M{x} 12h30"/>')
        parts.append(f'<text x="{x + 36}" y="16">{html.escape(series.name)}</text>')
        x += _legend_width(series)
    return parts


def _legend_width(series: Series) -> int:
    return len(series.name) * CHARACTER_WIDTH + 52
