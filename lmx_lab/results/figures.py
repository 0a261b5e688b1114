"""Draw line charts over time and heat maps as inline SVG, without scripts or external files."""

from __future__ import annotations

import base64
import math
import re
import statistics
import textwrap
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lmx_lab.results.pages import Displayed, Formats, html_text

GAP_S = 2.0
"""Points that are further apart than this are not connected, because nothing was recorded between them."""
WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 28
NO_VALUES = "<p>No measurements have been recorded.</p>"
TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)

LINES = (
    'stroke="#0b5cad" stroke-width="2"',
    'stroke="#b34700" stroke-width="2" stroke-dasharray="8 5"',
    'stroke="#2f7d32" stroke-width="3" stroke-dasharray="1 5"',
)
"""The styles of the lines of a chart, which differ without their colours."""
CSS = """\
.chart { display: block; width: 100%; max-width: 45rem; height: auto; }
.chart text { fill: var(--muted); }
.chart .grid { stroke: var(--grid); }
.chart .line-0 { stroke: var(--line-0); }
.chart .line-1 { stroke: var(--line-1); }
.chart .line-2 { stroke: var(--line-2); }
"""
"""The colours of charts in a page that defines ``--muted``, ``--grid`` and ``--line-0`` to ``--line-2``."""
Rgb = tuple[int, int, int]
SEQUENTIAL: tuple[Rgb, Rgb] = ((255, 255, 255), (8, 81, 156))
"""The colours of 0 and the largest value."""
NEGATIVE: Rgb = (178, 24, 43)
"""The colour of the smallest value if there are negative ones."""
CHARACTER_WIDTH = 6.2
"""Approximate width of a character of 10 px, because SVG cannot measure text."""
MIN_WIDTH, MAX_WIDTH = 420.0, 900.0
"""The width in pixels that titles of narrow heat maps may have, and that the cells of wide ones have together."""
SCALE_WIDTH, SCALE_STEPS = 120.0, 40
"""Width of the scale of a heat map in pixels, and the number of its colours."""


class Picture(Displayed):
    """A result that is displayed as an SVG."""

    heat_map: Callable[..., HeatMap]

    def svg(self) -> str:
        """Return the picture as an ``svg`` element, by default that of ``heat_map``."""
        return self.heat_map().svg()

    def _repr_html_(self) -> str:
        return self.svg()

    def _formats(self) -> Formats:
        def draw(kind: str) -> bytes:
            # Imported here, because matplotlib is optional.
            from lmx_lab.results.drawing import figure_of, write_figure

            return write_figure(figure_of(self.svg()), kind)

        return {
            **super()._formats(),
            ".svg": lambda: standalone_svg(self.svg()).encode(),
            ".png": lambda: draw("png"),
            ".pdf": lambda: draw("pdf"),
        }


def standalone_svg(svg: str) -> str:
    """Return an ``svg`` element as the content of a file, which has its own colours."""
    start, rest = re.sub(r' style="[^"]*"', "", svg.replace("currentColor", "#111"), count=1).split(" ", 1)
    return f'{start} xmlns="http://www.w3.org/2000/svg" style="background:#fff" {rest}'


# Line charts


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
        assert len(self.series) <= len(LINES)
        assert all(len(series.values) == len(self.at) for series in self.series)

    def svg(self) -> str:
        """Return the chart as an ``svg`` element, with a title and a description for screen readers. A chart without
        values is a sentence that says so.
        """
        if not self._has_values():
            return NO_VALUES
        highest = max((summary.highest for series in self.series if (summary := series.summary())), default=0.0)
        ticks = value_ticks(highest, whole=self.whole)
        # The time axis has at least 10 seconds.
        first, last = self.at[0], max(self.at[-1], self.at[0] + 10)
        bottom = HEIGHT - BOTTOM

        def place(at: float, value: float) -> tuple[float, float]:
            x = LEFT + (at - first) / (last - first) * (WIDTH - LEFT - RIGHT)
            return x, bottom - max(0.0, value) / ticks[-1] * (bottom - TOP)

        title_id, text_id = f"chart-{self.key}-title", f"chart-{self.key}-text"
        text = 'fill="#555"'
        heading = self.title if self.title.lower() == self.unit else f"{self.title}, {self.unit}"
        parts = [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            f'font-size="12" font-family="system-ui,sans-serif" aria-labelledby="{title_id} {text_id}">',
            f'<title id="{title_id}">{html_text(self.title)}</title>',
            f'<desc id="{text_id}">{html_text(self.description())}</desc>',
            f'<text x="4" y="16" {text}>{html_text(heading)}</text>',
        ]
        # A character is about 7 wide; SVG cannot measure text.
        room = (WIDTH - RIGHT - 7 * _length(heading) - 20) / max(1, len(self.series)) - 52
        names = [_clip(series.name, max(1.0, room / 7)) for series in self.series]
        widths = [_length(name) * 7 + 52 for name in names]
        left = WIDTH - RIGHT - sum(widths)
        for index, (name, width) in enumerate(zip(names, widths, strict=True)):
            parts.append(
                f'<path class="line line-{index}" fill="none" {LINES[index]} d="M{left:.1f} 12L{left + 30:.1f} 12"/>'
            )
            parts.append(f'<text x="{left + 36:.1f}" y="16" {text}>{html_text(name)}</text>')
            left += width
        decimals = max(0, -math.floor(math.log10(ticks[1]) + 1e-9))
        for tick in ticks:
            _, y = place(first, tick)
            label = f"{tick:,.{decimals}f}"
            # A longer label would extend beyond the chart.
            label = label if len(label) <= 7 else f"{tick:g}"
            parts.append(f'<path class="grid" stroke="#ccc" d="M{LEFT} {y:.1f}L{WIDTH - RIGHT} {y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" {text}>{label}</text>')
        for moment, label in time_ticks(first, last):
            x, _ = place(moment, 0)
            # A centred label at an end of the axis would extend beyond the chart.
            anchor = "start" if x < LEFT + 20 else "end" if x > WIDTH - RIGHT - 20 else "middle"
            parts.append(f'<path class="grid" stroke="#ccc" d="M{x:.1f} {bottom}L{x:.1f} {bottom + 5}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}" {text}>{label}</text>')
        for index, series in enumerate(self.series):
            lines, dots = "", ""
            for segment in segments(self.at, series.values):
                points = [f"{x:.1f} {y:.1f}" for x, y in downsample([place(*point) for point in segment])]
                if len(points) == 1:
                    # A line of length 0 with round ends is a dot.
                    dots += f"M{points[0]}L{points[0]}"
                else:
                    lines += "M" + "L".join(points)
            ends = 'fill="none" stroke-linecap="round" stroke-linejoin="round"'
            if lines:
                parts.append(f'<path class="line line-{index}" {ends} {LINES[index]} d="{lines}"/>')
            if dots:
                color = LINES[index].split()[0]
                parts.append(f'<path class="line line-{index}" {ends} {color} stroke-width="6" d="{dots}"/>')
        return "".join([*parts, "</svg>"])

    def image_html(self) -> str:
        """Return the chart as an ``img`` element with its own styles and the description as text.

        Unlike an ``svg`` element, it is shown in notebooks that are not trusted. A chart without values is a sentence.
        """
        if not self._has_values():
            return NO_VALUES
        encoded = base64.b64encode(standalone_svg(self.svg()).encode()).decode()
        text = html_text(f"{self.title}. {self.description()}")
        size = f'width="{WIDTH}" height="{HEIGHT}" style="max-width:100%;height:auto"'
        return f'<img {size} alt="{text}" src="data:image/svg+xml;base64,{encoded}">'

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


def format_time(at: float) -> str:
    """Format local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def format_clock(at: float) -> str:
    """Format the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def format_number(value: float) -> str:
    """Format a number with about three digits."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2}f}"


# Heat maps


@dataclass(frozen=True, kw_only=True)
class HeatMap(Picture):
    """A matrix of values as coloured cells."""

    title: str
    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]
    row_axis: str = ""
    column_axis: str = ""
    texts: Sequence[Sequence[str]] = field(default_factory=tuple)
    """Texts in the cells; by default none."""
    describe: Callable[[int, int], str] | None = None
    """Returns the text that is shown while the mouse is over a cell."""
    limit: float | None = None
    """The value with the full colour; by default the largest one."""
    unit: str = ""
    """What the values are, for the scale of colours below the map; without it, there is no scale."""
    cell: tuple[float, float] = (18.0, 18.0)
    """Width and height of a cell."""

    def with_values(self, digits: int = 2) -> HeatMap:
        """Return the map with the value of each cell as text, after the text that the cell has."""
        texts = [
            [
                f"{self.texts[at][column] if self.texts else ''} {format_signed(value, digits)}".strip()
                for column, value in enumerate(row)
            ]
            for at, row in enumerate(self.values)
        ]
        longest = max((_width(text) for row in texts for text in row), default=0.0)
        width, height = self.cell
        return replace(self, texts=texts, cell=(max(width, longest + 6), max(height, 14.0)))

    @property
    def _size(self) -> tuple[float, float]:
        """Width and height of a cell as it is drawn. Cells without texts are narrower if there are many."""
        width, height = self.cell
        return (width if self.texts else min(width, max(2.0, MAX_WIDTH / max(1, len(self.columns)))), height)

    @property
    def _limit(self) -> float:
        finite = [abs(value) for row in self.values for value in row if math.isfinite(value)]
        return self.limit or max(finite, default=1.0) or 1.0

    def svg(self) -> str:
        """Return the heat map as an ``svg`` element. Its labels have the colour of the surrounding text."""
        cell_width, cell_height = self._size
        width, height = cell_width * len(self.columns), cell_height * len(self.rows)
        left = 8 + max((_width(_clip(label)) for label in self.rows), default=0) + 16 * bool(self.row_axis)
        foot = 12 + max((_width(_clip(label)) for label in self.columns), default=0) + 16 * bool(self.column_axis)
        has_values = any(math.isfinite(value) for row in self.values for value in row)
        title = self.title if has_values else f"{self.title}: no values"
        # The title is bold, which makes it about 15 % wider. It is broken into lines that suit a page.
        bold = 1.15 * CHARACTER_WIDTH
        lines = textwrap.wrap(title, int(max(width, MIN_WIDTH) / bold * len(title) / max(1.0, _length(title))))
        top = 7 + 13 * max(1, len(lines))
        # A map of few columns is narrower than its texts.
        centre = max(left + width / 2, _width(self.column_axis) / 2 + 4)
        right = 8 + max(
            left + width,
            *(left + bold * _length(line) for line in lines),
            centre + _width(self.column_axis) / 2,
            left + (SCALE_WIDTH + 40 + _width(self.unit) if self.unit else 0),
        )
        bottom = top + height + foot
        parts = [
            f'<svg viewBox="0 0 {right:.0f} {bottom + 34 * bool(self.unit):.0f}" width="{right:.0f}" role="img" '
            'font-size="10" font-family="system-ui,sans-serif" style="max-width:100%;height:auto" '
            f'aria-label="{html_text(title)}">',
            *(
                f'<text x="{left:.0f}" y="{13 + 13 * at}" fill="currentColor" font-weight="700">'
                f"{html_text(line)}</text>"
                for at, line in enumerate(lines)
            ),
            *self._cells(left, top),
            *self._labels(left, top),
            *(self._scale(left, bottom + 6) if self.unit else ()),
        ]
        if self.row_axis:
            middle = max(top + height / 2, top + _width(self.row_axis) / 2)
            parts.append(
                f'<text x="10" y="{middle:.0f}" fill="currentColor" text-anchor="middle" '
                f'transform="rotate(-90 10 {middle:.0f})">{html_text(self.row_axis)}</text>'
            )
        if self.column_axis:
            parts.append(
                f'<text x="{centre:.0f}" y="{bottom - 4:.0f}" fill="currentColor" '
                f'text-anchor="middle">{html_text(self.column_axis)}</text>'
            )
        return "".join([*parts, "</svg>"])

    def _scale(self, left: float, top: float) -> list[str]:
        """Draw the colours of values, their unit, and the colour of cells without a value if there are some."""
        values, limit = [value for row in self.values for value in row], self._limit
        lowest = -limit if any(value < 0 for value in values) else 0.0
        step = SCALE_WIDTH / SCALE_STEPS
        # Each colour continues below the following ones, so that no background is visible between them.
        parts = [
            f'<path stroke="{_color(lowest + (limit - lowest) * (at + 0.5) / SCALE_STEPS, limit)}" stroke-width="8" '
            f'd="M{left + at * step:.1f} {top + 4:.1f}L{left + SCALE_WIDTH:.1f} {top + 4:.1f}"/>'
            for at in range(SCALE_STEPS)
        ]
        ticks = [lowest, (lowest + limit) / 2, limit]
        texts = [f"{tick:.3g}".replace("-", "\N{MINUS SIGN}") for tick in ticks]
        parts += [
            f'<text x="{left + at * SCALE_WIDTH / 2:.1f}" y="{top + 19:.1f}" fill="currentColor" '
            f'text-anchor="middle">{text}</text>'
            for at, text in enumerate(texts)
        ]
        missing = "" if all(map(math.isfinite, values)) else "; grey: no value"
        parts.append(
            f'<text x="{left + SCALE_WIDTH + 8:.1f}" y="{top + 8:.1f}" fill="currentColor">'
            f"{html_text(self.unit)}{missing}</text>"
        )
        return parts

    def _cells(self, left: float, top: float) -> list[str]:
        limit = self._limit
        width, height = self._size
        size = f'width="{width * len(self.columns):.1f}" height="{height * len(self.rows):.1f}"'
        parts = [f'<rect x="{left:.1f}" y="{top}" {size} fill="#fff"/>']
        for at, row in enumerate(self.values):
            for column, value in enumerate(row):
                # Less than 1 % of the full colour cannot be seen.
                if abs(value) < 0.01 * limit and not self.texts:
                    continue
                x, y = left + column * width, top + at * height
                title = "" if self.describe is None else f"<title>{html_text(self.describe(at, column))}</title>"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 0.5:.1f}" height="{height - 0.5:.1f}" '
                    f'fill="{_color(value, limit)}">{title}</rect>'
                )
                if self.texts and (text := self.texts[at][column]):
                    most = (width - 4) / CHARACTER_WIDTH
                    ink = "#fff" if math.isfinite(value) and abs(value) > 0.55 * limit else "#111"
                    parts.append(
                        f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}" fill="{ink}" '
                        f'text-anchor="middle" pointer-events="none">{html_text(_clip(text, most))}</text>'
                    )
        return parts

    def _labels(self, left: float, top: float) -> list[str]:
        width, height = self._size
        bottom = top + height * len(self.rows) + 8
        # Labels that would overlap are omitted.
        rows = range(0, len(self.rows), math.ceil(11 / height))
        columns = range(0, len(self.columns), math.ceil(11 / width))
        parts = [
            f'<text x="{left - 4:.1f}" y="{top + (at + 0.5) * height + 3.5:.1f}" fill="currentColor" '
            f'text-anchor="end">{html_text(_clip(self.rows[at]))}</text>'
            for at in rows
        ]
        for at in columns:
            x = left + (at + 0.5) * width + 3.5
            parts.append(
                f'<text x="{x:.1f}" y="{bottom:.1f}" fill="currentColor" text-anchor="end" '
                f'transform="rotate(-90 {x:.1f} {bottom:.1f})">{html_text(_clip(self.columns[at]))}</text>'
            )
        return parts


def format_signed(value: float, digits: int) -> str:
    """Format a value with a minus sign of the width of a digit; a value that is not known is empty."""
    # Adding 0 removes the sign of a negative zero.
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "\N{MINUS SIGN}") if math.isfinite(value) else ""


def _width(text: str) -> float:
    """Return the approximate width of a text in pixels."""
    return CHARACTER_WIDTH * _length(text)


def _length(text: str) -> float:
    """Return the length of a text in characters of average width."""
    # Chinese, Japanese and Korean characters and emoji are wide.
    return sum(
        1.9 if unicodedata.east_asian_width(character) in "WF" else 1.2 if character.isupper() else 1.0
        for character in text
    )


def _clip(text: str, most: float = 14) -> str:
    """Shorten a text to a number of characters of average width."""
    if _length(text) <= most:
        return text
    while text and _length(text) > most - 1:
        text = text[:-1]
    return f"{text}…"


def _color(value: float, limit: float) -> str:
    if not math.isfinite(value):
        return "#ddd"
    share = min(1.0, abs(value) / limit)
    start, end = SEQUENTIAL[0], SEQUENTIAL[1] if value >= 0 else NEGATIVE
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(start, end, strict=True))
