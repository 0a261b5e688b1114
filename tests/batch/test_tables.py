"""Test tables of polars and pyarrow: rows of them are answered, and the answers are a table of the same kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lmx_lab
from lmx_lab.settings import Settings

pytestmark = pytest.mark.slow
SCHEMA = {"n": int, "tags": list[str]}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lmx_lab.Lab]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=0, slots=4)
    with lmx_lab.Lab(settings, loop="thread") as lab:
        lab.load("echo")
        yield lab


@pytest.fixture(params=["polars", "pyarrow"])
def make(request: pytest.FixtureRequest) -> Any:
    module = pytest.importorskip(request.param)
    return module.DataFrame if request.param == "polars" else module.table


def test_tables_of_other_libraries(lab: lmx_lab.Lab, make: Any, tmp_path: Path) -> None:
    table = make({"text": ['{"n":3,"tags":["a"]}', None, "x"]})
    answers = lab.map(table, "{text}", schema=SCHEMA, n=2)
    assert type(answers) is type(table)
    columns = answers.to_pydict() if hasattr(answers, "to_pydict") else answers.to_dict(as_series=False)
    assert columns["n"][:4] == [3, 3, None, None]
    assert columns["tags"][:4] == ['["a"]', '["a"]', None, None]
    assert columns["sample"] == [0, 1] * 3
    assert "no value" in columns["error"][2]
    empty = lab.map(make({"text": []}), "{text}")
    assert type(empty) is type(table)
    assert len(empty) == 0
    assert lab.evaluate(make({"q": []}), "{q}", answer="q").score.n == 0
    result = lab.evaluate(table, "{text}", metric=lambda answer, row: answer == row["text"])
    assert result.df["score"].dropna().tolist() == [1, 1]


def test_columns_of_polars_and_wrong_tables(lab: lmx_lab.Lab) -> None:
    polars = pytest.importorskip("polars")
    assert lab.map(polars.Series("t", ["a", "b"]), "{t}")["answer"].to_list() == ["a", "b"]
    with pytest.raises(lmx_lab.LabError, match="LazyFrame"):
        lab.map(polars.LazyFrame({"t": ["a"]}), "{t}")
