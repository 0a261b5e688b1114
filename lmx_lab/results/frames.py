"""Make typed tables of pandas, polars or pyarrow.

pandas is optional and takes half a second to import, so it is imported when a table is made. polars and pyarrow are not
imported: a caller who passes one of their tables has imported them.
"""

from __future__ import annotations

import json
import numbers
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lmx_lab.extras import import_optional

Dtype = Literal["int64", "Int64", "float32", "float64", "bool", "boolean", "str", "text", "object", "time"]
"""The type of a column, with pandas' names for most of them. None is a missing value, which ``int64`` and ``bool`` do
not allow. ``str`` and ``text`` are texts; in pandas, ``text`` has the dtype ``object`` and keeps None. A ``time`` is
given in seconds since 1970 or as text in ISO 8601, and stored in UTC with microseconds."""
Library = Literal["polars", "pyarrow"]
"""A library of tables other than pandas."""
_DTYPES: Mapping[Any, tuple[Dtype, Dtype]] = {
    bool: ("bool", "boolean"),
    int: ("int64", "Int64"),
    float: ("float64", "float64"),
    str: ("str", "str"),
}
"""The types of required and of optional fields."""


def dtypes_of(shape: type) -> dict[str, Dtype]:
    """Return the column types of the fields of a dataclass or a pydantic model, in their order."""
    return {name: _dtype_of(hint) for name, hint in get_type_hints(shape).items()}


def _dtype_of(hint: Any) -> Dtype:
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    is_optional = NoneType in kinds
    kinds = [type(get_args(kind)[0]) if get_origin(kind) is Literal else kind for kind in kinds if kind is not NoneType]
    required, optional = _DTYPES.get(kinds[0] if len(kinds) == 1 else None, ("object", "object"))
    return optional if is_optional else required


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
    rows: Iterable[Mapping[str, Any]] | Iterable[Sequence[Any]],
    dtypes: Mapping[str, Any],
    *,
    index: Any = None,
    library: Library | None = None,
    needed_by: str = "df",
) -> Any:
    """Return rows as a table. Its columns and their types do not depend on the rows.

    Args:
        rows: Mappings, in which absent values are missing, or sequences of values in the order of ``dtypes``.
        dtypes, index, library, needed_by: As for ``make_table_of_columns``.

    Raises:
        MissingPackageError: as ``make_table_of_columns``.
    """
    given: list[Any] = list(rows)
    if given and isinstance(given[0], Mapping):
        columns = {name: [row.get(name) for row in given] for name in dtypes}
    else:
        columns = {name: [row[at] for row in given] for at, name in enumerate(dtypes)}
    return make_table_of_columns(columns, dtypes, index=index, library=library, needed_by=needed_by)


def make_table_of_columns(
    columns: Mapping[str, Any],
    dtypes: Mapping[str, Any],
    *,
    index: Any = None,
    library: Library | None = None,
    needed_by: str = "df",
) -> Any:
    """Return columns of the same length as a table.

    Integers are exact. In pandas, a column with an integer of more than 64 bits has the dtype ``object``.

    Args:
        columns: The values of each column: a sequence or an array.
        dtypes: The ``Dtype`` of each column, in the order of the table. For pandas, it can also be one of its own
            types, or None, which infers the type from the values.
        index: The labels of the rows, for pandas; by default their positions.
        library: The library of the table, which the caller has imported; None for pandas.
        needed_by: The attribute or function that makes the table, for the error message.

    Raises:
        MissingPackageError: pandas is needed and not installed.
    """
    if library == "polars":
        return _polars_table(sys.modules["polars"], columns, dtypes)
    if library == "pyarrow":
        return _arrow_table(sys.modules["pyarrow"], columns, dtypes)
    pandas = import_optional("pandas", needed_by)
    table = pandas.DataFrame({name: _pandas_series(pandas, columns[name], dtype) for name, dtype in dtypes.items()})
    if index is not None:
        # Without a dtype, pandas would convert integer labels to floats if some are missing.
        is_incomplete = isinstance(index, list) and any(label is None for label in index)
        table.index = pandas.Index(index, dtype="object" if is_incomplete else None)
    return table


def _pandas_series(pandas: Any, values: Sequence[Any], dtype: Any) -> Any:
    if dtype is None:
        dtype = optional_dtype(values)
    if dtype == "time":
        return pandas.Series(list(map(_time, values)), dtype="datetime64[us, UTC]")
    try:
        return pandas.Series(values, dtype="object" if dtype == "text" else dtype)
    except (OverflowError, TypeError):
        if dtype not in ("int64", "Int64") or not _has_large_integer(values):
            raise
        return pandas.Series([pandas.NA if value is None else value for value in values], dtype="object")


def _has_large_integer(values: Sequence[Any]) -> bool:
    return any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values)


def _time(value: float | str | None) -> datetime | None:
    if isinstance(value, str):
        return datetime.fromisoformat(value).astimezone(UTC)
    return None if value is None else datetime.fromtimestamp(value, UTC)


def _polars_table(polars: Any, columns: Mapping[str, Sequence[Any]], dtypes: Mapping[str, Dtype]) -> Any:
    kinds = {
        **dict.fromkeys(("int64", "Int64"), polars.Int64),
        **dict.fromkeys(("bool", "boolean"), polars.Boolean),
        **dict.fromkeys(("str", "text", "object"), polars.String),
        "float32": polars.Float32,
        "float64": polars.Float64,
        "time": polars.Datetime("us", "UTC"),
    }
    return polars.DataFrame(
        [polars.Series(name, _plain(columns[name], dtype), dtype=kinds[dtype]) for name, dtype in dtypes.items()]
    )


def _arrow_table(pyarrow: Any, columns: Mapping[str, Sequence[Any]], dtypes: Mapping[str, Dtype]) -> Any:
    kinds = {
        **dict.fromkeys(("int64", "Int64"), pyarrow.int64()),
        **dict.fromkeys(("bool", "boolean"), pyarrow.bool_()),
        **dict.fromkeys(("str", "text", "object"), pyarrow.string()),
        "float32": pyarrow.float32(),
        "float64": pyarrow.float64(),
        "time": pyarrow.timestamp("us", "UTC"),
    }
    return pyarrow.table(
        {name: pyarrow.array(_plain(columns[name], dtype), type=kinds[dtype]) for name, dtype in dtypes.items()}
    )


def _plain(values: Sequence[Any], dtype: Dtype) -> Sequence[Any]:
    """Return the values of a column for a library whose columns have only one type: those of an ``object`` column as
    they are if all of them are texts, otherwise as JSON texts.
    """
    if dtype == "time":
        return list(map(_time, values))
    if dtype != "object" or all(value is None or isinstance(value, str) for value in values):
        return values
    return [None if value is None else json.dumps(value, default=str) for value in values]
