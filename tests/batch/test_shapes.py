"""Test tables of many shapes in each library: the results have the index, order and number of the rows, prompts and
expected values are those of the table, and the table itself does not change.
"""

import datetime
import decimal

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest

WORDS = ["sea", "hill", "sea"]
DAY, AT = datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 12, 30)
VALUES = {
    "int8": pyarrow.array([1, 2, 3], pyarrow.int8()),
    "large integers": pyarrow.array([2**60 + 1, None, 3]),
    "unsigned integers": pyarrow.array([2**64 - 1, 0, 1], pyarrow.uint64()),
    "floats": pyarrow.array([0.1, None, float("nan")]),
    "infinity": pyarrow.array([float("inf"), 1.0, -0.0]),
    "float32": pyarrow.array([0.5, None, 2.0], pyarrow.float32()),
    "float16": pyarrow.array(np.array([0.5, 1, 2], np.float16)),
    "booleans": pyarrow.array([True, None, False]),
    "decimals": pyarrow.array([decimal.Decimal("1.50"), None, decimal.Decimal("2.00")]),
    "dates": pyarrow.array([DAY, None, DAY]),
    "times": pyarrow.array([AT, None, AT]),
    "times in nanoseconds": pyarrow.array([AT, None, AT], pyarrow.timestamp("ns")),
    "times with a zone": pyarrow.array([AT, None, AT], pyarrow.timestamp("us", "Europe/Berlin")),
    "times of day": pyarrow.array([AT.time(), None, AT.time()]),
    "durations": pyarrow.array([datetime.timedelta(hours=1), None, datetime.timedelta(days=2)]),
    "texts": pyarrow.array(["a", None, ""]),
    "large texts": pyarrow.array(["a", None, "b"], pyarrow.large_string()),
    "views of texts": pyarrow.array(["a", None, "b"], pyarrow.string_view()),
    "braces": pyarrow.array(["{text}", "{", "}}"]),
    "unicode": pyarrow.array(["e\u0301", "\U0001f469\u200d\U0001f467", "\u202e"]),
    "control characters": pyarrow.array(["a\nb", "\t", "\x00"]),
    "bytes": pyarrow.array([b"a", None, b"\xff"]),
    "categories": pyarrow.array(["a", None, "a"]).dictionary_encode(),
    "lists": pyarrow.array([[1, 2], None, []]),
    "lists of fixed length": pyarrow.array([[1, 2], None, [3, 4]], pyarrow.list_(pyarrow.int64(), 2)),
    "structs": pyarrow.array([{"a": 1, "b": "x"}, None, {"a": None, "b": None}]),
    "missing values": pyarrow.nulls(3),
}
NAMES = ["answer", "error", "score", "two words", "a.b", "0", "", "index", "\u00fc"]
BASE = pyarrow.table({"text": WORDS, "n": [1, 2, 3]})
LAYOUTS = {
    "no rows": BASE.slice(0, 0),
    "one row": BASE.slice(1, 1),
    "a part": BASE.slice(1),
    "reversed": BASE.take([2, 1, 0]),
    "chunks": pyarrow.concat_tables([BASE, BASE.slice(0, 0), BASE]),
    "more rows than are read ahead": pyarrow.concat_tables([BASE] * 100),
    "many columns": pyarrow.table({"text": WORDS, **{f"c{at}": [1, 2, 3] for at in range(100)}}),
    "one column": BASE.select(["text"]),
}
TABLES = {
    **{f"values: {kind}": pyarrow.table({"text": WORDS, "v": values}) for kind, values in VALUES.items()},
    **{f"name: {name}": pyarrow.table({"text": WORDS, name: ["x", "y", "z"]}) for name in NAMES},
    **LAYOUTS,
}


def with_index(frame, repeated):
    labels = [f"row {at % 2 if repeated else at}" for at in range(len(frame))][::-1]
    return frame.set_axis(pd.Index(labels, name="id", dtype="object"))


LIBRARIES = {
    "pandas": lambda table: with_index(table.to_pandas(), repeated=False),
    "pandas, types of pyarrow": lambda table: with_index(table.to_pandas(types_mapper=pd.ArrowDtype), repeated=True),
    "polars": polars.from_arrow,
    "pyarrow": lambda table: table,
}


def columns_of(table):
    """Return the values of each column as texts, which are equal for NaN and missing values of the same kind."""
    if isinstance(table, pd.DataFrame):
        rows = list(table.itertuples(index=False, name=None))
        return {name: [repr(row[at]) for row in rows] for at, name in enumerate(table.columns)}
    found = table.to_dict(as_series=False) if isinstance(table, polars.DataFrame) else table.to_pydict()
    return {name: list(map(repr, values)) for name, values in found.items()}


def types_of(table):
    return list(table.dtypes) if isinstance(table, pd.DataFrame) else table.schema


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("shape", TABLES)
def test_results_belong_to_the_rows_of_a_table(lab, shape, library):
    frame = LIBRARIES[library](TABLES[shape])
    before, types = columns_of(frame), types_of(frame)
    texts, name = TABLES[shape]["text"].to_pylist(), list(before)[-1]
    seen = []

    def prompt(row):
        seen.append({column: repr(value) for column, value in row.items()})
        return row["text"]

    answers, vectors = lab.map(frame, prompt), lab.embed_frame(frame, "text")
    scores = lab.evaluate(frame, "{text}", answer=name, metric=lambda answer, value: True, store=False).df
    assert (type(answers), type(vectors)) == (type(frame), type(frame))
    # The rows that a function reads, the answers, the vectors and the expected values have the order of the table.
    assert {column: [row[column] for row in seen] for column in before} == before
    assert columns_of(answers)["answer"] == list(map(repr, texts))
    known = dict(zip(WORDS, lab.embed(WORDS), strict=True))
    for vector, text in zip(vectors["embedding"], texts, strict=True):
        assert np.array_equal(vector.as_py() if isinstance(vector, pyarrow.Scalar) else vector, known[text])
    assert columns_of(scores)["expected"] == before[name]
    if isinstance(frame, pd.DataFrame):
        for table in (answers, vectors, scores):
            pd.testing.assert_index_equal(table.index, frame.index, exact=True)
    assert (columns_of(frame), types_of(frame)) == (before, types)
