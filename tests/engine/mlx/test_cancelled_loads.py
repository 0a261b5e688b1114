"""Test that a load of the MLX engine can be cancelled between two tensors, and that a hanging thread is replaced."""

import asyncio
import threading
from dataclasses import replace

import mlx.core as mx
import pytest

from lmx_lab.engine.mlx import weights
from lmx_lab.engine.mlx.weights import check_cancelled
from lmx_lab.errors import NotLoadedError
from lmx_lab.weights.catalog import Catalog
from tests.support.engines import TWO_SLOTS, load_entry, manager_with, mlx_engine, run

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_shared_model")]
WAIT_S = 60.0


class SlowTensors:
    """Makes the load of a model wait before one of its tensors."""

    def __init__(self):
        self.reached, self.resume = threading.Event(), threading.Event()
        self.waits = False
        self.responds = True
        """Whether the load notices that it was cancelled while it waits."""

    def check(self):
        check_cancelled()
        if self.waits:
            self.reached.set()
            while not self.resume.wait(0.01):
                if self.responds:
                    check_cancelled()


@pytest.fixture
def slow(monkeypatch):
    slow = SlowTensors()
    monkeypatch.setattr(weights, "check_cancelled", slow.check)
    yield slow
    slow.resume.set()


@pytest.fixture
def two(tiny_home, tiny):
    return Catalog(replace(TWO_SLOTS, home=tiny_home)).resolve("tiny-two")


async def test_a_load_is_cancelled_between_tensors_and_its_memory_is_released(tiny, two, slow):
    async with manager_with(tiny, TWO_SLOTS) as manager:
        used = mx.get_active_memory()
        slow.waits = True
        load = asyncio.create_task(load_entry(manager, two))
        await asyncio.to_thread(slow.reached.wait, WAIT_S)
        slow.waits = False
        assert await asyncio.wait_for(manager.unload("tiny-two"), WAIT_S) == 0
        with pytest.raises(NotLoadedError, match="load of tiny-two was cancelled; the previous model tiny is loaded"):
            await load
        assert (await run(manager))[1].model == "tiny"
        assert mx.get_active_memory() < 1.5 * used


async def test_an_engine_thread_that_hangs_in_a_load_is_replaced(tiny, two, slow):
    async with manager_with(tiny, replace(TWO_SLOTS, load_timeout_s=20)) as manager:
        mlx_engine(manager).cancel_s = 0.1
        slow.waits, slow.responds = True, False
        load = asyncio.create_task(load_entry(manager, two))
        await asyncio.to_thread(slow.reached.wait, WAIT_S)
        slow.waits = False
        await manager.cancel_load("tiny-two")
        with pytest.raises(NotLoadedError, match="the previous model tiny is loaded again"):
            await asyncio.wait_for(load, WAIT_S)
        assert (await run(manager))[1].model == "tiny"
        # The abandoned thread ends when the disk responds, without an effect on the new one.
        slow.resume.set()
        assert (await run(manager))[1].model == "tiny"
