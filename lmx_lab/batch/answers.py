"""Define the answer to a row, the typed columns of a schema, and the table of answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from numbers import Real
from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUndefinedAnnotation

from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.frames import Dtype, RowSource, make_table, utc_time

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
LOGPROBS = "logprobs"
"""Name of the column with the log-probabilities of the choices of a row."""
Schema = Mapping[str, Any] | type[BaseModel]
JSON_DTYPES: Mapping[str | None, Dtype] = {
    **{"integer": "Int64", "number": "float64", "boolean": "boolean", "string": "text"},
    **{"date": "date", "date-time": "time"},
}
"""The type of a column for each JSON type, and for formats of texts. Other columns contain Python objects."""
WIDER = {"number": {"integer", "number"}, "string": {"string", "date", "date-time"}}
"""The types that a type can represent."""
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
"""The JSON type of each Python type in ``enum`` and ``const``."""
INT64 = range(-(2**63), 2**63)
WHOLE_VALUE = "value"
"""Name of the column if the schema does not describe an object with properties."""


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


class TypedColumns:
    """The columns that a schema defines.

    Args:
        json_schema: The schema of an answer.
        convert: Validates the JSON text of an answer, and returns the values of its columns. The default returns the
            values of the text.
        output: The schema of the values that ``convert`` returns. Pydantic's names and types of a value may differ
            before and after its validation.
    """

    def __init__(
        self,
        json_schema: Mapping[str, Any],
        convert: Callable[[str], Any] | None = None,
        output: Mapping[str, Any] | None = None,
    ) -> None:
        self.json_schema = json_schema
        self._convert = convert
        root = output or json_schema
        top = _resolved(root, root)
        properties = top.get("properties") if isinstance(top, Mapping) else None
        self._is_object = isinstance(properties, Mapping) and bool(properties)
        members: Mapping[str, Any] = properties if self._is_object else {WHOLE_VALUE: root}  # type: ignore[assignment]
        self.dtypes: dict[str, Dtype] = {}
        """The type of each column: ``object`` if the schema allows several types apart from null, or any type."""
        for name, member in members.items():
            kinds = _json_types(member, root, python=convert is not None) - {"null"}
            if len(kinds) > 1:
                # The type that can represent all of them.
                kinds = {next((each for each in ("number", "string") if kinds <= WIDER[each]), None)}
            self.dtypes[name] = JSON_DTYPES.get(kinds.pop() if kinds else None, "object")

    @classmethod
    def of(cls, schema: Schema) -> TypedColumns:
        """Create the columns from a JSON schema, a pydantic model, or a dictionary that maps names to types.

        Raises:
            InvalidRequestError: the schema is none of these, or one of its types has no JSON schema.
        """
        model: Any = schema
        try:
            if isinstance(schema, Mapping) and schema and all(map(_is_type, schema.values())):
                # The names of columns are aliases, because they need not be names in Python.
                fields: dict[str, Any] = {
                    f"column_{at}": (kind, Field(alias=str(name))) for at, (name, kind) in enumerate(schema.items())
                }
                model = create_model("row", __config__=ConfigDict(extra="forbid"), **fields)
            if isinstance(model, type) and issubclass(model, BaseModel):
                schemas = [model.model_json_schema(mode=mode) for mode in ("validation", "serialization")]
                _check_aliases(model.__pydantic_core_schema__)
                # Columns that are empty in the rows in which the condition excludes their values.
                fields = {each.serialization_alias or name: each for name, each in model.model_fields.items()}
                excluded = [name for name, each in fields.items() if each.exclude_if is not None]

                def convert(text: str) -> Any:
                    # Strict types accept texts instead of dates, and lists instead of tuples, only in JSON.
                    found = model.model_validate_json(text).model_dump(by_alias=True)
                    return {**dict.fromkeys(excluded), **found} if excluded else found

                return cls(schemas[0], convert, schemas[1])
        except (PydanticUserError, PydanticUndefinedAnnotation) as exc:
            raise InvalidRequestError(f"a type in schema has no JSON schema: {exc.message}", param="schema") from None
        with suppress(TypeError):
            if isinstance(schema, Mapping) and schema and json.dumps(dict(schema)):
                return cls(schema)
        raise InvalidRequestError(
            f"schema is {schema!r:.80}; pass a JSON schema, a pydantic model, or a dictionary such as "
            "{'city': str, 'days': int}",
            param="schema",
        )

    def values(self, text: str) -> dict[str, Any]:
        """Return the values of an answer by column; None for columns that the answer does not contain.

        Raises:
            ValueError: the text is not complete JSON, a validator or serializer of a Python type failed, or a value
                does not have the type of its column.
        """
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if self._convert is not None:
            try:
                value = self._convert(text)
            except ValidationError as exc:
                problem = exc.errors()[0]
                place = ".".join(map(str, problem["loc"])) or "the value"
                raise ValueError(f"{place}: {problem['msg']}") from None
            except Exception as exc:
                raise ValueError(f"the schema raised {type(exc).__name__}: {exc}") from exc
        if not self._is_object:
            value = {WHOLE_VALUE: value}
        if not isinstance(value, Mapping):
            raise ValueError(f"the value is {value!r:.40}, which is not an object with the columns of the schema")
        if self._convert is not None and (absent := [name for name in self.dtypes if name not in value]):
            raise ValueError(f"the serializer of the schema returned no {absent[0]}")
        return {name: _column_value(name, kind, value.get(name)) for name, kind in self.dtypes.items()}


def _check_aliases(schema: Any, *, by_name: bool = False) -> None:
    """Check that each field of a type can be read by a name.

    Args:
        schema: A part of the type's schema in pydantic.
        by_name: Whether the type also reads the names of its fields.

    Raises:
        InvalidRequestError: a field is only read by a path. In pydantic's JSON schema, it has its name instead.
    """
    parts = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list | tuple) else ()
    if isinstance(schema, Mapping):
        by_name = (schema.get("config") or {}).get("validate_by_name", by_name)
        alias = schema.get("validation_alias")
        if isinstance(alias, list) and not by_name and not any(type(path) is list and len(path) == 1 for path in alias):
            raise InvalidRequestError(
                f"schema has a field with the validation alias {alias}, which pydantic leaves out of the JSON schema; "
                "add a name: AliasChoices('name', AliasPath(...))",
                param="schema",
            )
    for part in parts:
        _check_aliases(part, by_name=by_name)


def _is_type(value: Any) -> bool:
    """Return whether a value of a schema is a type, an alias of a type, or a generic type such as ``int | None``."""
    aliases = ("__value__", "__supertype__")
    return isinstance(value, type) or get_origin(value) is not None or any(hasattr(value, name) for name in aliases)


def _column_value(name: str, kind: Dtype, found: Any) -> Any:
    """Return a value as that of a column of this type.

    Raises:
        ValueError: the value has another type, or does not fit into 64 bits.
    """
    if isinstance(found, Enum):
        found = found.value
    if found is None:
        return None
    wrong = ValueError(f"{name} is {found!r:.40}, which does not have the type of its column, {kind}")
    # The serializer of a Python type may return another type than it declares.
    expected: dict[str, Any] = {"Int64": Real, "float64": Real | Decimal}
    expected |= {"boolean": bool, "date": date, "time": datetime}
    if not isinstance(found, expected.get(kind, object)):
        raise wrong
    try:
        if kind == "Int64":
            if (number := int(found)) not in INT64:
                raise ValueError(f"{name} is {number}, which is not a 64-bit integer")
            if number != found:
                raise wrong
            return number
        if kind == "float64":
            return float(found)
        return utc_time(found) if kind == "time" else found
    except OverflowError:
        raise ValueError(f"{name} is {found!r:.40}…, which is too large for a column of {kind}") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text:.40} is too large for a 64-bit float")
    return number


def _resolved(schema: Any, root: Any) -> Any:
    """Return the schema to which a schema refers within its document, or the schema itself."""
    for _ in range(100):  # A reference may refer to another one, or to itself.
        if not isinstance(schema, Mapping) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        found = root
        for part in schema["$ref"][2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = found
    return schema


def _json_types(schema: Any, root: Any, *, python: bool, depth: int = 0) -> set[str | None]:
    """Return the types that a JSON schema describes; None stands for any type.

    Args:
        python: Whether texts are converted to Python's types, so that their format is returned instead.
    """
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > 20:
        return {None}
    if isinstance(given := schema.get("type"), str | list):
        kinds: set[str | None] = {given} if isinstance(given, str) else set(given)
        is_format = python and kinds == {"string"} and schema.get("format") in WIDER["string"]
        return {schema["format"]} if is_format else kinds
    if "enum" in schema or "const" in schema:
        return {JSON_TYPES.get(type(value)) for value in schema.get("enum", [schema.get("const")])}
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list) and (name != "allOf" or len(schema[name]) == 1):
            parts = (_json_types(each, root, python=python, depth=depth + 1) for each in schema[name])
            return set().union(*parts)
    return {None}


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
    first = [SAMPLE, "answer"] if several else ["answer"]
    typed: Mapping[str, Dtype] = columns.dtypes if columns is not None else {}
    names = list(rows[0]) if rows else [*first, *typed, *list(DTYPES)[1:]]
    known: dict[str, Dtype] = {SAMPLE: "int64", LOGPROBS: "object", **DTYPES, **typed}
    dtypes = {name: known[name] for name in names}
    index = None
    if source.library is not None:
        # Other libraries have no columns of Python objects.
        objects = [name for name, dtype in typed.items() if dtype in ("object", "text")]
        texts = TypeAdapter(list[dict[str, Any]]).dump_python(
            [{name: row[name] for name in objects} for row in rows], mode="json", fallback=str
        )
        rows = [{**row, **plain} for row, plain in zip(rows, texts, strict=True)]
    else:
        # With several answers to each row, labels are repeated.
        index = source.index if len(source.index) == len(rows) else source.index.repeat(len(rows) // len(source.index))
    return make_table(rows, dtypes, index=index, library=source.library, needed_by="map")
