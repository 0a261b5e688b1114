"""Test tables as text and as HTML."""

from __future__ import annotations

from lmx_lab.frames import align_columns, html_table


def test_columns_of_text_are_aligned() -> None:
    assert align_columns([("name", "n"), ("a longer name", "1")]) == ["name           n", "a longer name  1"]


def test_cells_of_a_table_in_html_are_escaped_and_have_its_style() -> None:
    table = html_table(["a & b"], [["<b>"], ["c"]], style="color:red")
    assert table == (
        "<table><thead><tr><th style='color:red'>a &amp; b</th></tr></thead><tbody>"
        "<tr><td style='color:red'>&lt;b&gt;</td></tr><tr><td style='color:red'>c</td></tr></tbody></table>"
    )
