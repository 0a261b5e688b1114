"""Tests of buffers and observable values between tasks."""

from __future__ import annotations

import asyncio

import pytest

from lmx_lab.client.streams import MAX_CHARACTERS, MAX_ITEMS, MAX_UNREAD, EventBuffer, ObservableValue

pytestmark = pytest.mark.anyio


async def test_a_buffer_is_full_at_its_item_limit_and_has_room_again_at_half() -> None:
    buffer: EventBuffer[int] = EventBuffer()
    for number in range(MAX_ITEMS):
        assert buffer.has_room
        buffer.put(number, 1)
    assert not buffer.has_room
    assert [buffer.take() for _ in range(MAX_ITEMS // 2)] == list(range(MAX_ITEMS // 2))
    assert buffer.has_room


async def test_one_item_can_fill_a_buffer_by_its_size() -> None:
    buffer: EventBuffer[str] = EventBuffer()
    buffer.put("long", MAX_CHARACTERS)
    assert not buffer.has_room
    waiting = asyncio.create_task(buffer.room())
    assert buffer.take() == "long"
    await waiting
    assert len(buffer) == 0


async def test_items_can_be_taken_after_the_end() -> None:
    buffer: EventBuffer[int] = EventBuffer()
    buffer.put(1, 1)
    buffer.end()
    await buffer.filled()
    assert (buffer.take(), buffer.take()) == (1, None)
    await buffer.filled()


async def test_every_reader_gets_the_current_value_and_each_change() -> None:
    watched = ObservableValue(0)
    readers = [watched.changes() for _ in range(2)]
    assert [await anext(reader) for reader in readers] == [0, 0]
    watched.set(1)
    watched.set(2)
    watched.end()
    assert [[value async for value in reader] for reader in readers] == [[1, 2], [1, 2]]
    assert [value async for value in watched.changes()] == [2]


async def test_a_slow_reader_misses_old_changes_but_never_the_newest() -> None:
    watched = ObservableValue(0)
    reader = watched.changes()
    await anext(reader)
    for value in range(1, 1000):
        watched.set(value)
    watched.end()
    assert [value async for value in reader] == list(range(1000 - MAX_UNREAD, 1000))


async def test_a_reader_that_is_closed_is_removed() -> None:
    watched = ObservableValue(0)
    reader = watched.changes()
    await anext(reader)
    await reader.aclose()
    assert not watched._readers
