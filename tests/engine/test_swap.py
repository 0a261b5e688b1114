"""Requests that name different models take turns, one at a time: all requests for a model are served together, without
polling, and no request waits forever.
"""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.swap import SwapOrder, SwapQueue
from lmx_lab.errors import QueueFullError
from lmx_lab.settings import Settings

pytestmark = pytest.mark.anyio
SHARE, SHARE_S = 4, 2.0


def waiting_for(*models, now=0.0):
    order = SwapOrder(share=SHARE)
    add(order, *models, now=now)
    return order


def add(order, *models, now=0.0):
    tickets = [order.ticket(model, now) for model in models]
    for ticket in tickets:
        order.add(ticket)
    return tickets


def take_all(order, loaded, *, now=0.0):
    """Take all tickets; return their models in the order of their turns."""
    taken = []
    while (ticket := order.take({loaded}, now=now, busy=False)) is not None:
        loaded = ticket.model or loaded
        taken.append(ticket.model)
    return taken


def test_all_requests_that_wait_for_a_model_are_served_together():
    assert take_all(waiting_for("a", "b", "a", "b", "a"), "a") == ["a", "a", "a", "b", "b"]


def test_a_request_for_any_model_takes_the_loaded_one():
    assert take_all(waiting_for("b", None, "a"), "a") == [None, "a", "b"]


def test_the_longest_waiting_request_decides_which_model_is_next():
    assert take_all(waiting_for("c", "b", "c", "b"), "a") == ["c", "c", "b", "b"]


def test_within_a_model_the_order_is_that_of_arrival():
    order = SwapOrder(share=SHARE)
    first, second = order.ticket("a", 0.0), order.ticket("a", 0.0)
    order.add(second)
    order.add(first)
    assert order.take({"a"}, now=0.0, busy=False) is first
    assert order.take({"a"}, now=0.0, busy=False) is second


def test_a_later_request_for_the_loaded_model_goes_first_for_a_while():
    order = waiting_for("b")
    add(order, "a", now=SHARE_S / 2)
    assert take_all(order, "a", now=SHARE_S / 2) == ["a", "b"]


def test_a_later_request_does_not_pass_one_that_has_waited_long():
    order = waiting_for("b")
    assert order.take({"a"}, now=0.0, busy=True) is None
    add(order, "a", now=SHARE_S)
    assert take_all(order, "a", now=SHARE_S) == ["b", "a"]


def test_only_a_limited_number_of_later_requests_goes_first():
    order = waiting_for("b")
    assert order.take({"a"}, now=0.0, busy=True) is None
    add(order, *["a"] * (SHARE + 1))
    assert take_all(order, "a") == ["a"] * SHARE + ["b", "a"]


def test_requests_that_waited_when_the_turn_began_are_served_in_it_however_long_others_wait():
    order = waiting_for("c", *["b"] * (SHARE + 3))
    assert order.take({"b"}, now=SHARE_S * 5, busy=False) is not None
    assert take_all(order, "b", now=SHARE_S * 5) == ["b"] * (SHARE + 2) + ["c"]


def test_a_busy_model_keeps_its_turn_until_the_share_has_ended():
    order = waiting_for("b")
    assert order.take({"a"}, now=SHARE_S - 0.1, busy=True) is None
    assert order.share_ends_s() == SHARE_S
    ticket = order.take({"a"}, now=SHARE_S, busy=True)
    assert (ticket.model, len(order)) == ("b", 0)
    assert order.share_ends_s() is None


def test_a_discarded_ticket_has_no_turn():
    order = SwapOrder(share=SHARE)
    first, _ = add(order, "a", "a")
    order.discard(first)
    order.discard(first)
    assert take_all(order, "a") == ["a"]


@pytest.mark.slow
@given(st.lists(st.lists(st.sampled_from(["a", "b", "c"]), max_size=6), max_size=12))
def test_no_ticket_starves_and_none_is_lost(arrivals):
    """While tickets are added and taken, at most the share passes each ticket in a turn, and all have their turn."""
    order, loaded, taken = SwapOrder(share=SHARE), "a", 0
    for models in arrivals:
        add(order, *models)
        ticket = order.take({loaded}, now=0.0, busy=False)
        if ticket is not None:
            loaded, taken = ticket.model, taken + 1
            assert ticket.passed <= SHARE
    assert taken + len(take_all(order, loaded)) == sum(map(len, arrivals))


@dataclass
class Model:
    """The state of the main model, which the tests set."""

    loaded: str | None = "a"
    busy: bool = False
    changing: bool = False
    share_s: float = 2.0
    queue: SwapQueue = field(init=False)

    def __post_init__(self):
        self.queue = SwapQueue(
            Settings(slots=1, queue_limit=2),
            loaded=lambda: {self.loaded},
            is_busy=lambda: self.busy,
            is_changing=lambda: self.changing,
            share_s=self.share_s,
        )

    async def take(self, model, **options):
        """Wait for a turn, and load the model."""
        ticket = self.queue.ticket(model, limited=True)
        await self.queue.wait(ticket)
        self.loaded = model or self.loaded
        return ticket


async def test_one_request_at_a_time_has_its_turn():
    model = Model()
    first = await model.take("b")
    waiting = asyncio.create_task(model.take("a"))
    await asyncio.sleep(0)
    assert (len(model.queue), waiting.done()) == (2, False)
    model.queue.leave(first)
    model.queue.leave(await waiting)
    assert len(model.queue) == 0


async def test_a_turn_starts_only_after_a_load_or_unload_has_ended():
    model = Model(changing=True)
    waiting = asyncio.create_task(model.take("a"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    model.changing = False
    model.queue.update()
    await asyncio.wait_for(waiting, 10)


async def test_another_model_waits_for_the_end_of_requests_or_of_the_share():
    model = Model(busy=True, share_s=0.05)
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


async def test_a_request_that_leaves_while_it_waits_does_not_delay_others():
    model = Model()
    current = await model.take("a")
    left = model.queue.ticket("b", limited=True)
    waiting = asyncio.create_task(model.take("c"))
    await asyncio.sleep(0)
    model.queue.leave(left)
    model.queue.leave(left)
    model.queue.leave(current)
    assert (await asyncio.wait_for(waiting, 10)).model == "c"


async def test_the_number_of_waiting_requests_is_limited():
    model = Model()
    for _ in range(3):
        model.queue.ticket("b", limited=True)
    with pytest.raises(
        QueueFullError, match=r"requests that wait for their model: 3, and the limit is 3 \(slots 1 \+ queue_limit 2\)"
    ):
        model.queue.ticket("b", limited=True)
    model.queue.swap_s = 7.0
    with pytest.raises(QueueFullError, match=r"the last replacement of the model took 7\.0 s") as refused:
        model.queue.ticket("b", limited=True)
    assert refused.value.retry_after_s == 7.0
    model.queue.ticket("b", limited=False)
