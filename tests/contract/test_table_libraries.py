"""Test tables of pandas, polars and pyarrow: results are tables of the same library with types that do not vary."""

import datetime
import decimal
import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest

from lmx_lab.bench import compare, frame, summary
from lmx_lab.errors import InvalidRequestError
from lmx_lab.evals.experiments import Experiments
from lmx_lab.results.frames import make_table
from tests.support.samples import EVALUATION, run_of

pytestmark = pytest.mark.slow
LARGE = 2**60 + 1
"""An integer that a float cannot represent."""
Color = enum.Enum("Color", {"RED": "red", "BLUE": "blue"})
SCALARS = {
    **{"color": Color | None, "size": enum.IntEnum("Size", {"SMALL": 1}), "day": datetime.date, "share": int | float},
    **{"at": datetime.datetime, "cost": decimal.Decimal, "key": int | str},
}
TYPES = {"n": int | None, "far": bool | None, "x": float | None, "tags": list[str] | None}


@dataclass(frozen=True)
class Library:
    name: str
    make: Callable[[Mapping[str, list[Any]]], Any]
    columns: Callable[[Any], dict[str, list[Any]]]
    """The values of a table. Missing ones are None."""
    series: Callable[[str, list[Any]], Any]
    """Makes a column. Those of pyarrow have no name."""
    has_index: bool = False

    def __str__(self):
        return self.name


def known(value):
    if isinstance(value, np.ndarray | list):
        return list(value)
    return None if pd.isna(value) else value


PANDAS = Library(
    "pandas",
    lambda columns: pd.DataFrame(columns, index=[f"row {at}" for at in range(len(next(iter(columns.values()))))]),
    lambda table: {name: [known(value) for value in table[name]] for name in table.columns},
    lambda name, values: pd.Series(values, name=name),
    has_index=True,
)
POLARS = Library("polars", polars.DataFrame, lambda table: table.to_dict(as_series=False), polars.Series)
PYARROW = Library("pyarrow", pyarrow.table, lambda table: table.to_pydict(), lambda name, values: pyarrow.array(values))
every_library = pytest.mark.parametrize("library", [PANDAS, POLARS, PYARROW], ids=str)


@pytest.fixture
def table(library):
    return library.make({"text": ["sea", None, "hill"], "n": [1, LARGE, 3]})


def types_of(table):
    return table.dtypes.to_dict() if isinstance(table, pd.DataFrame) else table.schema


def check_index(library, result, labels):
    if library.has_index:
        assert list(result.index) == labels


@every_library
def test_answers_are_a_table_of_the_same_library(lab, library):
    rows = [f'{{"n":{LARGE},"far":true,"x":0.5,"tags":["a"]}}', '{"n":null,"far":null,"x":null,"tags":null}', None]
    table = library.make({"text": rows})
    answers = lab.map(table, "{text}", schema=TYPES, n=2)
    assert type(answers) is type(table)
    check_index(library, answers, [f"row {at}" for at in (0, 0, 1, 1, 2, 2)])
    columns = library.columns(answers)
    assert columns["sample"] == [0, 1] * 3
    assert columns["n"] == [LARGE, LARGE, None, None, None, None]
    assert columns["far"] == [True, True, None, None, None, None]
    assert columns["x"] == [0.5, 0.5, None, None, None, None]
    # Other libraries have no column of Python objects.
    assert columns["tags"][:3] == [["a"] if library.has_index else '["a"]'] * 2 + [None]
    assert [error is None for error in columns["error"]] == [True] * 4 + [False] * 2
    assert "no value" in columns["error"][4]
    assert columns["output_tokens"][4:] == [None, None]
    assert isinstance(columns["output_tokens"][0], int | np.integer)
    empty = lab.map(library.make({"text": []}), "{text}", schema=TYPES, n=2)
    assert (type(empty), len(empty), types_of(empty)) == (type(table), 0, types_of(answers))
    with pytest.raises(InvalidRequestError, match="a column 'answer', but each table of answers already has one"):
        lab.map(table, "{text}", schema={"answer": int})


@every_library
def test_enums_dates_and_unions_have_the_types_of_the_library(lab, library):
    row = (
        '{"color":"red","size":1,"day":"2026-01-02","share":2,"at":"2026-01-02T13:00:00+01:00","cost":"1.5","key":"a"}'
    )
    answers = lab.map(library.make({"text": [row, row.replace('"red"', "null")]}), "{text}", schema=SCALARS)
    columns = library.columns(answers)
    assert columns["error"] == [None, None]
    assert columns["color"] == ["red", None]
    assert columns["size"] == [1, 1]
    assert columns["day"] == [datetime.date(2026, 1, 2)] * 2
    assert columns["at"] == [datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)] * 2
    assert columns["share"] == [2.0, 2.0]
    assert columns["cost"] == [decimal.Decimal("1.5") if library.has_index else "1.5"] * 2
    assert columns["key"] == ["a" if library.has_index else '"a"'] * 2
    types = {
        "pandas": ["object", "Int64", "object", "float64", "datetime64[us, UTC]", "object", "object"],
        "polars": [
            "String",
            "Int64",
            "Date",
            "Float64",
            "Datetime(time_unit='us', time_zone='UTC')",
            "String",
            "String",
        ],
        "pyarrow": ["string", "int64", "date32[day]", "double", "timestamp[us, tz=UTC]", "string", "string"],
    }
    for rows in (answers, lab.map(library.make({"text": []}), "{text}", schema=SCALARS)):
        schema = types_of(rows)
        found = [schema.field(name).type if library is PYARROW else schema[name] for name in SCALARS]
        assert [str(each) for each in found] == types[library.name]


@every_library
def test_vectors_are_a_table_of_the_same_library(lab, library, table):
    vectors = lab.embed_frame(table, "text")
    assert type(vectors) is type(table)
    check_index(library, vectors, ["row 0", "row 1", "row 2"])
    columns = library.columns(vectors)
    first, last = lab.embed(["sea", "hill"]).tolist()
    assert columns == {"embedding": [first, None, last], "error": [None, "the text is missing", None]}
    empty = lab.embed_frame(library.make({"text": []}))
    assert (type(empty), len(empty)) == (type(table), 0)
    assert list(library.columns(empty)) == list(columns)


@every_library
def test_similar_rows_are_a_table_of_the_same_library(lab, library, table):
    found = lab.search(table, "hill", "text", top_n=2)
    assert type(found) is type(table)
    check_index(library, found, ["row 2", "row 0"])
    columns = library.columns(found)
    assert (columns["text"], columns["n"]) == (["hill", "sea"], [3, 1])
    assert columns["similarity"] == columns["score"]
    assert columns["similarity"][0] == pytest.approx(1, abs=1e-5)
    empty = lab.search(library.make({"text": []}), "sea")
    assert (type(empty), len(empty)) == (type(table), 0)
    assert list(library.columns(empty)) == ["text", "similarity", "score"]
    with pytest.raises(InvalidRequestError, match="a column 'score', which the result adds"):
        lab.search(library.make({"text": ["sea"], "score": [1]}), "sea", "text")


@every_library
def test_evaluations_have_the_index_of_the_table_and_exact_integers(lab, library, table):
    result = lab.evaluate(table, "{text}", metric=lambda answer, row: row["n"] in (1, LARGE), store=False)
    check_index(library, result.df, ["row 0", "row 1", "row 2"])
    assert result.df["score"].fillna(-1).tolist() == [1, -1, 0]
    large = lab.evaluate(library.make({"text": ["a"], "n": [LARGE]}), "{n}", answer="n", store=False)
    assert (large.df["expected"].iloc[0], large.score.mean) == (LARGE, 1)
    empty = lab.evaluate(library.make({"text": []}), "{text}", answer="text", store=False)
    assert (empty.score.n, types_of(empty.df)) == (0, types_of(result.df))


@every_library
def test_columns_are_tables_of_one_column(lab, library):
    texts = library.series("t", ["a", None])
    name = "text" if library is PYARROW else "t"
    answers = library.columns(lab.map(texts, f"{{{name}}}"))
    assert answers["answer"] == ["a", None]
    assert "no value" in answers["error"][1]
    assert library.columns(lab.embed_frame(texts))["error"] == [None, "the text is missing"]
    assert library.columns(lab.search(texts, "a"))[name] == ["a"]


def test_record_batches_and_chunked_columns_are_accepted(lab):
    table = pyarrow.table({"text": ["a", None]})
    for rows in (table["text"], table.to_batches()[0]):
        assert lab.map(rows, "{text}")["answer"].to_pylist() == ["a", None]
        assert lab.embed_frame(rows)["error"].to_pylist() == [None, "the text is missing"]
        assert lab.search(rows, "a")["text"].to_pylist() == ["a"]


def test_duplicate_columns_are_refused(lab):
    arrow = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["t", "t"])
    for table in (arrow, pd.DataFrame([["a", "b"]], columns=["t", "t"])):
        with pytest.raises(InvalidRequestError, match="two columns have the same name"):
            lab.map(table, "{t}")


# --- tables that are always those of pandas

FULL = run_of([1.0, 2.0], cached_tokens=LARGE, threads=None)
TABLES = {
    "requests of bench": lambda full: frame(FULL if full else []),
    "summary of bench": lambda full: summary(FULL if full else []),
    "comparison of bench": lambda full: compare(FULL, FULL, metrics=("ttft_ms",) if full else ()),
    "typed rows": lambda full: make_table([{"n": LARGE}] if full else [], {"n": "Int64", "name": "text"}),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_an_empty_table_has_the_columns_and_types_of_a_full_one(table):
    full, empty = table(True), table(False)
    assert (len(empty), types_of(empty)) == (0, types_of(full))
    assert len(full) > 0


def test_integers_of_requests_are_exact_although_others_are_missing():
    table = frame([*FULL, *run_of([1.0], concurrency=2)])
    assert table["cached_tokens"].tolist() == [LARGE, LARGE, pd.NA]
    assert str(table["threads"].dtype) == "Int64"


@pytest.mark.parametrize(
    "make",
    [
        lambda lab: frame([]),
        lambda lab: lab.map(["a"], "{text}"),
        lambda lab: lab.search(["a"], "a"),
        lambda lab: lab.evaluate(["a"], "{text}", answer="text"),
        lambda lab: EVALUATION.df,
        lambda lab: Experiments(lab.settings.home / "none.db").df,
        lambda lab: lab.rerank("a", ["a"]).df,
        lambda lab: lab.metrics().df,
        lambda lab: lab.requests.df,
    ],
    ids=["bench", "map", "search", "evaluate", "evaluation", "experiments", "rerank", "metrics", "requests"],
)
def test_without_pandas_the_error_says_what_to_install(lab, make, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install"):
        make(lab)
