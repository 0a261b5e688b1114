"""Draw with matplotlib: figures that notebooks display, and SVG in other formats.

pyplot is not used: it keeps each figure in memory until it is closed, and notebooks would display figures twice.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from lmx_lab.errors import InvalidRequestError
from lmx_lab.extras import optional_imports
from lmx_lab.results.pages import Displayed, Formats

with optional_imports("a plot"):
    import matplotlib as mpl
    from matplotlib import font_manager
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

if TYPE_CHECKING:
    from matplotlib.text import Text

WIDE_FONTS = ("Noto Sans CJK JP", "Noto Sans JP", "Hiragino Sans", "PingFang SC", "Yu Gothic", "Microsoft YaHei")
"""Fonts with Chinese and Japanese characters, which matplotlib's own font does not have."""
PIXELS_PER_INCH = 96


class NotebookFigure(Displayed, Figure):
    """A matplotlib figure that notebooks display without pyplot."""

    def _repr_png_(self) -> bytes:
        return write_figure(self, "png", dpi=110)

    def _formats(self) -> Formats:
        pictures = {f".{kind}": partial(write_figure, self, kind) for kind in ("svg", "png", "pdf")}
        return {**super()._formats(), **pictures}


def write_figure(figure: Figure, kind: str, dpi: int = 300) -> bytes:
    """Return the content of a file. In a PDF, texts can be selected and edited."""
    content = io.BytesIO()
    with mpl.rc_context({"pdf.fonttype": 42}):
        # Images are limited to 65,535 pixels in each direction.
        figure.savefig(content, format=kind, dpi=min(dpi, 65_000 / max(figure.get_size_inches())))
    return content.getvalue()


def fonts(scale: float = 1.0) -> AbstractContextManager[None]:
    """Return a context in which new texts also have the installed fonts with wide characters.

    Args:
        scale: The size of texts, compared with those of 10 points; at least 6 points are used.
    """
    installed = set(font_manager.get_font_names())
    families = [*mpl.rcParams["font.family"], *(name for name in WIDE_FONTS if name in installed)]
    return mpl.rc_context({"font.family": families, "font.size": max(6.0, 10.0 * min(1.0, scale))})


def size_in_inches(size: Sequence[float]) -> tuple[float, float]:
    """Return the width and the height of a figure.

    Raises:
        InvalidRequestError: it is not a width and a height from 1 to 100 inches.
    """
    with suppress(TypeError, ValueError):
        width, height = map(float, () if isinstance(size, str) else size)
        if 1 <= width <= 100 and 1 <= height <= 100:
            return width, height
    raise InvalidRequestError(
        f"size is {size!r:.80}; give the width and the height in inches, each from 1 to 100", param="size"
    )


def fit(text: Text, pixels: float) -> None:
    """Break a text into lines that are not longer than a number of pixels."""
    lines = text.get_text().split("\n")
    for characters in range(max(map(len, lines), default=0), 7, -1):
        text.set_text("\n".join(textwrap.fill(line, characters) for line in lines))
        box = text.get_window_extent()
        if (box.height if text.get_rotation() == 90 else box.width) <= pixels:
            return


def figure_of(svg: str) -> NotebookFigure:
    """Draw an SVG whose elements are rectangles, texts and paths of straight lines, like those of this package."""
    root = ElementTree.fromstring(svg.replace("currentColor", "#111"))
    _, _, width, height = map(float, root.get("viewBox", "").split())
    figure = NotebookFigure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0))
    font_px = float(root.get("font-size", "12"))
    with fonts():
        for element in root.iter():
            match element.tag.rpartition("}")[2]:
                case "rect":
                    x, y, wide, high = (float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
                    axes.add_patch(Rectangle((x, y), wide, high, facecolor=element.get("fill", "#000"), linewidth=0))
                case "text":
                    x, y = float(element.get("x", "0")), float(element.get("y", "0"))
                    align: dict[str, Any] = {"start": "left", "middle": "center", "end": "right"}
                    turned = "rotate" in element.get("transform", "")
                    axes.text(
                        x,
                        y,
                        element.text or "",
                        fontsize=font_px * 72 / PIXELS_PER_INCH,
                        fontweight=int(element.get("font-weight", "400")),
                        color=element.get("fill", "#000"),
                        horizontalalignment=align[element.get("text-anchor", "start")],
                        verticalalignment="baseline",
                        rotation=90 if turned else 0,
                        rotation_mode="anchor",
                        # Two dollar signs would be a formula.
                        parse_math=False,
                    )
                case "path":
                    # NaN separates the parts of a path.
                    steps = re.findall(r"([ML])([-\d.]+) ([-\d.]+)", element.get("d", ""))
                    parts = [([math.nan] * (command == "M") + [float(x)], float(y)) for command, x, y in steps]
                    dashes = [float(length) for length in element.get("stroke-dasharray", "").split()]
                    stroke = float(element.get("stroke-width", "1"))
                    is_round = element.get("stroke-linecap") == "round" and not dashes
                    axes.plot(
                        [x for xs, _ in parts for x in xs],
                        [y for xs, y in parts for _ in xs],
                        color=element.get("stroke", "#000"),
                        linewidth=stroke * 72 / PIXELS_PER_INCH,
                        linestyle=(0, [length / stroke for length in dashes]) if dashes else "-",
                        # matplotlib does not draw lines of length 0, which are dots.
                        marker="o" if is_round else "",
                        markersize=stroke * 72 / PIXELS_PER_INCH,
                        markeredgewidth=0,
                    )
    return figure
