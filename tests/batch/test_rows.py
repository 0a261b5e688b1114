"""Test the rows of tables, arrays and iterables: names of columns, narrow floats, and rows without columns."""

import datetime
import io
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.evals import Choice, Numeric

NARROW = np.array([19.99, 0.1], np.float32)
HALF = np.array([0.1, 2.5], np.float16)
WORDS = ["sea", "hill"]
ARRAYS = {
    "texts": np.array(WORDS),
    "objects": np.array(WORDS, dtype=object),
    "unique": pd.Series([*WORDS, "sea"]).unique(),
    "unique strings": pd.Series([*WORDS, "sea"], dtype="string").unique(),
    "unique categories": pd.Series([*WORDS, "sea"], dtype="category").unique(),
    "index": pd.Index(WORDS),
    "index of categories": pd.CategoricalIndex(WORDS),
    "records": np.array([(word,) for word in WORDS], dtype=[("text", "U5")]),
    "levels": pd.MultiIndex.from_arrays([WORDS], names=["text"]),
}
Pair = namedtuple("Pair", ["text", "n"])


@dataclass
class Word:
    text: str


FRAME = pd.DataFrame({"text": WORDS})
WITHOUT_COLUMNS = {
    "itertuples": FRAME.itertuples,
    "iterrows": FRAME.iterrows,
    "items": FRAME["text"].items,
    "groups": lambda: iter(FRAME.groupby("text")),
    "iter_rows": lambda: polars.DataFrame({"text": WORDS}).iter_rows(),
    "zip": lambda: zip(WORDS, WORDS, strict=True),
    "lists": lambda: iter([["a", "b"]]),
    "bytes": lambda: iter([b"a"]),
    "dataclasses": lambda: iter([Word("a")]),
    "series": lambda: iter([FRAME.iloc[0]]),
    "named tuples": lambda: iter([Pair("a", 1)]),
    "record batches": lambda: iter(pyarrow.table(FRAME).to_batches()),
    "chunks of a file": lambda: pd.read_csv(io.StringIO("text\nsea"), chunksize=1),
    "objects": lambda: iter([object()]),
    "a list of tuples": lambda: [("a", "b")],
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_and_indexes_are_tables(lab, kind):
    rows = ARRAYS[kind]
    answers = lab.map(rows, "{text}")
    assert answers["answer"].tolist() == WORDS
    assert answers.index.identical(pd.RangeIndex(2))
    assert lab.embed_frame(rows)["error"].tolist() == [None, None]
    assert lab.search(rows, "hill", top_n=1)["text"].tolist() == ["hill"]
    assert lab.evaluate(rows, "{text}", answer="text", store=False).score.mean == 1
    assert lab.map(rows[:0], "{text}").columns.tolist() == answers.columns.tolist()


def test_the_name_of_an_index_and_the_positions_of_an_array_are_columns(lab):
    assert lab.map(pd.Index(WORDS, name="word"), "{word}")["answer"].tolist() == WORDS
    assert lab.map(np.array([["a", "b"]]), "{0} {1}")["answer"].tolist() == ["a b"]
    days = pd.date_range("2026-01-02", periods=1)
    assert lab.map(days, "{text:%d.%m.%Y}")["answer"].tolist() == ["02.01.2026"]
    for array in (np.array("a"), np.zeros((1, 1, 1))):
        with pytest.raises(InvalidRequestError, match="the rows have the type ndarray"):
            lab.map(array, "{text}")


def test_columns_with_levels_are_searched(lab):
    frame = pd.DataFrame([["sea", 1], ["hill", 2]], columns=pd.MultiIndex.from_tuples([("text", "x"), ("n", "y")]))
    found = lab.search(frame, "hill", ("text", "x"), top_n=1)
    assert found.columns.tolist() == [*frame.columns, ("similarity", ""), ("score", "")]
    assert found[("n", "y")].tolist() == [2]


def test_lazy_frames_and_readers_are_tables_of_their_library(lab):
    lazy = polars.LazyFrame({"text": WORDS})
    assert lab.map(lazy, "{text}")["answer"].to_list() == WORDS
    assert lab.search(lazy, "hill", top_n=1)["text"].to_list() == ["hill"]
    batches = pyarrow.table({"text": WORDS}).to_reader(1)
    assert lab.map(batches, "{text}")["answer"].to_pylist() == WORDS


def test_objects_that_are_not_tables_are_refused_with_the_remedy(lab):
    with pytest.raises(InvalidRequestError, match="StringMethods; pass a data frame"):
        lab.map(pd.Series(WORDS).str, "{text}")
    with pytest.raises(InvalidRequestError, match=r"columns are pandas\.DataFrame\(columns\)"):
        lab.map({"text": WORDS}, "{text}")
    with pytest.raises(InvalidRequestError, match=r"a function reads the column 'a:b': lambda row: row\['a:b'\]"):
        lab.map(pd.DataFrame({"a:b": WORDS}), "{a:b}")
    # The default text of an object is its address.
    rows = pd.DataFrame({"text": pd.Series([object(), "a"], dtype="object")})
    answers = lab.map(rows, "{text}")
    assert "has no text" in answers["error"][0]
    assert answers["answer"][1] == "a"


@pytest.mark.parametrize("kind", WITHOUT_COLUMNS)
def test_rows_that_are_collections_without_names_are_refused(lab, kind):
    rows = WITHOUT_COLUMNS[kind]
    with pytest.raises(InvalidRequestError, match=r"row 0 has the type .* convert each row to a dictionary"):
        list(lab.map(rows(), "{text}"))


def test_single_values_and_dictionaries_are_rows_of_an_iterable(lab):
    values = ["a", 1, 1.5, datetime.date(2026, 1, 2), {"text": "b"}, None]
    texts = ["a", "1", "1.5", "2026-01-02", "b", None]
    assert [row["answer"] for row in lab.map(iter(values), "{text}")] == texts
    assert lab.map(values, "{text}")["answer"].tolist() == texts
    assert "decode it" in lab.map([{"text": b"a"}], "{text}")["error"][0]


@pytest.mark.parametrize(
    "table",
    [
        pd.DataFrame({"price": NARROW, "half": HALF}),
        pd.DataFrame({"price": pd.array(NARROW, dtype="Float32"), "half": HALF}),
        pd.DataFrame({"price": pd.array(NARROW, dtype=pd.ArrowDtype(pyarrow.float32())), "half": HALF}),
        polars.DataFrame({"price": NARROW, "half": [0.1, 2.5]}),
        pyarrow.table({"price": NARROW, "half": HALF}),
        [{"price": price, "half": half} for price, half in zip(NARROW, HALF, strict=True)],
    ],
)
def test_narrow_floats_have_their_shortest_text(lab, table):
    assert list(lab.map(table, "{price} {half}")["answer"].to_numpy()) == ["19.99 0.1", "0.1 2.5"]
    assert next(iter(lab.map(table, lambda row: f"{row['price']}")["answer"].to_numpy())) == "19.99"
    for metric in ("exact_match", "contains", "numeric"):
        result = lab.evaluate(table, "{price}", answer="price", metric=metric, store=False)
        assert result.df["expected"].tolist() == [19.99, 0.1]
        assert result.score.mean == 1


PRICES = pyarrow.array(
    [{"a": 19.99, "b": [0.1], "c": 0.1}],
    pyarrow.struct({"a": pyarrow.float32(), "b": pyarrow.list_(pyarrow.float32(), 1), "c": pyarrow.float64()}),
)
OBJECTS = [{"a": np.float32(19.99), "b": [np.float16(0.1)], "c": 0.1}]


@pytest.mark.parametrize(
    "table",
    [
        pd.DataFrame({"v": OBJECTS}),
        pd.DataFrame({"v": pd.Series(PRICES, dtype=pd.ArrowDtype(PRICES.type))}),
        polars.DataFrame({"v": PRICES}),
        pyarrow.table({"v": PRICES}),
        [{"v": OBJECTS[0]}],
        pd.DataFrame({"v": pd.Series(OBJECTS)}).to_numpy(),
    ],
    ids=["pandas", "pandas with types of pyarrow", "polars", "pyarrow", "list", "array"],
)
def test_narrow_floats_in_lists_and_dictionaries_have_their_shortest_text(lab, table):
    (answer,) = lab.map(table, lambda row: str(*row.values()))["answer"].to_numpy()
    assert answer == "{'a': 19.99, 'b': [0.1], 'c': 0.1}"


def test_narrow_floats_in_maps_tuples_and_categories_have_their_shortest_text(lab):
    kind = pyarrow.map_(pyarrow.string(), pyarrow.float32())
    columns = {
        "map": pyarrow.array([[("a", 0.1)]], kind),
        "categories": pyarrow.array([0.1], pyarrow.float32()).dictionary_encode(),
    }
    assert lab.map(pyarrow.table(columns), "{map} {categories}")["answer"].to_pylist() == ["[('a', 0.1)] 0.1"]
    frame = pd.DataFrame({"tuple": [(NARROW[0], 1)], "categories": pd.Categorical(NARROW[:1])})
    assert lab.map(frame, "{tuple} {categories}")["answer"].tolist() == ["(19.99, 1) 19.99"]


def test_missing_narrow_floats_are_errors_of_their_rows(lab):
    for column in (pd.array([None, 1.5], dtype="Float32"), np.array([np.nan, 1.5], np.float32)):
        answers = lab.map(pd.DataFrame({"price": column}), "{price}")
        assert answers["answer"].tolist() == [None, "1.5"]
        assert "no value" in answers["error"][0]
    assert lab.map(polars.Series("p", NARROW), "{p}")["answer"].to_list() == ["19.99", "0.1"]


def test_columns_are_selected_by_integers(lab):
    frame = pd.DataFrame({0: WORDS, np.int64(1): [["sea", "x"], ["x", "hill"]], 2: WORDS})
    assert lab.map(frame, "{0}!")["answer"].tolist() == ["sea!", "hill!"]
    assert lab.map(frame, lambda row: row[0] + row["2"] + row.get(2))["answer"].tolist() == ["sea" * 3, "hill" * 3]
    assert "KeyError" in lab.map(frame, lambda row: row[3])["error"][0]
    assert lab.embed_frame(frame, 0)["error"].tolist() == [None, None]
    assert lab.search(frame, "hill", np.int64(0), top_n=1)[0].tolist() == ["hill"]
    assert lab.evaluate(frame, "{0}", answer=2, store=False).score.mean == 1
    assert lab.evaluate(frame, "{0}", metric=lambda answer, row: answer == row[2], store=False).score.mean == 1
    chosen = lab.evaluate(frame, "{0}", answer=2, metric=Choice(1), store=False)
    assert chosen.df["choices"].tolist() == [("sea", "x"), ("x", "hill")]
    rows = [{0: word} for word in WORDS]
    assert lab.map(rows, "{0}")["answer"].tolist() == WORDS
    assert [row["answer"] for row in lab.map(iter(rows), "{0}")] == WORDS
    assert lab.search(rows, "hill", 0, top_n=1)["0"].tolist() == ["hill"]
    with pytest.raises(InvalidRequestError, match="answer names the column '3', but the columns are 0, 1, 2"):
        lab.evaluate(frame, "{0}", answer=3)


def test_numpy_numbers_are_parameters(lab, tmp_path):
    one, cache = np.int64(1), tmp_path / "answers.db"
    options = {"n": np.int64(2), "seed": one, "max_tokens": one, "temperature": np.float32(0.5), "top_k": np.int8(3)}
    assert lab.map(["a"], "{text}", cache=cache, **options)["answer"].tolist() == ["a", "a"]
    vectors = [lab.embed_frame(["a"], dimensions=number, truncate=np.True_, cache=cache) for number in (np.int64(4), 4)]
    assert [len(each["embedding"][0]) for each in vectors] == [4, 4]
    assert len(lab.search(WORDS, "a", top_n=one)) == 1
    result = lab.evaluate(["7.4"], "{text}", answer="text", metric=Numeric(relative=np.float32(0.1)), **options)
    assert lab.experiments[np.int64(-1)].facts.settings["parameters"]["top_k"] == 3
    assert result.pass_at(one).n == 1
    assert len(result.lens(position=one).df) == 1
