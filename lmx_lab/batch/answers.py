"""Define the answer to a row, read the rows of a table, and create the table of their answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmx_lab.batch.columns import TypedColumns
from lmx_lab.batch.prompts import Row
from lmx_lab.errors import InvalidRequestError
from lmx_lab.extras import import_optional
from lmx_lab.results.frames import Dtype, Library, make_table, make_table_of_columns

if TYPE_CHECKING:
    import pandas as pd

TEXT = "text"
"""Name of the column if the rows are texts or a series without a name."""
DTYPES: Mapping[str, Dtype] = {
    "answer": "text",
    "reasoning": "text",
    "finish_reason": "text",
    "error": "text",
    "prompt_tokens": "Int64",
    "cached_tokens": "Int64",
    "output_tokens": "Int64",
    "ttft_s": "float64",
    "total_s": "float64",
    "request_id": "text",
}
"""The columns of each table of answers, with their types."""
SAMPLE = "sample"
"""Name of the column that numbers the answers to the same row."""
VECTOR, ERROR = "embedding", "error"
"""The columns of a table of vectors."""
ARROW_ROWS = 1000
"""Number of rows of a pyarrow table that are converted to Python values in one step."""
LOGPROBS = "logprobs"
"""Name of the column with the log-probabilities of the choices of a row."""


@dataclass(frozen=True, kw_only=True)
class RowAnswer:
    """The answer to a row, or the error that prevented it."""

    text: str | None = None
    reasoning: str = ""
    finish_reason: str | None = None
    error: str | None = None
    """The reason why there is no answer, or why its values do not match the schema."""
    code: str = ""
    """The code of the error (``LabError.code``)."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    """Time from sending the request to the end of the answer, including the wait in the queue."""
    request_id: str | None = None
    """Id of the request: ``lab.requests[request_id]`` returns its record. None for an attached lab."""
    logprobs: Sequence[float] | None = None
    """Log-probability of each choice after the prompt; None if the row has no choices."""


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """The rows to answer."""

    rows: Iterator[tuple[Any, Row]]
    """Pairs of an index label and a row."""
    columns: Sequence[str] | None
    """Names of the columns; None if they are not known before the first row is read."""
    index: Any = None
    """The index of the table of answers; None if rows are read and answers are returned one by one."""
    library: Library | None = None
    """The library of the table of rows, and of the table of answers; None for pandas."""


def read_source(data: Any) -> RowSource:
    """Return the rows of a data frame, a series, a table or a column of pyarrow, a text, a sequence or an iterable.

    Raises:
        InvalidRequestError: the data is none of these, or two columns have the same name.
        MissingPackageError: the answers are returned as a table, and pandas is not installed.
    """
    rows: Iterator[tuple[Any, Row]]
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(data, pandas.DataFrame):
        return _of_frame(data)
    if pandas is not None and isinstance(data, pandas.Series):
        name = str(data.name) if data.name is not None else TEXT
        rows = ((label, {name: value}) for label, value in data.items())
        return RowSource(rows=rows, columns=[name], index=data.index)
    if (source := _of_other_library(data)) is not None:
        return source
    if isinstance(data, str):
        data = [data]
    if isinstance(data, bytes | Mapping) or not isinstance(data, Iterable) or hasattr(data, "columns"):
        raise InvalidRequestError(
            f"the rows are a {type(data).__name__}; pass a data frame of pandas or polars, one of its columns, a "
            "pyarrow table, a list of texts or dictionaries, or an iterable of them",
            param="frame",
        )
    rows = ((position, _row(value)) for position, value in enumerate(data))
    if not isinstance(data, Sequence):
        return RowSource(rows=rows, columns=None)
    columns = list(dict.fromkeys(name for value in data for name in _row(value))) or [TEXT]
    return RowSource(rows=rows, columns=columns, index=import_optional("pandas", "map").RangeIndex(len(data)))


def _of_frame(frame: pd.DataFrame) -> RowSource:
    columns = [str(name) for name in frame.columns]
    _check_unique(columns)
    values = frame.itertuples(index=False, name=None)
    rows = ((label, dict(zip(columns, row, strict=True))) for label, row in zip(frame.index, values, strict=True))
    return RowSource(rows=rows, columns=columns, index=frame.index)


def _of_other_library(data: Any) -> RowSource | None:
    """Return the rows of a polars or pyarrow table; None if the data is something else."""
    polars, pyarrow = sys.modules.get("polars"), sys.modules.get("pyarrow")
    rows: Iterator[Row]
    if polars is not None and isinstance(data, polars.Series):
        data = data.to_frame(data.name or TEXT)
    if polars is not None and isinstance(data, polars.DataFrame):
        rows = data.iter_rows(named=True)
        return RowSource(rows=enumerate(rows), columns=data.columns, index=range(data.height), library="polars")
    data = None if pyarrow is None else _to_arrow(pyarrow, data)
    if pyarrow is None or not isinstance(data, pyarrow.Table):
        return None
    columns = data.column_names
    _check_unique(columns)
    rows = (row for batch in data.to_batches(max_chunksize=ARROW_ROWS) for row in batch.to_pylist())
    return RowSource(rows=enumerate(rows), columns=columns, index=range(data.num_rows), library="pyarrow")


def _to_arrow(pyarrow: Any, data: Any) -> Any:
    """Convert a pyarrow column or record batch to a table. Other data is returned unchanged."""
    if isinstance(data, pyarrow.RecordBatch):
        return pyarrow.Table.from_batches([data])
    return pyarrow.table({TEXT: data}) if isinstance(data, pyarrow.Array | pyarrow.ChunkedArray) else data


def _check_unique(columns: Sequence[str]) -> None:
    if len(set(columns)) < len(columns):
        raise InvalidRequestError(f"two columns have the same name: {', '.join(columns)}; rename one", param="frame")


def _row(value: Any) -> Row:
    return value if isinstance(value, Mapping) else {TEXT: value}


def check_names(columns: TypedColumns) -> None:
    """Check that no column of a schema has the name of a column that each table of answers has.

    Raises:
        InvalidRequestError: a column has such a name.
    """
    for name in columns.dtypes:
        if name in DTYPES or name == SAMPLE:
            raise InvalidRequestError(
                f"the schema has a column {name!r}, but each table of answers already has one; rename it",
                param="schema",
            )


def answer_row(answer: RowAnswer, values: Mapping[str, Any], *, sample: int | None) -> dict[str, Any]:
    """Return the row of the table for an answer.

    Args:
        values: The values of the typed columns.
        sample: Number of the answer among the answers to the same row; None if each row has one answer.
    """
    row = {name: getattr(answer, name) for name in DTYPES if name != "answer"}
    return {**({} if sample is None else {SAMPLE: sample}), "answer": answer.text, **values, **row}


def answer_table(
    rows: Sequence[Mapping[str, Any]], source: RowSource, columns: TypedColumns | None, *, several: bool
) -> Any:
    """Create the table of answers, in the same library as that of the rows.

    Args:
        several: Whether each row has several answers.
    """
    if source.library is None:
        return answer_frame(rows, source.index, columns, several=several)
    return make_table(rows, _dtypes(rows, columns, several=several), library=source.library)


def vector_table(vectors: Sequence[Any], errors: Sequence[str | None], source: RowSource) -> Any:
    """Create the table of vectors, in the same library as that of the rows. A row without a vector has an error."""
    if source.library is None:
        columns = {VECTOR: vectors, ERROR: errors}
        dtypes = {VECTOR: "object", ERROR: "text"}
        return make_table_of_columns(columns, dtypes, index=source.index, needed_by="embed_frame")
    width = next((len(vector) for vector in vectors if vector is not None), 0)
    lists = [None if vector is None else vector.tolist() for vector in vectors]
    if source.library == "polars":
        polars: Any = sys.modules["polars"]
        kind = polars.Array(polars.Float32, width) if width else polars.List(polars.Float32)
        return polars.DataFrame(
            [polars.Series(VECTOR, lists, dtype=kind), polars.Series(ERROR, errors, dtype=polars.String)]
        )
    pyarrow: Any = sys.modules["pyarrow"]
    kind = pyarrow.list_(pyarrow.float32(), width or -1)
    return pyarrow.table({VECTOR: pyarrow.array(lists, type=kind), ERROR: pyarrow.array(errors, type=pyarrow.string())})


def select_rows(data: Any, source: RowSource, order: Sequence[int], added: Mapping[str, Sequence[float]]) -> Any:
    """Return some rows of a table in this order, with further columns of numbers.

    Args:
        data: The table from which ``source`` was read: a polars or pyarrow table, or a pandas data frame.
    """
    if source.library is None:
        return data.iloc[list(order)].assign(**added)
    if source.library == "polars":
        polars: Any = sys.modules["polars"]
        frame = data.to_frame(data.name or TEXT) if isinstance(data, polars.Series) else data
        found = frame.select(polars.all().gather(polars.Series(order, dtype=polars.UInt32)))
        return found.with_columns(polars.Series(name, each, dtype=polars.Float64) for name, each in added.items())
    pyarrow: Any = sys.modules["pyarrow"]
    table = _to_arrow(pyarrow, data).take(pyarrow.array(order, type=pyarrow.int64()))
    for name, numbers in added.items():
        table = table.append_column(name, pyarrow.array(numbers, type=pyarrow.float64()))
    return table


def _dtypes(rows: Sequence[Mapping[str, Any]], columns: TypedColumns | None, *, several: bool) -> Mapping[str, Dtype]:
    """Return the columns of a table of answers, with their types."""
    dtypes: dict[str, Dtype] = {SAMPLE: "int64", LOGPROBS: "object", **DTYPES}
    dtypes |= columns.dtypes if columns is not None else {}
    first = [SAMPLE, "answer"] if several else ["answer"]
    names = list(rows[0]) if rows else [*first, *(columns.dtypes if columns else ()), *list(DTYPES)[1:]]
    return {name: dtypes[name] for name in names}


def answer_frame(
    rows: Sequence[Mapping[str, Any]], index: Any, columns: TypedColumns | None = None, *, several: bool = False
) -> pd.DataFrame:
    """Create the data frame of answers from its rows.

    Args:
        index: Labels of the rows that were answered. They are repeated if each row has several answers.
        several: Whether each row has several answers.
    """
    index = import_optional("pandas", "map").Index(index)
    repeated = index if len(index) == len(rows) else index.repeat(len(rows) // len(index))
    frame: pd.DataFrame = make_table(rows, _dtypes(rows, columns, several=several), index=repeated, needed_by="map")
    return frame
