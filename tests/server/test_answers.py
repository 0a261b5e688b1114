"""Tests of concurrent streams and coroutines: results, errors and cancellation."""

import asyncio
from contextlib import aclosing

import pytest

from lmx_lab.errors import EngineError
from lmx_lab.server.answers import gather, merge

pytestmark = pytest.mark.anyio


async def counting(name, count, closed):
    try:
        for number in range(count):
            yield f"{name}{number}"
            await asyncio.sleep(0)
    finally:
        closed.append(name)


async def failing():
    yield "f0"
    raise EngineError("broken")


async def endless(closed):
    try:
        await asyncio.Event().wait()
    finally:
        closed.append("endless")


@pytest.mark.parametrize("counts", [[3], [3, 3], [0, 5, 1], [0, 0]])
async def test_all_items_of_each_source_are_yielded_in_order(counts):
    closed = []
    names = "abc"[: len(counts)]
    sources = [counting(name, count, closed) for name, count in zip(names, counts, strict=True)]
    items = [item async for item in merge(sources)]
    for name, count in zip(names, counts, strict=True):
        assert [item for item in items if item[0] == name] == [f"{name}{number}" for number in range(count)]
    assert sorted(closed) == sorted(names)


async def test_two_sources_take_turns():
    items = [item async for item in merge([counting("a", 50, []), counting("b", 50, [])])]
    assert {item[0] for item in items[:10]} == {"a", "b"}


async def test_an_error_closes_the_other_sources_and_is_raised():
    closed = []
    with pytest.raises(EngineError, match="broken"):
        async for _ in merge([counting("a", 1000, closed), failing()]):
            pass
    assert closed == ["a"]


async def test_closing_the_merged_stream_closes_all_sources():
    closed = []
    async with aclosing(merge([counting("a", 1000, closed), counting("b", 1000, closed)])) as items:
        async for _ in items:
            break
    assert sorted(closed) == ["a", "b"]


async def test_a_source_is_not_read_ahead_of_a_slow_reader():
    produced = []

    async def source():
        for number in range(100):
            produced.append(number)
            yield number

    async with aclosing(merge([source(), source()])) as items:
        await anext(items)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(produced) < 10


async def test_results_come_in_order():
    async def work(number):
        for _ in range(5 - number):
            await asyncio.sleep(0)
        return number

    assert await gather(work(number) for number in range(5)) == [0, 1, 2, 3, 4]


async def test_the_first_error_cancels_the_other_coroutines():
    closed = []

    async def fail():
        raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        await gather([endless(closed), fail()])
    assert closed == ["endless"]


async def test_cancelling_cancels_all_coroutines():
    closed = []
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gather([endless(closed), endless(closed)]), 0.01)
    assert closed == ["endless", "endless"]
