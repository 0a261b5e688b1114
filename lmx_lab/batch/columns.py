"""Convert a schema to typed columns of a table, and JSON answers to the values in these columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, get_origin

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.frames import Dtype

Schema = Mapping[str, Any] | type[BaseModel]
DTYPES: Mapping[str, Dtype] = {"integer": "Int64", "number": "float64", "boolean": "boolean"}
"""The type of a column for each JSON type. Columns of other types contain Python objects."""
INT64 = range(-(2**63), 2**63)
WHOLE_VALUE = "value"
"""Name of the column if the schema does not describe an object with properties."""


class TypedColumns:
    """The columns that a schema defines.

    Args:
        json_schema: The schema of an answer.
        convert: Validates the value of an answer, and returns the values of its columns.
    """

    def __init__(self, json_schema: Mapping[str, Any], convert: Callable[[Any], Mapping[str, Any]]) -> None:
        self.json_schema = json_schema
        self._convert = convert
        properties = json_schema.get("properties")
        is_object = isinstance(properties, Mapping) and bool(properties)
        self._is_object = is_object
        members: Mapping[str, Any] = properties if is_object else {WHOLE_VALUE: json_schema}  # type: ignore[assignment]
        self.dtypes: dict[str, Dtype] = {}
        """The type of each column: ``object`` if the schema allows several types apart from null, or any type."""
        for name, member in members.items():
            kinds = _json_types(member) - {"null"}
            self.dtypes[name] = DTYPES.get(kinds.pop() or "", "object") if len(kinds) == 1 else "object"

    @classmethod
    def of(cls, schema: Schema) -> TypedColumns:
        """Create the columns from a JSON schema, a pydantic model, or a dictionary that maps names to types.

        Raises:
            InvalidRequestError: the schema is none of these, or one of its types has no JSON schema.
        """
        try:
            if isinstance(schema, type) and issubclass(schema, BaseModel):
                model = schema
                return cls(
                    model.model_json_schema(),
                    lambda value: model.model_validate(value).model_dump(by_alias=True),
                )
            if (
                isinstance(schema, Mapping)
                and schema
                and all(isinstance(kind, type) or get_origin(kind) is not None for kind in schema.values())
            ):
                adapters: dict[str, TypeAdapter[Any]] = {str(name): TypeAdapter(kind) for name, kind in schema.items()}
                schemas, shared = TypeAdapter.json_schemas(
                    [(name, "validation", each) for name, each in adapters.items()]
                )
                json_schema = {
                    "type": "object",
                    "properties": {name: schemas[name, "validation"] for name in adapters},
                    "required": list(adapters),
                    "additionalProperties": False,
                    **({"$defs": shared["$defs"]} if "$defs" in shared else {}),
                }
                return cls(
                    json_schema,
                    lambda value: {name: each.validate_python(value[name]) for name, each in adapters.items()},
                )
        except PydanticUserError as exc:
            raise InvalidRequestError(f"a type in schema has no JSON schema: {exc.message}", param="schema") from None
        if not isinstance(schema, Mapping) or not schema:
            raise InvalidRequestError(
                f"schema is {schema!r:.80}; pass a JSON schema, a pydantic model, or a dictionary such as "
                "{'city': str, 'days': int}",
                param="schema",
            )
        return cls(schema, lambda value: value)

    def values(self, text: str) -> dict[str, Any]:
        """Return the values of an answer by column; None for columns that the answer does not contain.

        Raises:
            ValueError: the text is not complete JSON, a value fails a check of the pydantic model, or a number does not
                fit into 64 bits.
        """
        value = json.loads(text)
        try:
            converted = self._convert(value) if self._is_object else {WHOLE_VALUE: self._convert(value)}
        except ValidationError as exc:
            problem = exc.errors()[0]
            place = ".".join(map(str, problem["loc"])) or "the value"
            raise ValueError(f"{place}: {problem['msg']}") from None
        values: dict[str, Any] = {name: converted.get(name) for name in self.dtypes}
        for name, kind in self.dtypes.items():
            found = values[name]
            if kind == "Int64" and found is not None:
                values[name] = int(found)
                if values[name] not in INT64:
                    raise ValueError(f"{name} is {values[name]}, which is not a 64-bit integer")
            if kind == "float64" and found is not None:
                try:
                    values[name] = float(found)
                except OverflowError:
                    raise ValueError(f"{name} is {found!r:.40}…, which is too large for a 64-bit float") from None
        return values


def _json_types(schema: Any) -> set[str | None]:
    """Return the types that a JSON schema describes; None stands for any type."""
    if not isinstance(schema, Mapping):
        return {None}
    if "type" not in schema and schema.get("anyOf"):
        return set().union(*map(_json_types, schema["anyOf"]))
    given = schema.get("type")
    return set(given) if isinstance(given, list) else {given}
