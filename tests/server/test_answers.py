"""Tests of the order in which concurrent streams are read.

``tests/flows/test_completions.py`` has their results, errors and cancellation.
"""

import asyncio
from contextlib import aclosing

import pytest

from lmx_lab.server.answers import merge

pytestmark = pytest.mark.anyio


async def test_two_sources_take_turns():
    async def counting(name):
        for _ in range(50):
            yield name
            await asyncio.sleep(0)

    items = [item async for item in merge([counting("a"), counting("b")])]
    assert set(items[:10]) == {"a", "b"}


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
