"""Make typed tables of pandas, polars or pyarrow, and read the rows of tables.

pandas is optional and takes half a second to import, so it is imported when a table is made. polars and pyarrow are not
imported: a caller who passes one of their tables has imported them.
"""

from __future__ import annotations

import itertools
import json
import numbers
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from datetime import UTC, date, datetime
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from lmx_lab.errors import InvalidRequestError
from lmx_lab.extras import import_optional

if TYPE_CHECKING:
    import pandas as pd

Dtype = Literal["int64", "Int64", "float32", "float64", "bool", "boolean", "str", "text", "object", "date", "time"]
"""The type of a column, with pandas' names for most of them. None is a missing value, which ``int64`` and ``bool`` do
not allow. ``str`` and ``text`` are texts; in pandas, ``text`` has the dtype ``object`` and keeps None. A ``time`` is
given in seconds since 1970, as text in ISO 8601 or as ``datetime``, and stored in UTC with microseconds. In pandas,
a ``date`` is an object."""
Library = Literal["polars", "pyarrow"]
"""A library of tables other than pandas."""
TEXT = "text"
"""Name of the column if the rows are texts or a series without a name."""
NARROW: Mapping[str, type[np.floating[Any]]] = {
    **dict.fromkeys(("float32", "Float32", "float", "float[pyarrow]"), np.float32),
    **dict.fromkeys(("float16", "Float16", "halffloat", "halffloat[pyarrow]"), np.float16),
}
"""Types of columns whose numbers have fewer digits than those of Python, by their names in pandas, polars and
pyarrow."""
VECTOR, ERROR = "embedding", "error"
"""The columns of a table of vectors."""
_DTYPES: Mapping[Any, tuple[Dtype, Dtype]] = {
    bool: ("bool", "boolean"),
    int: ("int64", "Int64"),
    float: ("float64", "float64"),
    str: ("str", "str"),
}
"""The types of required and of optional fields."""
_LIBRARY_TYPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("int64", "Int64"), ("Int64", "int64")),
    **dict.fromkeys(("bool", "boolean"), ("Boolean", "bool_")),
    **dict.fromkeys(("str", "text", "object"), ("String", "string")),
    **{"float32": ("Float32", "float32"), "float64": ("Float64", "float64"), "date": ("Date", "date32")},
    "time": ("Datetime", "timestamp", "us", "UTC"),
}
"""The names of types in polars and in pyarrow, and their arguments."""


def dtypes_of(shape: type) -> dict[str, Dtype]:
    """Return the column types of the fields of a dataclass or a pydantic model, in their order."""
    dtypes: dict[str, Dtype] = {}
    for name, hint in get_type_hints(shape).items():
        hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = [type(get_args(kind)[0]) if get_origin(kind) is Literal else kind for kind in hints]
        known = [kind for kind in kinds if kind is not NoneType]
        required, optional = _DTYPES.get(known[0] if len(known) == 1 else None, ("object", "object"))
        dtypes[name] = required if len(known) == len(kinds) else optional
    return dtypes


def optional_dtype(values: Iterable[Any]) -> Dtype | None:
    """Return the nullable type of integers or booleans if some are missing; None for other values, because the type
    that pandas infers represents all of them.
    """
    kinds = {type(value) for value in values}
    known = kinds - {NoneType}
    if known == kinds or not known:
        return None
    if known == {bool}:
        return "boolean"
    return "Int64" if bool not in known and all(issubclass(kind, numbers.Integral) for kind in known) else None


def make_table(
    rows: Iterable[Mapping[str, Any]] | Iterable[Sequence[Any]] | Mapping[str, Any],
    dtypes: Mapping[str, Any],
    *,
    index: Any = None,
    library: Library | None = None,
    needed_by: str = "df",
) -> pd.DataFrame:
    """Return rows or columns as a data frame, or as a table of another library.

    Its columns and their types do not depend on the values. Integers are exact. In pandas, a column with an integer of
    more than 64 bits has the dtype ``object``.

    Args:
        rows: Mappings, in which absent values are missing, or sequences of values in the order of ``dtypes``; or a
            mapping of each column's name to its values, a sequence or an array.
        dtypes: The ``Dtype`` of each column, in the order of the table. For pandas, it can also be one of its own
            types, or None, which infers the type from the values.
        index: The labels of the rows, for pandas; by default their positions.
        library: The library of the table, which the caller has imported; None for pandas.
        needed_by: The attribute or function that makes the table, for the error message.

    Raises:
        MissingPackageError: pandas is needed and not installed.
    """
    if isinstance(rows, Mapping):
        columns: Mapping[str, Any] = rows
    else:
        given: list[Any] = list(rows)
        if given and isinstance(given[0], Mapping):
            columns = {name: [row.get(name) for row in given] for name in dtypes}
        else:
            columns = {name: [row[at] for row in given] for at, name in enumerate(dtypes)}
    if library is not None:
        module: Any = sys.modules[library]
        made = {}
        for name, dtype in dtypes.items():
            polars_name, pyarrow_name, *unit = _LIBRARY_TYPES[dtype]
            values = _plain(columns[name], dtype)
            if library == "polars":
                made[name] = module.Series(name, values, dtype=getattr(module, polars_name)(*unit))
            else:
                made[name] = module.array(values, type=getattr(module, pyarrow_name)(*unit))
        found: pd.DataFrame = module.DataFrame(made) if library == "polars" else module.table(made)
        return found
    pandas = import_optional("pandas", needed_by)
    table = pandas.DataFrame({name: _pandas_series(pandas, columns[name], dtype) for name, dtype in dtypes.items()})
    if isinstance(index, list):
        # Without a dtype, pandas would convert integer labels to floats if some are missing.
        index = pandas.Index(index, dtype="object" if None in index else None)
    if index is not None:
        table.index = index
    return table


def index_fields(index: pd.Index) -> list[dict[str, Any]]:
    """Return the levels of an index, with their names and types, as values that ``to_plain`` converts to JSON."""
    return [{"name": name, **_level_fields(index.get_level_values(at))} for at, name in enumerate(index.names)]


def _level_fields(level: Any) -> dict[str, Any]:
    kind = str(level.dtype)
    if kind == "category":
        categories = _level_fields(level.categories)
        return {"dtype": kind, "codes": level.codes, "categories": categories, "ordered": level.ordered}
    if kind.startswith("interval"):
        sides = {name: _level_fields(getattr(level, name)) for name in ("left", "right")}
        return {"dtype": "interval", "closed": level.closed, **sides}
    values = list(level)
    are_dates = kind == "object" and {type(value) for value in values if value is not None} == {date}
    return {"dtype": "date" if are_dates else kind, "values": values}


def make_index(levels: Sequence[Mapping[str, Any]]) -> pd.Index:
    """Return the index of ``index_fields`` after it was stored as JSON. Labels that are other objects than dates, times
    and numbers are texts.
    """
    pandas = import_optional("pandas", "df")

    def level(given: Mapping[str, Any]) -> Any:
        if given["dtype"] == "category":
            categories = level(given["categories"])
            return pandas.Categorical.from_codes(given["codes"], categories=categories, ordered=given["ordered"])
        if given["dtype"] == "interval":
            return pandas.IntervalIndex.from_arrays(level(given["left"]), level(given["right"]), closed=given["closed"])
        if given["dtype"].startswith("date") and not given["dtype"].startswith("datetime"):
            days = [None if day is None else date.fromisoformat(day) for day in given["values"]]
            return pandas.Index(days, dtype="object" if given["dtype"] == "date" else given["dtype"])
        values = [tuple(value) if isinstance(value, list) else value for value in given["values"]]
        return pandas.Index(values, dtype=given["dtype"], tupleize_cols=False)

    names = [tuple(each["name"]) if isinstance(each["name"], list) else each["name"] for each in levels]
    made = list(map(level, levels))
    return pandas.Index(made[0], name=names[0]) if len(made) == 1 else pandas.MultiIndex.from_arrays(made, names=names)


def _pandas_series(pandas: Any, values: Sequence[Any], dtype: Any) -> Any:
    if dtype is None:
        dtype = optional_dtype(values)
    if dtype == "time":
        return pandas.Series(list(map(utc_time, values)), dtype="datetime64[us, UTC]")
    try:
        return pandas.Series(values, dtype="object" if dtype in ("text", "date") else dtype)
    except (OverflowError, TypeError):
        is_large = any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values)
        if dtype not in ("int64", "Int64") or not is_large:
            raise
        return pandas.Series([pandas.NA if value is None else value for value in values], dtype="object")


def utc_time(value: datetime | float | str | None) -> datetime | None:
    """Return a time in UTC. A ``datetime`` without a time zone is in UTC; a text without one has the local zone.

    Raises:
        OverflowError: the year is not from 1 to 9999 in UTC.
    """
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    if isinstance(value, str):
        return datetime.fromisoformat(value).astimezone(UTC)
    return None if value is None else datetime.fromtimestamp(value, UTC)


def _plain(values: Sequence[Any], dtype: Dtype) -> Sequence[Any]:
    """Return the values of a column for a library whose columns have only one type: those of an ``object`` column as
    JSON texts, and those of a ``text`` column as JSON texts if they have no other text.
    """
    if dtype == "time":
        return list(map(utc_time, values))
    if dtype not in ("object", "text"):
        return values

    def is_plain(value: Any) -> bool:
        return value is None or (dtype == "text" and isinstance(value, str))

    return [value if is_plain(value) else json.dumps(value, default=str) for value in values]


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """The rows of a table, or of an iterable."""

    rows: Iterator[tuple[Any, Mapping[str, Any]]]
    """Pairs of an index label and a row."""
    columns: Sequence[str] | None
    """Names of the columns; None if they are not known before the first row is read."""
    index: Any = None
    """The labels of the rows, for pandas; None for an iterable, whose rows are read one by one."""
    library: Library | None = None
    """The library of the table; None for pandas."""


class TableRow(dict[str, Any]):
    """A row. Its columns can also be selected by the names of the table that are not texts, such as ``row[0]``."""

    @classmethod
    def of(cls, names: Iterable[Any], values: Iterable[Any], narrow: Iterable[Any]) -> TableRow:
        """Create a row, in which a number has the fewest digits that identify it in its type: ``19.99`` in float32.

        Args:
            narrow: The result of ``narrow_types`` for each column.
        """
        pairs = zip(names, values, narrow, strict=True)
        return cls((str(name), _shortest(value, types)) for name, value, types in pairs)

    def __missing__(self, name: Any) -> Any:
        if isinstance(name, str):
            raise KeyError(name)
        return self[str(name)]

    def get(self, name: Any, default: Any = None) -> Any:
        return super().get(str(name), default)


def narrow_types(dtype: Any) -> Any:
    """Return the type of a column if its numbers have fewer digits than those of Python, otherwise None. For objects
    with fields, this is a dictionary of the types of the fields, and for lists the type of their elements.
    """
    dtype = getattr(dtype, "pyarrow_dtype", dtype)
    for name in ("inner", "value_type", "item_type"):
        if (elements := getattr(dtype, name, None)) is not None:
            return narrow_types(elements)
    if isinstance(fields := getattr(dtype, "fields", None), list):
        return {each.name: narrow_types(getattr(each, "dtype", None) or each.type) for each in fields}
    categories = getattr(getattr(dtype, "categories", None), "dtype", dtype)
    return NARROW.get(str(categories))


def _shortest(value: Any, narrow: Any) -> Any:
    if isinstance(value, np.float32 | np.float16):
        return float(str(value))
    if type(value) in (list, tuple):
        return type(value)(_shortest(each, narrow) for each in value)
    if type(value) is dict:
        types = narrow if isinstance(narrow, dict) else dict.fromkeys(value, narrow)
        return {name: _shortest(each, types.get(name)) for name, each in value.items()}
    return float(str(narrow(value))) if isinstance(narrow, type) and isinstance(value, float) else value


def read_source(data: Any) -> RowSource:
    """Return the rows of a data frame, a column, an array, a table of pyarrow, a text, a sequence or an iterable.

    Raises:
        InvalidRequestError: the data is none of these, a row of a sequence is not a dictionary or a single value, or
            two columns have the same name.
        MissingPackageError: the data is a list or an array, and pandas is not installed.
    """
    data = to_table(data)
    pandas = sys.modules.get("pandas")
    polars, pyarrow = sys.modules.get("polars"), sys.modules.get("pyarrow")
    index: Any
    values: Iterable[Iterable[Any]]
    library: Library | None = None
    if pandas is not None and isinstance(data, pandas.DataFrame):
        index, columns, dtypes = data.index, [str(name) for name in data.columns], data.dtypes
        values = data.itertuples(index=False, name=None)
    elif polars is not None and isinstance(data, polars.DataFrame):
        index, columns, dtypes, library = range(data.height), data.columns, data.dtypes, "polars"
        values = data.iter_rows()
    elif pyarrow is not None and isinstance(data, pyarrow.Table):
        index, columns, dtypes, library = range(data.num_rows), data.column_names, data.schema.types, "pyarrow"
        # The rows of a batch are converted to Python values in one step.
        batches = data.to_batches(max_chunksize=1000)
        values = (row.values() for batch in batches for row in batch.to_pylist())
    else:
        return _listed_source(data)
    if len(set(columns)) < len(columns):
        raise InvalidRequestError(f"two columns have the same name: {', '.join(columns)}; rename one", param="frame")
    narrow = list(map(narrow_types, dtypes))
    rows = ((label, TableRow.of(columns, row, narrow)) for label, row in zip(index, values, strict=True))
    return RowSource(rows=rows, columns=columns, index=index, library=library)


def _listed_source(data: Any) -> RowSource:
    """Return the rows of a text, a sequence or an iterable."""
    if isinstance(data, str):
        data = [data]
    values = None
    if not isinstance(data, bytes | Mapping | np.ndarray) and not hasattr(data, "columns"):
        # Some objects have ``__iter__`` but cannot be iterated, such as ``series.str``.
        with suppress(TypeError):
            values = iter(data)
    if values is None:
        hint = "; one row is a list with one dictionary, and columns are pandas.DataFrame(columns)"
        raise InvalidRequestError(
            f"the rows have the type {type(data).__name__}; pass a data frame of pandas or polars, one of its columns, "
            "a pyarrow table, an array, a list of texts or dictionaries, or an iterable of them"
            f"{hint if isinstance(data, Mapping) else ''}",
            param="frame",
        )
    rows = ((at, _listed_row(at, value)) for at, value in enumerate(values))
    if not isinstance(data, Sequence):
        return RowSource(rows=rows, columns=None)
    listed = [row for _, row in rows]
    columns = list(dict.fromkeys(name for row in listed for name in row)) or [TEXT]
    index = import_optional("pandas", "map").RangeIndex(len(listed))
    return RowSource(rows=iter(enumerate(listed)), columns=columns, index=index)


def _listed_row(at: int, value: Any) -> TableRow:
    """Return a row of a sequence or an iterable.

    Raises:
        InvalidRequestError: the value is a tuple or another object, whose text is not a prompt.
    """
    if isinstance(value, Mapping):
        return TableRow.of(value, value.values(), itertools.repeat(None, len(value)))
    is_single = isinstance(value, str | np.generic) or not (
        is_dataclass(value) or isinstance(value, Iterable) or hasattr(value, "__getitem__")
    )
    if not is_single or not has_text(value):
        raise InvalidRequestError(
            f"row {at} has the type {type(value).__name__}, and its values have no names of columns; pass the data "
            "frame, the table or the array itself, or convert each row to a dictionary",
            param="frame",
        )
    return TableRow.of([TEXT], [value], [None])


def has_text(value: object) -> bool:
    """Return whether the text of a value describes it. The default text of an object is only its address."""
    return any(
        getattr(type(value), name) is not getattr(object, name) for name in ("__str__", "__repr__", "__format__")
    )


def to_table(data: Any) -> Any:
    """Convert a column or an array to a table of its library, and record batches of pyarrow to a table. Collect a lazy
    frame of polars.

    An array of one dimension is a column. Other data is returned unchanged.
    """
    pandas = sys.modules.get("pandas")
    polars, pyarrow = sys.modules.get("polars"), sys.modules.get("pyarrow")
    if polars is not None and isinstance(data, polars.Series | polars.LazyFrame):
        return data.to_frame(data.name or TEXT) if isinstance(data, polars.Series) else data.collect()
    if pyarrow is not None and isinstance(data, pyarrow.RecordBatch | pyarrow.RecordBatchReader):
        return data.read_all() if hasattr(data, "read_all") else pyarrow.Table.from_batches([data])
    if pyarrow is not None and isinstance(data, pyarrow.Array | pyarrow.ChunkedArray):
        return pyarrow.table({TEXT: data})
    is_array = isinstance(data, np.ndarray) and data.ndim in (1, 2)
    kinds = () if pandas is None else (pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray)
    if not is_array and not isinstance(data, kinds):
        return data
    pandas = import_optional("pandas", "map")
    if isinstance(data, pandas.MultiIndex) or (is_array and (data.ndim == 2 or data.dtype.names)):
        return pandas.DataFrame(data if is_array else data.to_frame(index=False))
    name = getattr(data, "name", None)
    return pandas.DataFrame({TEXT if name is None else name: data})


def vector_table(vectors: Sequence[Any], errors: Sequence[str | None], source: RowSource) -> Any:
    """Return vectors as a table of the same library as that of the rows. A row without a vector has an error."""
    if source.library is None:
        columns = {VECTOR: vectors, ERROR: errors}
        dtypes = {VECTOR: "object", ERROR: "text"}
        return make_table(columns, dtypes, index=source.index, needed_by="embed_frame")
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
        found = data.iloc[list(order)].copy()
        for name, each in added.items():
            # In a table whose columns have several levels, the other ones are empty.
            found[(name, *[""] * (found.columns.nlevels - 1)) if found.columns.nlevels > 1 else name] = each
        return found
    if source.library == "polars":
        polars: Any = sys.modules["polars"]
        found = data.select(polars.all().gather(polars.Series(order, dtype=polars.UInt32)))
        return found.with_columns(polars.Series(name, each, dtype=polars.Float64) for name, each in added.items())
    pyarrow: Any = sys.modules["pyarrow"]
    table = data.take(pyarrow.array(order, type=pyarrow.int64()))
    for name, each in added.items():
        table = table.append_column(name, pyarrow.array(each, type=pyarrow.float64()))
    return table
