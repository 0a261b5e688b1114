"""Turns through the client, with a real daemon whose model is scripted."""

import asyncio
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace

import httpx2
import pytest

from lmx_lab import errors
from lmx_lab.client.daemon import AsyncDaemonClient, AsyncSession
from lmx_lab.client.daemon_events import (
    PermissionRequestEvent,
    ResetFrame,
    SnapshotFrame,
    TurnDoneEvent,
    TurnTokenEvent,
)
from lmx_lab.client.daemon_routes import ClientTimes
from lmx_lab.client.turn import TurnResult, TurnToolCall, turn_error
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.retention import delete_expired
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.sessions import PermissionRecord, TurnOverrides
from tests.support.daemons import UPSTREAM as UNREACHABLE
from tests.support.daemons import serving
from tests.support.model_server import STALL, Gate, Scripted, calls, refuses, says, thought, token
from tests.support.sockets import Network, Proxy, Through
from tests.support.waiting import WAIT_S, auntil

pytestmark = pytest.mark.anyio
FAR = 4e9
"""A Unix time in seconds at which all events have expired."""


# No test must pass because the record is read periodically.
SHORT = ClientTimes(min_delay_s=0.005, refusal_s=0.001, ended_s=0.05, deciding_s=0.05, record_s=3600.0)


class Place:
    """A daemon with two tools, of which ``add`` needs no permission, and a session for the current test."""

    client: AsyncDaemonClient
    session: AsyncSession

    def __init__(self, model, daemon):
        self.model = model
        self.daemon = daemon
        self.written = []
        """Arguments of the calls of ``write``."""
        daemon.tool(self.add, read_only=True)
        daemon.tool(self.write)

    def add(self, a: int, b: int) -> int:
        """Adds."""
        return a + b

    def write(self, text: str) -> str:
        """Writes."""
        self.written.append(text)
        return "written"

    async def delete_expired(self):
        """Delete everything that retention can delete."""
        services = self.daemon.services
        await asyncio.to_thread(self.daemon.run, delete_expired(services.store, services.log, Limits(), now_s=FAR))


@contextmanager
def running_daemon(home):
    with Scripted() as model, serving(home, upstream=model.url) as daemon:
        yield Place(model, daemon)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("home")) as place:
        yield place


@asynccontextmanager
async def here(place, *scripts, transport=None, times=SHORT):
    """Create a session for one test, in which the model answers with these scripts."""
    place.model.play(*scripts)
    place.written.clear()
    options = {"token": place.daemon.token, "transport": transport, "times": times}
    async with AsyncDaemonClient(place.daemon.url, **options) as place.client, asyncio.timeout(WAIT_S):
        place.session = await place.client.session()
        yield place


def has(events, kind):
    return any(isinstance(event, kind) for event in events)


WRITES = calls(("write", {"text": "hello"}))


# Results


async def test_a_result_contains_text_thoughts_calls_and_statistics(place):
    asked = calls(("add", {"a": 1, "b": 2}), ("add", "{no JSON"), ("nothing", {}), text=["Let me see. "])
    async with here(place, asked, says("It is ", "three.", thinks=["1 + 2", " is 3"])) as at:
        events, overrides = [], TurnOverrides(temperature=0.5, max_tokens=70)
        result = await at.session.run("1 + 2?", turn_id="t1", on_event=events.append, overrides=overrides)
        record = await at.session.turn("t1")
        again = [event async for event in at.session.stream("1 + 2?", turn_id="t1", overrides=overrides)]
    assert (at.model.bodies[0]["temperature"], at.model.bodies[0]["max_tokens"]) == (0.5, 70)
    assert (result.text, result.thinking, result.stop_reason) == ("It is three.", "1 + 2 is 3", "end")
    assert (result.turn_id, result.session_id, result.reconnects) == ("t1", at.session.session_id, 0)
    assert result.stats == record.stats
    told = sorted((call.name, call.arguments, call.status) for call in result.tool_calls if call.arguments is not None)
    assert told == [("add", {"a": 1, "b": 2}, "ok"), ("nothing", {}, "error")]
    assert [(call.name, call.status) for call in result.tool_calls if call.arguments is None] == [("add", "error")]
    assert next(call.text for call in result.tool_calls if call.status == "ok") == "3"
    assert str(result) == "It is three."
    assert [event.event for event in events][:2] == ["turn.queued", "turn.started"]
    assert isinstance(events[-1], TurnDoneEvent)
    assert {event.turn_id for event in events} == {"t1"}
    assert again == events


async def test_a_turn_whose_events_were_deleted_is_read_from_its_record(place):
    async with here(place, says("one")) as at:
        first = await at.session.run("go", turn_id="t1")
        await at.delete_expired()
        again = await at.session.run("go", turn_id="t1")
    assert (again.text, again.stats) == (first.text, first.stats)


@pytest.mark.slow
async def test_a_slow_reader_receives_all_events_of_a_turn_that_has_ended(place):
    async with here(place, calls(("add", {"a": 1, "b": 2})), says("one", thinks=["hm"])) as at:
        first = [event async for event in at.session.stream("go", turn_id="t1")]
        again = []
        async for event in at.session.stream("go", turn_id="t1"):
            again.append(event)
            # Longer than the time without events after which the record ends the turn.
            await asyncio.sleep(2 * SHORT.ended_s)
    assert [event.seq for event in again] == [event.seq for event in first]


async def test_a_second_reader_of_a_running_turn_receives_all_of_its_events(place):
    gate = Gate()
    async with here(place, [token("one "), gate, *says("two")]) as at:
        first = asyncio.create_task(at.session.run("go", turn_id="t1"))
        await gate.reached()
        events = []
        second = asyncio.create_task(at.session.run("go", turn_id="t1", on_event=events.append))
        await auntil(lambda: has(events, TurnTokenEvent))
        gate.open()
        assert (await first).text == (await second).text == "one two"
        assert events[0].event == "turn.queued"


# Failures


async def test_the_error_of_a_turn_has_its_own_class_and_names_the_turn(place):
    async with here(place, refuses(400, "context_length_exceeded", "9000 tokens, 2048 fit")) as at:
        with pytest.raises(errors.ContextLengthError, match=r"turn t1: .*2048"):
            await at.session.run("go", turn_id="t1")
        seen = []
        with pytest.raises(errors.ContextLengthError):
            seen += [event.event async for event in at.session.stream("go")]


async def test_a_turn_that_is_not_accepted_raises_the_daemons_error(place):
    gate = Gate()
    async with here(place, [gate, *says("one")]) as at:
        running = asyncio.create_task(at.session.run("go"))
        await gate.reached()
        with pytest.raises(errors.TurnInProgressError):
            await at.session.run("more", when_busy="reject")
        gate.open()
        assert (await running).text == "one"
        with pytest.raises(errors.SessionNotFoundError):
            await AsyncSession(at.client, "nowhere").run("go")
        with pytest.raises(errors.InvalidRequestError, match="content"):
            await at.session.run("")
        with pytest.raises(errors.InvalidRequestError, match="turn_id"):
            await at.session.run("go", turn_id="no id!")


async def test_a_wrong_token_and_a_missing_daemon_fail_immediately(place):
    async with AsyncDaemonClient(place.daemon.url, token="wrong") as client, asyncio.timeout(WAIT_S):
        with pytest.raises(errors.UnauthorizedError) as caught:
            await AsyncSession(client, "s").run("go")
        assert "wrong" not in str(caught.value)
    async with AsyncDaemonClient(UNREACHABLE, token=None) as client, asyncio.timeout(WAIT_S):
        with pytest.raises(errors.UnreachableError, match="lmx-lab daemon"):
            await AsyncSession(client, "s").run("go")


async def test_deleting_a_session_ends_its_turn_for_the_caller(place):
    gate = Gate()
    async with here(place, [token("one "), gate]) as at:
        running = asyncio.create_task(at.session.run("go"))
        await gate.reached()
        await at.session.delete()
        assert (await running).stop_reason == "cancelled"
        gate.open()


# Cancelling


async def test_cancelling_the_caller_cancels_the_turn(place):
    async with here(place, [token("one "), STALL]) as at:
        events = []
        running = asyncio.create_task(at.session.run("go", turn_id="t1", on_event=events.append))
        await auntil(lambda: has(events, TurnTokenEvent))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        record = await at.session.turn("t1", wait_s=10)
        assert (record.status, record.stop_reason, record.text) == ("done", "cancelled", "one ")


async def test_cancelling_during_the_submit_leaves_no_running_turn(tmp_path):
    is_submitted, is_slow = asyncio.Event(), asyncio.Event()

    async def delay(request, send):
        if request.url.path.endswith("/turns"):
            is_submitted.set()
            await is_slow.wait()
        return await send(request)

    # With a daemon of its own: the request of the cancelled turn may reach the model after the end of this test.
    with running_daemon(tmp_path) as place:
        async with here(place, [STALL], transport=Network(delay)) as at:
            running = asyncio.create_task(at.session.run("go", turn_id="t1"))
            await is_submitted.wait()
            running.cancel()
            await asyncio.sleep(0)
            is_slow.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (await at.session.turn("t1", wait_s=10)).stop_reason == "cancelled"


async def test_closing_a_stream_cancels_the_turn_unless_it_has_ended(place):
    async with here(place, [token("one "), STALL], says("two")) as at:
        async with aclosing(at.session.stream("go", turn_id="t1")) as events:
            async for event in events:
                if isinstance(event, TurnTokenEvent):
                    break
        assert (await at.session.turn("t1", wait_s=10)).stop_reason == "cancelled"
        async with aclosing(at.session.stream("go", turn_id="t2")) as events:
            async for event in events:
                if isinstance(event, TurnDoneEvent):
                    break
        assert (await at.session.turn("t2")).stop_reason == "end"


async def test_an_error_in_on_event_cancels_the_turn_and_is_raised(place):
    def fail(event):
        raise ZeroDivisionError

    async with here(place, [token("one "), STALL]) as at:
        with pytest.raises(ZeroDivisionError):
            await at.session.run("go", turn_id="t1", on_event=fail)
        assert (await at.session.turn("t1", wait_s=10)).stop_reason == "cancelled"


async def test_a_turn_that_another_client_cancels_has_a_result(place):
    gate = Gate()
    async with here(place, [thought("hm"), token("one "), gate]) as at:
        running = asyncio.create_task(at.session.run("go", turn_id="t1"))
        await gate.reached()
        assert (await at.session.cancel()).turn_ids == ["t1"]
        result = await running
        gate.open()
        assert (await at.session.cancel(queued=True)).cancelled == 0
    assert (result.stop_reason, result.text, result.thinking) == ("cancelled", "one ", "hm")


# Permissions


async def later(permission):
    await asyncio.sleep(0)
    return permission.arguments == {"text": "hello"}


def raises(kind):
    async def ask(permission):
        raise kind("the callback failed")

    return ask


@pytest.mark.parametrize(
    ("policy", "status"),
    [
        *((policy, "ok") for policy in ("allow", lambda permission: True, lambda permission: "allow", later)),
        *((policy, "denied") for policy in ("deny", lambda permission: False)),
    ],
)
async def test_a_policy_decides_about_a_call(place, policy, status):
    async with here(place, WRITES, says("done")) as at:
        result = await at.session.run("go", on_permission=policy)
    assert (result.text, at.written) == ("done", ["hello"] if status == "ok" else [])
    assert [(call.status, call.arguments) for call in result.tool_calls] == [(status, {"text": "hello"})]


async def test_an_invalid_policy_is_refused_before_the_turn_is_submitted(place):
    async with here(place, WRITES) as at:
        with pytest.raises(errors.InvalidRequestError, match="maybe"):
            await at.session.run("go", on_permission="maybe")
        assert (await at.session.snapshot()).messages == []


async def decide_nothing(permission):
    return None


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (raises(ZeroDivisionError), ZeroDivisionError, "the callback failed"),
        # Not to be mistaken for a timeout of the daemon, a cancelled turn or a lost connection.
        (raises(TimeoutError), TimeoutError, "the callback failed"),
        (raises(asyncio.CancelledError), asyncio.CancelledError, "the callback failed"),
        (raises(errors.UnreachableError), errors.UnreachableError, "the callback failed"),
        (decide_nothing, errors.InvalidRequestError, "on_permission returned None"),
    ],
)
async def test_a_policy_that_fails_cancels_the_turn_and_its_exception_is_raised(place, policy, error, message):
    async with here(place, WRITES) as at:
        with pytest.raises(error, match=message):
            await at.session.run("go", turn_id="t1", on_permission=policy)
        assert (await at.session.turn("t1", wait_s=10)).stop_reason == "cancelled"
        assert at.written == []


async def test_a_policy_is_not_called_for_a_permission_that_was_decided_before(place):
    asked = []

    def ask(permission: PermissionRecord) -> bool:
        asked.append(permission.tool)
        return True

    gate = Gate()
    async with here(place, WRITES, [gate, *says("done")]) as at:
        first = asyncio.create_task(at.session.run("go", turn_id="t1", on_permission=ask))
        await gate.reached()
        second = asyncio.create_task(at.session.run("go", turn_id="t1", on_permission=ask))
        gate.open()
        assert (await first).text == (await second).text == "done"
    assert asked == ["write"]


async def test_a_policy_is_cancelled_when_another_client_decides(place):
    asked, dropped = asyncio.Event(), asyncio.Event()

    async def never(permission: PermissionRecord) -> bool:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            dropped.set()
        return True

    gate = Gate()
    async with here(place, WRITES, [gate, *says("done")]) as at:
        running = asyncio.create_task(at.session.run("go", turn_id="t1", on_permission=never))
        beside = asyncio.create_task(at.session.run("go", turn_id="t1"))
        await asked.wait()
        (permission,) = await at.client.permissions()
        assert (permission.tool, permission.arguments) == ("write", {"text": "hello"})
        decided = await at.client.decide(permission.permission_id, "allow", scope="session")
        assert (decided.decision, decided.scope, decided.resolved_by) == ("allow", "session", "client")
        await dropped.wait()
        gate.open()
        assert (await running).text == (await beside).text == "done"
        assert at.written == ["hello"]


# Bad networks


class Late(Network):
    """A transport that, once ``is_late``, opens a second WebSocket long after the turn's record was read, or never."""

    def __init__(self, *, opens):
        super().__init__(self.delay)
        self._opens = opens
        self.is_late = False
        self._sockets = 0
        self._looked = asyncio.Event()

    async def delay(self, request, send):
        if request.method == "GET" and request.url.path.endswith("/turns/t1"):
            self._looked.set()
        if self.is_late and "upgrade" in request.headers:
            self._sockets += 1
            if self._sockets > 1:
                await self._looked.wait()
                await asyncio.sleep(5 * SHORT.ended_s if self._opens else 2 * WAIT_S)
        return await send(request)


async def without_websockets(request, send):
    """Answer like a proxy that does not support WebSockets."""
    if "upgrade" in request.headers:
        return httpx2.Response(404, headers={"content-type": "text/html"}, content=b"<html>", request=request)
    return await send(request)


@asynccontextmanager
async def proxied(at):
    """Provide the same session in another client, whose connections a test can cut."""
    async with (
        Proxy(lambda: at.daemon.port) as proxy,
        AsyncDaemonClient(at.daemon.url, token=at.daemon.token, transport=Through(proxy), times=SHORT) as client,
    ):
        yield proxy, AsyncSession(client, at.session.session_id)


async def test_a_submit_whose_answer_was_lost_runs_one_turn(place):
    lost = []

    async def lose_answers(request, send):
        response = await send(request)
        if request.url.path.endswith("/turns") and len(lost) < 4:
            lost.append(response)
            await response.aclose()
            raise httpx2.ReadError("cut")
        return response

    async with here(place, says("one"), says("two"), transport=Network(lose_answers)) as at:
        assert (await at.session.run("go")).text == "one"
        assert len(at.model.bodies) == 1


async def test_a_stored_record_does_not_end_a_turn_while_events_can_still_arrive(place):
    late = Late(opens=True)
    asked = calls(("add", {"a": 1, "b": 2}))
    async with here(place, asked, says("one", thinks=["hm"]), transport=late) as at:
        events = []
        first = await at.session.run("go", turn_id="t1", on_event=events.append)
        late.is_late = True
        again = []
        assert await at.session.run("go", turn_id="t1", on_event=again.append) == first
    assert [event.seq for event in again] == [event.seq for event in events]
    assert (first.thinking, len(first.tool_calls)) == ("hm", 1)


async def test_a_turn_ends_by_its_record_if_the_events_cannot_be_received(place):
    late = Late(opens=False)
    async with here(place, says("one", thinks=["hm"]), transport=late, times=replace(SHORT, missed_s=0.2)) as at:
        first = await at.session.run("go", turn_id="t1")
        late.is_late = True
        again = await at.session.run("go", turn_id="t1")
    assert (again.text, again.stats, again.thinking) == (first.text, first.stats, "")


async def test_without_websockets_a_turn_ends_by_its_record(place):
    async with here(
        place, WRITES, says("done"), refuses(400, "context_length_exceeded"), transport=Network(without_websockets)
    ) as at:
        result = await at.session.run("go", on_permission="allow")
        assert (result.text, result.stop_reason, at.written) == ("done", "end", ["hello"])
        assert result.stats is not None
        with pytest.raises(errors.ContextLengthError, match="turn t2"):
            await at.session.run("go", turn_id="t2")


async def test_without_websockets_a_turn_ends_while_a_policy_is_still_running(place):
    asked = asyncio.Event()

    async def never(permission: PermissionRecord) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    async with here(place, WRITES, transport=Network(without_websockets)) as at:
        running = asyncio.create_task(at.session.run("go", turn_id="t1", on_permission=never))
        await asked.wait()
        await at.session.cancel("t1")
        assert (await running).stop_reason == "cancelled"


@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_turn_whose_events_were_pruned_meanwhile_still_has_a_result(place, has_ended):
    gate, last = Gate(), Gate()
    script = [token("one "), gate, *says("two")[:-1], last, *says()[-1:]]
    async with here(place, calls(("add", {"a": 1, "b": 2})), script) as at, proxied(at) as (proxy, session):
        events = []
        running = asyncio.create_task(session.run("go", turn_id="t1", on_event=events.append))
        await auntil(lambda: has(events, TurnTokenEvent))
        proxy.is_shut = True
        proxy.cut()
        gate.open()
        while (await at.session.snapshot()).partial_text != "one two":
            pass
        if has_ended:
            last.open()
            await at.session.turn("t1", wait_s=10)
        await at.delete_expired()
        proxy.is_shut = False
        await auntil(lambda: running.done() or has(events, SnapshotFrame))
        last.open()
        result = await running
    assert has(events, ResetFrame)
    assert (result.text, result.stop_reason, result.reconnects) == ("one two", "end", 1)


async def test_a_permission_that_was_requested_during_a_disconnection_is_decided(place):
    gate = Gate()
    script = [gate, *WRITES]
    async with here(place, script, says("done")) as at, proxied(at) as (proxy, session):
        events = []
        running = asyncio.create_task(session.run("go", on_permission="allow", on_event=events.append))
        await gate.reached()
        await auntil(lambda: bool(events))
        proxy.is_shut = True
        proxy.cut()
        gate.open()
        while not await at.client.permissions():
            pass
        await at.delete_expired()
        proxy.is_shut = False
        assert (await running).text == "done"
    assert has(events, SnapshotFrame)
    assert not has(events, PermissionRequestEvent)


# The session itself


async def test_a_session_is_read_changed_forked_and_deleted(place):
    async with here(place, says("one")) as at:
        await at.session.run("go", turn_id="t1")
        changed = await at.session.change(title="A title", metadata={"a": [1, None]})
        assert (changed.title, changed.metadata) == ("A title", {"a": [1, None]})
        assert (await at.session.change(title=None)).title is None
        with pytest.raises(errors.RevisionConflictError):
            await at.session.change(title="late", revision=changed.revision)
        fork = await at.session.fork(title="The other")
        snapshot = await fork.snapshot()
        assert (snapshot.title, snapshot.forked_from) == ("The other", at.session.session_id)
        assert [message.content for message in snapshot.messages] == ["go", "one"]
        with pytest.raises(errors.TurnNotFoundError):
            await at.session.fork(through_turn_id="none")
        await at.session.delete()
        await at.session.delete()
        with pytest.raises(errors.SessionNotFoundError):
            await at.session.snapshot()
        assert (await fork.run("more")).text == "one"


@pytest.mark.parametrize(("code", "kind"), errors.ERROR_CLASSES.items())
def test_every_code_raises_its_class(code, kind):
    error = turn_error("t1", ErrorDetail(code=code, message="what, the limit, the next step", type="t", param="p"))
    assert type(error) is kind
    assert (str(error), error.param) == ("turn t1: what, the limit, the next step", "p")


def test_an_unknown_code_is_a_turn_error_that_shows_the_code():
    error = turn_error("t1", ErrorDetail(code="too-bored", message="no", type="t"))
    assert type(error) is errors.TurnError
    assert str(error) == "turn t1: no (too-bored)"


def test_a_result_is_shown_with_its_calls_and_its_cost():
    call = TurnToolCall(call_id="c", name="add", arguments={"a": 1}, status="ok", text="<2>" * 500, elapsed_s=0.25)
    result = TurnResult(
        turn_id="t1", session_id="s", text="Two.", thinking="", stop_reason="end", stats=None, tool_calls=(call,)
    )
    assert repr(call).startswith('→ add({"a": 1}) ok in 0.25 s: <2>')
    assert len(repr(call)) < 600
    assert repr(result).splitlines()[2:] == ["Two.", "", "turn t1 · end"]
    assert "<2>" not in result._repr_html_()
