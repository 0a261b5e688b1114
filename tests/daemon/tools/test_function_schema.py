"""Schemas of Python functions, and arguments that are validated against them."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import pandas as pd
import pytest
from pydantic import Field

from lmx_lab.daemon.tools.function_schema import function_schema, read_docstring
from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.daemon.tools.tool import ToolResult
from lmx_lab.errors import InvalidRequestError
from tests.daemon.tools.functions import Box, Colour, Point, called

pytestmark = pytest.mark.anyio


@pytest.fixture
def tools() -> PythonTools:
    return PythonTools()


def everything(
    text: str,
    number: int = 3,
    *,
    share: Annotated[float, Field(ge=0, le=1, description="of the whole")] = 0.5,
    mode: Literal["fast", "slow"] = "fast",
    colour: Colour = Colour.RED,
    maybe: int | None = None,
    items: list[Point] | None = None,
    table: dict[str, int] | None = None,
    box: Box | None = None,
    day: Annotated[datetime.date | None, "which day"] = None,
    loose=None,
    schema: str = "a name that pydantic has",
    _hidden: int = 1,
) -> str:
    """Does everything.

    And more of it.

    Args:
        text: What to say,
            on two lines.
        number (int): How often.
        day: Not this text.
        unknown: Nothing has this name.

    Returns:
        All of it.
    """
    return repr((text, number, share, mode, colour, maybe, items, table, box, day, loose, schema, _hidden))


def test_the_schema_comes_from_the_signature_and_the_docstring(tools):
    tool = tools.register(everything)
    jsonschema.Draft202012Validator.check_schema(tool.parameters)
    properties = tool.parameters["properties"]
    assert tool.name == "everything"
    assert tool.description == "Does everything.\n\nAnd more of it."
    assert tool.needs_permission
    assert tool.parameters["required"] == ["text"]
    assert tool.parameters["additionalProperties"] is False
    assert properties["text"] == {"type": "string", "description": "What to say, on two lines."}
    assert properties["number"] == {"type": "integer", "default": 3, "description": "How often."}
    assert (properties["share"]["description"], properties["share"]["maximum"]) == ("of the whole", 1)
    assert properties["mode"]["enum"] == ["fast", "slow"]
    assert properties["day"]["description"] == "which day"
    assert set(tool.parameters["$defs"]) == {"Box", "Colour", "Point"}
    assert "title" not in str(tool.parameters)
    assert {"schema", "_hidden", "loose"} <= set(properties)


async def test_arguments_become_the_annotated_types(tools):
    box = {"low": {"x": 1}, "high": {"x": 2}}
    given = {"text": "hi", "number": "4", "colour": "blue", "items": [{"x": 1}], "box": box, "day": "2026-11-22"}
    result = await called(tools, everything, **given, loose=[1, "a"], _hidden=2)
    one, day = Point(x=1), datetime.date(2026, 11, 22)
    first = ("hi", 4, 0.5, "fast", Colour.BLUE, None, [one], None, Box(one, Point(x=2)), day)
    assert result == ToolResult(status="ok", text=repr((*first, [1, "a"], "a name that pydantic has", 2)))


async def test_invalid_arguments_are_described_and_the_function_is_not_called(tools):
    result = await called(tools, everything, number="many", mode="odd", colour="green", extra=1)
    assert result.status == "error"
    assert "was not called" in result.text
    for said in (
        "text: is missing",
        "number: ",
        "'many'",
        "'fast' or 'slow'",
        "extra: is not a parameter; the parameters are: text",
    ):
        assert said in result.text
    assert "pydantic.dev" not in result.text


@pytest.mark.parametrize(
    "arguments", [{"text": 1}, {"text": "\ud800"}, {"text": None}, {"": 1}, {"text": ["x"] * 100_000}]
)
async def test_unusual_arguments_are_errors(tools, arguments):
    def shout(text: str) -> str:
        return text.upper()

    result = await called(tools, shout, **arguments)
    assert result.status == "error"
    assert len(result.text) < 2000


def test_a_function_that_cannot_be_a_tool_is_refused_with_a_remedy(tools):
    def many(*values: int) -> None: ...
    def named(**values: int) -> None: ...
    def positional(a: int, /) -> None: ...
    def frame(table: pd.DataFrame) -> None: ...
    def unknown(a: Nowhere) -> None: ...  # noqa: F821
    def callback(a: Callable[[int], int]) -> None: ...

    remedies = {
        many: "that is a list",
        named: "that is a dict",
        positional: "remove the /",
        frame: "JSON cannot represent",
        unknown: "Nowhere",
        callback: "JSON cannot represent",
    }
    for function, remedy in remedies.items():
        with pytest.raises(InvalidRequestError, match=remedy):
            tools.register(function)
    for thing in (3, "text", Point, None):
        with pytest.raises(InvalidRequestError, match="not a function"):
            tools.register(thing)
    with pytest.raises(InvalidRequestError, match="set name="):
        tools.register(lambda: 1)
    for name in ("", "a b", "ü", "x" * 65, "a.b", "time__now"):
        with pytest.raises(InvalidRequestError, match="set name="):
            tools.register(everything, name=name)
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        tools.register(everything, timeout_s=0)
    assert tools.list_tools() == []


def test_methods_partials_and_callable_objects_can_be_tools(tools):
    class Counter:
        def add(self, by: int) -> int:
            """Adds."""
            return by

        def __call__(self, by: int) -> int:
            return by

    assert tools.register(Counter().add).parameters["required"] == ["by"]
    assert tools.register(Counter(), name="counter").parameters["properties"] == {"by": {"type": "integer"}}
    partial = tools.register(functools.partial(everything, number=4), name="partial")
    assert partial.parameters["properties"]["number"]["default"] == 4
    assert partial.description.startswith("Does everything.")
    assert tools.register(lambda: 1, name="one").parameters["properties"] == {}

    def odd_default(a: int = 1, b: Any = object()) -> None: ...  # noqa: B008

    assert "required" not in tools.register(odd_default).parameters


def test_docstrings_of_three_styles_are_parsed():
    def google(a: int, b: int) -> None:
        """Sum: of things.

        Arguments:
          a: first: of all
          b (int, optional): second

            goes on
        """

    def numpy(a: int, b: int) -> None:
        """Sum.

        Parameters
        ----------
        a : int
            first
        b
            second
            goes on

        Returns
        -------
        int
        """

    def sphinx(a: int, b: int) -> None:
        """Sum.

        :param a: first
        :param int b: second
            goes on
        :returns: nothing
        """

    assert read_docstring(google) == ("Sum: of things.", {"a": "first: of all", "b": "second goes on"})
    assert read_docstring(numpy) == ("Sum.", {"a": "first", "b": "second goes on"})
    assert read_docstring(sphinx) == ("Sum.", {"a": "first", "b": "second goes on"})
    assert read_docstring(lambda: 1) == ("", {})
    assert function_schema(google).parameters["properties"]["b"]["description"] == "second goes on"


@pytest.mark.parametrize(
    ("docstring", "description", "texts"),
    [
        ("Sum.\n\nKeyword Args:\n  a: first\n\nNote:\n  Slow.", "Sum.", {"a": "first"}),
        ("Sum.\n\nother parameters:\n  **a: first\n\nSee Also:\n  max", "Sum.", {"a": "first"}),
        ("Sum.\n\nArgs:\n  a: first\n\nRaises:\n  without a colon", "Sum.", {"a": "first"}),
        ("Sum.\n\nParameters\n----------\na, b : int\n    both", "Sum.", {"a": "both", "b": "both"}),
        ("Return a\n:class:`int` or None.", "Return a\n:class:`int` or None.", {}),
        ("Sum.\n\nArgs:\n  no entry", "Sum.\n\nArgs:\n  no entry", {}),
    ],
)
def test_sections_and_entries_of_a_docstring_are_recognized(docstring, description, texts):
    def function() -> None: ...

    function.__doc__ = docstring
    assert read_docstring(function) == (description, texts)
