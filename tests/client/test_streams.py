"""Handing things from one task to another."""

from __future__ import annotations

import asyncio

import pytest

from lmx_lab.client.streams import CHARACTERS, ITEMS, UNREAD, EventBuffer, ObservableValue

pytestmark = pytest.mark.anyio


async def test_there_is_room_until_there_are_too_many_items_and_again_at_half() -> None:
    mailbox: EventBuffer[int] = EventBuffer()
    for number in range(ITEMS):
        assert mailbox.has_room
        mailbox.put(number, 1)
    assert not mailbox.has_room
    assert [mailbox.take() for _ in range(ITEMS // 2)] == list(range(ITEMS // 2))
    assert mailbox.has_room


async def test_one_item_may_be_too_long_and_then_there_is_no_room() -> None:
    mailbox: EventBuffer[str] = EventBuffer()
    mailbox.put("long", CHARACTERS)
    assert not mailbox.has_room
    waiting = asyncio.create_task(mailbox.room())
    assert mailbox.take() == "long"
    await waiting
    assert len(mailbox) == 0


async def test_after_the_end_what_is_there_can_be_taken() -> None:
    mailbox: EventBuffer[int] = EventBuffer()
    mailbox.put(1, 1)
    mailbox.end()
    await mailbox.filled()
    assert (mailbox.take(), mailbox.take()) == (1, None)
    await mailbox.filled()


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
