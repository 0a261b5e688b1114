"""Test line charts: their description, gaps and ticks. ``contract/test_figures`` has what all figures share."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.results.figures import (
    HeatMap,
    LineChart,
    Series,
    downsample,
    format_number,
    segments,
    time_ticks,
    value_ticks,
)

SVG = "{http://www.w3.org/2000/svg}"


def parse_svg(chart):
    return ElementTree.fromstring(chart.svg().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def lines(chart):
    """Return the paths of the lines, without those of the legend, which come first."""
    found = [path.get("d", "") for path in parse_svg(chart).iter(f"{SVG}path") if "line " in path.get("class", "")]
    return found[len(chart.series) :]


def chart(at, *values, **other):
    named = [Series(name=f"line <{index}>", values=series) for index, series in enumerate(values)]
    return LineChart(key="k", title="Speed & more", unit="tok/s", at=at, series=named, **other)


def test_a_chart_has_a_title_and_a_text_description():
    svg = parse_svg(chart([0, 1, 2], [0, 4, 2]))
    ids = {node.get("id"): node.text for node in svg.iter() if node.get("id")}
    assert svg.get("role") == "img"
    title, text = (ids[name] for name in svg.get("aria-labelledby", "").split())
    assert title == "Speed & more"
    assert "line <0>: latest 2, median above 0 3, highest 4." in text


def test_gaps_in_time_and_values_are_not_drawn():
    """Half a second and two seconds are not a gap. More is one, as is a value that is not a number."""
    assert len(segments([0, 0.5, 2.5, 4.6], [1, 1, 1, 1])) == 2
    assert segments([0, 1, 2], [1, math.nan, 3]) == [[(0, 1)], [(2, 3)]]
    (path,) = lines(chart([0, 1, 10, 11], [1, 2, 3, 4]))
    assert path.count("M") == 2
    assert "Gaps without measurements: 1." in chart([0, 1, 10, 11], [1, 2, 3, 4]).description()


def test_a_peak_survives_ten_thousand_values():
    at = [index * 0.09 for index in range(10_000)]
    values = [1.0] * 10_000
    values[5_003] = 7.0
    (path,) = lines(chart(at, values))
    assert len(path) < 30_000
    heights = [float(y) for y in re.findall(r" ([\d.]+)", path)]
    assert heights.count(min(heights)) == 1


@given(st.floats(1e-9, 1e15), st.booleans())
def test_the_value_axis_reaches_the_highest_value_in_few_round_steps(highest, whole):
    ticks = value_ticks(highest, whole=whole)
    assert ticks[0] == 0
    assert ticks[-1] >= highest * 0.999
    assert 2 <= len(ticks) <= 6
    assert re.match(r"[125]\.?0*e", f"{ticks[1]:.6e}")
    assert not whole or all(tick == int(tick) for tick in ticks)


def test_an_axis_without_values_has_ticks():
    assert value_ticks(0) == [0, 0.5, 1.0]
    assert value_ticks(0, whole=True) == [0, 1.0]
    assert value_ticks(5e-324)[-1] == 1.0


@given(st.floats(1, 4e9), st.floats(10, 1e8))
def test_the_time_axis_has_few_round_times(first, span):
    ticks = time_ticks(first, first + span)
    assert 1 <= len(ticks) <= 8
    assert all(first <= at <= first + span for at, _ in ticks)


@pytest.mark.parametrize(
    ("label", "shown"), [("\x1b", r"\x1b"), ("\x7f", r"\x7f"), ("\ufffe", r"\ufffe"), ("\ud800", r"\ud800")]
)
def test_labels_with_characters_that_xml_does_not_have_can_be_saved(tmp_path, label, shown):
    drawn = HeatMap(title=label, values=[[1.0]], rows=[label], columns=[f"a{label}"], row_axis="row")
    root = ElementTree.parse(drawn.save(tmp_path / "map.svg")).getroot()
    assert {shown, f"a{shown}"} <= {element.text for element in root.iter()}
    for name in ("map.png", "map.html"):
        assert drawn.save(tmp_path / name).stat().st_size > 500
    chart = LineChart(key="k", title=label, unit="", at=[0.0], series=[Series(name=label, values=[1.0])])
    ElementTree.fromstring(chart.svg())


def test_a_column_of_points_keeps_its_lowest_and_highest():
    assert downsample([(1.1, 5), (1.2, 9), (1.3, 1), (2.0, 4)]) == [(1.2, 9), (1.3, 1), (2.0, 4)]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (3, "3"), (0.256, "0.26"), (12.34, "12.3"), (1234.5, "1,234"), (-0.5, "-0.50")]
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text
