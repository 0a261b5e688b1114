"""The slots of running turns."""

from __future__ import annotations

import asyncio

import pytest

from lmx_lab.daemon.turns.concurrency import TurnSlots

pytestmark = pytest.mark.anyio


async def queue(slots, *continuing):
    """Start tasks that acquire a slot, in this order. Returns them and the list of those that have acquired it."""
    order = []

    async def take(number: int, is_continuing: bool) -> None:
        await slots.acquire(continuing=is_continuing)
        order.append(number)

    tasks = [asyncio.create_task(take(number, first)) for number, first in enumerate(continuing)]
    await asyncio.sleep(0)
    return tasks, order


async def test_continuing_turns_have_priority_and_the_others_are_served_in_order():
    slots = TurnSlots(1)
    await slots.acquire()
    tasks, order = await queue(slots, False, True, False, True)
    for _ in range(4):
        slots.release()
    await asyncio.gather(*tasks)
    assert (order, slots.free) == ([1, 3, 0, 2], 0)
    slots.release()
    assert slots.free == 1


@pytest.mark.parametrize("given", ["before", "after"])
async def test_a_slot_is_not_lost_when_its_waiter_is_cancelled(given):
    slots = TurnSlots(1)
    await slots.acquire()
    tasks, order = await queue(slots, False, False)
    if given == "before":
        slots.release()
    tasks[0].cancel()
    if given == "after":
        slots.release()
    await asyncio.wait(tasks, timeout=5)
    assert (order, slots.free, tasks[0].cancelled()) == ([1], 0, True)
