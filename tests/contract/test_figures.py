"""Contract of figures: values are inside the limits and visible, texts are complete, and no renderer is missing."""

import ast
import io
import itertools
import math
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from benchmarks import curves, page
from benchmarks.report import Row
from lmx_lab.bench import by_concurrency
from lmx_lab.bench.plots import MAX_LINES
from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook.report import CSS as PAGE_CSS
from lmx_lab.results.figures import LINES, LineChart, Series
from tests.contract.figures import RENDERERS, Cells, Html, Line, Matplotlib, Renderer, drawn_texts, parse_svg, pixels_of
from tests.support.browser import chromium
from tests.support.programs import run_script
from tests.support.samples import run_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
FIGURE_TYPES = {"Figure", "NotebookFigure", "HeatMap"}
VALUES = {
    "rising": [0.25, 0.5, 1.0],
    "falling": [1.0, 0.75, 0.5, 0.25],
    "constant": [0.5, 0.5, 0.5, 0.5],
    "peak": [0.1, 0.1, 1.0, 0.1, 0.1],
    "one": [0.5],
}
MIN_PIXELS = 10
"""Half of a dot, because the first value may be at the edge of the drawing area."""
HOSTILE = "<b>&\"$1$^'{"
LONG = "A WIDE NAME, " * 6
WIDE = "長い名前と絵文字🙂" * 3
AWKWARD = {
    "a name of one word": ([0.25, 0.5, 1.0], LONG.replace(" ", "_")),
    "a name of many words": ([0.25, 0.5, 1.0], LONG),
    "a wide name": ([0.25, 0.5, 1.0], "\N{FULLWIDTH LATIN CAPITAL LETTER W}" * 20),
    "one value": ([0.5], LONG),
    "twelve values": ([at / 12 for at in range(1, 13)], "lab"),
}
NO_VALUES = re.compile("no values|No measurements|not known|nothing to plot|no choices")
TEXTS_THAT_ARE_CUT = """(svg) => {
    const page = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter((text) => {
        const box = text.getBoundingClientRect();
        return box.left < page.left - 1 || box.right > page.right + 1
            || box.top < page.top - 1 || box.bottom > page.bottom + 1;
    }).map((text) => text.textContent);
}"""


def all_renderers(*abilities, kind=Renderer):
    """Run a test with each renderer of a kind that has the abilities."""
    found = [each for each in RENDERERS if isinstance(each, kind) and each.can.issuperset(abilities)]
    return pytest.mark.parametrize("renderer", found, ids=[renderer.name for renderer in found])


def blue(pixels):
    """Return the number of pixels in the colour of the first line, or of cells of at least half the largest value."""
    return int((pixels[..., 2].astype(int) - pixels[..., 0] > 60).sum())


def inside(pixels, area, scale=1.0):
    top, bottom, left, right = (round(scale * each) for each in (area.top, area.bottom, area.left, area.right))
    return pixels[max(0, top) : bottom + 1, max(0, left) : right + 1]


@pytest.mark.parametrize("shape", VALUES)
@all_renderers()
def test_every_value_is_inside_the_limits_at_its_size(renderer, shape):
    check_values(renderer, VALUES[shape])


@pytest.mark.parametrize("unit", [1e-6, 1e9])
@all_renderers("large")
def test_very_small_and_large_values_are_inside_the_limits(renderer, unit):
    check_values(renderer, [unit * value for value in VALUES["rising"]])


def check_values(renderer, values):
    pictures = list(renderer.pictures(renderer.draw(values)))
    assert pictures
    for picture in pictures:
        assert len(picture.places) == len(values)
        assert [place for place in (*picture.places, *picture.ends) if not picture.area.contains(place)] == []
        assert picture.page.contains((picture.area.left, picture.area.top))
        assert picture.page.contains((picture.area.right, picture.area.bottom))
        assert [value for _, value in sorted(zip(picture.levels, values, strict=True))] == sorted(values)
        if "ratio" in renderer.can:
            assert max(picture.levels) > 0.4
            levels = [level / max(picture.levels) for level in picture.levels]
            assert levels == pytest.approx([value / max(values) for value in values], abs=0.01)


@all_renderers("ratio")
def test_values_of_zero_are_on_the_axis(renderer):
    for picture in renderer.pictures(renderer.draw([0.0, 0.0])):
        assert all(map(picture.area.contains, picture.places))
        assert picture.levels == pytest.approx([0.0] * len(picture.places), abs=0.01)
        assert len(picture.places) == (0 if isinstance(renderer, Cells) else 2)


@given(st.lists(st.floats(0, 1e12) | st.just(math.nan), min_size=1, max_size=40), st.floats(0, 1e10))
def test_any_values_are_inside_the_limits_of_an_svg(values, first):
    drawn = [(Line(), Line().chart(values, first=first).svg()), (Cells(), Cells().draw(values))]
    for renderer, figure in drawn:
        for picture in renderer.pictures(figure):
            assert all(map(picture.area.contains, (*picture.places, *picture.ends)))


@pytest.mark.parametrize("shape", ["rising", "one"])
@all_renderers(kind=Matplotlib)
def test_the_drawing_area_of_a_plot_has_the_colour_of_the_data(renderer, shape):
    # Values above 1, to which matplotlib's axes reach without data.
    unit = 100.0 if "large" in renderer.can else 1.0
    figure = renderer.draw([unit * value for value in VALUES[shape]])
    pixels = pixels_of(figure)
    assert all(blue(inside(pixels, picture.area)) > MIN_PIXELS for picture in renderer.pictures(figure))


@all_renderers("missing", kind=Matplotlib)
def test_the_drawing_area_of_a_plot_without_values_has_no_colour(renderer):
    figure = renderer.draw([math.nan, math.nan])
    pixels = pixels_of(figure)
    assert not any(blue(inside(pixels, picture.area)) for picture in renderer.pictures(figure))


def test_a_browser_shows_the_data_and_all_texts_of_html_figures():
    drawn = [
        (renderer, renderer.draw(values, WIDE + LONG if isinstance(renderer, Cells) else "lab"))
        for renderer in RENDERERS
        if isinstance(renderer, Html)
        for values in ([0.5, 0.75, 1.0, 0.8], [0.7])
    ]
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1600, "height": 1200})
        tab.set_content(f"<style>{PAGE_CSS} figure {{ width: 1500px }}</style>")
        for renderer, figure in drawn:
            (picture,) = renderer.pictures(figure)
            tab.locator("body").evaluate("(body, html) => { body.innerHTML = html }", f"<figure>{figure}</figure>")
            shown = tab.locator("svg, img").first
            pixels = (255 * imread(io.BytesIO(shown.screenshot()))).astype(int)
            scale = pixels.shape[1] / picture.page.right
            assert blue(inside(pixels, picture.area, scale)) > MIN_PIXELS, renderer.name
            if not figure.startswith("<img"):
                assert shown.evaluate(TEXTS_THAT_ARE_CUT) == [], renderer.name


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("case", AWKWARD)
@all_renderers()
def test_no_text_is_cut_or_covers_another(renderer, case):
    values, name = AWKWARD[case]
    check_texts(renderer.draw(values, name if "name" in renderer.can else "lab"))


@all_renderers(kind=Html)
def test_no_label_of_200_values_covers_another(renderer):
    check_texts(renderer.draw([at / 200 for at in range(1, 201)]))


def check_texts(figure):
    (_, page), *texts = drawn_texts(figure)
    assert texts
    assert [text for text, box in texts if min(box.x0, box.y0, page.x1 - box.x1, page.y1 - box.y1) < -1] == []
    covered = [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(texts, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]
    assert covered == []


@all_renderers("missing")
def test_a_gap_is_not_drawn(renderer):
    for picture in renderer.pictures(renderer.draw([0.5, 0.75, math.nan, 1.0, 0.5])):
        assert len(picture.places) == 4
        assert all(map(picture.area.contains, picture.places))
        if "line" in renderer.can:
            assert picture.lines == 2


@all_renderers("line")
def test_values_without_a_gap_are_one_line(renderer):
    assert {picture.lines for picture in renderer.pictures(renderer.draw([0.5, 0.75, 1.0]))} == {1}


@all_renderers("missing")
def test_a_figure_without_known_values_says_so(renderer):
    for values in ([math.nan], [math.nan, math.nan]):
        figure = renderer.draw(values)
        assert NO_VALUES.search(renderer.texts(figure))
        assert not any(picture.places for picture in renderer.pictures(figure))


@all_renderers("empty")
def test_a_figure_of_no_values_says_so_or_is_refused(renderer):
    try:
        words = renderer.texts(renderer.draw([]))
    except InvalidRequestError as exc:
        words = str(exc)
    assert NO_VALUES.search(words)


@all_renderers("name")
def test_names_are_shown_as_they_are(renderer):
    figure = renderer.draw([0.25, 0.5], HOSTILE)
    assert HOSTILE in renderer.texts(figure)
    if isinstance(figure, Figure):
        drawn = [text for text in figure.findobj(Text) if text.get_parse_math()]
        assert [text.get_text() for text in drawn if is_math_text(text.get_text())] == []
    else:
        assert "<b>" not in figure


@all_renderers(kind=Html)
def test_an_svg_is_described_in_words(renderer):
    root = parse_svg(renderer.draw([0.25, 0.5]))
    assert root.get("role") == "img"
    texts = {node.get("id", ""): node.text or "" for node in root.iter()}
    names = root.get("aria-labelledby", "").split()
    descriptions = [texts[name] for name in names] if names else [root.get("aria-label")]
    assert all(descriptions)


def test_lines_of_a_chart_differ_without_their_colours_and_others_are_refused():
    assert len({re.sub(r'stroke="[^"]*"', "", style) for style in LINES}) == len(LINES)
    with pytest.raises(AssertionError):
        LineChart(key="k", title="t", unit="u", at=[0], series=[Series(name="n", values=[1])] * (len(LINES) + 1))


def test_lines_and_bars_of_a_plot_have_their_own_styles_and_more_are_refused():
    def samples(count, *users):
        return [one for at in range(count) for each in users for one in run_of([1.0], target=f"{at}", concurrency=each)]

    (lines,) = by_concurrency(samples(MAX_LINES, 1, 2), metrics=("ttft_ms",)).axes
    styles = [(line.get_color(), line.get_marker()) for line in lines.lines if line.get_marker() not in ("_", "None")]
    assert len(styles) == len(set(styles)) == MAX_LINES
    assert all(one[1] != other[1] for one, other in itertools.pairwise(styles))
    (bars,) = by_concurrency(samples(MAX_LINES, 1), metrics=("ttft_ms",)).axes
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars.patches}) == MAX_LINES
    with pytest.raises(InvalidRequestError, match=f"{MAX_LINES + 1} lines; the limit is {MAX_LINES}"):
        by_concurrency(samples(MAX_LINES + 1, 1))


def test_a_chart_of_the_benchmarks_has_a_line_for_each_server():
    rows = [
        Row(figure=curves.STREAMS, case="", model="m", value=1.0 + at, detail={"server": f"server {at}", "x": x})
        for at in range(8)
        for x in (1, 2)
    ]
    (axes,) = page.chart(curves.STREAMS, rows).axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 8


def test_figures_need_neither_pyplot_nor_another_host():
    code = (
        "import sys; from tests.contract.figures import RENDERERS, Matplotlib;"
        "drawn = [(renderer, renderer.draw([0.5, 1.0])) for renderer in RENDERERS];"
        "print({figure._repr_png_()[:4] for _, figure in drawn if hasattr(figure, '_repr_png_')});"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    assert run_script(code) == "{b'\\x89PNG'}\nFalse\n"
    for renderer in RENDERERS:
        if isinstance(renderer, Html):
            figure = renderer.draw([0.5, 1.0])
            assert not re.search(r"<script|href=|@import|url\(|src=\"(?!data:)", figure)


def test_every_function_that_makes_a_figure_is_drawn_by_a_renderer():
    called = set()

    def record(frame, event, arg):
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(record)
    try:
        for renderer in RENDERERS:
            drawn_texts(renderer.draw([0.5, 1.0]))
    finally:
        sys.setprofile(None)
    found = {
        (str(path), name)
        for folder in ("lmx_lab", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for name in figure_functions(path)
    }
    assert len(found) > 10
    assert found - called == set()


def figure_functions(path):
    """Return the public functions of a file that return a figure, or whose text contains the start of an SVG."""

    def walk(node, prefix=""):
        names = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                names += walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
                returned = ast.unparse(child.returns).strip("'\"") if child.returns else ""
                texts = [each.value for each in ast.walk(child) if isinstance(each, ast.Constant)]
                if FIGURE_TYPES & set(returned.split(" | ")) or any(
                    isinstance(text, str) and "<svg" in text for text in texts
                ):
                    names.append(f"{prefix}{child.name}")
        return names

    return walk(ast.parse(path.read_text(encoding="utf-8")))
