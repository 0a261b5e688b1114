"""Python functions as tools: registration, results, time limits and threads."""

from __future__ import annotations

import asyncio
import datetime
import functools
import itertools
import threading
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from lmx_lab.daemon.tools.python_tools import THREADS, PythonTools
from lmx_lab.daemon.tools.tool import ToolResult
from lmx_lab.errors import InvalidRequestError
from tests.daemon.tools.functions import Box, Colour, Point, called

pytestmark = pytest.mark.anyio


@pytest.fixture
def tools():
    return PythonTools()


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
    assert stuck is not None
    assert (stuck.status, "0.05 s" in stuck.text) == ("timeout", True)
    result = await tools.call("patient", {})
    assert result is not None
    assert result.status == "timeout"
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
    assert full is not None
    assert (full.status, "not called" in full.text) == ("error", True)
    release.set()
    await asyncio.to_thread(ended.wait)
    async with asyncio.timeout(20):
        while (result := await tools.call("one", {})) is None or result.status != "ok":  # noqa: ASYNC110
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
