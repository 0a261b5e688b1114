"""Python functions as tools: schemas, arguments that are validated, results, time limits and threads."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
import functools
import itertools
import math
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel, Field

from lmx_lab.daemon.tools import THREADS, PythonTools, ToolResult
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.function_schema import read_docstring

pytestmark = pytest.mark.anyio


@pytest.fixture
def tools():
    return PythonTools()


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: float
    y: float = 0.0


@dataclasses.dataclass
class Box:
    low: Point
    high: Point


class Counter:
    """Keep a count."""

    def add(self, by: int) -> int:
        """Adds."""
        return by

    @classmethod
    def make(cls, by: int) -> int:
        return by

    @staticmethod
    def twice(by: int) -> int:
        return 2 * by

    @functools.lru_cache  # noqa: B019
    def kept(self, by: int) -> int:
        return by

    def __call__(self, by: int) -> int:
        """Count.

        Args:
            by: How far.
        """
        return by


async def called(tools, function, /, **arguments):
    """Register a function and call it."""
    return await tools.call(tools.register(function, name="f").name, arguments)


# Schemas and arguments


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


def test_a_default_that_json_does_not_have_is_not_in_the_schema(tools):
    def find(below: float = math.inf, above: float = 0.5, between: float | None = math.nan) -> None:
        """Finds."""

    properties = tools.register(find).parameters["properties"]
    assert ["default" in properties[name] for name in ("below", "above", "between")] == [False, True, False]


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
    def undecorated(function):
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    def ahead(a: Annotated[str, Field(pattern="(?=a)")]) -> None: ...
    def undecided(a: Annotated[Point | Box, Field(discriminator="kind")]) -> None: ...

    remedies = {
        many: "that is a list",
        named: "that is a dict",
        positional: "remove the /",
        frame: "JSON cannot represent",
        unknown: "Nowhere",
        callback: "JSON cannot represent",
        ahead: "look-around",
        undecided: "JSON cannot represent",
        undecorated(callback): r"functools\.wraps",
        math.sqrt: "wrap the function",
        Counter.add: r"pass that of an object, such as Counter\(\)\.add",
        functools.lru_cache(Counter.add): r"such as Counter\(\)\.add",
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
    for method in (Counter().add, Counter.make, Counter.twice, Counter().kept):
        tool = tools.register(method)
        assert (tool.name, tool.parameters["required"]) == (method.__name__, ["by"])
    tool = tools.register(Counter())
    assert (tool.name, tool.description) == ("Counter", "Count.")
    assert tool.parameters["properties"] == {"by": {"type": "integer", "description": "How far."}}
    assert tools.register(functools.partial(Counter(), by=2), name="two").parameters["properties"]["by"]["default"] == 2
    assert tools.register(functools.partial(Counter.add, Counter())).name == "add"
    partial = tools.register(functools.partial(everything, number=4), name="partial")
    assert partial.parameters["properties"]["number"]["default"] == 4
    assert partial.description.startswith("Does everything.")
    assert tools.register(lambda: 1, name="one").parameters["properties"] == {}

    def odd_default(a: int = 1, b: Any = object()) -> None: ...  # noqa: B008

    assert "required" not in tools.register(odd_default).parameters

    def written(a: float = math.nan, b: str = "\ud800", c: dict = {"title": "T"}) -> None: ...  # noqa: B006

    # The schema has no default that JSON cannot represent, and keeps titles in other values than schemas.
    a, b, c = tools.register(written).parameters["properties"].values()
    assert "default" not in {**a, **b}
    assert c["default"] == {"title": "T"}


@pytest.mark.parametrize(
    ("docstring", "description", "texts"),
    [
        (
            "Sum: of things.\n\nArguments:\n  a: first: of all\n  b (int, optional): second\n\n    goes on\n",
            "Sum: of things.",
            {"a": "first: of all", "b": "second goes on"},
        ),
        (
            "Sum.\n\nParameters\n----------\na : int\n    first\nb\n    second\n    goes on\n\nReturns\n-------\nint\n",
            "Sum.",
            {"a": "first", "b": "second goes on"},
        ),
        (
            "Sum.\n\n:param a: first\n:param int b: second\n    goes on\n:returns: nothing",
            "Sum.",
            {"a": "first", "b": "second goes on"},
        ),
        ("Sum.\n\nKeyword Args:\n  a: first\n\nNote:\n  Slow.", "Sum.", {"a": "first"}),
        ("Sum.\n\nother parameters:\n  **a: first\n\nSee Also:\n  max", "Sum.", {"a": "first"}),
        ("Sum.\n\nArgs:\n  a: first\n\nRaises:\n  without a colon", "Sum.", {"a": "first"}),
        ("Sum.\n\nParameters\n----------\na, b : int\n    both", "Sum.", {"a": "both", "b": "both"}),
        ("Return a\n:class:`int` or None.", "Return a\n:class:`int` or None.", {}),
        ("Sum.\n\nArgs:\n  no entry", "Sum.\n\nArgs:\n  no entry", {}),
        (None, "", {}),
    ],
)
def test_docstrings_of_three_styles_are_parsed(docstring, description, texts):
    def function() -> None: ...

    function.__doc__ = docstring
    assert read_docstring(function) == (description, texts)


# Registration


def test_a_function_that_is_registered_again_replaces_only_itself(tools):
    def version(text: str) -> Callable[..., str]:
        def greet() -> str:
            return text

        return greet

    def other() -> None: ...

    tools.register(version("one"))
    tools.register(version("two"), read_only=True)
    assert [tool.read_only for tool in tools.list_tools()] == [True]
    with pytest.raises(InvalidRequestError, match="remove that tool first"):
        tools.register(other, name="greet")
    tools.remove("greet")
    tools.remove("greet")
    tools.register(other, name="greet")


# Results


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        ({"a": [1, 2.5, None], "ü": True}, '{"a": [1, 2.5, null], "ü": true}'),
        (Point(x=1), '{"x": 1.0, "y": 0.0}'),
        (Box(Point(x=1), Point(x=2)), '{"low": {"x": 1.0, "y": 0.0}, "high": {"x": 2.0, "y": 0.0}}'),
        (datetime.date(2026, 11, 22), "2026-11-22"),
        (Colour.RED, "red"),
        ({1, 2}, "[1, 2]"),
        (np.float32(0.5), "0.5"),
        ({"n": np.int64(3)}, '{"n": 3}'),
        (np.arange(3), "[0, 1, 2]"),
        (float("nan"), "NaN"),
        ({"mean": np.float64("-inf"), "all": (1.0, float("nan"))}, '{"mean": "-Infinity", "all": [1.0, "NaN"]}'),
        (b"\xff\x00", "b'\\xff\\x00'"),
        (iter([1, 2]), "[1, 2]"),
        (pd.DataFrame({"a": [1, 2]}), "   a\n0  1\n1  2"),
    ],
)
async def test_results_become_text(tools, value, text):
    assert (await called(tools, lambda: value)).text == text


async def test_results_have_a_limit(tools):
    assert len((await called(tools, lambda: "x" * 5_000_000)).text) == 2**20
    tools.remove("f")
    assert len((await called(tools, functools.partial(itertools.count, 1))).text) < 10_000


async def test_the_items_of_generators_are_a_list(tools):
    def below(limit: int):
        yield from range(limit)

    async def endless():
        for number in itertools.count():
            yield number

    assert (await called(tools, below, limit=3)).text == "[0, 1, 2]"
    tools.remove("f")
    assert (await called(tools, endless)).text.endswith(" 998, 999]")


async def test_an_exception_becomes_a_result_without_a_traceback(tools):
    def broken(code: int) -> None:
        secret = "hunter2"  # noqa: F841
        raise (SystemExit(code) if code else ValueError("the value is wrong"))

    assert (await called(tools, broken, code=0)).text == "ValueError: the value is wrong"
    result = await called(tools, broken, code=3)
    assert (result.status, result.text) == ("error", "SystemExit: 3")


# Time and threads


async def test_an_async_function_runs_in_another_thread_on_its_own_loop(tools):
    here = threading.get_ident(), asyncio.get_running_loop()

    async def elsewhere() -> bool:
        await asyncio.sleep(0)
        return threading.get_ident() != here[0] and asyncio.get_running_loop() is not here[1]

    assert (await called(tools, elsewhere)).text == "true"


async def test_a_call_ends_at_its_time_limit_and_an_async_function_is_cancelled(tools):
    release, cancelled = threading.Event(), threading.Event()

    async def patient() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    tools.register(release.wait, name="stuck", timeout_s=0.05)
    tools.register(patient, timeout_s=0.05)
    stuck = await tools.call("stuck", {})
    assert (stuck.status, "0.05 s" in stuck.text) == ("timeout", True)
    assert (await tools.call("patient", {})).status == "timeout"
    # If its thread starts late, the call is abandoned before, and cancelled as soon as it starts.
    assert await asyncio.to_thread(cancelled.wait, 20)
    release.set()


async def test_a_cancelled_call_ends_immediately(tools):
    begun, release = threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        release.wait()

    tools.register(stuck)
    call = asyncio.create_task(tools.call("stuck", {}))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    release.set()


async def test_the_number_of_concurrent_calls_is_limited(tools):
    release, ended = threading.Event(), threading.Barrier(THREADS + 1)

    def stuck() -> None:
        release.wait()
        ended.wait()

    tools.register(stuck, timeout_s=0.01)
    tools.register(lambda: 1, name="one")
    for _ in range(THREADS):
        await tools.call("stuck", {})
    full = await tools.call("one", {})
    assert (full.status, "not called" in full.text) == ("error", True)
    release.set()
    await asyncio.to_thread(ended.wait)
    async with asyncio.timeout(20):
        while (await tools.call("one", {})).status != "ok":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_printing_and_registering_work_from_any_thread(tools, capsys):
    def talk(text: str) -> None:
        print(text)

    await asyncio.gather(*(asyncio.to_thread(tools.register, talk, name=f"talk{number}") for number in range(20)))
    assert len(tools.list_tools()) == 20
    result = await tools.call("talk7", {"text": "out loud"})
    assert result == ToolResult(status="ok", text="null")
    assert capsys.readouterr().out == "out loud\n"


async def test_calling_an_unknown_tool_returns_none(tools):
    assert await tools.call("nobody", {}) is None
