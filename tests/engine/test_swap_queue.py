"""Requests that name different models take turns, one at a time, without polling."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from lmx_lab.engine import swap_order
from lmx_lab.engine.swap_order import Ticket
from lmx_lab.engine.swap_queue import SwapQueue
from lmx_lab.errors import QueueFullError
from lmx_lab.settings import Settings

pytestmark = pytest.mark.anyio


@dataclass
class Model:
    """The state of the main model, which the tests set."""

    loaded: str | None = "a"
    busy: bool = False
    changing: bool = False
    changes: int = 0
    queue: SwapQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = SwapQueue(
            Settings(slots=1, queue_limit=2),
            loaded=lambda: self.loaded,
            is_busy=lambda: self.busy,
            is_changing=lambda: self.changing,
            on_change=self.count,
        )

    def count(self) -> None:
        self.changes += 1

    async def take(self, model: str | None, **options: Any) -> Ticket:
        """Wait for a turn, and load the model."""
        ticket = self.queue.ticket(model, limited=True)
        await self.queue.wait(ticket)
        self.loaded = model or self.loaded
        return ticket


async def test_one_request_at_a_time_has_its_turn() -> None:
    model = Model()
    first = await model.take("b")
    waiting = asyncio.create_task(model.take("a"))
    await asyncio.sleep(0)
    assert (len(model.queue), waiting.done()) == (2, False)
    model.queue.leave(first)
    model.queue.leave(await waiting)
    assert len(model.queue) == 0


async def test_a_turn_starts_only_after_a_load_or_unload_has_ended() -> None:
    model = Model(changing=True)
    waiting = asyncio.create_task(model.take("a"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    model.changing = False
    model.queue.update()
    await asyncio.wait_for(waiting, 10)


async def test_another_model_waits_for_the_end_of_requests_or_of_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_order, "SHARE_S", 0.05)
    model = Model(busy=True)
    started = asyncio.get_running_loop().time()
    await asyncio.wait_for(model.take("b"), 10)
    assert asyncio.get_running_loop().time() - started >= 0.05
    model = Model(busy=True)
    waiting = asyncio.create_task(model.take("b"))
    await asyncio.sleep(0)
    model.busy = False
    model.queue.update()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waiting.done()


async def test_a_request_that_leaves_while_it_waits_does_not_delay_others() -> None:
    model = Model()
    current = await model.take("a")
    left = model.queue.ticket("b", limited=True)
    waiting = asyncio.create_task(model.take("c"))
    await asyncio.sleep(0)
    model.queue.leave(left)
    model.queue.leave(left)
    model.queue.leave(current)
    assert (await asyncio.wait_for(waiting, 10)).model == "c"


async def test_the_number_of_waiting_requests_is_limited() -> None:
    model = Model()
    for _ in range(3):
        model.queue.ticket("b", limited=True)
    with pytest.raises(
        QueueFullError, match=r"3 requests wait for their model, and the limit is 3 \(slots 1 \+ queue_limit 2\)"
    ):
        model.queue.ticket("b", limited=True)
    model.queue.swap_s = 7.0
    with pytest.raises(QueueFullError, match=r"the last replacement of the model took 7\.0 s") as refused:
        model.queue.ticket("b", limited=True)
    assert refused.value.retry_after_s == 7.0
    model.queue.ticket("b", limited=False)


async def test_changes_of_the_queue_are_reported() -> None:
    model = Model()
    ticket = await model.take("a")
    assert model.changes == 1
    model.queue.leave(ticket)
    assert model.changes == 2
