"""A load can be cancelled at any point, and all its callers get one result."""

from __future__ import annotations

import asyncio

import pytest

from lmx_lab.engine.load_operation import LOAD_BASE_S, LoadOperation, load_limit_s
from lmx_lab.engine.unload_operation import UnloadOperation
from lmx_lab.errors import NotLoadedError
from lmx_lab.values.models import LoadReport, LoadSpec

pytestmark = pytest.mark.anyio
REPORT = LoadReport(model="tiny", load_s=1.0, memory_bytes=1)
CANCELLED = NotLoadedError("the load was cancelled")


def operation():
    loop = asyncio.get_running_loop()
    unload = UnloadOperation(done=loop.create_future(), requested=False)
    return LoadOperation(spec=LoadSpec(model="tiny"), entry=None, done=loop.create_future(), unload=unload)


async def test_a_part_of_a_load_returns_its_result():
    assert await operation().run(asyncio.sleep(0, "found")) == "found"


async def test_cancelling_ends_the_current_part_and_waits_for_its_end():
    load, ended = operation(), asyncio.Event()

    async def part() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    running = asyncio.create_task(load.run(part()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    load.cancel(CANCELLED)
    with pytest.raises(NotLoadedError, match="the load was cancelled"):
        await running
    assert ended.is_set()


async def test_a_cancelled_load_starts_no_further_part():
    load = operation()
    load.cancel(CANCELLED)
    load.cancel(NotLoadedError("later"))
    with pytest.raises(NotLoadedError, match="the load was cancelled"):
        load.check()
    with pytest.raises(NotLoadedError, match="the load was cancelled"):
        await load.run(asyncio.sleep(60))


async def test_work_after_a_cancelled_load_can_be_cancelled_too():
    load = operation()
    load.cancel(CANCELLED)
    assert await load.restore(asyncio.sleep(0, "restored")) == "restored"
    restoring = asyncio.create_task(load.restore(asyncio.sleep(60)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    load.cancel(NotLoadedError("later"), restores_previous=False)
    with pytest.raises(NotLoadedError, match="the load was cancelled"):
        await restoring
    assert not load.restores_previous


def test_the_time_limit_of_a_load_is_proportional_to_its_size():
    assert load_limit_s(0, None) == LOAD_BASE_S
    assert load_limit_s(100 * 10**9, None) == LOAD_BASE_S + 5000
    assert load_limit_s(100 * 10**9, 7.0) == 7.0


async def test_only_the_first_result_counts():
    load = operation()
    load.finish(REPORT)
    load.finish(CANCELLED)
    assert await load.done is REPORT
