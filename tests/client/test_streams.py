"""Handing things from one task to another."""

from __future__ import annotations

import asyncio

import pytest

from lmx_lab.client.streams import CHARACTERS, ITEMS, UNREAD, EventBuffer, ObservableValue

pytestmark = pytest.mark.anyio


async def test_there_is_room_until_there_are_too_many_items_and_again_at_half() -> None:
    buffer: EventBuffer[int] = EventBuffer()
    for number in range(ITEMS):
        assert buffer.has_room
        buffer.put(number, 1)
    assert not buffer.has_room
    assert [buffer.take() for _ in range(ITEMS // 2)] == list(range(ITEMS // 2))
    assert buffer.has_room


async def test_one_item_may_be_too_long_and_then_there_is_no_room() -> None:
    buffer: EventBuffer[str] = EventBuffer()
    buffer.put("long", CHARACTERS)
    assert not buffer.has_room
    waiting = asyncio.create_task(buffer.room())
    assert buffer.take() == "long"
    await waiting
    assert len(buffer) == 0


async def test_after_the_end_what_is_there_can_be_taken() -> None:
    buffer: EventBuffer[int] = EventBuffer()
    buffer.put(1, 1)
    buffer.end()
    await buffer.filled()
    assert (buffer.take(), buffer.take()) == (1, None)
    await buffer.filled()


async def test_every_reader_of_a_value_gets_it_as_it_is_and_each_change() -> None:
    watched = ObservableValue(0)
    readers = [watched.changes() for _ in range(2)]
    assert [await anext(reader) for reader in readers] == [0, 0]
    watched.set(1)
    watched.set(2)
    watched.end()
    assert [[value async for value in reader] for reader in readers] == [[1, 2], [1, 2]]
    assert [value async for value in watched.changes()] == [2]


async def test_a_slow_reader_misses_old_changes_and_never_the_newest() -> None:
    watched = ObservableValue(0)
    reader = watched.changes()
    await anext(reader)
    for value in range(1, 1000):
        watched.set(value)
    watched.end()
    assert [value async for value in reader] == list(range(1000 - UNREAD, 1000))


async def test_a_reader_that_leaves_is_forgotten() -> None:
    watched = ObservableValue(0)
    reader = watched.changes()
    await anext(reader)
    await reader.aclose()
    assert not watched._readers
