"""Fifty schemas of an answer: pydantic models for ``parse`` of openai-python, and plain JSON schemas.

Strings, lists and numbers are bounded, so that the answers of a model with 135M parameters end.
"""

from __future__ import annotations

import datetime
import enum
import uuid
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints

Word = Annotated[str, Field(max_length=12)]
Small = Annotated[int, Field(ge=0, le=99)]
T = TypeVar("T")


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 10


class Person(BaseModel):
    name: Word
    age: Annotated[int, Field(ge=0, le=120)]


class Address(BaseModel):
    street: Word
    city: Word


class Customer(BaseModel):
    person: Person
    address: Address


class Order(BaseModel):
    number: Small
    customer: Customer


class Car(BaseModel):
    colour: Colour
    size: Size


class Mixed(BaseModel):
    value: Literal["a", 1, True, None]


class Either(BaseModel):
    value: Small | Word


class EitherModel(BaseModel):
    value: Person | Address


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


Animal = Annotated[Cat | Dog, Field(discriminator="kind")]


class Pet(BaseModel):
    pet: Animal


class Zoo(BaseModel):
    pets: Annotated[list[Animal], Field(min_length=1, max_length=2)]


class Perhaps(BaseModel):
    name: Word | None
    address: Address | None


class Palette(BaseModel):
    colours: Annotated[list[Colour], Field(min_length=2, max_length=4)]


class Team(BaseModel):
    people: Annotated[list[Person], Field(min_length=1, max_length=2)]


class Grid(BaseModel):
    rows: Annotated[list[Annotated[list[Small], Field(min_length=2, max_length=2)]], Field(min_length=2, max_length=2)]


class Triple(BaseModel):
    triple: tuple[Small, Word, bool]


class Points(BaseModel):
    points: Annotated[list[tuple[Small, Small]], Field(min_length=1, max_length=3)]


class Leaf(BaseModel):
    colour: Colour
    children: Annotated[list[Leaf], Field(max_length=1)]


class Link(BaseModel):
    value: Small
    next: Link | None


class Folder(BaseModel):
    name: Word
    file: File | None


class File(BaseModel):
    size: Small
    parent: Folder | None


class Sum(BaseModel):
    left: Small
    right: Small | Product


class Product(BaseModel):
    factor: Small
    of: Small | Sum


class Counts(BaseModel):
    counts: dict[Annotated[str, StringConstraints(pattern="^[a-z]{1,4}$")], Small] = Field(max_length=3)


class Bounds(BaseModel):
    part: Annotated[float, Field(ge=0, le=1, multiple_of=0.01)]
    below: Annotated[int, Field(gt=-10, lt=0)]
    even: Annotated[int, Field(ge=0, le=100, multiple_of=2)]


class Plate(BaseModel):
    plate: Annotated[str, Field(pattern=r"^[A-Z]{2}-[0-9]{3}$")]
    text: Annotated[str, Field(min_length=3, max_length=8)]


class Times(BaseModel):
    day: datetime.date
    id: uuid.UUID


class Moment(BaseModel):
    at: datetime.datetime


class Fixed(BaseModel):
    version: Literal[2]
    kind: Literal["fixed"]


class Defaults(BaseModel):
    count: Small = 3
    colour: Colour = Colour.RED
    flag: bool = False


class NoneOrList(BaseModel):
    items: Annotated[list[Small], Field(max_length=2)] | None = None


class Page(BaseModel, Generic[T]):
    items: Annotated[list[T], Field(min_length=1, max_length=2)]
    more: bool


class People(Page[Person]):
    """A class with its own name, because ``Page[Person]`` is not a valid name in the format."""


class Employee(Person):
    """A class that inherits two fields."""

    boss: Person | None = None


class Described(BaseModel):
    """A class with titles, descriptions and aliases, as in most applications."""

    model_config = ConfigDict(title="Something described", populate_by_name=True)

    from_: Annotated[Word, Field(alias="from", description="Where it comes from", examples=["here"])]
    size: Annotated[Small, Field(alias="größe", title="Größe")]


class TokenTable(RootModel[Annotated[list[Word], Field(min_length=1, max_length=3)]]):
    """A class whose value is a list instead of an object."""


MODELS: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (
        *(Person, Customer, Order, Car, Mixed, Either, EitherModel, Pet, Zoo, Perhaps, Palette, Team, Grid, Triple),
        *(Points, Leaf, Link, Folder, Sum, Counts, Bounds, Plate, Times, Moment, Fixed, Defaults, NoneOrList),
        *(People, Employee, Described, TokenTable),
    )
}


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that requires these properties and forbids others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
PLAIN: dict[str, Any] = {
    "const": {"const": {"a": [1, None, "x"]}},
    "enum of every type": {"enum": [None, True, 1.5, "one", [1], {"a": 1}]},
    "empty object": closed(),
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "several types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 9},
    "root string": {"type": "string", "pattern": "^(yes|no|perhaps)$"},
    "root array": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
    "tuple and others": {
        "type": "array",
        "prefixItems": [SHORT, DIGIT],
        "items": {"type": "boolean"},
        "minItems": 2,
        "maxItems": 4,
    },
    "optional properties": {**closed(a=DIGIT, b=SHORT, c={"type": "null"}), "required": ["b"]},
    "further properties": {**closed(a=DIGIT), "patternProperties": {"^x[0-9]$": DIGIT}, "maxProperties": 3},
    "references": {
        "$defs": {"a/b~c": DIGIT, "pair": {"type": "array", "items": {"$ref": "#/$defs/a~1b~0c"}, "maxItems": 2}},
        **closed(pair={"$ref": "#/$defs/pair"}, one={"$ref": "#/$defs/a~1b~0c"}),
    },
    "draft 7 definitions": {"definitions": {"d": DIGIT}, **closed(d={"$ref": "#/definitions/d"})},
    "recursive root": closed(
        colour={"enum": ["red", "blue"]}, of={"anyOf": [{"type": "null"}, {"$ref": "#"}], "default": None}
    ),
    "anyOf objects": {"anyOf": [closed(a=DIGIT), closed(b=SHORT)]},
    "oneOf that excludes": {"oneOf": [closed(kind={"const": "a"}, a=DIGIT), closed(kind={"const": "b"}, b=SHORT)]},
    "allOf merged": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 20}]},
    "formats": closed(mail={"type": "string", "format": "email", "maxLength": 20}, ip={"format": "ipv4"}),
    "decimal steps": closed(price={"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25}),
    "keys to escape": closed(**{'"quoted"\\': DIGIT, "ünïcode ☃": {"const": "\u00e9\n"}, "": {"type": "null"}}),
}

RECURSIVE = {
    "Leaf": '{"colour": "red", "children": [{"colour": "blue", "children": []}]}',
    "Link": '{"value": 1, "next": {"value": 2, "next": null}}',
    "Folder": '{"name": "a", "file": {"size": 1, "parent": {"name": "b", "file": null}}}',
    "Sum": '{"left": 1, "right": {"factor": 2, "of": {"left": 3, "right": 4}}}',
    "recursive root": '{"colour": "red", "of": {"colour": "blue", "of": null}}',
}
"""Values of recursive schemas that a prompt asks to repeat, because a small model would otherwise not end them."""
