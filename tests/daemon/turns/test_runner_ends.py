"""Turns that are cancelled, wait for permissions, are stopped with the daemon, or run on a full disk."""

import asyncio
import contextlib
import sqlite3

import pytest

from lmx_lab import errors
from lmx_lab.daemon.storage import turns as turn_rows
from lmx_lab.daemon.storage.store import Store
from lmx_lab.wire.sessions import CancelTurns, Decision, SessionMessage
from tests.support.daemons import ASKS, FREE, WAIT_S, ScriptedToolbox, check_log, daemon
from tests.support.model_server import DROP, STALL, Gate, calls, says, thought, token
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
ALLOW, DENY = Decision(decision="allow"), Decision(decision="deny")


def held(toolbox):
    """Make tools wait until the returned gate is open, or they are cancelled."""
    gate = Gate()

    async def work(name, arguments, note):
        gate.arrive()
        await auntil(lambda: gate.is_open)
        return "done"

    toolbox.work = work
    return gate


# --- cancelling


async def test_cancelling_keeps_the_partial_answer_and_closes_the_stream(here, upstream):
    session, turn = await here.begin([thought("Hm"), token("Hel"), STALL])
    await here.seen("turn.token")
    answer = await here.turns.cancel(session, CancelTurns())
    assert (answer.cancelled, answer.turn_ids) == (1, [turn])
    record = await here.ended(session, turn)
    assert (record.status, record.stop_reason, record.text, record.error) == ("done", "cancelled", "Hel", None)
    await upstream.until(lambda: upstream.left == 1)
    shown = await here.snapshot(session)
    assert [(message.role, message.content) for message in shown.messages] == [("user", "hello"), ("assistant", "Hel")]
    assert (await here.turns.cancel(session, CancelTurns())).cancelled == 0
    assert (await here.turns.cancel(session, CancelTurns(turn_id=turn))).cancelled == 0


async def test_a_queued_turn_that_is_cancelled_never_runs(here, upstream):
    gate = Gate()
    session = await here.session([gate, *says("1")])
    first, second, third = [await here.submit(session, str(n)) for n in range(3)]
    answer = await here.turns.cancel(session, CancelTurns(turn_id=second))
    assert answer.turn_ids == [second]
    record = await here.turns.read(session, second)
    assert (record.stop_reason, record.text, record.started_at) == ("cancelled", "", None)
    gate.open()
    await here.ended(session, first)
    assert (await here.ended(session, third)).text == "1"
    assert [body["messages"][-1]["content"] for body in upstream.bodies] == ["0", "2"]


async def test_all_turns_can_be_cancelled_at_once(here):
    session = await here.session([STALL])
    turns = [await here.submit(session) for _ in range(3)]
    await here.seen("turn.started")
    assert (await here.turns.cancel(session, CancelTurns(queued=True))).turn_ids == turns
    for turn in turns:
        assert (await here.ended(session, turn)).stop_reason == "cancelled"
    assert here.turns.counts() == (0, 0)


async def test_cancelling_a_turn_stops_its_tools_and_ends_their_calls(here, upstream):
    gate = held(here.toolbox)
    session, turn = await here.begin(calls((FREE, {}), (ASKS, {}), text=["Let me."]), says("next"))
    await gate.reached()
    await here.asked()
    assert [(await here.turns.cancel(session, CancelTurns())).cancelled for _ in range(2)] == [1, 0]
    record = await here.ended(session, turn)
    assert (record.stop_reason, record.text) == ("cancelled", "Let me.")
    statuses = [item["data"]["status"] for item in await here.seen("tool.end", 2)]
    assert statuses == ["cancelled", "cancelled"]
    (resolved,) = [item["data"]["permission"] for item in await here.seen("permission.resolved")]
    assert resolved["resolved_by"] == "cancel"
    with pytest.raises(errors.PermissionExpiredError, match="stopped"):
        await here.turns.decide(resolved["permission_id"], ALLOW)
    with pytest.raises(errors.PermissionNotFoundError):
        await here.turns.decide("prm_nope", ALLOW)
    assert here.toolbox.running == 0
    here.toolbox.work = lambda name, arguments, note: "done"
    await here.run(session, "go on")
    roles = [message["role"] for message in upstream.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "user"]


async def test_a_turn_ends_even_if_a_tool_does_not_stop(tmp_path, upstream):
    toolbox, gate = ScriptedToolbox(), Gate()

    async def work(name, arguments, note):
        gate.arrive()
        while not gate.is_open:
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                note("I am still here")
        note("late")
        return "late"

    toolbox.work = work
    async with daemon(tmp_path, upstream, toolbox, cancel_s=0.05) as here:
        session, turn = await here.begin(calls((FREE, {})), says("next"))
        await gate.reached()
        await here.turns.cancel(session, CancelTurns())
        assert (await here.ended(session, turn)).stop_reason == "cancelled"
        (end,) = await here.seen("tool.end")
        assert (end["data"]["status"], "did not end in time" in end["data"]["text"]) == ("cancelled", True)
        assert (await here.run(session)).text == "next"
        gate.open()
        await auntil(lambda: here.turns.is_idle)
        check_log(await here.events())


# --- permissions


async def test_an_allowed_call_runs_with_exactly_the_requested_arguments(here):
    session, turn = await here.begin(calls((ASKS, {"path": "x"})), says("ok"))
    (permission,) = await here.asked()
    assert (permission.tool, permission.arguments, permission.turn_id) == (ASKS, {"path": "x"}, turn)
    assert permission.expires_at > permission.requested_at
    assert here.toolbox.called == []
    shown = await here.snapshot(session)
    assert (shown.status, shown.permissions) == ("waiting", [permission])
    decided = await here.turns.decide(permission.permission_id, ALLOW)
    assert (decided.decision, decided.scope, decided.resolved_by) == ("allow", "once", "client")
    assert (await here.ended(session, turn)).text == "ok"
    assert here.toolbox.called == [(ASKS, {"path": "x"})]
    kinds = await here.kinds(session)
    assert kinds[3:7] == ["permission.request", "permission.resolved", "tool.start", "tool.end"]
    assert (await here.turns.list_permissions()).permissions == []


async def test_a_denial_is_reported_to_the_model_and_the_tool_does_not_run(here, upstream):
    session, turn = await here.begin(calls((ASKS, {})), says("pity"))
    with pytest.raises(errors.InvalidRequestError):
        await here.decide("deny", scope="session")
    await here.decide("deny")
    assert (await here.ended(session, turn)).text == "pity"
    assert here.toolbox.called == []
    (end,) = await here.seen("tool.end")
    assert end["data"]["status"] == "denied"
    assert "denied" in upstream.bodies[1]["messages"][-1]["content"]


async def test_a_permission_without_a_decision_is_denied(tmp_path, upstream):
    async with daemon(tmp_path, upstream, permission_timeout_s=0.02) as here:
        session, turn = await here.begin(calls((ASKS, {})), says("pity"))
        (permission,) = [item["data"]["permission"] for item in await here.seen("permission.request")]
        assert (await here.ended(session, turn)).text == "pity"
        (resolved,) = [item["data"]["permission"] for item in await here.seen("permission.resolved")]
        assert (resolved["decision"], resolved["resolved_by"]) == ("deny", "expiry")
        assert here.toolbox.called == []
        with pytest.raises(errors.PermissionExpiredError, match="it expired"):
            await here.turns.decide(permission["permission_id"], ALLOW)
        check_log(await here.events())


async def test_the_first_of_two_decisions_counts(here):
    session, turn = await here.begin(calls((ASKS, {})), says("ok"))
    (permission,) = await here.asked()
    both = (here.turns.decide(permission.permission_id, decision) for decision in (ALLOW, DENY))
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert first.decision == "allow"
    assert isinstance(second, errors.AlreadyResolvedError)
    assert "allow" in str(second)
    await here.ended(session, turn)
    assert len(here.toolbox.called) == 1


async def test_allowing_a_tool_for_a_session_does_not_affect_other_sessions(tmp_path, upstream):
    upstream.then(calls((ASKS, {"n": 1})), calls((ASKS, {"n": 2})), says("ok"), calls((ASKS, {"n": 3})), says("ok"))
    async with daemon(tmp_path, upstream) as here:
        session, turn = await here.begin()
        await here.decide("allow", scope="session")
        await here.ended(session, turn)
    async with daemon(tmp_path, upstream) as here:
        await here.run(session)
        assert len(here.toolbox.called) == 1
        other, turn = await here.begin(calls((ASKS, {})), says("ok"))
        (permission,) = await here.asked(2)
        assert permission.session_id == other
        await here.decide("allow")
        await here.ended(other, turn)


async def test_a_turn_that_waits_for_a_permission_does_not_occupy_a_slot(tmp_path, upstream):
    upstream.then(lambda body: calls((ASKS, {})) if body["messages"][-1]["content"] == "ask" else says("ok"))
    async with daemon(tmp_path, upstream, running_turns=1) as here:
        session, turn = await here.begin(content="ask")
        await here.asked()
        assert (await here.answer()).text == "ok"
        assert here.turns.counts() == (1, 0)
        await here.decide("allow")
        assert (await here.ended(session, turn)).text == "ok"
        await auntil(lambda: here.turns.is_idle)


async def test_a_turn_that_waits_to_continue_can_be_cancelled(tmp_path, upstream):
    gate = Gate()
    async with daemon(tmp_path, upstream, running_turns=1) as here:
        session, turn = await here.begin(calls((ASKS, {})), [gate, *says("ok")])
        await here.asked()
        other, second = await here.begin()
        await gate.reached()
        await here.decide("deny")
        await here.seen("tool.end")
        await here.turns.cancel(session, CancelTurns())
        assert (await here.ended(session, turn)).stop_reason == "cancelled"
        gate.open()
        assert (await here.ended(other, second)).text == "ok"
        await auntil(lambda: here.turns.is_idle)


# --- deleted sessions


async def test_deleting_a_session_ends_its_turns_first(here):
    session = await here.session([token("Hel"), STALL])
    turns = [await here.submit(session) for _ in range(2)]
    await here.seen("turn.token")
    waiting = asyncio.create_task(here.turns.read(session, turns[0], wait_s=WAIT_S))
    await here.turns.delete_session(session)
    kinds = [(item["turn_id"], item["event"]) for item in await here.events(session)]
    assert kinds[-1] == (None, "session.deleted")
    assert {(turn, "turn.done") for turn in turns} <= set(kinds)
    with pytest.raises(errors.SessionNotFoundError):
        await here.submit(session)
    await asyncio.wait([waiting])
    assert isinstance(waiting.exception(), errors.SessionNotFoundError) or waiting.result().stop_reason == "cancelled"
    await here.turns.delete_session(session)
    await here.turns.delete_session("nope")
    assert here.turns.counts() == (0, 0)
    await auntil(lambda: here.turns.is_idle)


async def test_a_session_can_be_deleted_while_all_slots_are_taken(tmp_path, upstream):
    upstream.then([STALL])
    async with daemon(tmp_path, upstream, running_turns=1) as here:
        busy, other = await here.session(), await here.session()
        await here.submit(busy)
        await here.seen("turn.started")
        await here.submit(other)
        await asyncio.wait_for(here.turns.delete_session(other), WAIT_S)
        check_log(await here.events(other))
        await here.turns.cancel(busy, CancelTurns())


# --- the daemon stops or crashes


async def test_stopping_ends_running_turns_and_keeps_queued_ones_for_the_next_start(tmp_path, upstream):
    async with daemon(tmp_path, upstream) as here:
        session = await here.session([token("Hel"), STALL], says("later"))
        first, second = await here.submit(session), await here.submit(session)
        await here.seen("turn.token")
        await here.turns.stop(mode="now", grace_s=0)
        record = await here.turns.read(session, first)
        assert (record.error.code, record.text) == ("daemon-stopping", "Hel")
        assert (await here.turns.read(session, second)).status == "queued"
        with pytest.raises(errors.StoppingError):
            await here.submit(session)
        await here.turns.stop(mode="now", grace_s=0)
    await upstream.until(lambda: upstream.left == 1)
    async with daemon(tmp_path, upstream) as here:
        assert (await here.ended(session, second)).text == "later"
        check_log(await here.events())


async def test_draining_completes_running_turns_and_starts_none(tmp_path, upstream):
    gate = Gate()
    async with daemon(tmp_path, upstream) as here:
        session = await here.session([gate, *says("ok")])
        first, second = await here.submit(session), await here.submit(session)
        await gate.reached()
        stopping = asyncio.create_task(here.turns.stop(mode="drain", grace_s=WAIT_S))
        await asyncio.sleep(0)
        gate.open()
        await stopping
        assert (await here.turns.read(session, first)).text == "ok"
        assert (await here.turns.read(session, second)).status == "queued"


@pytest.mark.parametrize("is_shortened", [True, False])
async def test_a_drain_ends_running_turns_after_its_grace_period_or_when_it_is_shortened(
    tmp_path, upstream, is_shortened
):
    async with daemon(tmp_path, upstream) as here:
        session, turn = await here.begin([STALL])
        await here.seen("turn.started")
        grace_s = WAIT_S if is_shortened else 0.01
        stopping = asyncio.create_task(here.turns.stop(mode="drain", grace_s=grace_s))
        await asyncio.sleep(0)
        if is_shortened:
            await here.turns.stop(mode="now", grace_s=0)
        await stopping
        record = await here.turns.read(session, turn)
        assert (record.status, record.error.code) == ("error", "daemon-stopping")


async def test_a_tool_that_runs_during_a_stop_is_interrupted(tmp_path, upstream):
    toolbox = ScriptedToolbox()
    gate = held(toolbox)
    async with daemon(tmp_path, upstream, toolbox) as here:
        await here.begin(calls((FREE, {})))
        await gate.reached()
        await here.turns.stop(mode="now", grace_s=0)
        (end,) = await here.seen("tool.end")
        assert end["data"]["status"] == "interrupted"
        check_log(await here.events())


async def test_after_a_crash_started_turns_end_tools_do_not_run_again_and_queued_turns_run(tmp_path, upstream):
    toolbox = ScriptedToolbox()
    gate = held(toolbox)
    async with daemon(tmp_path, upstream, toolbox, stop=False) as here:
        session = await here.session(calls((FREE, {}), (ASKS, {}), text=["Let me."]), says("later"))
        first, second = await here.submit(session), await here.submit(session)
        await gate.reached()
        await here.asked()
    async with daemon(tmp_path, upstream) as here:
        record = await here.ended(session, first)
        assert (record.error.code, record.text) == ("daemon-restarted", "Let me.")
        assert (await here.ended(session, second)).text == "later"
        events = await here.events()
        check_log(events)
        ends = [item["data"] for item in events if item["event"] == "tool.end"]
        assert [end["status"] for end in ends] == ["interrupted", "interrupted"]
        assert here.toolbox.called == []
        assert (await here.turns.list_permissions()).permissions == []
        roles = [message["role"] for message in upstream.bodies[1]["messages"]]
        assert roles == ["user", "assistant", "tool", "tool", "user"]


class Late(ScriptedToolbox):
    """A toolbox whose tools are available later."""

    def __init__(self):
        super().__init__()
        self.there = asyncio.Event()
        self.later, self.listed = self.listed, []

    @property
    def is_starting(self):
        return not self.there.is_set()

    async def wait_started(self):
        await self.there.wait()
        self.listed = self.later


@pytest.mark.parametrize("come", [True, False])
async def test_turns_wait_for_mcp_servers_to_start_for_a_limited_time(tmp_path, upstream, come):
    upstream.then(says("ok"))
    late = Late()
    async with daemon(tmp_path, upstream, late, tools_start_s=WAIT_S if come else 0.01) as here:
        session, turn = await here.begin()
        cancelled = await here.submit(session)
        await here.turns.cancel(session, CancelTurns(turn_id=cancelled))
        if come:
            assert (await here.turns.read(session, turn)).status == "queued"
            late.there.set()
        await here.ended(session, turn)
        assert ("tools" in upstream.bodies[0]) is come


async def test_a_daemon_can_stop_while_turns_wait_for_mcp_servers(tmp_path, upstream):
    async with daemon(tmp_path, upstream, Late()) as here:
        turn = await here.submit(session := await here.session())
        await asyncio.wait_for(here.turns.stop(mode="now", grace_s=0), WAIT_S)
        assert (await here.turns.read(session, turn)).status == "queued"


async def test_after_a_crash_the_text_in_the_log_is_kept(tmp_path, upstream):
    async with daemon(tmp_path, upstream, stop=False) as here:
        session, turn = await here.begin([thought("Hm"), token("Hel"), STALL])
        await here.seen("turn.token")
    async with daemon(tmp_path, upstream) as here:
        assert (await here.ended(session, turn)).text == "Hel"
        check_log(await here.events())
        answer = (await here.snapshot(session)).messages[-1]
        assert (answer.content, answer.reasoning_content) == ("Hel", "Hm")


# --- a full disk


@contextlib.contextmanager
def full_disk(store, *, for_ends=True):
    """Make a store behave as on a full disk. Yields a list that grows with each write that fails.

    Args:
        for_ends: Whether writes of ends fail too, as if the reserve were used up.
    """
    refused, write = [], store.write

    async def write_if_space(work, *, ending=False):
        def failing(transaction):
            work(transaction)
            raise sqlite3.OperationalError("database or disk is full")

        if ending and not for_ends:
            return await write(work, ending=ending)
        refused.append(work)
        return await write(failing, ending=ending)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "write", write_if_space)
        yield refused


async def test_a_full_disk_refuses_a_submit(here):
    session = await here.session(says("ok"))
    with full_disk(here.store), pytest.raises(errors.StorageFullError):
        await here.submit(session)
    assert (await here.run(session)).text == "ok"


@pytest.mark.parametrize("for_ends", [False, True])
async def test_a_full_disk_stops_the_model_and_the_turn_ends_once_there_is_space(here, upstream, for_ends):
    gate = Gate()
    session, turn = await here.begin([token("Hel"), gate, token("lo"), STALL], says("ok"))
    await here.seen("turn.token")
    with full_disk(here.store, for_ends=for_ends) as refused:
        gate.open()
        await upstream.until(lambda: upstream.left == 1)
        await auntil(lambda: not for_ends or len(refused) >= 4)
    record = await here.ended(session, turn)
    assert (record.error.code, record.text) == ("storage-full", "Hello")
    assert (await here.run(session)).text == "ok"


@pytest.mark.parametrize("tool", [FREE, ASKS])
async def test_on_a_full_disk_no_tool_is_started(here, tool):
    gate = Gate()
    session, turn = await here.begin([gate, *calls((tool, {}), (FREE, {}))], says("ok"))
    await gate.reached()
    with full_disk(here.store) as refused:
        gate.open()
        await auntil(lambda: len(refused) >= 2)
    record = await here.ended(session, turn)
    assert (record.error.code, here.toolbox.called) == ("storage-full", [])


async def test_on_a_full_disk_a_running_tool_is_stopped(here):
    first = asyncio.Event()

    async def work(name, arguments, note):
        await (first.wait() if arguments["n"] == 1 else asyncio.Event().wait())
        return "done"

    here.toolbox.work = work
    session, turn = await here.begin(calls((FREE, {"n": 1}), (FREE, {"n": 2})), says("ok"))
    await here.seen("tool.start", 2)
    with full_disk(here.store) as refused:
        first.set()
        await auntil(lambda: not here.toolbox.running and len(refused) >= 2)
    record = await here.ended(session, turn)
    assert record.error.code == "storage-full"
    assert [item["data"]["status"] for item in await here.seen("tool.end", 2)] == ["ok", "cancelled"]


async def test_a_queued_turn_starts_once_there_is_space(here, monkeypatch):
    gate = Gate()
    session = await here.session([gate, *says("1")], says("2"))
    first, second = await here.submit(session), await here.submit(session)
    await gate.reached()
    start_next, full = turn_rows.start_next, [sqlite3.OperationalError("database or disk is full")]

    def once(*arguments, **fields):
        if full:
            raise full.pop()
        return start_next(*arguments, **fields)

    monkeypatch.setattr(turn_rows, "start_next", once)
    gate.open()
    await here.ended(session, first)
    assert (await here.ended(session, second)).text == "2"
    assert not full


async def test_on_a_disk_that_stays_full_the_next_start_ends_the_turn(tmp_path, upstream):
    gate = Gate()
    async with daemon(tmp_path, upstream, cancel_s=0.01) as here:
        session, turn = await here.begin([token("Hel"), gate, DROP])
        await here.seen("turn.started")
        with full_disk(here.store) as refused:
            gate.open()
            await auntil(lambda: len(refused) >= 2)
            await here.turns.stop(mode="now", grace_s=0)
            assert (await here.turns.read(session, turn)).status == "running"
    async with daemon(tmp_path, upstream) as here:
        record = await here.ended(session, turn)
        assert record.error.code == "daemon-restarted"
        check_log(await here.events())


async def test_a_start_on_a_full_disk_recovers_when_there_is_space(tmp_path, upstream, monkeypatch):
    async with daemon(tmp_path, upstream, stop=False) as here:
        session = await here.session([STALL], says("later"))
        first, second = await here.submit(session), await here.submit(session)
        await upstream.until(lambda: len(upstream.bodies) == 1)
    full = True
    write = Store.write

    async def failing(store, work, **options):
        if full:
            raise errors.StorageFullError("full")
        return await write(store, work, **options)

    monkeypatch.setattr(Store, "write", failing)
    async with daemon(tmp_path, upstream) as here:
        assert (await here.turns.read(session, first)).status == "running"
        full = False
        assert (await here.ended(session, second)).text == "later"
        assert (await here.turns.read(session, first)).status == "error"
        check_log(await here.events())


async def test_a_turn_ends_even_after_an_unexpected_exception(here, upstream, monkeypatch, caplog):
    upstream.then(calls((FREE, {})), says("ok"))
    tool_end, bugs = turn_rows.end_tool, iter([ZeroDivisionError("kaputt")])

    def once(*arguments, **fields):
        for bug in bugs:
            raise bug
        tool_end(*arguments, **fields)

    monkeypatch.setattr(turn_rows, "end_tool", once)
    session = await here.session()
    record = await here.run(session)
    assert (record.error.code, "kaputt" in record.error.message) == ("turn-failed", False)
    assert "ZeroDivisionError" in caplog.text
    assert (await here.run(session)).text == "ok"


async def test_a_turn_whose_history_cannot_be_read_ends_with_an_error(here, upstream):
    """The history is parsed only after the transaction that starts the turn, for which other turns wait."""
    session = await here.session(messages=[SessionMessage(role="user", content="before")])
    await here.store.write(lambda tx: tx.execute("UPDATE messages SET body = '{}' WHERE session_id = ?", session))
    turn = await here.run(session)
    assert (turn.status, turn.error.code) == ("error", "turn-failed")
    upstream.then(says("ok"))
    assert (await here.answer()).text == "ok"
