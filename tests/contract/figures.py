"""Draw values with each renderer of figures, and read what the figure shows."""

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Text

from benchmarks import curves, page
from benchmarks.report import Row
from lmx_lab.batch.answers import RowAnswer
from lmx_lab.bench import by_concurrency, by_prompt_length
from lmx_lab.evals.evaluation import Evaluation
from lmx_lab.evals.rows import EvaluatedRow, RunFacts
from lmx_lab.instrument import probes
from lmx_lab.instrument.patching import PatchSweep
from lmx_lab.instrument.probes import LayerActivations, Probe, ProbeRun
from lmx_lab.instrument.traces import AttentionPattern, LogitAttribution, LogitLensTable
from lmx_lab.results import figures
from lmx_lab.results.drawing import figure_of
from lmx_lab.results.figures import HeatMap, LineChart, Series
from lmx_lab.values.tracing import Trace
from tests.support.samples import sample

NAME = "lab"
SVG = "{http://www.w3.org/2000/svg}"
METRICS = ("ttft_ms", "e2e_ms")
Place = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a figure in pixels or in units of its ``viewBox``; ``top`` is less than ``bottom``."""

    left: float
    top: float
    right: float
    bottom: float

    def contains(self, place):
        # Coordinates in an SVG have one decimal.
        return self.left - 0.1 <= place[0] <= self.right + 0.1 and self.top - 0.1 <= place[1] <= self.bottom + 0.1


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What one coordinate system of a figure shows."""

    page: Box
    area: Box
    """The drawing area, which contains the values."""
    places: Sequence[Place]
    """The place of each value that is drawn."""
    ends: Sequence[Place] = ()
    """The ends of intervals."""
    levels: Sequence[float]
    """How strongly a value is shown, from 0 to 1: its height above the axis, or the strength of its colour."""
    lines: int = 0
    """Number of separate lines; 0 if the values are not connected."""
    texts: Sequence[str]


class Renderer:
    """Draws the values of one series with a function of the project, and reads the figure.

    ``can`` contains what is not true of all renderers:

    - ``large``: values are not limited to 1
    - ``missing``: NaN is a value that is not known
    - ``ratio``: levels have the ratio of the values, because the axis is linear and begins at 0
    - ``line``: values are connected
    - ``empty``: there may be no values
    - ``name``: values have a name of the user
    """

    name: str
    can = frozenset()

    def draw(self, values, name=NAME):
        raise NotImplementedError

    def pictures(self, figure):
        raise NotImplementedError

    def texts(self, figure):
        """Return all texts of a figure that a reader sees."""
        raise NotImplementedError


class Html(Renderer):
    """Figures that are HTML with one SVG, or with several, of which the first is read."""

    def pictures(self, figure):
        if (root := parse_svg(figure)) is not None:
            left, top, width, height = map(float, root.get("viewBox", "").split())
            page = Box(left=left, top=top, right=left + width, bottom=top + height)
            yield self._picture(root, page, [text for text in map(inner_text, root.iter(f"{SVG}text")) if text])

    def texts(self, figure):
        return " ".join(
            [*re.findall(r"<(?:p|div)>(.*?)<", figure), *(t for each in self.pictures(figure) for t in each.texts)]
        )

    def _picture(self, root, page, texts):
        raise NotImplementedError


def svg_of(html):
    """Return the first SVG of a figure, also of an image, with its namespace; empty if there is none."""
    if image := re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html):
        html = base64.b64decode(image[1]).decode()
    found = re.search(r"<svg.*?</svg>", html, re.DOTALL)
    if not found:
        return ""
    # Only SVG outside of HTML needs the name.
    return found[0] if "xmlns=" in found[0] else found[0].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)


def parse_svg(html):
    """Return the first SVG of a figure; None if there is none."""
    return ElementTree.fromstring(svg) if (svg := svg_of(html)) else None


def drawn_texts(drawn):
    """Return the texts of a figure with their boxes, without the labels of ticks that are outside of the axes. The
    first box is that of the figure.
    """
    figure = figure_of(svg_of(drawn)) if isinstance(drawn, str) else drawn
    pixels_of(figure)
    hidden = set()
    for axes in figure.axes:
        for axis in axes.xaxis, axes.yaxis:
            low, high = sorted(axis.get_view_interval())
            margin = 1e-6 * (high - low)
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            hidden |= {tick.label1 for tick in ticks if not low - margin <= tick.get_loc() <= high + margin}
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()]
    shown = [text for text in texts if text.get_text().strip() and text not in hidden]
    return [("", figure.bbox), *((text.get_text(), text.get_window_extent()) for text in shown)]


def inner_text(element):
    return "".join(element.itertext())


def steps(path):
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", path.get("d", ""))]


def heights(places, area):
    return [(area.bottom - y) / (area.bottom - area.top) for _, y in places]


class Line(Html):
    name, can = "line chart", frozenset({"empty", "large", "missing", "ratio", "line", "name"})

    def draw(self, values, name=NAME):
        return self.chart(values, name).svg()

    def chart(self, values, name=NAME, *, first=0.0):
        times = [first + at for at in range(len(values))]
        return LineChart(key="k", title="Speed", unit="tok/s", at=times, series=[Series(name=name, values=values)])

    def _picture(self, root, page, texts):
        area = Box(
            left=figures.LEFT,
            top=figures.TOP,
            right=figures.WIDTH - figures.RIGHT,
            bottom=figures.HEIGHT - figures.BOTTOM,
        )
        # The first line is in the legend.
        _, *paths = [path for path in root.iter(f"{SVG}path") if "line-0" in path.get("class", "")]
        # The line of a dot begins and ends at the same place.
        places = list(dict.fromkeys(place for path in paths for place in steps(path)))
        parts = sum(path.get("d", "").count("M") for path in paths)
        return Picture(page=page, area=area, places=places, levels=heights(places, area), lines=parts, texts=texts)


class LineImage(Line):
    name = "line chart as an image"

    def draw(self, values, name=NAME):
        return self.chart(values, name).image_html()


class ProbeChart(Html):
    name, can = "probe", frozenset({"ratio", "line"})

    def draw(self, values, name=NAME):
        run = ProbeRun(["one", "two", "three", "four"], [0, 1, 0, 1], folds=2)
        layers = {layer: [value * 0.9, value * 1.1] for layer, value in enumerate(values)}
        return Probe(layers, run, LayerActivations(4, list(layers), 1))._repr_html_()

    def _picture(self, root, page, texts):
        area = Box(
            left=probes.LEFT, top=probes.TOP, right=probes.WIDTH - probes.RIGHT, bottom=probes.HEIGHT - probes.BOTTOM
        )
        paths = [(path.get("class"), path.get("stroke"), steps(path)) for path in root.iter(f"{SVG}path")]
        places = [drawn[0] for name, _, drawn in paths if name == "dot"]
        assert [drawn for name, _, drawn in paths if name == "line"] == [places]
        ends = [end for name, color, drawn in paths if name is None and color == probes.COLOR for end in drawn]
        levels = heights(places, area)
        return Picture(page=page, area=area, places=places, ends=ends, levels=levels, lines=1, texts=texts)


class Cells(Html):
    """A heat map, of which one row shows the values. Values of 0 are white, like the background, and are not read."""

    name, can = "heat map", frozenset({"empty", "large", "missing", "ratio", "name"})

    def draw(self, values, name=NAME):
        columns = [str(at) for at in range(len(values))]
        return HeatMap(title="Values", values=[values], rows=[name], columns=columns, row_axis="row").svg()

    def _picture(self, root, page, texts):
        (area, _), *cells = map(rectangle, root.iter(f"{SVG}rect"))
        corners = [corner for box, _ in cells for corner in ((box.left, box.top), (box.right, box.bottom))]
        known = [(box, color) for box, color in cells if color not in ("#ddd", "#ffffff")]
        places = [((box.left + box.right) / 2, (box.top + box.bottom) / 2) for box, _ in known]
        levels = [(255 - int(color[1:3], 16)) / (255 - figures.SEQUENTIAL[1][0]) for _, color in known]
        return Picture(page=page, area=area, places=places, ends=corners, levels=levels, texts=texts)


class CellsWithValues(Cells):
    name = "heat map with values"

    def draw(self, values, name=NAME):
        columns = [str(at) for at in range(len(values))]
        drawn = HeatMap(title="Values", values=[values], rows=[name], columns=columns, row_axis="row", unit="unit")
        return drawn.with_values().svg()


def rectangle(element):
    x, y, width, height = (float(element.get(name, "")) for name in ("x", "y", "width", "height"))
    return Box(left=x, top=y, right=x + width, bottom=y + height), element.get("fill", "")


def trace(values, name, details, **arrays):
    """Return the result of a trace of a text with a token for each value."""
    places = range(len(values))
    return Trace(
        model=name,
        tokens=tuple(places),
        texts=tuple(f" {at}" for at in places),
        arrays={hook: np.asarray(array, np.float32) for hook, array in arrays.items()},
        details={"positions": list(places), **details},
    )


class Attention(Cells):
    name, can = "attention", frozenset({"ratio", "name"})

    def draw(self, values, name=NAME):
        pattern = np.zeros((len(values), 1, len(values)))
        pattern[-1:] = values
        return AttentionPattern(
            trace(values, name, {}, **{"blocks.0.attn.hook_pattern": pattern}), head=0
        )._repr_html_()


class Patching(Cells):
    name, can = "patching", frozenset({"large", "missing", "ratio", "name"})

    def draw(self, values, name=NAME):
        details = {"names": ["blocks.0.hook_resid_post"], "heads": [None], "clean": [1.0, 0.0], "corrupt": [0.0, 0.0]}
        return PatchSweep(trace(values, name, details, logits=[[[value, 0.0] for value in values]]))._repr_html_()


class Attribution(Cells):
    name, can = "attribution", frozenset({"large", "ratio", "name"})

    def draw(self, values, name=NAME):
        details = {"logit": 1.0, "embedding": 0.0, "bias": 0.0}
        given = trace(values, name, details, heads=[values], attention=[0.0], mlp=[0.0])
        return LogitAttribution(given, label="' Paris' minus ' Rome'")._repr_html_()


class Lens(Cells):
    name, can = "logit lens", frozenset({"ratio", "name"})

    def draw(self, values, name=NAME):
        logprobs = [[[math.log(value) if value else -math.inf] for value in values]]
        given = trace(values, name, {"texts": {"0.0": " word"}}, ids=np.zeros_like(logprobs), logprobs=logprobs)
        return LogitLensTable(given)._repr_html_()


class Matplotlib(Renderer):
    """Figures of matplotlib, each of whose axes shows the values."""

    def pictures(self, figure):
        pixels_of(figure)
        for axes in figure.axes:
            box, height = axes.bbox, figure.bbox.height
            area = Box(left=box.x0, top=height - box.y1, right=box.x1, bottom=height - box.y0)
            drawn = points_of(axes)
            places = [place for points in drawn for place in places_of(axes, points)]
            intervals = [each for each in axes.containers if isinstance(each, ErrorbarContainer)]
            ends = [ends for each in intervals for bars in each.lines[2] for ends in bars.get_segments()]
            yield Picture(
                page=Box(left=0, top=0, right=figure.bbox.width, bottom=height),
                area=area,
                places=places,
                ends=[place for each in ends for place in places_of(axes, each)],
                levels=heights(places, area),
                lines=sum(
                    int((np.diff(np.isfinite(points[:, 1]).astype(int), prepend=0) == 1).sum()) for points in drawn
                ),
                texts=texts_of(figure),
            )

    def texts(self, figure):
        return " ".join(texts_of(figure))


def points_of(axes):
    """Return the coordinates of the values of each line and each bar."""
    lines = [np.asarray(line.get_xydata()) for line in axes.lines if line.get_marker() in page.MARKERS]
    bars = [np.array([[bar.get_x() + bar.get_width() / 2, bar.get_height()]]) for bar in axes.patches]
    return [*lines, *bars]


def pixels_of(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def places_of(axes, points):
    """Return the pixels of points of the data that are finite."""
    placed = axes.transData.transform(np.asarray(points, float).reshape(-1, 2))
    height = axes.figure.bbox.height
    return [(float(x), float(height - y)) for x, y in placed if math.isfinite(y)]


def texts_of(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


class Concurrency(Matplotlib):
    """Two plots of the values, each of which is the median of seven requests."""

    name, can = "by_concurrency", frozenset({"empty", "large", "missing", "ratio", "line", "name"})
    plot = staticmethod(by_concurrency)

    def draw(self, values, name=NAME):
        cases = [{"target": name, "concurrency": 2**at} for at in range(len(values))]
        return self.bench(values, cases)

    def bench(self, values, cases):
        samples = [
            sample(**case, **dict.fromkeys(METRICS, None if math.isnan(value) else value * factor))
            for value, case in zip(values, cases, strict=True)
            for factor in (0.8, 0.8, 0.9, 1, 1.1, 1.2, 1.2)
        ]
        return self.plot(samples, metrics=METRICS)


class PromptLength(Concurrency):
    name = "by_prompt_length"
    plot = staticmethod(by_prompt_length)

    def draw(self, values, name=NAME):
        return self.bench(values, [{"target": name, "prompt_tokens_wanted": 16 * 2**at} for at in range(len(values))])


class Bars(Concurrency):
    name, can = "by_concurrency with one value", frozenset({"large", "missing", "ratio", "name"})

    def draw(self, values, name=NAME):
        return self.bench(values, [{"target": f"{name}{at or ''}"} for at in range(len(values))])


class Calibration(Matplotlib):
    name, can = "calibration", frozenset({"empty", "line", "name"})

    def draw(self, values, name=NAME):
        facts = RunFacts(
            at=0, name=name, model="m", engine="echo", weights="", settings={}, frame="", versions={}, machine=""
        )
        rows = [
            EvaluatedRow(
                label=at,
                prompt="p",
                expected="a",
                answer="a",
                score=value,
                choices=["a", "b"],
                answered=RowAnswer(logprobs=[math.log(probability), math.log(1 - probability)]),
            )
            for at, value in enumerate(values)
            for probability in [0.05 + 0.9 * at / len(values)]
        ]
        figure = Evaluation(facts, rows).plot_calibration()
        assert figure is not None
        return figure


class Curves(Matplotlib):
    name, can = "benchmarks page", frozenset({"large", "line"})

    def draw(self, values, name=NAME):
        rows = [
            Row(figure=curves.STREAMS, case="", model="m", value=value, detail={"server": name, "x": 2**at})
            for at, value in enumerate(values)
        ]
        return page.chart(curves.STREAMS, rows)


RENDERERS = (
    Line(),
    LineImage(),
    ProbeChart(),
    Cells(),
    CellsWithValues(),
    Attention(),
    Patching(),
    Attribution(),
    Lens(),
    Concurrency(),
    PromptLength(),
    Bars(),
    Calibration(),
    Curves(),
)
