"""Turns through the client, with a real daemon whose model is scripted."""

import asyncio
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import pytest

from lmx_lab.client.daemon import AsyncDaemonClient, AsyncSession
from lmx_lab.client.daemon_events import (
    DaemonEvent,
    PermissionRequestEvent,
    ResetFrame,
    SnapshotFrame,
    TurnDoneEvent,
    TurnTokenEvent,
)
from lmx_lab.client.daemon_routes import ClientTimes
from lmx_lab.client.turn import TurnAccumulator, TurnResult, TurnToolCall, turn_error
from lmx_lab.daemon.daemon import Daemon
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.retention import delete_expired
from lmx_lab.errors import (
    ERROR_CLASSES,
    ContextLengthError,
    IdempotencyConflictError,
    InvalidRequestError,
    QueueFullError,
    RevisionConflictError,
    SessionNotFoundError,
    TurnError,
    TurnInProgressError,
    UnauthorizedError,
    UnreachableError,
)
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.sessions import PermissionRecord, TurnOverrides, TurnRecord
from tests.support.daemons import UPSTREAM as UNREACHABLE
from tests.support.daemons import serving
from tests.support.model_server import STALL, Gate, Scripted, calls, refuses, says, thought, token
from tests.support.sockets import Proxy, Through

pytestmark = pytest.mark.anyio
WAIT_S = 20.0
FAR = 4e9
"""A Unix time in seconds at which all events have expired."""


# No test must pass because the record is read periodically.
SHORT = ClientTimes(min_delay_s=0.005, refusal_s=0.001, ended_s=0.05, deciding_s=0.05, record_s=3600.0)


class Model:
    """Answers with the scripts of the current test."""

    def __init__(self):
        self._scripts = ()
        self.bodies = []

    def play(self, *scripts):
        self._scripts = scripts
        self.bodies = []

    def __call__(self, body):
        script = self._scripts[min(len(self.bodies), len(self._scripts) - 1)]
        self.bodies.append(body)
        return script(body) if callable(script) else script


class Place:
    """A daemon with two tools, of which ``add`` needs no permission."""

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


@contextmanager
def running_daemon(home, **limits):
    model = Model()
    with Scripted(model) as upstream, serving(home, Limits(**limits), upstream=upstream.url) as daemon:
        yield Place(model, daemon)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("home")) as place:
        yield place


@dataclass(frozen=True)
class Here:
    daemon: Daemon
    model: Model
    client: AsyncDaemonClient
    session: AsyncSession
    written: list[str]

    async def delete_expired(self):
        """Delete everything that retention can delete."""
        services = self.daemon.services
        await asyncio.to_thread(self.daemon.run, delete_expired(services.store, services.log, Limits(), now_s=FAR))


@asynccontextmanager
async def here(place, *scripts, transport=None, times=SHORT):
    """Create a session for one test."""
    place.model.play(*scripts)
    place.written.clear()
    daemon = place.daemon
    async with AsyncDaemonClient(daemon.url, token=daemon.token, transport=transport, times=times) as client:
        async with asyncio.timeout(WAIT_S):
            yield Here(daemon, place.model, client, await client.session(), place.written)


WRITES = calls(("write", {"text": "hello"}))


# Results


async def test_a_result_contains_text_thoughts_calls_and_statistics(place):
    asked = calls(("add", {"a": 1, "b": 2}), ("add", "{no JSON"), ("nothing", {}), text=["Let me see. "])
    async with here(place, asked, says("It is ", "three.", thinks=["1 + 2", " is 3"])) as at:
        events = []
        result = await at.session.run("1 + 2?", turn_id="t1", on_event=events.append)
        record = await at.session.turn("t1")
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


async def test_a_stream_ends_with_the_turns_end(place):
    async with here(place, says("a ", "b ", "c")) as at:
        events = [event async for event in at.session.stream("go")]
    assert "".join(event.data.text for event in events if isinstance(event, TurnTokenEvent)) == "a b c"
    assert isinstance(events[-1], TurnDoneEvent)


async def test_overrides_reach_the_model(place):
    async with here(place, says("a")) as at:
        await at.session.run("go", overrides=TurnOverrides(temperature=0.5, max_tokens=7))
    assert (at.model.bodies[0]["temperature"], at.model.bodies[0]["max_tokens"]) == (0.5, 7)


async def test_submitting_a_turn_again_returns_the_same_result_and_runs_it_once(place):
    async with here(place, says("one", thinks=["hm"]), says("two")) as at:
        first = await at.session.run("go", turn_id="t1")
        again = await at.session.run("go", turn_id="t1")
        with pytest.raises(IdempotencyConflictError):
            await at.session.run("something else", turn_id="t1")
        assert first == again
        assert len(at.model.bodies) == 1


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
        while not any(isinstance(event, TurnTokenEvent) for event in events):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        gate.open()
        assert (await first).text == (await second).text == "one two"
        assert events[0].event == "turn.queued"


# Failures


async def test_the_error_of_a_turn_has_its_own_class_and_names_the_turn(place):
    async with here(place, refuses(400, "context-length-exceeded", "9000 tokens, 2048 fit")) as at:
        with pytest.raises(ContextLengthError, match=r"turn t1: .*2048"):
            await at.session.run("go", turn_id="t1")
        seen = []
        with pytest.raises(ContextLengthError):
            seen += [event.event async for event in at.session.stream("go")]


@pytest.mark.slow
async def test_a_turn_that_is_not_accepted_raises_the_daemons_error(tmp_path):
    with running_daemon(tmp_path, queued_turns_per_session=1) as place:
        await check_refusals(place)


async def check_refusals(place):
    gate = Gate()
    async with here(place, [gate, *says("one")]) as at:
        running = asyncio.create_task(at.session.run("go"))
        await gate.reached()
        with pytest.raises(TurnInProgressError):
            await at.session.run("more", when_busy="reject")
        waiting = asyncio.create_task(at.session.run("more"))
        while not (await at.session.snapshot()).queued_turn_ids:
            pass
        with pytest.raises(QueueFullError) as caught:
            await at.session.run("even more")
        assert caught.value.retry_after_s is not None
        gate.open()
        assert [(await task).text for task in (running, waiting)] == ["one", "one"]
        with pytest.raises(SessionNotFoundError):
            await AsyncSession(at.client, "nowhere").run("go")
        with pytest.raises(InvalidRequestError, match="content"):
            await at.session.run("")
        with pytest.raises(InvalidRequestError, match="turn_id"):
            await at.session.run("go", turn_id="no id!")


async def test_a_wrong_token_and_a_missing_daemon_fail_immediately(place):
    async with AsyncDaemonClient(place.daemon.url, token="wrong") as client, asyncio.timeout(WAIT_S):
        with pytest.raises(UnauthorizedError) as caught:
            await AsyncSession(client, "s").run("go")
        assert "wrong" not in str(caught.value)
    async with AsyncDaemonClient(UNREACHABLE, token=None) as client, asyncio.timeout(WAIT_S):
        with pytest.raises(UnreachableError, match="lmx-lab daemon"):
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
        begun = asyncio.Event()

        def note(event: DaemonEvent) -> None:
            if isinstance(event, TurnTokenEvent):
                begun.set()

        running = asyncio.create_task(at.session.run("go", turn_id="t1", on_event=note))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        record = await at.session.turn("t1", wait_s=10)
        assert (record.status, record.stop_reason, record.text) == ("done", "cancelled", "one ")


async def test_cancelling_during_the_submit_leaves_no_running_turn(place):
    slow = Slow()
    async with here(place, [STALL], transport=slow) as at:
        running = asyncio.create_task(at.session.run("go", turn_id="t1"))
        await slow.sent.wait()
        running.cancel()
        await asyncio.sleep(0)
        slow.go_on.set()
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


async def test_an_error_in_a_callback_cancels_the_turn_and_is_raised(place):
    def fail(event: object) -> bool:
        raise ZeroDivisionError

    async with here(place, WRITES, [token("one "), STALL]) as at:
        with pytest.raises(ZeroDivisionError):
            await at.session.run("go", turn_id="t1", on_permission=fail)
        with pytest.raises(ZeroDivisionError):
            await at.session.run("go", turn_id="t2", on_event=fail)
        for turn_id in ("t1", "t2"):
            assert (await at.session.turn(turn_id, wait_s=10)).stop_reason == "cancelled"


async def test_a_turn_that_another_client_cancels_has_a_result(place):
    gate = Gate()
    async with here(place, [thought("hm"), token("one "), gate]) as at:
        running = asyncio.create_task(at.session.run("go"))
        await gate.reached()
        assert (await at.session.cancel()).cancelled == 1
        result = await running
        gate.open()
    assert (result.stop_reason, result.text, result.thinking) == ("cancelled", "one ", "hm")


# Permissions


async def later(permission):
    await asyncio.sleep(0)
    return permission.arguments == {"text": "hello"}


@pytest.mark.parametrize("policy", ["allow", lambda permission: True, lambda permission: "allow", later])
async def test_a_policy_can_allow_a_call(place, policy):
    async with here(place, WRITES, says("done")) as at:
        result = await at.session.run("go", on_permission=policy)
    assert (result.text, at.written) == ("done", ["hello"])
    assert [call.status for call in result.tool_calls] == ["ok"]


@pytest.mark.parametrize("policy", ["deny", lambda permission: False])
async def test_a_policy_can_deny_a_call(place, policy):
    async with here(place, WRITES, says("well then")) as at:
        result = await at.session.run("go", on_permission=policy)
    assert (result.text, at.written) == ("well then", [])
    assert [(call.status, call.arguments) for call in result.tool_calls] == [("denied", {"text": "hello"})]


async def test_a_policy_that_returns_no_decision_is_an_error(place):
    def unsure(permission: PermissionRecord) -> Any:
        return None

    async with here(place, WRITES) as at:
        with pytest.raises(InvalidRequestError, match="on_permission returned None"):
            await at.session.run("go", turn_id="t1", on_permission=unsure)
        assert (await at.session.turn("t1", wait_s=10)).stop_reason == "cancelled"
        assert at.written == []


@pytest.mark.parametrize("kind", [TimeoutError, asyncio.CancelledError, UnreachableError])
async def test_an_exception_of_a_policy_is_not_mistaken_for_a_timeout_of_the_daemon(place, kind):
    async def ask(permission: PermissionRecord) -> bool:
        raise kind("the callback failed")

    async with here(place, WRITES) as at:
        with pytest.raises(kind, match="the callback failed"):
            await at.session.run("go", turn_id="t1", on_permission=ask)
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
        await at.client.decide(permission.permission_id, "allow")
        await dropped.wait()
        gate.open()
        assert (await running).text == (await beside).text == "done"
        assert at.written == ["hello"]


# Bad networks


class Slow(httpx2.AsyncBaseTransport):
    """A transport that delays submits before they are sent."""

    def __init__(self):
        self._network = httpx2.AsyncHTTPTransport()
        self.sent, self.go_on = asyncio.Event(), asyncio.Event()

    async def handle_async_request(self, request):
        if request.url.path.endswith("/turns"):
            self.sent.set()
            await self.go_on.wait()
        return await self._network.handle_async_request(request)

    async def aclose(self):
        await self._network.aclose()


class Deaf(Slow):
    """A transport that loses the answers to the first submits."""

    lost = 0

    async def handle_async_request(self, request):
        response = await self._network.handle_async_request(request)
        if request.url.path.endswith("/turns") and self.lost < 4:
            self.lost += 1
            await response.aclose()
            raise httpx2.ReadError("cut")
        return response


class Old(Slow):
    """A proxy that does not support WebSockets."""

    async def handle_async_request(self, request):
        if "upgrade" in request.headers:
            return httpx2.Response(404, headers={"content-type": "text/html"}, content=b"<html>", request=request)
        return await self._network.handle_async_request(request)


class Late(Slow):
    """A transport that, once ``is_late``, opens a second WebSocket long after the turn's record was read, or never."""

    def __init__(self, *, opens):
        super().__init__()
        self._opens = opens
        self.is_late = False
        self._sockets = 0
        self._looked = asyncio.Event()

    async def handle_async_request(self, request):
        if request.method == "GET" and request.url.path.endswith("/turns/t1"):
            self._looked.set()
        if self.is_late and "upgrade" in request.headers:
            self._sockets += 1
            if self._sockets > 1:
                await self._looked.wait()
                await asyncio.sleep(5 * SHORT.ended_s if self._opens else 2 * WAIT_S)
        return await self._network.handle_async_request(request)


@asynccontextmanager
async def proxied(at):
    """Provide the same session in another client, whose connections a test can cut."""
    async with (
        Proxy(lambda: at.daemon.port) as proxy,
        AsyncDaemonClient(at.daemon.url, token=at.daemon.token, transport=Through(proxy), times=SHORT) as client,
    ):
        yield proxy, AsyncSession(client, at.session.session_id)


async def test_a_submit_whose_answer_was_lost_runs_one_turn(place):
    async with here(place, says("one"), says("two"), transport=Deaf()) as at:
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
    async with here(place, WRITES, says("done"), refuses(400, "context-length-exceeded"), transport=Old()) as at:
        result = await at.session.run("go", on_permission="allow")
        assert (result.text, result.stop_reason, at.written) == ("done", "end", ["hello"])
        assert result.stats is not None
        with pytest.raises(ContextLengthError, match="turn t2"):
            await at.session.run("go", turn_id="t2")


async def test_without_websockets_a_turn_ends_while_a_policy_is_still_running(place):
    asked = asyncio.Event()

    async def never(permission: PermissionRecord) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    async with here(place, WRITES, transport=Old()) as at:
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
        while not any(isinstance(event, TurnTokenEvent) for event in events):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
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
        while not any(isinstance(event, SnapshotFrame) for event in events) and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        last.open()
        result = await running
    assert any(isinstance(event, ResetFrame) for event in events)
    assert (result.text, result.stop_reason, result.reconnects) == ("one two", "end", 1)


async def test_a_permission_that_was_requested_during_a_disconnection_is_decided(place):
    gate = Gate()
    script = [gate, *WRITES]
    async with here(place, script, says("done")) as at, proxied(at) as (proxy, session):
        events = []
        running = asyncio.create_task(session.run("go", on_permission="allow", on_event=events.append))
        await gate.reached()
        while not events:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        proxy.is_shut = True
        proxy.cut()
        gate.open()
        while not await at.client.permissions():
            pass
        await at.delete_expired()
        proxy.is_shut = False
        assert (await running).text == "done"
    assert any(isinstance(event, SnapshotFrame) for event in events)
    assert not any(isinstance(event, PermissionRequestEvent) for event in events)


# The session itself


async def test_a_session_is_read_changed_forked_and_deleted(place):
    async with here(place, says("one")) as at:
        await at.session.run("go", turn_id="t1")
        changed = await at.session.change(title="A title", metadata={"a": [1, None]})
        assert (changed.title, changed.metadata) == ("A title", {"a": [1, None]})
        assert (await at.session.change(title=None)).title is None
        with pytest.raises(RevisionConflictError):
            await at.session.change(title="late", revision=changed.revision)
        fork = await at.session.fork(title="The other")
        snapshot = await fork.snapshot()
        assert (snapshot.title, [message.content for message in snapshot.messages]) == ("The other", ["go", "one"])
        await at.session.delete()
        await at.session.delete()
        with pytest.raises(SessionNotFoundError):
            await at.session.snapshot()
        assert (await fork.run("more")).text == "one"


@pytest.mark.parametrize(("code", "kind"), ERROR_CLASSES.items())
def test_every_code_raises_its_class(code, kind):
    error = turn_error("t1", ErrorDetail(code=code, message="what, the limit, the next step", type="t", param="p"))
    assert type(error) is kind
    assert (str(error), error.param) == ("turn t1: what, the limit, the next step", "p")


def test_an_unknown_code_is_a_turn_error_that_shows_the_code():
    error = turn_error("t1", ErrorDetail(code="too-bored", message="no", type="t"))
    assert type(error) is TurnError
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


def test_the_error_of_a_record_is_raised():
    record = TurnRecord(
        turn_id="t1",
        session_id="s",
        status="error",
        content="go",
        overrides=None,
        stop_reason=None,
        text="half",
        error=ErrorDetail(code="daemon-restarted", message="it ended", type="t"),
        stats=None,
        queued_at="",
        started_at=None,
        ended_at="",
    )
    with pytest.raises(TurnError, match="turn t1: it ended"):
        TurnAccumulator("s", "t1").result(record, reconnects=0)
