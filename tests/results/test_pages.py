"""Test pages and files of results. ``contract/test_figures`` has what all figures share."""

import ast
import math
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

import lmx_lab
from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.drawing import NotebookFigure
from lmx_lab.results.figures import HeatMap, Picture
from lmx_lab.results.pages import html_of
from tests.support.panels import Page

pytestmark = pytest.mark.slow

SIGNED = HeatMap(title="Values", values=[[-2.5, 0.25, math.nan]], rows=["a"], columns=["x", "y", "z"], unit="logits")
STARTS = {".html": b"<!DOCTYPE html>", ".svg": b"<svg xmlns=", ".png": b"\x89PNG", ".pdf": b"%PDF"}
NOT_SAVED = {"Lab"}


@pytest.mark.parametrize("suffix", STARTS)
def test_a_picture_is_saved_in_the_format_of_the_suffix(tmp_path, suffix):
    path = SIGNED.save(tmp_path / f"map{suffix.upper()}")
    assert path.read_bytes().startswith(STARTS[suffix])


def test_a_saved_svg_has_its_own_colours(tmp_path):
    root = ElementTree.parse(SIGNED.save(tmp_path / "map.svg")).getroot()
    assert root.get("style") == "background:#fff"
    assert "currentColor" not in {element.get("fill") for element in root.iter()}


@pytest.mark.parametrize("suffix", [".html", ".svg", ".png", ".pdf"])
def test_a_figure_of_matplotlib_is_saved_in_the_same_formats(tmp_path, suffix):
    figure = NotebookFigure()
    figure.subplots().plot([1, 2])
    content = figure.save(tmp_path / f"figure{suffix}").read_bytes()
    assert content.startswith(b"<?xml" if suffix == ".svg" else STARTS[suffix])
    if suffix == ".html":
        assert "data:image/svg+xml" in dict(Page(content.decode()).elements)["img"]["src"]


def test_a_map_that_is_too_wide_for_an_image_has_fewer_pixels(tmp_path):
    columns = [str(at) for at in range(800)]
    wide = HeatMap(title="Values", values=[[0.5] * 800], rows=["a"], columns=columns, cell=(50.0, 12.0)).with_values()
    assert 60_000 < imread(wide.save(tmp_path / "wide.png")).shape[1] < 65_536


def test_dots_are_drawn_in_all_formats(tmp_path):
    class Dot(Picture):
        def svg(self):
            return (
                '<svg viewBox="0 0 20 20"><path d="M10 10L10 10" stroke="#000" stroke-width="8" '
                'stroke-linecap="round"/></svg>'
            )

    assert imread(Dot().save(tmp_path / "dot.png"))[..., :3].min() == 0


@pytest.mark.parametrize("name", ["map", "map.txt", "folder.png/map"])
def test_another_suffix_is_refused_with_those_that_exist(tmp_path, name):
    with pytest.raises(InvalidRequestError, match=r"HeatMap can be saved as \.html, \.svg, \.png, \.pdf"):
        SIGNED.save(tmp_path / name)
    with pytest.raises(InvalidRequestError, match="create it first"):
        SIGNED.save(tmp_path / "missing" / "map.png")


@pytest.mark.parametrize("path", [None, 5, b"a.html", "a\0.html", "~no-such-user/a.html", "\ud800.html"], ids=repr)
def test_what_is_not_a_path_is_refused(path):
    with pytest.raises(InvalidRequestError, match="is not a path of a file"):
        SIGNED.save(path)


def test_a_heat_map_has_a_scale_with_signs_and_its_values_on_request():
    texts = [text.text for text in ElementTree.fromstring(SIGNED.svg()).iter("text")]
    assert texts[-4:] == ["\N{MINUS SIGN}2.5", "0", "2.5", "logits; grey: no value"]
    shown = SIGNED.with_values(1)
    assert shown.texts == [["\N{MINUS SIGN}2.5", "0.2", ""]]
    assert HeatMap(title="", values=[[-0.001]], rows=["a"], columns=["x"]).with_values().texts == [["0.00"]]
    words = HeatMap(title="", values=[[0.5]], rows=["a"], columns=["x"], texts=[["word"]])
    assert words.with_values().texts == [["word 0.50"]]
    assert words.with_values().cell[0] > words.cell[0]


def test_any_object_is_shown_as_a_notebook_displays_it():
    frame = pd.DataFrame({"figure": ["<b>"]})
    assert "&lt;b&gt;" in html_of(frame)
    figure = Figure()
    axes = figure.subplots()
    assert html_of(figure).startswith("<img")
    assert html_of(axes).startswith("<img")
    assert "<script>" not in html_of("<script>")
    assert "DataFrame" in html_of(pd.DataFrame)


def test_every_result_that_notebooks_display_can_be_saved():
    missing = []
    for path in Path(lmx_lab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name not in NOT_SAVED:
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                if "_repr_html_" in methods and not {"Displayed", "Picture", "TokenTable"} & set(
                    map(ast.unparse, node.bases)
                ):
                    missing.append(node.name)
    assert missing == []
