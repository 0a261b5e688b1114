"""Requests are completed even if their caller is cancelled, they are repeated, or the disk was full before."""

import asyncio
import contextlib
import threading

import pytest

from lmx_lab import errors
from lmx_lab.daemon.storage import permissions
from lmx_lab.daemon.storage import turns as turn_rows
from lmx_lab.daemon.storage.store import Store
from lmx_lab.daemon.turns.concurrency import TurnSlots, give_way
from lmx_lab.wire.sessions import CancelTurns, Decision, SubmitTurn
from tests.support.daemons import ASKS, FREE, WAIT_S, check_log, daemon
from tests.support.model_server import STALL, Gate, calls, says, token

pytestmark = pytest.mark.anyio
ALLOW = Decision(decision="allow")


async def cancel_during(monkeypatch, module, name, work):
    """Cancel the caller of ``work`` during this change of the database."""
    began, go, change = threading.Event(), threading.Event(), getattr(module, name)

    def held(*arguments):
        began.set()
        assert go.wait(WAIT_S)
        return change(*arguments)

    monkeypatch.setattr(module, name, held)
    caller = asyncio.create_task(work)
    assert await asyncio.to_thread(began.wait, WAIT_S)
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled()
    go.set()


async def test_a_turn_runs_even_if_its_submitter_was_cancelled(here, monkeypatch):
    session = await here.session(says("ok"))
    body = SubmitTurn(content="hi", turn_id="t")
    await cancel_during(monkeypatch, turn_rows, "submit", here.turns.submit(session, body))
    await here.seen("turn.done")
    assert here.turns.counts()[1] == 0


async def test_a_decision_takes_effect_even_if_its_caller_was_cancelled(here, monkeypatch):
    session, turn = await here.begin(calls((ASKS, {})), says("ok"))
    (permission,) = await here.asked()
    await cancel_during(monkeypatch, permissions, "decide", here.turns.decide(permission.permission_id, ALLOW))
    assert (await here.ended(session, turn)).text == "ok"


async def test_a_repeated_submit_has_the_cursor_of_the_current_session_of_that_id(tmp_path, upstream):
    upstream.then(says("ok"))
    body = SubmitTurn(content="hi", turn_id="t")
    async with daemon(tmp_path, upstream) as here:
        for _ in range(2):
            await here.session(session_id="s")
            first, _ = await here.turns.submit("s", body)
            await here.ended("s", "t")
            again, new = await here.turns.submit("s", body)
            assert (again.cursor, new) == (first.cursor, False)
            await here.turns.delete_session("s")


async def test_concurrent_deletions_of_a_session_both_wait_for_its_end(here, upstream):
    upstream.then(calls((FREE, {})))
    is_deleting, let_go = asyncio.Event(), asyncio.Event()

    async def work(*_):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        is_deleting.set()
        await let_go.wait()
        return "done"

    here.toolbox.work = work
    session = await here.session()
    await here.submit(session)
    await here.seen("tool.start")
    first = asyncio.create_task(here.turns.delete_session(session))
    await is_deleting.wait()
    second = asyncio.create_task(here.turns.delete_session(session))
    await here.store.write(lambda tx: None)
    assert not second.done()
    let_go.set()
    await asyncio.gather(first, second)
    assert (await here.kinds(session))[-2:] == ["turn.done", "session.deleted"]


async def test_a_turn_that_waited_for_a_permission_has_priority_over_new_turns(tmp_path, upstream):
    gate = Gate()
    upstream.then(calls((ASKS, {})), [gate, *says("other")], says("ok"))
    async with daemon(tmp_path, upstream, running_turns=1) as here:
        asking = await here.session()
        first = await here.submit(asking)
        (permission,) = await here.asked()
        others = [await here.session() for _ in range(3)]
        turns = [await here.submit(other) for other in others]
        await gate.reached()
        await here.turns.decide(permission.permission_id, ALLOW)
        await here.seen("tool.end")
        # Wait until the turn waits for a slot, a few iterations of the loop after the event is published.
        await give_way(20)
        gate.open()
        for session, turn in [(asking, first), *zip(others, turns, strict=True)]:
            await here.ended(session, turn)
        ends = [item["session_id"] for item in await here.events() if item["event"] == "turn.done"]
        assert ends[1] == asking


# --- turns of an earlier process that cannot be ended immediately


@contextlib.asynccontextmanager
async def abandoned(folder, upstream, monkeypatch, queued=()):
    """A daemon whose session ``s`` has a turn ``t`` of an earlier process, which it could not end on a full disk.

    Args:
        queued: Ids of turns that wait behind it.
    """
    async with daemon(folder, upstream, stop=False) as here:
        await here.session(session_id="s")
        for turn_id in ("t", *queued):
            await here.submit("s", turn_id=turn_id)
        await here.seen("turn.token")
    write, full = Store.write, iter([errors.StorageFullError("full")])

    async def failing(store, work, **options):
        for exc in full:
            raise exc
        return await write(store, work, **options)

    monkeypatch.setattr(Store, "write", failing)
    async with daemon(folder, upstream, retry_s=600.0) as here:
        assert (await here.turns.read("s", "t")).status == "running"
        yield here
        check_log(await here.events())


async def test_deleting_a_session_ends_an_abandoned_turn(tmp_path, upstream, monkeypatch):
    upstream.then([token("Hel"), STALL])
    async with abandoned(tmp_path, upstream, monkeypatch) as here:
        await here.turns.delete_session("s")
        assert (await here.kinds("s"))[-3:] == ["message.done", "turn.error", "session.deleted"]


@pytest.mark.parametrize("turn_id", [None, "t"])
async def test_an_abandoned_turn_can_be_cancelled(tmp_path, upstream, monkeypatch, turn_id):
    upstream.then([token("Hel"), STALL])
    async with abandoned(tmp_path, upstream, monkeypatch) as here:
        waiting = asyncio.create_task(here.ended("s", "t"))
        assert (await here.turns.cancel("s", CancelTurns(turn_id=turn_id))).turn_ids == ["t"]
        record = await waiting
        assert (record.error.code, record.text) == ("daemon-restarted", "Hel")
        assert (await here.turns.cancel("s", CancelTurns())).cancelled == 0


async def test_the_next_turn_starts_after_the_end_of_an_abandoned_one(tmp_path, upstream, monkeypatch):
    upstream.then([token("Hel"), STALL], says("ok"))
    async with abandoned(tmp_path, upstream, monkeypatch) as here:
        assert (await here.run("s", turn_id="next")).text == "ok"
        texts = [message.content for message in (await here.snapshot("s")).messages]
        assert texts == ["hello", "Hel", "hello", "ok"]
        order = [(item["event"], item["turn_id"]) for item in await here.events("s")]
        assert order.index(("turn.error", "t")) < order.index(("turn.started", "next"))


async def test_a_repeated_submit_starts_a_turn_that_is_queued(tmp_path, upstream, monkeypatch):
    upstream.then([token("Hel"), STALL], says("ok"))
    async with abandoned(tmp_path, upstream, monkeypatch, queued=["next"]) as here:
        assert here.turns.counts() == (0, 1)
        _, new = await here.turns.submit("s", SubmitTurn(content="hello", turn_id="next"))
        assert not new
        assert (await here.ended("s", "next")).text == "ok"
        assert here.turns.counts() == (0, 0)


async def queue(slots, *continuing):
    """Start tasks that acquire a slot, in this order. Returns them and the list of those that have acquired it."""
    order = []

    async def take(number, is_continuing):
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
