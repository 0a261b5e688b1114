"""Schemas of the common types of a language, as the generators of schemas write them."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import pathlib
import uuid
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    RootModel,
    SecretStr,
    StringConstraints,
    TypeAdapter,
    WithJsonSchema,
)
from pydantic.json_schema import GenerateJsonSchema

DRAFT = "https://json-schema.org/draft/2020-12/schema"


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool = True


class Described(BaseModel):
    """A class with titles, descriptions and aliases, as in most applications."""

    model_config = ConfigDict(title="Something described", populate_by_name=True)
    from_: Annotated[str, Field(alias="from", max_length=12, description="Where it comes from", examples=["here"])]
    size: Annotated[int, Field(ge=0, le=99, alias="größe", title="Größe")] = 3


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: Annotated[list[T], Field(min_length=1, max_length=2)]
    first: T | None


class Cats(Page[Cat]):
    """A class that inherits from one whose name is not valid as a name in the format."""

    named: Described | None = None


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""The pattern of serialized decimals."""
Word = Annotated[str, StringConstraints(max_length=12)]
PYDANTIC: dict[str, Any] = {
    "int": int,
    "float": float,
    "float from 0 to 1": Annotated[float, Field(ge=0, le=1)],
    "bool": bool,
    "None": None,
    "str": Word,
    "str with a pattern": Annotated[str, Field(pattern="^[a-z]{1,5}$")],
    "bytes": Annotated[bytes, Field(max_length=12)],
    "secret": Annotated[SecretStr, Field(max_length=12)],
    "Decimal": Annotated[decimal.Decimal, WithJsonSchema({"type": "string", "pattern": DECIMAL})],
    "date": datetime.date,
    "time": datetime.time,
    "datetime": datetime.datetime,
    "timedelta": datetime.timedelta,
    "UUID": uuid.UUID,
    "IPv4": ipaddress.IPv4Address,
    "URL": HttpUrl,
    "any URL": AnyUrl,
    "path": Annotated[pathlib.Path, Field(max_length=12)],
    "enum": Level,
    "literal": Literal["a", 1, None],
    "optional": Word | None,
    "list": Annotated[list[int], Field(max_length=3)],
    "set": Annotated[set[int], Field(max_length=3)],
    "tuple": tuple[int, Word],
    "model": Cat,
    "models with a discriminator": Annotated[Cat | Dog, Field(discriminator="kind")],
    "list of models": Annotated[list[Cat], Field(max_length=2)],
    "models without a discriminator": Dog | Described,
    "inherited generic model": Cats,
    "root model": RootModel[Annotated[list[Word], Field(min_length=1, max_length=3)]],
    "multiple": Annotated[int, Field(ge=0, le=100, multiple_of=2)],
}


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that requires these properties and forbids others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SHORT = {"type": "string", "maxLength": 8}
COMPOSED: dict[str, Any] = {
    "nested const": {"const": {"a": [1, None, "x"]}},
    "enum of every type": {"enum": [None, True, 1.5, "one", [1], {"a": 1}]},
    "several types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 9},
    "choice of words": {"type": "string", "pattern": "^(yes|no|perhaps)$"},
    "nested arrays": {"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 2},
    "array of tuples": {"type": "array", "items": {"type": "array", "prefixItems": [DIGIT, SHORT], "items": False}}
    | {"maxItems": 2},
    "tuple and others": {"type": "array", "prefixItems": [SHORT, DIGIT], "items": {"type": "boolean"}}
    | {"minItems": 2, "maxItems": 4},
    "optional properties": {**closed(a=DIGIT, b=SHORT, c={"type": "null"}), "required": ["b"]},
    "further properties": {**closed(a=DIGIT), "patternProperties": {"^x[0-9]$": DIGIT}, "maxProperties": 3},
    "anyOf objects": {"anyOf": [closed(a=DIGIT), closed(b=SHORT)]},
    "oneOf that excludes": {"oneOf": [closed(kind={"const": "a"}, a=DIGIT), closed(kind={"const": "b"}, b=SHORT)]},
    "allOf merged": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 20}]},
    "decimal steps": closed(price={"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25}),
    "keys to escape": closed(**{'"quoted"\\': DIGIT, "ünïcode ☃": {"const": "\u00e9\n"}, "": {"type": "null"}}),
}


SAFE = 2**53 - 1
ZOD: dict[str, Any] = {
    "int": {"type": "integer", "minimum": -SAFE, "maximum": SAFE},
    "positive": {"type": "number", "exclusiveMinimum": 0},
    "email": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    "uuid": {
        "type": "string",
        "format": "uuid",
        "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
        "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
    },
    "url": {"type": "string", "format": "uri"},
    "iso.datetime": {
        "type": "string",
        "format": "date-time",
        "pattern": r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0"
        r"[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))T(?:"
        r"(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$",
    },
    "iso.date": {"type": "string", "format": "date", "pattern": r"^\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])$"},
    "iso.time": {
        "type": "string",
        "format": "time",
        "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$",
    },
    "iso.duration": {
        "type": "string",
        "format": "duration",
        "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
    },
    "nanoid": {"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"},
    "base64": {"type": "string", "format": "base64", "contentEncoding": "base64", "maxLength": 12},
    "jwt": {"type": "string", "format": "jwt", "maxLength": 12},
    "record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "boolean"},
        "required": ["a", "b"],
    },
    "literal": {"type": "string", "const": "a"},
    "nullable": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "minItems": 2, "items": False},
}
GO: dict[str, Any] = {
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "uint64": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**64 - 1},
    "one int64": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
    "float64": {"type": "number", "format": "double"},
    "time.Time": {"type": "string", "format": "date-time"},
    "[]byte": {"type": "string", "contentEncoding": "base64", "maxLength": 8},
    "[]string": {"type": ["array", "null"], "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    "empty struct": {"type": "object", "properties": None, "required": None, "additionalProperties": False},
    "draft 4": {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False},
}
C_SHARP: dict[str, Any] = {
    "int": {"type": "integer", "format": "int32"},
    "long": {"type": "integer", "format": "int64"},
    "decimal": {"type": "number", "format": "decimal"},
    "TimeSpan": {"type": "string", "pattern": r"^-?(\d+\.)?\d{2}:\d{2}:\d{2}(\.\d{1,7})?$"},
    "Guid": {"type": "string", "format": "guid", "maxLength": 9},
    "char": {"type": "string", "minLength": 1, "maxLength": 1},
    "int or text": {"type": ["string", "integer"], "pattern": r"^-?(?:0|[1-9]\d*)$"},
    "int?": {"type": ["integer", "null"], "format": "int32"},
}
UNBOUNDED: dict[str, Any] = {
    "dict of Pydantic": TypeAdapter(dict[str, bool]).json_schema(),
    "dict of Pydantic with a pattern": TypeAdapter(
        dict[Annotated[str, StringConstraints(pattern="^[a-z]{1,3}$")], int]
    ).json_schema(),
    "record of Zod": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "^[a-z]{1,3}$"},
        "additionalProperties": {"type": "boolean"},
    },
    "map of Go": {"type": "object", "additionalProperties": {"type": "integer"}},
}
"""Schemas with objects of any size, whose answers a model with random weights may never end."""
NEUTRAL: dict[str, Any] = {
    "list": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "uniqueItems": False,
        "contains": {},
        "minItems": 0,
        "maxItems": 3,
    },
    "object": {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 0, "patternProperties": {}},
    "text": {"type": "string", "format": "colour", "minLength": 0, "maxLength": 5, "pattern": None},
}


class _Plain(GenerateJsonSchema):
    schema_dialect = DRAFT


def generated_schemas() -> dict[str, dict[str, Any]]:
    """Return objects with one required property each, by the generator and the type."""
    found = {
        f"Pydantic {name}": TypeAdapter(kind).json_schema(schema_generator=_Plain) for name, kind in PYDANTIC.items()
    }
    for generator, schemas in (("Zod", ZOD), ("Go", GO), ("C#", C_SHARP), ("neutral", NEUTRAL), ("composed", COMPOSED)):
        found |= {f"{generator} {name}": schema for name, schema in schemas.items()}
    wrapped = {}
    for name, schema in found.items():
        inner = dict(schema)
        definitions = {"$defs": inner.pop("$defs")} if "$defs" in inner else {}
        wrapped[name] = {"$schema": DRAFT, **closed(value=inner), **definitions}
    return wrapped
