"""Test the types of tables, and tables as text and as HTML."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import pytest

from lmx_lab.results.frames import dtypes_of, make_table, optional_dtype
from lmx_lab.results.tables import Html, align_columns, html_table

LARGE = 2**60 + 1
"""An integer that a float cannot represent."""
COLUMNS = {
    **{"count": "int64", "maybe": "Int64", "small": "float32", "wide": "float64", "yes": "bool", "perhaps": "boolean"},
    **{"name": "str", "text": "text", "value": "object", "at": "time"},
}
FULL = (LARGE, LARGE, 0.5, 0.5, True, True, "a", "b", [1, 2], 1.5)
PARTIAL = (1, None, None, None, False, None, None, None, None, None)


@pytest.mark.parametrize("rows", [[], [FULL], [PARTIAL], [PARTIAL, FULL], [FULL, PARTIAL]])
def test_the_columns_and_their_types_do_not_depend_on_the_rows(rows):
    table = make_table(rows, COLUMNS)
    assert [str(dtype) for dtype in table.dtypes] == [
        *("int64", "Int64", "float32", "float64", "bool", "boolean", "str", "object", "object"),
        "datetime64[us, UTC]",
    ]
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == len(rows)
    mappings = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    pd.testing.assert_frame_equal(make_table(mappings, COLUMNS), table)


def test_integers_and_booleans_are_exact_although_others_are_missing():
    table = make_table([PARTIAL, FULL], COLUMNS)
    assert table["count"].tolist() == [1, LARGE]
    assert table["maybe"].tolist() == [pd.NA, LARGE]
    assert table["perhaps"].tolist() == [pd.NA, True]
    assert table["text"].tolist() == [None, "b"]
    assert table["value"].tolist() == [None, [1, 2]]


@pytest.mark.parametrize("large", [2**63, -(2**63) - 1, 2**70])
@pytest.mark.parametrize("dtype", ["int64", "Int64"])
def test_integers_of_more_than_64_bits_are_exact(large, dtype):
    column = make_table([{"n": large}, {"n": -(2**63)}, {}], {"n": dtype})["n"]
    assert column.tolist() == [large, -(2**63), pd.NA]
    assert column.isna().tolist() == [False, False, True]


def test_values_of_another_type_are_not_hidden_in_a_column_of_objects():
    with pytest.raises((TypeError, ValueError)):
        make_table([("two",)], {"n": "Int64"})


def test_times_are_given_in_seconds_or_as_text():
    rows = [(1_800_000_000.25,), ("2027-01-15T09:00:00.25+01:00",), ("2027-01-15T08:00:00.250Z",), (None,)]
    times = make_table(rows, {"at": "time"})["at"]
    assert times[:3].tolist() == [pd.Timestamp("2027-01-15 08:00:00.25", tz="UTC")] * 3
    assert times.isna().tolist() == [False, False, False, True]


def test_labels_are_kept():
    for labels in (["a", "b"], [LARGE, 1], [LARGE, None], [("a", 1), ("b", 2)]):
        assert list(make_table([(1,), (2,)], {"n": "int64"}, index=labels).index) == labels
    for index in (pd.date_range("2026-01-01", periods=2, name="day"), pd.Index([LARGE, None], dtype="Int64")):
        assert make_table([(1,), (2,)], {"n": "int64"}, index=index).index.identical(index)


def test_types_without_a_name_are_inferred_without_rounding():
    columns = {"n": [LARGE, None], "yes": [None, True], "x": [1, 0.5], "name": ["a", None], "none": [None, None]}
    table = make_table(columns, dict.fromkeys(columns))
    assert [str(dtype) for dtype in table.dtypes] == ["Int64", "boolean", "float64", "str", "object"]
    assert table["n"][0] == LARGE
    assert make_table([{"n": LARGE}, {}], {"n": None})["n"].tolist() == [LARGE, pd.NA]
    assert optional_dtype([np.int64(LARGE), None]) == "Int64"
    assert [optional_dtype(values) for values in ([1, 2], [1, True, None], [1, 0.5, None], [])] == [None] * 4


def test_columns_can_be_arrays():
    table = make_table({"n": np.arange(2), "x": np.zeros(2, np.float32)}, {"n": "int64", "x": "float32"})
    assert table["n"].tolist() == [0, 1]
    assert table["x"].dtype == "float32"


@dataclass
class Shape:
    count: int
    maybe: int | None
    share: float
    known: float | None
    yes: bool
    perhaps: bool | None
    name: str | None
    kind: Literal["a", "b"] | None
    pair: tuple[int, int]


def test_the_types_of_a_dataclass_are_those_of_its_fields():
    assert dtypes_of(Shape) == {
        **{"count": "int64", "maybe": "Int64", "share": "float64", "known": "float64", "yes": "bool"},
        **{"perhaps": "boolean", "name": "str", "kind": "str", "pair": "object"},
    }


def test_columns_of_text_are_aligned():
    assert align_columns([("name", "n"), ("a longer name", "1")]) == ["name           n", "a longer name  1"]


def test_texts_in_a_table_in_html_are_escaped_and_have_its_style():
    rows = [["<b>", Html("<i>x</i>")], ["c", 1]]
    table = html_table(["a & b", "n"], rows, caption="<>", row_names=True, style="color:red")
    assert table == (
        "<table><caption style='color:red'>&lt;&gt;</caption>"
        "<thead><tr><th scope=col style='color:red'>a &amp; b</th><th scope=col style='color:red'>n</th></tr></thead>"
        "<tbody><tr><th scope=row style='color:red'>&lt;b&gt;</th><td style='color:red'><i>x</i></td></tr>"
        "<tr><th scope=row style='color:red'>c</th><td style='color:red'>1</td></tr></tbody></table>"
    )
    assert html_table(("\x1b",), [["\x1b[31m"]], caption="\x1b", style="").count("\\x1b") == 3
    assert align_columns([["a\x1b", "b"]]) == ["a\\x1b  b"]
    assert html_table((), [["a"]]) == "<table><tbody><tr><td style='text-align:left'>a</td></tr></tbody></table>"
