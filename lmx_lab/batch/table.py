"""Read the rows of a table, and make the table of their answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmx_lab.batch.answer import RowAnswer
from lmx_lab.batch.columns import TypedColumns
from lmx_lab.batch.prompts import Row
from lmx_lab.errors import InvalidRequestError
from lmx_lab.frames import pandas_for

if TYPE_CHECKING:
    import pandas as pd

TEXT = "text"
"""The column of rows that are texts, and of a series without a name."""
DTYPES: Mapping[str, str] = {
    "answer": "object",
    "reasoning": "object",
    "finish_reason": "object",
    "error": "object",
    "prompt_tokens": "Int64",
    "cached_tokens": "Int64",
    "output_tokens": "Int64",
    "ttft_s": "float64",
    "total_s": "float64",
}
"""The columns that each table of answers has."""
SAMPLE = "sample"
"""The column with the number of an answer among those to the same row."""


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """The rows to answer."""

    rows: Iterator[tuple[Any, Row]]
    """Rows with their labels in the index."""
    columns: Sequence[str] | None
    """None if they are known only from the first row."""
    index: Any = None
    """The index of the table of answers; None for rows that are read one by one, whose answers are too."""


def read_source(data: Any) -> RowSource:
    """Return the rows of a data frame, a series, a text, a sequence or an iterable.

    Raises:
        InvalidRequestError: it is none of them.
        ImportError: pandas is not installed, and the answers would be a table.
    """
    rows: Iterator[tuple[Any, Row]]
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(data, pandas.DataFrame):
        return _of_frame(data)
    if pandas is not None and isinstance(data, pandas.Series):
        name = str(data.name) if data.name is not None else TEXT
        rows = ((label, {name: value}) for label, value in data.items())
        return RowSource(rows=rows, columns=[name], index=data.index)
    if isinstance(data, str):
        data = [data]
    if isinstance(data, bytes | Mapping) or not isinstance(data, Iterable) or hasattr(data, "columns"):
        raise InvalidRequestError(
            f"the rows are a {type(data).__name__}; pass a pandas data frame, one of its columns, a list of texts or "
            "dictionaries, or an iterable of them",
            param="frame",
        )
    rows = ((position, _row(value)) for position, value in enumerate(data))
    if not isinstance(data, Sequence):
        return RowSource(rows=rows, columns=None)
    columns = list(dict.fromkeys(name for value in data for name in _row(value))) or [TEXT]
    return RowSource(rows=rows, columns=columns, index=pandas_for("map").RangeIndex(len(data)))


def _of_frame(frame: pd.DataFrame) -> RowSource:
    columns = [str(name) for name in frame.columns]
    if len(set(columns)) < len(columns):
        raise InvalidRequestError(f"two columns have the same name: {', '.join(columns)}; rename one", param="frame")
    values = frame.itertuples(index=False, name=None)
    rows = ((label, dict(zip(columns, row, strict=True))) for label, row in zip(frame.index, values, strict=True))
    return RowSource(rows=rows, columns=columns, index=frame.index)


def _row(value: Any) -> Row:
    return value if isinstance(value, Mapping) else {TEXT: value}


def check_names(columns: TypedColumns) -> None:
    """Check that no column of a schema has the name of another column of the table.

    Raises:
        InvalidRequestError: one has.
    """
    for name in columns.dtypes:
        if name in DTYPES or name == SAMPLE:
            raise InvalidRequestError(
                f"the schema has a column {name!r}, as each table of answers has; rename it", param="schema"
            )


def answer_row(answer: RowAnswer, values: Mapping[str, Any], *, sample: int | None) -> dict[str, Any]:
    """Return the row of an answer.

    Args:
        values: The values of the typed columns.
        sample: Number of the answer among those to the same row; None if there is one for each row.
    """
    row = {name: getattr(answer, name) for name in DTYPES if name != "answer"}
    return {**({} if sample is None else {SAMPLE: sample}), "answer": answer.text, **values, **row}


def answer_frame(rows: Sequence[Mapping[str, Any]], index: Any, columns: TypedColumns | None) -> pd.DataFrame:
    """Return the table of the rows of answers.

    Args:
        index: Labels of the rows that were answered. With several answers for each row, the labels are repeated.
    """
    dtypes = {SAMPLE: "int64", **DTYPES, **(columns.dtypes if columns is not None else {})}
    names = list(rows[0]) if rows else ["answer", *(columns.dtypes if columns else ()), *list(DTYPES)[1:]]
    repeated = index if len(index) == len(rows) else index.repeat(len(rows) // len(index))
    pandas = pandas_for("map")
    made = {name: pandas.Series([row[name] for row in rows], index=repeated, dtype=dtypes[name]) for name in names}
    frame: pd.DataFrame = pandas.DataFrame(made, index=repeated)
    return frame
