"""Draw heat maps as inline SVG, without scripts or external files."""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Rgb = tuple[int, int, int]
SEQUENTIAL: tuple[Rgb, Rgb] = ((255, 255, 255), (8, 81, 156))
"""The colours of 0 and the largest value."""
NEGATIVE: Rgb = (178, 24, 43)
"""The colour of the smallest value if there are negative ones."""
MISSING = "#ddd"
CHARACTER_WIDTH = 6.2
"""Approximate width of a character of 10 px, because SVG cannot measure text."""
WIDE = 1.7
"""Width of a Chinese, Japanese or Korean character or an emoji, in characters of average width."""
BOLD = 1.15
"""Relative width of bold text."""
LABEL_CHARACTERS = 14
INVISIBLE = 0.01
"""Fraction of the full colour below which a cell without text is not drawn."""
DARK = 0.55
"""Fraction of the full colour above which text is white."""


@dataclass(frozen=True, kw_only=True)
class HeatMap:
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
    cell: tuple[float, float] = (18.0, 18.0)
    """Width and height of a cell."""

    def svg(self) -> str:
        """Return the heat map as an ``svg`` element. Its labels have the colour of the surrounding text."""
        width, height = self.cell[0] * len(self.columns), self.cell[1] * len(self.rows)
        left = 8 + max((_width(_clip(label)) for label in self.rows), default=0) + 16 * bool(self.row_axis)
        foot = 12 + max((_width(_clip(label)) for label in self.columns), default=0) + 16 * bool(self.column_axis)
        has_values = any(math.isfinite(value) for row in self.values for value in row)
        title = self.title if has_values else f"{self.title}: no values"
        # A map of few columns is narrower than its texts.
        centre = max(left + width / 2, _width(self.column_axis) / 2 + 4)
        right = max(left + width, left + BOLD * _width(title), centre + _width(self.column_axis) / 2) + 8
        bottom = 20 + height + foot
        parts = [
            f'<svg viewBox="0 0 {right:.0f} {bottom:.0f}" width="{right:.0f}" role="img" '
            'style="max-width:100%;height:auto;font:10px system-ui,sans-serif" '
            f'aria-label="{html.escape(title)}">',
            f'<text x="{left:.0f}" y="13" fill="currentColor" font-weight="600">{html.escape(title)}</text>',
            *self._cells(left),
            *self._labels(left),
        ]
        if self.row_axis:
            middle = 20 + height / 2
            parts.append(
                f'<text x="10" y="{middle:.0f}" fill="currentColor" text-anchor="middle" '
                f'transform="rotate(-90 10 {middle:.0f})">{html.escape(self.row_axis)}</text>'
            )
        if self.column_axis:
            parts.append(
                f'<text x="{centre:.0f}" y="{bottom - 4:.0f}" fill="currentColor" '
                f'text-anchor="middle">{html.escape(self.column_axis)}</text>'
            )
        return "".join([*parts, "</svg>"])

    def _cells(self, left: float) -> list[str]:
        finite = [abs(value) for row in self.values for value in row if math.isfinite(value)]
        limit = self.limit or max(finite, default=1.0) or 1.0
        width, height = self.cell
        size = f'width="{width * len(self.columns):.1f}" height="{height * len(self.rows):.1f}"'
        parts = [f'<rect x="{left:.1f}" y="20" {size} fill="#fff"/>']
        for at, row in enumerate(self.values):
            for column, value in enumerate(row):
                if abs(value) < INVISIBLE * limit and not self.texts:
                    continue
                x, y = left + column * width, 20 + at * height
                title = "" if self.describe is None else f"<title>{html.escape(self.describe(at, column))}</title>"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 0.5:.1f}" height="{height - 0.5:.1f}" '
                    f'fill="{_color(value, limit)}">{title}</rect>'
                )
                if self.texts and (text := self.texts[at][column]):
                    most = (width - 4) / CHARACTER_WIDTH
                    ink = "#fff" if math.isfinite(value) and abs(value) > DARK * limit else "#111"
                    parts.append(
                        f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}" fill="{ink}" '
                        f'text-anchor="middle" pointer-events="none">{html.escape(_clip(text, most))}</text>'
                    )
        return parts

    def _labels(self, left: float) -> list[str]:
        width, height = self.cell
        bottom = 20 + height * len(self.rows) + 8
        parts = [
            f'<text x="{left - 4:.1f}" y="{20 + (at + 0.5) * height + 3.5:.1f}" fill="currentColor" '
            f'text-anchor="end">{html.escape(_clip(label))}</text>'
            for at, label in enumerate(self.rows)
        ]
        for at, label in enumerate(self.columns):
            x = left + (at + 0.5) * width + 3.5
            parts.append(
                f'<text x="{x:.1f}" y="{bottom:.1f}" fill="currentColor" text-anchor="end" '
                f'transform="rotate(-90 {x:.1f} {bottom:.1f})">{html.escape(_clip(label))}</text>'
            )
        return parts


def _width(text: str) -> float:
    """Return the approximate width of a text in pixels."""
    return CHARACTER_WIDTH * _length(text)


def _length(text: str) -> float:
    """Return the length of a text in characters of average width."""
    return sum(WIDE if unicodedata.east_asian_width(character) in "WF" else 1.0 for character in text)


def _clip(text: str, most: float = LABEL_CHARACTERS) -> str:
    """Shorten a text to a number of characters of average width."""
    if _length(text) <= most:
        return text
    while text and _length(text) > most - 1:
        text = text[:-1]
    return f"{text}…"


def _color(value: float, limit: float) -> str:
    if not math.isfinite(value):
        return MISSING
    share = min(1.0, abs(value) / limit)
    start, end = SEQUENTIAL[0], SEQUENTIAL[1] if value >= 0 else NEGATIVE
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(start, end, strict=True))
