"""Tests of the daemon's async client against a real daemon, and against other servers at its address."""

import asyncio
import json
import logging
import sys
import traceback
from contextlib import asynccontextmanager

import pytest

from lmx_lab import errors
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.daemon.storage.event_log import record_pruned
from lmx_lab.wire.mcp import McpServerConfig, McpTestFailed, McpTestPassed
from lmx_lab.wire.sessions import CancelTurns, ChangeSession, ForkSession, SessionMessage, SubmitTurn
from tests.support.asking import invalid
from tests.support.daemons import TOKEN, serving, write_state, write_tokens
from tests.support.mcp import COUNTING
from tests.support.sockets import Network, answering, whole

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def daemon(home):
    with serving(home) as daemon:
        yield daemon


@pytest.fixture
async def client(daemon, home):
    async with AsyncDaemonClient.discover(home) as client:
        yield client


class Recorded(Network):
    """A transport that records the path and the authorization header of each request."""

    def __init__(self):
        super().__init__(self.record)
        self.requests = []

    async def record(self, request, send):
        self.requests.append((request.url.path, request.headers.get("authorization")))
        return await send(request)


@asynccontextmanager
async def answered(*answers, token=TOKEN):
    """A client of a server with these answers, and the server."""
    with answering(*answers) as server:
        async with AsyncDaemonClient(server.url, token=token) as client:
            yield client, server


# --- the daemon


async def test_the_daemon_is_shut_down(tmp_path):
    with serving(tmp_path) as daemon:
        async with AsyncDaemonClient.discover(tmp_path) as client:
            await client.shut_down(mode="now")
        assert await asyncio.to_thread(daemon.wait, 20)


# --- sessions


async def test_a_session_is_created_once_per_id(client):
    history = [SessionMessage(role="user", content="hi"), SessionMessage(role="assistant", content="hello")]
    session = await client.session("mine", title="One", tools=["time__*"], messages=history, metadata={"a": [1, None]})
    assert (await client.session("mine", title="Two")).session_id == session.session_id == "mine"
    read = await client.read_session("mine")
    assert (read.title, read.tools, read.metadata) == ("One", ["time__*"], {"a": [1, None]})
    assert (await client.read_session((await client.session(tools=())).session_id)).tools == [], "not the same as None"
    assert [message.content for message in read.messages] == ["hi", "hello"]
    await client.delete_session("mine")
    await client.delete_session("mine")
    with pytest.raises(errors.SessionNotFoundError):
        await client.read_session("mine")


async def test_sessions_are_listed_in_pages(client):
    created = [(await client.session(title=f"paged {number}")).session_id for number in range(3)]
    first = await client.sessions(limit=2, q="PAGED")
    second = await client.sessions(limit=2, q="PAGED", cursor=first.next_cursor)
    assert [record.session_id for record in first.sessions + second.sessions] == created[::-1]
    assert (len(first.sessions), second.next_cursor) == (2, None)
    await client.change_session(created[0], ChangeSession(archived=True))
    archived = (await client.sessions(archived=True, q="paged")).sessions
    assert [record.session_id for record in archived] == created[:1]


@pytest.mark.slow
async def test_an_mcp_server_is_tested_added_changed_and_removed(client, tmp_path):
    args = (str(COUNTING), str(tmp_path / "notes"), "0")
    config = McpServerConfig(name="counting", command=sys.executable, args=args, env={"KEY": "hidden"})
    failed = await client.test_mcp_server({"name": "none", "command": "no-such-program-anywhere"})
    assert isinstance(failed, McpTestFailed)
    assert failed.error_kind == "command-not-found"
    tested = await client.test_mcp_server(config)
    assert isinstance(tested, McpTestPassed)
    assert [tool.name for tool in tested.tools] == ["counting__count"]
    assert await client.mcp_servers() == []
    assert (await client.add_mcp_server(config)).env == {"KEY": "***"}
    with pytest.raises(errors.McpServerExistsError):
        await client.add_mcp_server(config)
    assert isinstance(await client.test_mcp_server("counting"), McpTestPassed)
    assert (await client.restart_mcp_server("counting")).state in ("starting", "ready")
    changed = await client.change_mcp_server("counting", {"enabled": False})
    assert (changed.enabled, (await client.mcp_server("counting")).state) == (False, "disabled")
    assert await client.mcp_tools("counting") == []
    await client.remove_mcp_server("counting")
    await client.remove_mcp_server("counting")
    assert await client.mcp_servers() == []


# --- events


async def test_events_are_read_in_pages(daemon, client):
    last = await asyncio.to_thread(write_tokens, daemon, 5, "of-a-session")
    page = await client.page(after=last - 5, limit=3, types=["turn.*", "session.*"], session_ids=["of-a-session"])
    assert ([event.seq for event in page.events], page.more) == ([last - 4, last - 3, last - 2], True)
    rest = await client.page(after=page.cursor, session_ids=["of-a-session"])
    assert ([event.seq for event in rest.events], rest.more) == ([last - 1, last], False)
    assert (await client.page()).events == []
    assert (await client.page(wait_s=0.000_01)).events == []


async def test_an_expired_cursor_has_a_reason(daemon, client):
    last = await asyncio.to_thread(write_tokens, daemon, 5)
    log, store = daemon.services.log, daemon.services.store
    await asyncio.to_thread(lambda: daemon.run(store.write(lambda transaction: record_pruned(transaction, last - 2))))
    log.set_pruned(last - 2)
    for cursor, reason in (
        ({"after": last - 3}, "pruned"),
        ({"after": last + 1000}, "ahead"),
        ({"after": 0, "stream_id": "stm_other"}, "other-stream"),
    ):
        with pytest.raises(errors.CursorExpiredError) as caught:
            await client.page(**cursor)
        assert caught.value.reason == reason


# --- requests that are not sent


@pytest.mark.parametrize("wrong", ["", "..", "a/b", "a" * 65, "a?b", "ä", "a\n"])
async def test_an_invalid_id_is_not_sent(client, wrong):
    for request, name in (
        (client.read_session(wrong), "session_id"),
        (client.delete_session(wrong), "session_id"),
        (client.read_turn("s", wrong), "turn_id"),
        (client.decide(wrong, "allow"), "permission_id"),
        (client.remove_mcp_server(wrong), "name"),
    ):
        with invalid(name):
            await request


async def test_invalid_arguments_are_named(client):
    for request, name in (
        (client.decide("prm_1", "maybe"), "decision"),
        (client.shut_down(grace_s=-1), "grace_s"),
        (client.session(tools="time"), "tools"),
        (client.session("a b"), "session_id"),
        (client.session(metadata="abc"), "metadata"),
        (client.session(metadata={"a": {1}}), "metadata"),
        (client.sessions(limit=0), "limit"),
        (client.page(after=-1), "after"),
        (client.page(wait_s=-1), "wait"),
        (client.page(wait_s=float("nan")), "wait"),
        (client.page(types=["nope"]), "types"),
    ):
        with pytest.raises(errors.InvalidRequestError) as caught:
            await request
        assert (caught.value.param or "").startswith(name)


async def test_a_closed_client_refuses_requests(daemon):
    client = AsyncDaemonClient(daemon.url, token=daemon.token)
    await client.state()
    await client.aclose()
    await client.aclose()
    with pytest.raises(errors.InvalidRequestError, match="closed"):
        await client.state()


# --- when the token is sent


async def test_the_daemon_identifies_itself_once_before_the_token_is_sent(daemon, home):
    network = Recorded()
    async with AsyncDaemonClient.discover(home, transport=network) as client:
        await asyncio.gather(*(client.state() for _ in range(10)))
    assert network.requests == [("/v3/health", None), *[("/v3/daemon", f"Bearer {daemon.token}")] * 10]
    assert network.closings == 1


async def test_an_explicit_address_is_not_checked(daemon):
    network = Recorded()
    async with AsyncDaemonClient(f"{daemon.url}/v3", token=daemon.token, transport=network) as client:
        state = await client.state()
    assert (state.daemon_id, "events-socket" in state.features) == (daemon.daemon_id, True)
    assert [path for path, _ in network.requests] == ["/v3/daemon"]


def port(server):
    return int(server.url.rpartition(":")[2])


def health(daemon_id):
    return whole(json.dumps({"status": "ok", "name": "lmx-lab-daemon", "api_version": 3, "daemon_id": daemon_id}))


def permissions(*ids):
    return whole(json.dumps({"permissions": list(ids)}))


@pytest.mark.parametrize(
    "answer",
    [
        whole("<html>", kind="text/html"),
        whole("{}"),
        whole('{"status": "ok"', kind="application/json"),
        whole("nothing here", status="404 Not Found", kind="text/plain"),
        whole("", status="302 Found", extra="location: /login\r\n"),
        health("dmn_2"),
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
    ],
    ids=["page", "json", "half-json", "404", "login", "other-daemon", "ssh", "nothing"],
)
async def test_another_server_at_the_address_does_not_get_the_token(tmp_path, answer):
    with answering(answer) as server:
        write_state(tmp_path, port=port(server))
        async with AsyncDaemonClient.discover(tmp_path) as client:
            with pytest.raises(errors.UnreachableError) as caught:
                await client.submit_turn("s", SubmitTurn(content="hi"))
            with pytest.raises(errors.UnreachableError):
                await client.connection()
    assert server.url in str(caught.value)
    assert not isinstance(caught.value, errors.WrongServerError), "the daemon may come back elsewhere"
    assert server.requests
    assert all(TOKEN not in request and "/v3/health" in request for request in server.requests)


async def test_another_server_after_a_lost_connection_does_not_get_the_token(tmp_path):
    with answering(health("dmn_1"), b"", health("dmn_2")) as server:
        write_state(tmp_path, port=port(server))
        async with AsyncDaemonClient.discover(tmp_path) as client:
            with pytest.raises(errors.UnreachableError, match="dmn_2"):
                await client.state()
    assert [TOKEN in request for request in server.requests] == [False, True, False]


def traceback_with_variables(error):
    """The traceback with the values of all variables, except those of the test."""
    frames = error.__traceback__.tb_next
    return "".join(traceback.TracebackException(type(error), error, frames, capture_locals=True).format())


@pytest.mark.parametrize("token", [None, "wrong-sesame-43"])
async def test_a_wrong_token_is_reported_without_showing_it(daemon, token, caplog):
    caplog.set_level(logging.DEBUG)
    async with AsyncDaemonClient(daemon.url, token=token) as client:
        assert (await client.health()).status == "ok"
        with pytest.raises(errors.UnauthorizedError, match="discover") as caught:
            await client.state()
        assert "sesame" not in f"{client!r} {client} {vars(client)}"
    assert "sesame" not in traceback_with_variables(caught.value) + caplog.text


async def test_the_token_is_in_no_traceback_and_no_log(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    text = ""
    with answering(health("dmn_1"), b"", health("dmn_1"), whole("<html>", kind="text/html")) as server:
        write_state(tmp_path, port=port(server))
        async with AsyncDaemonClient.discover(tmp_path) as client:
            for request in (client.fork_session("s", ForkSession()), client.state()):
                with pytest.raises(errors.UnreachableError) as caught:
                    await request
                text += traceback_with_variables(caught.value)
    assert sum(TOKEN in request for request in server.requests) == 2
    assert "self = <" in text, "the traceback has values"
    assert TOKEN not in text + caplog.text


# --- restarts of the daemon


async def test_a_restarted_daemon_is_found(tmp_path):
    with serving(tmp_path):
        client = AsyncDaemonClient.discover(tmp_path)
        session_id = (await client.session()).session_id
    with pytest.raises(errors.UnreachableError, match="lmx-lab daemon"):
        await client.state()
    with serving(tmp_path) as daemon:
        # The request was not sent before, so it cannot create a second fork.
        assert (await client.fork_session(session_id, ForkSession())).forked_from == session_id
        assert (await client.state()).daemon_id == daemon.daemon_id
        assert client.url == daemon.url
    await client.aclose()


async def test_a_refused_token_is_read_again_once(daemon, home, tmp_path):
    fields = {"port": daemon.port, "daemon_id": daemon.daemon_id}
    write_state(tmp_path, token="an-old-one", **fields)
    network = Recorded()
    async with AsyncDaemonClient.discover(tmp_path, transport=network) as client:
        with pytest.raises(errors.UnauthorizedError):
            await client.state()
        assert [path for path, _ in network.requests] == ["/v3/health", "/v3/daemon"]
        write_state(tmp_path, token=daemon.token, **fields)
        assert (await client.fork_session((await client.session()).session_id, ForkSession())).forked_from


async def test_a_new_address_is_checked_as_well(tmp_path):
    with answering(health("dmn_1"), permissions()) as first, answering(health("dmn_3")) as second:
        write_state(tmp_path, port=port(first))
        async with AsyncDaemonClient.discover(tmp_path) as client:
            await client.permissions()
            write_state(tmp_path, port=port(second), daemon_id="dmn_2")
            assert client.credentials.refresh()
            with pytest.raises(errors.UnreachableError, match="dmn_3"):
                await client.permissions()
    assert [TOKEN in request for request in first.requests + second.requests] == [False, True, False]


async def test_a_request_that_may_have_been_executed_is_not_repeated_at_another_address(tmp_path):
    with answering(health("dmn_2")) as second:

        def restart_meanwhile():
            write_state(tmp_path, port=port(second), daemon_id="dmn_2")
            yield b""

        with answering(health("dmn_1"), restart_meanwhile()) as first:
            write_state(tmp_path, port=port(first))
            async with AsyncDaemonClient.discover(tmp_path) as client:
                with pytest.raises(errors.ConnectionLostError):
                    await client.fork_session("s", ForkSession())
    assert (len(first.requests), second.requests) == (2, [])


# --- servers that misbehave


async def test_an_idempotent_request_is_repeated_once_after_a_lost_connection():
    async with answered(b"", permissions()) as (client, server):
        assert await client.permissions() == []
    assert len(server.requests) == 2
    async with answered(b"") as (client, server):
        with pytest.raises(errors.ConnectionLostError):
            await client.permissions()
    assert len(server.requests) == 2


async def test_a_submission_is_repeated_with_the_same_id():
    accepted = whole(json.dumps({"turn_id": "t", "status": "queued", "cursor": 1}), status="202 Accepted")
    async with answered(b"", accepted) as (client, server):
        await client.submit_turn("s", SubmitTurn(content="hi"))
    first, second = (json.loads(request.partition("\r\n\r\n")[2]) for request in server.requests)
    assert first == second
    assert first["turn_id"].startswith("trn_")


async def test_the_error_shows_that_the_first_request_may_have_arrived():
    gone = asyncio.Event()

    async def take_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        listener.close()
        writer.transport.abort()
        gone.set()

    listener = await asyncio.start_server(take_one, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with AsyncDaemonClient(f"http://127.0.0.1:{port}", token=TOKEN) as client:
        with pytest.raises(errors.ConnectionLostError):
            await client.submit_turn("s", SubmitTurn(content="hi"))
    assert gone.is_set()


async def test_a_request_that_is_not_idempotent_is_not_repeated():
    async with answered(b"") as (client, server):
        for request in (
            client.fork_session("s", ForkSession()),
            client.cancel_turns("s", CancelTurns()),
            client.change_session("s", ChangeSession(title="a")),
            client.decide("p", "allow"),
            client.restart_mcp_server("m"),
        ):
            with pytest.raises(errors.ConnectionLostError):
                await request
    assert len(server.requests) == 5


@pytest.mark.parametrize(("extra", "retry_after_s"), [("", None), ("retry-after: 7\r\n", 7.0)])
@pytest.mark.parametrize("own", [True, False], ids=["daemon", "proxy"])
async def test_a_503_has_the_advised_delay(extra, retry_after_s, own):
    body = json.dumps({"error": {"code": "daemon-stopping", "message": "it ends"}}) if own else "<html>"
    answer = whole(body, status="503 Service Unavailable", kind="application/json" if own else "text/html", extra=extra)
    async with answered(answer) as (client, server):
        with pytest.raises(errors.StoppingError if own else errors.UnreachableError) as caught:
            await client.state()
    assert caught.value.retry_after_s == retry_after_s
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        whole("<html>", kind="text/html"),
        whole('{"permissions": [}'),
        whole('{"sessions": []}'),
        whole('{"permissions": []}')[:-4],
        whole("", status="204 No Content"),
    ],
    ids=["page", "no-json", "other-json", "cut-off", "empty"],
)
async def test_an_invalid_response_is_reported(answer):
    async with answered(answer) as (client, server):
        with pytest.raises(errors.UnreachableError, match=server.url):
            await client.permissions()


async def test_a_deletion_confirmed_by_another_program_is_an_error():
    async with answered(whole("<html>", kind="text/html")) as (client, _):
        with pytest.raises(errors.UnreachableError, match="daemon"):
            await client.delete_session("s")


async def test_fields_of_a_newer_daemon_are_ignored():
    known = json.loads(health("dmn_9").partition(b"\r\n\r\n")[2])
    async with answered(whole(json.dumps({**known, "moon": {"phase": "full"}})), token=None) as (client, _):
        assert (await client.health()).daemon_id == "dmn_9"


# --- WebSockets


async def test_a_websocket_sends_the_token_in_a_header(daemon, home):
    network = Recorded()
    async with AsyncDaemonClient.discover(home, transport=network) as client:
        for _ in range(2):
            connection = await client.connection()
            async with connection.websocket("/v3/events", {"types": ["turn.*", "tool.*"]}) as socket:
                assert json.loads(await socket.receive_text())["event"] == "stream.hello"
    opened = [("/v3/health", None), ("/v3/events", f"Bearer {daemon.token}")]
    assert network.requests == opened * 2, "the identity is checked each time"


async def test_a_refused_websocket_raises_the_daemons_error(daemon, client):
    connection = await client.connection()
    with invalid("after"):
        async with connection.websocket("/v3/events", {"after": "soon"}):
            pass
    async with AsyncDaemonClient(daemon.url, token="wrong") as stranger:
        connection = await stranger.connection()
        with pytest.raises(errors.UnauthorizedError):
            async with connection.websocket("/v3/events"):
                pass


@pytest.mark.parametrize("status", ["200 OK", "101 Switching Protocols", "503 Service Unavailable"])
async def test_an_invalid_websocket_response_is_reported(status):
    async with answered(whole("<html>", status=status, kind="text/html")) as (client, server):
        connection = await client.connection()
        with pytest.raises(errors.UnreachableError, match=server.url):
            async with connection.websocket("/v3/events"):
                pass
