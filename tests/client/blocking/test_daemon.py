"""Tests of the daemon's blocking client, with a real daemon in this process before a scripted model server."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest

from lmx_lab import errors
from lmx_lab.client.daemon import DaemonClient
from lmx_lab.client.daemon_events import DaemonEvent, PermissionRequestEvent, TurnDoneEvent
from lmx_lab.client.subscription import MemoryCursor
from lmx_lab.wire.mcp import McpServerConfig, McpTestFailed
from lmx_lab.wire.sessions import (
    CancelTurns,
    ChangeSession,
    CreateSession,
    ForkSession,
    PermissionRecord,
    SubmitTurn,
    TurnOverrides,
)
from tests.support.daemons import serving
from tests.support.model_server import STALL, Scripted, calls, says, token
from tests.support.programs import run_script
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
HELLO = says("Hello ", "there.", thinks=["Hm."])
NO_TOOLS = TurnOverrides(tools=[])


@pytest.fixture(scope="module")
def upstream():
    with Scripted(lambda body: _script(body["messages"][-1])) as upstream:
        yield upstream


def _script(last):
    if last["content"] == "stall":
        return [token("never"), STALL]
    if last["content"] == "call":
        return calls(("add", {"a": 1, "b": 2}))
    return HELLO


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, upstream):
    with serving(tmp_path_factory.mktemp("home"), upstream=upstream.url) as daemon:

        @daemon.tool
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b

        yield daemon


@pytest.fixture(scope="module")
def client(daemon):
    with DaemonClient.discover(daemon.folder.parent) as client:
        yield client


@pytest.fixture
def session(client):
    session = client.session(title="a test")
    yield session
    session.delete()


# --- turns


def test_a_turn_returns_its_result(session):
    threads = set()
    seen = []

    def note(event: DaemonEvent) -> None:
        threads.add(threading.get_ident())
        seen.append(event)

    result = session.run("hi", on_event=note)
    assert (result.text, result.thinking, result.stop_reason) == ("Hello there.", "Hm.", "end")
    assert isinstance(seen[-1], TurnDoneEvent)
    assert threads == {threading.get_ident()}
    assert session.turn(result.turn_id, wait_s=1).text == "Hello there."


def test_a_turn_is_streamed(session):
    with session.stream("hi", turn_id="t-1") as events:
        kinds = [event.event for event in events]
    assert kinds[-1] == "turn.done"
    assert "turn.token" in kinds
    assert session.run("hi", turn_id="t-1").text == "Hello there."


@pytest.mark.parametrize("way", ["run", "stream"])
@pytest.mark.parametrize(("verdict", "status"), [(True, "ok"), ("deny", "denied")])
def test_permissions_are_decided_in_the_callers_thread(session, way, verdict, status):
    requests = []

    def decide(permission: PermissionRecord) -> bool:
        requests.append((permission.tool, threading.get_ident()))
        return verdict

    if way == "run":
        assert [call.status for call in session.run("call", on_permission=decide).tool_calls] == [status]
    else:
        ends = [
            event.data.status for event in session.stream("call", on_permission=decide) if event.event == "tool.end"
        ]
        assert ends == [status]
    assert requests == [("add", threading.get_ident())]


def test_a_policy_can_be_one_decision_for_all(session):
    assert [call.text for call in session.run("call", on_permission="allow").tool_calls] == ["3"]


def interrupt_when(true):
    def press() -> None:
        until(true)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.parametrize("way", ["run", "stream", "body"])
def test_an_interrupt_cancels_the_turn(session, way):
    def ask() -> None:
        if way == "run":
            session.run("stall", turn_id="t")
            return
        for event in session.stream("stall", turn_id="t"):
            if way == "body" and event.event == "turn.token":
                raise KeyboardInterrupt

    def streaming() -> bool:
        return bool(session.snapshot().partial_text)

    thread = interrupt_when(streaming) if way != "body" else None
    with pytest.raises(KeyboardInterrupt):
        ask()
    if thread is not None:
        thread.join()
    record = session.turn("t", wait_s=20)
    assert (record.status, record.stop_reason) == ("done", "cancelled")


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_of_a_callback_cancels_the_turn(session, error):
    def decide(permission: PermissionRecord) -> bool:
        raise error

    with pytest.raises(error):
        session.run("call", turn_id="t", on_permission=decide)
    record = session.turn("t", wait_s=20)
    assert (record.status, record.stop_reason) == ("done", "cancelled")


def test_leaving_a_stream_cancels_its_turn(session):
    for _ in session.stream("stall", turn_id="t"):
        break
    assert session.turn("t", wait_s=20).stop_reason == "cancelled"


# --- sessions, permissions and MCP servers: each method once


def test_closing_the_client_cancels_a_turn_whose_stream_was_dropped(daemon, session):
    with DaemonClient.discover(daemon.folder.parent) as other:
        for event in other.session(session.session_id).stream("stall"):
            if event.event == "turn.token":
                break
    turn_id = session.snapshot().active_turn_id or event.turn_id
    assert turn_id is not None
    assert session.turn(turn_id, wait_s=20).stop_reason == "cancelled"


def test_an_invalid_policy_is_refused_before_the_turn_is_submitted(session):
    with pytest.raises(errors.InvalidRequestError, match="maybe"):
        session.run("hello", on_permission="maybe")
    assert session.snapshot().messages == []


def test_sessions_are_created_read_changed_forked_and_deleted(client):
    session = client.session("mine", title="one", tools=[])
    assert session.session_id == client.session("mine").session_id == "mine"
    turn = session.run("hi").turn_id
    record = session.change(title="two")
    with pytest.raises(errors.RevisionConflictError):
        session.change(title="three", revision=record.revision - 1)
    assert client.change_session("mine", ChangeSession(archived=True)).title == "two"
    assert [it.session_id for it in client.sessions(archived=True).sessions] == ["mine"]
    forks = [session.fork(through_turn_id=turn), session.fork(title="f")]
    ids = [fork.session_id for fork in forks] + [client.fork_session("mine", ForkSession()).session_id]
    assert len(client.read_session(ids[0]).messages) == len(session.snapshot().messages) == 2
    assert client.create_session(CreateSession(session_id="mine")).session_id == "mine"
    for session_id in ids:
        client.delete_session(session_id)
    session.delete()
    with pytest.raises(errors.SessionNotFoundError):
        session.snapshot()
    assert repr(session) == f"<Session mine of {client.url}>"


def test_turns_are_submitted_read_and_cancelled_separately(client, session):
    accepted = client.submit_turn(session.session_id, SubmitTurn(content="stall", overrides=NO_TOOLS))
    assert client.cancel_turns(session.session_id, CancelTurns(turn_id=accepted.turn_id)).cancelled == 1
    assert client.read_turn(session.session_id, accepted.turn_id, 20).stop_reason == "cancelled"
    assert session.cancel().cancelled == 0


def test_permissions_are_listed_and_decided_by_another_client(client, session):
    def decide(event: DaemonEvent) -> None:
        if isinstance(event, PermissionRequestEvent):
            (pending,) = client.permissions()
            assert client.decide(pending.permission_id, "allow", scope="session").decision == "allow"

    assert [call.status for call in session.run("call", on_event=decide).tool_calls] == ["ok"]


@pytest.mark.slow
def test_mcp_servers_are_configured(client):
    config = {"name": "none", "command": "no-such-program", "enabled": False}
    assert client.add_mcp_server(config).state == "disabled"
    assert client.change_mcp_server("none", {"args": ["x"]}).args == ("x",)
    assert [server.name for server in client.mcp_servers()] == [client.mcp_server("none").name]
    assert client.mcp_tools("none") == []
    assert isinstance(client.test_mcp_server(config), McpTestFailed)
    assert isinstance(client.test_mcp_server(McpServerConfig.model_validate(config)), McpTestFailed)
    with pytest.raises(errors.InvalidRequestError):
        client.restart_mcp_server("none")
    client.remove_mcp_server("none")
    with pytest.raises(errors.McpServerNotFoundError):
        client.mcp_server("none")


# --- events


def test_the_cursor_is_that_of_the_last_event_that_was_read(client, session):
    store = MemoryCursor()
    with client.events(session_ids=[session.session_id], cursor=store) as events:
        assert events.opened() is not None
        session.run("hi")
        first = next(events)
        assert (events.state.state, events.reconnects) == ("live", 0)
        assert repr(events) == f"<BlockingSubscription to {client.url}: live>"
    saved = store.load()
    assert saved is not None
    assert saved.seq == first.seq
    rest = client.events(session_ids=[session.session_id], cursor=store)
    seqs = []
    for event in rest:
        seqs.append(event.seq)
        if isinstance(event, TurnDoneEvent):
            break
    page = client.page(after=0, session_ids=[session.session_id])
    assert [first.seq, *seqs] == [event.seq for event in page.events if event.seq >= (first.seq or 0)]


def test_another_thread_can_read_the_states_of_the_connection(client):
    states = []
    with client.events(types=["turn.started"]) as events:
        thread = threading.Thread(target=lambda: states.extend(state.state for state in events.states()))
        thread.start()
        events.opened()
        until(lambda: "live" in states)
    thread.join()
    assert states[-1] == "closed"


def test_an_interrupt_ends_the_wait_for_events(client, session):
    with client.events(session_ids=[session.session_id]) as events:
        events.opened()
        session.run("hi")
        last = client.page(after=0, session_ids=[session.session_id]).events[-1].seq
        thread = interrupt_when(lambda: events.cursor is not None and events.cursor.seq == last)
        with pytest.raises(KeyboardInterrupt):
            list(events)
        thread.join()
        assert list(events) == []


def test_a_closed_subscription_does_not_connect(client):
    events = client.events()
    events.close()
    with pytest.raises(errors.HostingError, match="closed"):
        events.opened()
    assert events.state.state == "connecting"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_affect_its_parents_streams(daemon):
    output = run_script(f"""
import os
from lmx_lab import blocking as stream
from lmx_lab.client.daemon import DaemonClient
stream.END_S = 3600.0
client = DaemonClient.discover({str(daemon.folder.parent)!r})
events = client.events(after=0)
first = next(events).seq
child = os.fork()
if not child:
    events.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
client.session()
assert next(events).seq > first
print("more")
""")
    assert output == "more\n"


def test_the_token_of_a_client_is_not_displayed(daemon):
    with DaemonClient(daemon.url, token=daemon.token) as client:
        assert client.state().daemon_id == client.health().daemon_id == daemon.daemon_id
        assert daemon.token not in repr(client) + repr(client.session("s")) + repr(vars(client))
    with pytest.raises(errors.UnauthorizedError), DaemonClient(daemon.url, token="wrong") as client:
        client.state()


@pytest.mark.slow
def test_a_daemon_is_shut_down(tmp_path):
    with serving(tmp_path) as daemon:
        with DaemonClient.discover(tmp_path) as client:
            client.shut_down(mode="now")
            until(lambda: not daemon.running)
            with suppress(errors.LabError):
                client.health()
        with pytest.raises(errors.UnreachableError):
            DaemonClient.discover(tmp_path)
