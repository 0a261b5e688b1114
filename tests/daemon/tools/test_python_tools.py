"""Python functions as tools: schemas, arguments, results, time, threads."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel, Field

from lmx_lab.daemon.tools.python_tools import THREADS, PythonTools
from lmx_lab.daemon.tools.tool import ToolResult
from lmx_lab.errors import InvalidRequestError

pytestmark = pytest.mark.anyio


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


@pytest.fixture
def tools() -> PythonTools:
    return PythonTools()


async def called(tools: PythonTools, function: Callable[..., Any], /, **arguments: Any) -> ToolResult:
    tool = tools.register(function, name="f")
    result = await tools.call(tool.name, arguments)
    assert result is not None
    return result


# Schemas


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


def test_the_schema_comes_from_the_signature_and_the_docstring(tools: PythonTools) -> None:
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


async def test_arguments_become_the_annotated_types(tools: PythonTools) -> None:
    box = {"low": {"x": 1}, "high": {"x": 2}}
    given = {"text": "hi", "number": "4", "colour": "blue", "items": [{"x": 1}], "box": box, "day": "2026-11-22"}
    result = await called(tools, everything, **given, loose=[1, "a"], _hidden=2)
    one, day = Point(x=1), datetime.date(2026, 11, 22)
    first = ("hi", 4, 0.5, "fast", Colour.BLUE, None, [one], None, Box(one, Point(x=2)), day)
    assert result == ToolResult(status="ok", text=repr((*first, [1, "a"], "a name that pydantic has", 2)))


async def test_invalid_arguments_are_described_and_the_function_is_not_called(tools: PythonTools) -> None:
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
async def test_unusual_arguments_are_errors(tools: PythonTools, arguments: dict[str, Any]) -> None:
    def shout(text: str) -> str:
        return text.upper()

    result = await called(tools, shout, **arguments)
    assert result.status == "error"
    assert len(result.text) < 2000


def test_a_function_that_cannot_be_a_tool_is_refused_with_a_remedy(tools: PythonTools) -> None:
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
            tools.register(thing)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="set name="):
        tools.register(lambda: 1)
    for name in ("", "a b", "ü", "x" * 65, "a.b", "time__now"):
        with pytest.raises(InvalidRequestError, match="set name="):
            tools.register(everything, name=name)
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        tools.register(everything, timeout_s=0)
    assert tools.list_tools() == []


def test_methods_partials_and_callable_objects_can_be_tools(tools: PythonTools) -> None:
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


def test_a_function_that_is_registered_again_replaces_only_itself(tools: PythonTools) -> None:
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
        (b"\xff\x00", "b'\\xff\\x00'"),
        (iter([1, 2]), "[1, 2]"),
        (pd.DataFrame({"a": [1, 2]}), "   a\n0  1\n1  2"),
    ],
)
async def test_results_become_text(tools: PythonTools, value: Any, text: str) -> None:
    assert (await called(tools, lambda: value)).text == text


async def test_results_have_a_limit(tools: PythonTools) -> None:
    assert len((await called(tools, lambda: "x" * 5_000_000)).text) == 2**20
    tools.remove("f")
    assert len((await called(tools, functools.partial(itertools.count, 1))).text) < 10_000


async def test_an_exception_becomes_a_result_without_a_traceback(tools: PythonTools) -> None:
    def broken(code: int) -> None:
        secret = "hunter2"  # noqa: F841
        raise (SystemExit(code) if code else ValueError("the value is wrong"))

    assert (await called(tools, broken, code=0)).text == "ValueError: the value is wrong"
    result = await called(tools, broken, code=3)
    assert (result.status, result.text) == ("error", "SystemExit: 3")


# Time and threads


async def test_an_async_function_runs_in_another_thread_on_its_own_loop(tools: PythonTools) -> None:
    here = threading.get_ident(), asyncio.get_running_loop()

    async def elsewhere() -> bool:
        await asyncio.sleep(0)
        return threading.get_ident() != here[0] and asyncio.get_running_loop() is not here[1]

    assert (await called(tools, elsewhere)).text == "true"


async def test_a_call_ends_at_its_time_limit_and_an_async_function_is_cancelled(tools: PythonTools) -> None:
    release, cancelled = threading.Event(), threading.Event()

    async def patient() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    tools.register(release.wait, name="stuck", timeout_s=0.05)
    tools.register(patient, timeout_s=0.05)
    stuck = await tools.call("stuck", {})
    assert stuck is not None
    assert (stuck.status, "0.05 s" in stuck.text) == ("timeout", True)
    result = await tools.call("patient", {})
    assert result is not None
    assert result.status == "timeout"
    # Where its thread is late, it is given up before it begins, and cancelled as soon as it has.
    assert await asyncio.to_thread(cancelled.wait, 20)
    release.set()


async def test_a_cancelled_call_ends_immediately(tools: PythonTools) -> None:
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


async def test_the_number_of_concurrent_calls_is_limited(tools: PythonTools) -> None:
    release, ended = threading.Event(), threading.Barrier(THREADS + 1)

    def stuck() -> None:
        release.wait()
        ended.wait()

    tools.register(stuck, timeout_s=0.01)
    tools.register(lambda: 1, name="one")
    for _ in range(THREADS):
        await tools.call("stuck", {})
    full = await tools.call("one", {})
    assert full is not None
    assert (full.status, "not called" in full.text) == ("error", True)
    release.set()
    await asyncio.to_thread(ended.wait)
    async with asyncio.timeout(20):
        while (result := await tools.call("one", {})) is None or result.status != "ok":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_printing_and_registering_work_from_any_thread(
    tools: PythonTools, capsys: pytest.CaptureFixture[str]
) -> None:
    def talk(text: str) -> None:
        print(text)

    await asyncio.gather(*(asyncio.to_thread(tools.register, talk, name=f"talk{number}") for number in range(20)))
    assert len(tools.list_tools()) == 20
    result = await tools.call("talk7", {"text": "out loud"})
    assert result == ToolResult(status="ok", text="null")
    assert capsys.readouterr().out == "out loud\n"


async def test_calling_an_unknown_tool_returns_none(tools: PythonTools) -> None:
    assert await tools.call("nobody", {}) is None
