"""Test the typed columns of a schema, and the values of answers."""

import datetime
import decimal
import enum
import uuid
from typing import Annotated, Any, Literal, NewType, Optional

import pandas as pd
import pydantic
import pytest
from pydantic import AliasChoices, AliasPath, BaseModel, Field

from lmx_lab.batch.answers import TypedColumns
from lmx_lab.errors import InvalidRequestError

Color = enum.Enum("Color", {"RED": "red", "BLUE": "blue"})
Size = enum.IntEnum("Size", {"SMALL": 1, "LARGE": 2})
Days = NewType("Days", int)
NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
KEY = "12345678-1234-5678-1234-567812345678"
TYPES = [
    (Optional[int], "3", "Int64", 3),  # noqa: UP045
    (float | None, "3", "float64", 3.0),
    (bool | None, "true", "boolean", True),
    (Days, "3", "Int64", 3),
    (Annotated[int, Field(ge=0)] | None, "3", "Int64", 3),
    (int | float, "3", "float64", 3.0),
    (Literal[1, 2], "2", "Int64", 2),
    (Literal[1, None], "1", "Int64", 1),
    (Literal[True], "true", "boolean", True),
    (Literal["a", "b"], '"a"', "text", "a"),
    (Literal["a", None], '"a"', "text", "a"),
    (Literal["a", 1], "1", "object", 1),
    (Size, "2", "Int64", 2),
    (Color, '"red"', "text", "red"),
    (Color | None, '"red"', "text", "red"),
    (datetime.date, '"2026-01-02"', "date", NOON.date()),
    (datetime.date | None, '"2026-01-02"', "date", NOON.date()),
    (datetime.datetime, '"2026-01-02T13:00:00+01:00"', "time", NOON),
    (datetime.datetime, '"2026-01-02T12:00:00"', "time", NOON),
    (Annotated[datetime.date, pydantic.Strict()], '"2026-01-02"', "date", NOON.date()),
    (Annotated[tuple[int, str], pydantic.Strict()], '[1,"a"]', "object", (1, "a")),
    (datetime.date | str, '"soon"', "text", "soon"),
    (datetime.time, '"12:00:00"', "text", datetime.time(12)),
    (decimal.Decimal, '"1.50"', "text", decimal.Decimal("1.50")),
    (uuid.UUID, f'"{KEY}"', "text", uuid.UUID(KEY)),
    (list[float], "[1]", "object", [1.0]),
    (int | str, '"a"', "object", "a"),
    (Any, "[1]", "object", [1]),
]


@pytest.mark.parametrize(("type_", "text", "dtype", "expected"), TYPES, ids=str)
@pytest.mark.parametrize("is_model", [False, True])
def test_the_type_of_a_column_is_that_of_its_python_type(type_, text, dtype, expected, is_model):
    schema = pydantic.create_model("Row", v=(type_, ...)) if is_model else {"v": type_}
    columns = TypedColumns.of(schema)
    assert columns.dtypes == {"v": dtype}
    value = columns.values(f'{{"v":{text}}}')["v"]
    assert (type(value), value) == (type(expected), expected)


@pytest.mark.parametrize(
    ("member", "dtype"),
    [
        ({"type": ["integer", "null"]}, "Int64"),
        ({"enum": ["a", None]}, "text"),
        ({"const": 1.5}, "float64"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "float64"),
        ({"allOf": [{"$ref": "#/$defs/flag"}]}, "boolean"),
        ({"$ref": "#/$defs/loop"}, "object"),
        ({"$ref": "#/$defs/none"}, "object"),
        ({"type": "string", "format": "date"}, "text"),
        (True, "object"),
    ],
)
def test_the_type_of_a_column_is_that_of_its_json_schema(member, dtype):
    shared = {"flag": {"type": "boolean"}, "loop": {"$ref": "#/$defs/loop"}}
    schema = {"type": "object", "properties": {"v": member}, "$defs": shared}
    assert TypedColumns.of(schema).dtypes == {"v": dtype}
    assert TypedColumns.of({**schema, "$ref": "#/$defs/row", "$defs": {**shared, "row": schema}}).dtypes == {"v": dtype}


class Names(BaseModel):
    one: int = Field(alias="One")
    two: int = Field(validation_alias="n_two")
    three: int = Field(validation_alias=AliasChoices("t", "n_three"))
    four: int = Field(serialization_alias="Four")
    secret: str = Field(default="", exclude=True)

    @pydantic.computed_field
    @property
    def total(self) -> int:
        return self.one + self.two


class Written(BaseModel):
    days: int
    far: bool = True

    @pydantic.field_serializer("days")
    def write(self, days) -> str:
        return f"{days} days"


class Untyped(BaseModel):
    far: bool = True
    days: int

    @pydantic.field_serializer("days")
    def write(self, days):
        return f"{days} days"


class Flag(BaseModel):
    far: bool

    @pydantic.field_serializer("far")
    def write(self, far):
        return "yes"


class Other(BaseModel):
    days: int

    @pydantic.model_serializer
    def write(self):
        return {"other": self.days}


class Listed(BaseModel):
    days: int

    @pydantic.model_serializer
    def write(self):
        return [self.days]


class Nested(BaseModel):
    a: int = Field(default=0, validation_alias=AliasPath("b", "a"))


class Named(Nested):
    model_config = pydantic.ConfigDict(validate_by_name=True)


class Conditional(BaseModel):
    days: int = Field(serialization_alias="Days", exclude_if=lambda days: days == 0)
    one: int = Field(validation_alias=AliasChoices(AliasPath("b", 0), "first"))


class Node(BaseModel):
    name: str
    children: "list[Node]" = []


def test_the_columns_of_a_model_are_those_of_its_serialization():
    columns = TypedColumns.of(Names)
    assert columns.dtypes == dict.fromkeys(["One", "two", "three", "Four", "total"], "Int64")
    values = columns.values('{"One":1,"n_two":2,"t":3,"four":4,"secret":"s"}')
    assert values == {"One": 1, "two": 2, "three": 3, "Four": 4, "total": 3}
    assert TypedColumns.of(Written).dtypes == {"days": "text", "far": "boolean"}
    assert TypedColumns.of(Written).values('{"days":3}') == {"days": "3 days", "far": True}
    assert TypedColumns.of({"trip": Written}).values('{"trip":{"days":3}}') == {"trip": {"days": "3 days", "far": True}}
    assert TypedColumns.of(Node).dtypes == {"name": "text", "children": "object"}
    assert TypedColumns.of(Node).values('{"name":"a","children":[]}') == {"name": "a", "children": []}
    # A value is left out in the rows in which its condition excludes it; the other columns are not affected.
    conditional = TypedColumns.of(Conditional)
    assert conditional.dtypes == {"Days": "Int64", "one": "Int64"}
    assert [conditional.values(f'{{"days":{days},"first":1}}')["Days"] for days in (0, 2)] == [None, 2]
    assert TypedColumns.of(Named).values('{"a":3}') == {"a": 3}
    assert TypedColumns.of(pydantic.RootModel[datetime.date]).values('"2026-01-02"') == {"value": NOON.date()}


@pytest.mark.parametrize(
    ("schema", "text", "message"),
    [
        (Untyped, '{"days":3}', "days is '3 days', which does not have the type of its column, Int64"),
        (Flag, '{"far":true}', "far is 'yes'"),
        (Other, '{"days":3}', "returned no days"),
        (Listed, '{"days":3}', "not an object"),
        ({"v": float}, '{"v":1e999}', "1e999 is too large"),
        ({"v": list[float]}, '{"v":[-1e999]}', "-1e999 is too large"),
        ({"v": Any}, '{"v":{"w":1e400}}', "1e400 is too large"),
        ({"v": Any}, '{"v":Infinity}', "Infinity is too large"),
        ({"v": int}, '{"v":9223372036854775808}', "64-bit"),
        ({"v": datetime.datetime}, '{"v":"0001-01-01T00:00:00+05:00"}', "too large for a column of time"),
        ({"type": "object", "properties": {"v": {"type": "number"}}}, '{"v":1e999}', "1e999 is too large"),
        ({"type": "object", "properties": {"v": {"type": "number"}}}, f'{{"v":1{"0" * 400}}}', "too large"),
        ({"type": ["object", "null"], "properties": {"v": {"type": "integer"}}}, "null", "not an object"),
    ],
)
def test_values_that_do_not_fit_their_column_are_errors(schema, text, message):
    with pytest.raises(ValueError, match=message):
        TypedColumns.of(schema).values(text)


@pytest.mark.parametrize("schema", [{"v": [float]}, {"v": object()}, {"v": "int", "w": int}, [], 3])
def test_a_schema_that_is_no_schema_is_refused(schema):
    with pytest.raises(InvalidRequestError, match="pass a JSON schema"):
        TypedColumns.of(schema)


@pytest.mark.parametrize("schema", [Nested, {"v": list[Nested]}, pydantic.RootModel[Nested]])
def test_a_field_that_only_a_path_reads_is_refused(schema):
    # Its JSON schema has the name of the field, which pydantic would ignore in the answer.
    with pytest.raises(InvalidRequestError, match=r"validation alias \['b', 'a'\].*add a name: AliasChoices"):
        TypedColumns.of(schema)


def refuse(days):
    if days == 1:
        raise KeyError("no first day")
    if days == 0:
        raise ZeroDivisionError("no days")
    return 6 // days


class Refusing(BaseModel):
    days: Annotated[int, pydantic.AfterValidator(refuse)]


class Computing(BaseModel):
    days: int

    @pydantic.computed_field
    @property
    def share(self) -> float:
        return refuse(self.days)


@pytest.mark.parametrize("schema", [Refusing, Computing, {"days": Annotated[int, pydantic.AfterValidator(refuse)]}])
def test_any_exception_of_a_validator_is_an_error_of_its_row(lab, tmp_path, schema):
    rows = [f'{{"days":{days}}}' for days in (0, 1, 2)]
    for _ in range(2):
        answers = lab.map(rows, "{text}", schema=schema, cache=tmp_path / "answers.db")
        assert answers["error"].tolist() == [
            "the schema raised ZeroDivisionError: no days",
            "the schema raised KeyError: 'no first day'",
            None,
        ]
        assert answers["answer"].tolist() == rows
        assert answers["days"].isna().tolist() == [True, True, False]
    with pytest.raises(InvalidRequestError, match="row 0: the schema raised ZeroDivisionError"):
        lab.map(rows, "{text}", schema=schema, errors="raise")


def test_typed_columns_without_values_keep_their_type(lab):
    schema = {"n": int, "x": float, "far": bool, "day": datetime.date, "at": datetime.datetime, "name": str}
    types = ["Int64", "float64", "boolean", "object", "datetime64[us, UTC]", "object"]
    for rows in ([], [None]):
        answers = lab.map(rows, "{text}", schema=schema)
        assert [str(answers[name].dtype) for name in schema] == types
        assert answers[list(schema)].isna().all(axis=None)
    frame = pd.DataFrame({"text": ['{"at":"2026-01-02T12:00:00Z"}']})
    assert lab.map(frame, "{text}", schema={"at": datetime.datetime})["at"][0] == pd.Timestamp(NOON)
