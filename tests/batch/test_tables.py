"""Test tables of polars and pyarrow: rows of them are answered, and the answers are a table of the same kind."""

import polars
import pyarrow
import pytest

import lmx_lab
from lmx_lab.settings import Settings

pytestmark = pytest.mark.slow
SCHEMA = {"n": int, "tags": list[str]}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=0, slots=4)
    with lmx_lab.Lab(settings, loop="thread") as lab:
        lab.load("echo")
        yield lab


@pytest.fixture(params=[polars.DataFrame, pyarrow.table], ids=["polars", "pyarrow"])
def make(request):
    return request.param


def as_lists(table):
    values = table.to_pydict() if hasattr(table, "to_pydict") else table.to_dict(as_series=False)
    return dict(values)


def test_tables_of_other_libraries_are_accepted_and_returned(lab, make, tmp_path):
    table = make({"text": ['{"n":3,"tags":["a"]}', None, "x"]})
    answers = lab.map(table, "{text}", schema=SCHEMA, n=2)
    assert type(answers) is type(table)
    columns = as_lists(answers)
    assert columns["n"][:4] == [3, 3, None, None]
    assert columns["tags"][:4] == ['["a"]', '["a"]', None, None]
    assert columns["sample"] == [0, 1] * 3
    assert "no value" in columns["error"][2]
    empty = lab.map(make({"text": []}), "{text}")
    assert type(empty) is type(table)
    assert len(empty) == 0
    assert list(as_lists(lab.map(make({"text": []}), "{text}", schema=SCHEMA, n=2))) == list(columns)
    assert lab.evaluate(make({"q": []}), "{q}", answer="q").score.n == 0
    result = lab.evaluate(table, "{text}", metric=lambda answer, row: answer == row["text"])
    assert result.df["score"].dropna().tolist() == [1, 1]


def test_integers_and_booleans_are_exact_although_others_are_missing(lab, make):
    schema = {"n": int | None, "far": bool | None, "x": float | None, "tags": list[str] | None}
    rows = ['{"n":1152921504606846977,"far":true,"x":0.5,"tags":["a"]}', '{"n":null,"far":null,"x":null,"tags":null}']
    answers = lab.map(make({"text": [*rows, None]}), "{text}", schema=schema)
    columns = as_lists(answers)
    assert columns["n"] == [2**60 + 1, None, None]
    assert columns["far"] == [True, None, None]
    assert columns["x"] == [0.5, None, None]
    empty = lab.map(make({"text": []}), "{text}", schema=schema)
    assert empty.schema == answers.schema


def test_embed_frame_and_search_return_a_table_of_the_same_library(lab, make):
    table = make({"text": ["sea", None, "hill"], "n": [1, 2, 3]})
    vectors = lab.embed_frame(table, "text")
    assert type(vectors) is type(table)
    columns = as_lists(vectors)
    expected = lab.embed(["sea", "hill"])
    assert [list(each) for each in (columns["embedding"][0], columns["embedding"][2])] == expected.tolist()
    assert columns["embedding"][1] is None
    assert columns["error"] == [None, "the text is missing", None]
    found = lab.search(table, "hill", "text", top_n=2)
    assert type(found) is type(table)
    columns = as_lists(found)
    assert list(columns) == ["text", "n", "similarity", "score"]
    assert columns["n"] == [3, 1]
    assert columns["similarity"][0] == pytest.approx(1, abs=1e-5)
    empty = make({"text": []})
    assert len(lab.embed_frame(empty)) == len(lab.search(empty, "sea")) == 0
    with pytest.raises(lmx_lab.LabError, match="score"):
        lab.search(make({"text": ["sea"], "score": [1]}), "sea", "text")


def test_pyarrow_columns_and_record_batches_are_accepted(lab):
    table = pyarrow.table({"text": ["a", None]})
    for rows in (table["text"], table["text"].chunk(0), table.to_batches()[0]):
        answers = lab.map(rows, "{text}")
        assert answers["answer"].to_pylist() == ["a", None]
        assert "no value" in answers["error"][1].as_py()
        assert lab.embed_frame(rows)["error"].to_pylist() == [None, "the text is missing"]
        assert lab.search(rows, "a")["text"].to_pylist() == ["a"]


def test_columns_of_polars_and_wrong_tables(lab):
    texts = polars.Series("t", ["a", "b"])
    assert lab.map(texts, "{t}")["answer"].to_list() == ["a", "b"]
    assert lab.search(texts, "b", top_n=1)["t"].to_list() == ["b"]
    with pytest.raises(lmx_lab.LabError, match="LazyFrame"):
        lab.map(polars.LazyFrame({"t": ["a"]}), "{t}")
