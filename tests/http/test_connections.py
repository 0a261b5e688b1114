"""Connections: limits on heads, bodies and messages, deadlines, clients that read nothing, and lost machines."""

import asyncio
import contextlib
import gc
import resource
import socket
import subprocess
import sys
import time
import tracemalloc
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode

from lmx_lab.client.connection import parse_error
from lmx_lab.errors import QueueFullError
from lmx_lab.http import SMALL_BYTES, Limits, connections
from lmx_lab.http.connections import WebSocketProtocol, rest_after
from lmx_lab.http.errors import on_bug, status_of
from lmx_lab.wire.errors import ErrorBody
from tests.http.raw import (
    GET,
    HANDSHAKE,
    READ_LATER_S,
    SHORT,
    SHORT_S,
    answer_to,
    app,
    check_timeout_error,
    connect_raw,
    lifespan,
    open_socket,
    running,
)
from tests.support.programs import ROOT
from tests.support.waiting import WAIT_S, auntil

pytestmark = pytest.mark.anyio
FRAGMENT, PING = b"\x00\x81\0\0\0\0a", b"\x89\x80\0\0\0\0"
LONG_TEXT = b"a" * 1_000_000


async def test_content_length_with_transfer_encoding_is_refused_and_the_connection_closed():
    head = "POST /read HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await answer_to(f"{head}0\r\n\r\n{GET.decode()}")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"send one of them" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_all_pipelined_requests_of_a_client_that_ends_its_side_are_answered(version):
    requests = [GET.replace(b"/read", b"/stream"), GET] if version == b"1.1" else [GET]
    async with running(app) as host, connect_raw(host) as client:
        client.send(b"".join(requests).replace(b"HTTP/1.1", b"HTTP/" + version))
        client.writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            received = await client.reader.read()
    assert received.count(b"HTTP/1.1 200 ") == len(requests)
    assert received.endswith(b"\r\n0")


async def test_a_client_that_ends_its_side_within_a_body_is_disconnected():
    async with running(app) as host, connect_raw(host) as client:
        client.send(b"POST /read HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\nabc")
        client.writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            assert await client.reader.read() == b""


@pytest.mark.parametrize(
    ("lines", "body", "split", "status"),
    [(300, "", None, 431), (300, "", 900, 431), (20, "\n" * 1000, None, 200), (20, "\n" * 1000, -1002, 200)],
)
async def test_the_lines_of_a_head_are_limited_and_those_of_a_body_are_not_counted(lines, body, split, status):
    head = ["POST / HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *[f"x{it}: y" for it in range(lines)]]
    whole = "\r\n".join([*head, "", body])
    answer = await answer_to(whole) if split is None else await answer_to(whole[:split], whole[split:])
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("request_line", "headers"),
    [
        ("POST /", ("upgrade: websocket", "connection: upgrade", "sec-websocket-key: x", "content-length: 0")),
        ("GET /", ("upgrade: websocket", "connection: upgrade")),
    ],
)
async def test_a_request_without_an_upgrade_is_an_ordinary_request(request_line, headers):
    answer = await answer_to("\r\n".join([f"{request_line} HTTP/1.1", "host: localhost", *headers, "", ""]))
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_the_error_for_a_head_request_with_an_invalid_body_has_no_body(caplog):
    head = "HEAD / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await answer_to(f"{head}x\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\n")
    assert not [record for record in caplog.records if record.name == "asyncio"]


CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (CHUNKED + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n", b"over 65536 bytes more"),
        (CHUNKED + (b"1;" + b"x" * 9000 + b"\r\na\r\n") * 20 + b"0\r\n\r\n", b"over 65536 bytes more"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 5000 + b"\r\n", b"more than 256 lines"),
    ],
)
async def test_tiny_chunks_long_extensions_and_many_lines_are_rejected(sent, answer):
    async with running(app) as host, connect_raw(host) as client:
        client.send(sent)
        assert answer in await client.read_to_end()


async def test_long_chunks_are_received_completely():
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    async with running(app) as host, connect_raw(host) as client:
        client.send(CHUNKED + chunk * 500 + b"0\r\n\r\n" + GET)
        assert (await client.read_response()).endswith(b"\r\n2048000")
        assert (await client.read_response()).endswith(b"\r\n0")


HEAD = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
CHUNKED_REFUSED = b"POST /refuse HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("drip", [b"", b"y"])
@pytest.mark.parametrize("kept", [False, True])
async def test_an_incomplete_head_is_answered_with_408(kept, drip):
    async with running(app, SHORT) as host, connect_raw(host) as client:
        if kept:
            client.send(GET)
            assert (await client.read_response()).endswith(b"0")
        client.send(b"GET /read HTTP/1.1\r\nx: ")
        answer = await client.read_to_end(drip)
    assert "head" in check_timeout_error(answer)
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("begin", [HEAD % (b"/refuse", 10**6), CHUNKED_REFUSED + b"ffff\r\n"])
async def test_the_rest_of_a_body_is_read_only_for_a_limited_time_after_the_response(begin):
    async with running(app, SHORT) as host, connect_raw(host) as client:
        client.send(begin)
        assert (await client.read_response()).startswith(b"HTTP/1.1 403 ")
        assert await client.read_to_end(b"y") == b""


async def test_a_connection_is_kept_if_the_body_ends_soon_after_the_response():
    async with running(app, Limits(linger_s=SHORT_S)) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/refuse", 2))
        assert (await client.read_response()).endswith(b"no")
        client.send(b"yy" + HEAD % (b"/read", 2) + b"y")
        await asyncio.sleep(2 * SHORT_S)
        client.send(b"y")
        assert (await client.read_response()).endswith(b"\r\n2")


async def test_an_idle_connection_is_closed_without_a_response():
    async with running(app, Limits(idle_s=SHORT_S)) as host, connect_raw(host) as client:
        assert await client.read_to_end() == b""


async def test_a_connection_that_is_idle_after_a_rejected_body_is_closed():
    async with running(app, Limits(idle_s=SHORT_S)) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/refuse", 2) + b"y")
        assert (await client.read_response()).endswith(b"no")
        client.send(b"y")
        assert await client.read_to_end() == b""


@pytest.mark.slow
async def test_time_in_which_the_server_was_busy_does_not_count_against_clients():
    limits = Limits(head_s=SHORT_S, late_s=SHORT_S / 5)
    async with running(app, limits) as host, connect_raw(host) as client:
        client.send(GET[:9])
        await auntil(lambda: bool(host._server.server_state.connections))
        (connection,) = host._server.server_state.connections
        assert isinstance(connection, connections.HttpProtocol)
        await auntil(lambda: bool(connection.conn.trailing_data[0]))
        time.sleep(3 * SHORT_S)  # noqa: ASYNC251 (that is the case)
        # Data that arrives in the next moment counts too.
        await asyncio.sleep(SHORT_S / 10)
        client.send(GET[9:])
        assert (await client.read_response()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
async def test_a_body_that_the_application_does_not_read_yet_has_no_deadline():
    body = b"y" * 400_000
    async with running(app, SHORT) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/read-later", len(body)) + body[:100_000])
        await asyncio.sleep(READ_LATER_S + 0.75 * SHORT_S)
        client.send(body[100_000:])
        assert (await client.read_response()).endswith(b"\r\n400000")


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 5])
async def test_a_response_can_take_any_time(size):
    """Also the response to a request that announces a body and never sends it."""
    async with running(app, SHORT) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/stream", size))
        async with asyncio.timeout(20):
            answer = await client.reader.readuntil(b"\r\n0\r\n\r\n")
    assert answer.count(b"1\r\nx\r\n") == 6


@pytest.mark.slow
async def test_a_response_can_begin_at_any_time():
    async with running(app, SHORT) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/read-later", 0))
        assert (await client.read_response()).endswith(b"\r\n0")


FULL = status_of(QueueFullError)


async def test_connections_beyond_the_limit_are_rejected_with_429():
    async with (
        running(app, Limits(connections=2)) as host,
        httpx2.AsyncClient(base_url=host.url, trust_env=False, timeout=WAIT_S) as http,
    ):
        async with connect(host.url.replace("http", "ws"), proxy=None) as socket_, connect_raw(host) as client:
            await auntil(lambda: len(host._server.server_state.connections) == 2)
            answer = await http.get("/read")
            assert answer.status_code == FULL
            ErrorBody.model_validate_json(answer.content)
            error = parse_error(answer.content, retry_after=answer.headers["retry-after"])
            assert isinstance(error, QueueFullError)
            assert error.retry_after_s == 5
            assert "2 connections" in error.message
            with pytest.raises(InvalidStatus) as refused:
                await connect(host.url.replace("http", "ws"), proxy=None)
            assert refused.value.response.status_code == FULL
            # Existing connections are still served.
            await socket_.send("hello")
            assert await socket_.recv() == "hello"
            client.send(GET)
            assert (await client.read_response()).startswith(b"HTTP/1.1 200 ")
        await auntil(lambda: not host._server.server_state.connections)
        assert (await http.get("/read")).status_code == 200


@pytest.mark.parametrize(
    ("limit", "descriptor", "reserved"),
    [(1024, 895, False), (1024, 896, True), (256, 191, False), (256, 192, True), (-1, 10**6, False)],
)
def test_the_last_file_descriptors_are_reserved_for_the_process(limit, descriptor, reserved, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert connections.is_reserved(descriptor) is reserved


@pytest.mark.slow
async def test_many_connections_can_wait_for_a_busy_event_loop():
    async with running(app) as host:
        with contextlib.ExitStack() as crowd:
            # The event loop does not run meanwhile; with a full backlog the connection attempt would fail.
            address = ("127.0.0.1", host.port)
            waiting = [crowd.enter_context(socket.create_connection(address, WAIT_S)) for _ in range(100)]
            for each in waiting:
                each.sendall(GET)
            answers = await asyncio.gather(*(asyncio.to_thread(each.recv, 12) for each in waiting))
        assert set(answers) == {b"HTTP/1.1 200"}


DESCRIPTORS = 256
CROWD = 300
SERVER = f"""
import asyncio, logging, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from lmx_lab.http.uvicorn_server import bind, serve
from tests.http.raw import lifespan, respond

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
    else:
        with open(__import__("os").devnull, "rb"):
            await respond(send, b"opened")

async def main():
    sock = bind("127.0.0.1", 0, explicit=True)
    print(sock.getsockname()[1], flush=True)
    sys.stdin.readline()
    host = await serve(app, sock)
    await asyncio.to_thread(sys.stdin.readline)
    await host.stop()

logging.basicConfig()
asyncio.run(main())
"""


async def test_the_response_to_an_internal_error_says_that_the_connection_is_closed():
    api = FastAPI()
    api.add_exception_handler(Exception, on_bug)

    @api.get("/read")
    async def fail() -> None:
        raise ZeroDivisionError

    async with running(api) as host, connect_raw(host) as client:
        client.send(GET)
        head, _, body = (await client.read_to_end()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"connection: close" in head.lower().splitlines()
    assert b"internal-error" in body


@pytest.mark.slow
def test_many_waiting_connections_leave_the_reserved_file_descriptors():
    """They are accepted in one step, before they can be counted. Asyncio alone would log thousands of errors."""
    command = [sys.executable, "-c", SERVER]
    piped = subprocess.PIPE
    with (
        subprocess.Popen(command, text=True, cwd=ROOT, stdin=piped, stdout=piped, stderr=piped) as process,
        contextlib.ExitStack() as crowd,
    ):
        crowd.callback(process.kill)
        assert process.stdin is not None
        port = int(process.stdout.readline())
        first = crowd.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        rest = [crowd.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S)) for _ in range(CROWD)]
        process.stdin.write("serve\n")
        process.stdin.flush()
        # Rejected connections were made after all accepted ones.
        told = rest[-1].recv(4096)
        first.sendall(GET)
        answer = b""
        while not answer.endswith(b"opened") and (piece := first.recv(4096)):
            answer += piece
        _, said = process.communicate("stop\n", timeout=WAIT_S)
    assert told.startswith(b"HTTP/1.1 %d " % FULL)
    assert answer.endswith(b"opened")
    assert said == ""
    assert process.returncode == 0


# WebSockets


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("transfer-encoding: chunked", 400),
        ("x: " + "y" * 9000, 431),
        ("\r\n".join(f"x-{number}: y" for number in range(200)), 431),
        ("sec-websocket-version: 8", 400),
        ("sec-websocket-key: x", 400),
    ],
)
async def test_an_invalid_handshake_is_answered_and_closed(header, status):
    name = header.partition(":")[0]
    valid = [line for line in HANDSHAKE.decode().split("\r\n") if line and not line.startswith(f"{name}:")]
    answer = await answer_to("\r\n".join([*valid, header, "", ""]))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1") == 1
    assert b"x-content-type-options: nosniff\r\n" in answer


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_texts_are_framed_as_the_websocket_protocol_defines(size):
    texts = ["x" * size, "é"]
    expected = b"".join(Frame(Opcode.TEXT, text.encode()).serialize(mask=False) for text in texts)
    assert connections.encode_text_frames(texts) == expected


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"\x01\x81\0\0\0\0a" + FRAGMENT * 20_000, PING * 20_000])
async def test_a_flood_of_short_frames_closes_the_websocket(sent):
    async with running(app) as host, open_socket(host) as client:
        client.send(sent)
        assert (1008).to_bytes(2) in await client.reader.read()


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_disconnected_after_an_unanswered_ping():
    ended = asyncio.Event()

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        await receive()
        await send({"type": "websocket.accept"})
        sending = asyncio.create_task(send_without_end(send))
        assert (await receive())["code"] == 1011
        sending.cancel()
        ended.set()

    async def send_without_end(send):
        while True:
            await send({"type": "websocket.send", "text": "a" * 10_000})

    async with running(flood, Limits(linger_s=SHORT_S), ws_pong_s=SHORT_S) as host, asyncio.timeout(WAIT_S):
        with socket.create_connection(("127.0.0.1", host.port)) as client:
            client.sendall(HANDSHAKE)
            await ended.wait()
            await auntil(lambda: not host._server.server_state.connections)


async def test_long_frames_and_fragments_are_received_completely():
    async with running(app) as host, open_socket(host, "/length") as client:
        frame = b"\x81\xff" + (3_000_000).to_bytes(8) + b"\0\0\0\0" + b"a" * 3_000_000
        fragment = b"\xff" + (200_000).to_bytes(8) + b"\0\0\0\0" + b"a" * 200_000
        client.send(frame + b"\x01" + fragment + (b"\x00" + fragment) * 9 + b"\x80" + fragment)
        for size in (b"3000000", b"2200000"):
            assert size in await client.reader.readuntil(b" characters")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([Frame(Opcode.TEXT, LONG_TEXT)], id="whole"),
        pytest.param([Frame(Opcode.BINARY, LONG_TEXT, fin=False)], id="incomplete"),
        pytest.param([Frame(Opcode.TEXT, b"a", fin=False), Frame(Opcode.CONT, LONG_TEXT)], id="fragments"),
        pytest.param(None, id="incomplete frame"),
    ],
)
async def test_a_message_does_not_stay_in_memory_after_a_disconnect(frames, monkeypatch):
    lost = asyncio.Event()
    connection_lost = WebSocketProtocol.connection_lost

    def record(connection: WebSocketProtocol, exc: Exception | None) -> None:
        connection_lost(connection, exc)
        lost.set()

    monkeypatch.setattr(WebSocketProtocol, "connection_lost", record)
    whole = b"".join(frame.serialize(mask=True) for frame in frames or [Frame(Opcode.TEXT, LONG_TEXT)])
    gc.disable()
    tracemalloc.start()
    try:
        async with running(app) as host, open_socket(host) as client:
            client.send(whole if frames else whole[:-1])
            await client.writer.drain()
            # Without a close frame, which would replace the last frame.
            client.writer.transport.abort()
            await asyncio.wait_for(lost.wait(), WAIT_S)
            await asyncio.sleep(SHORT_S)
            held = [stat for stat in tracemalloc.take_snapshot().statistics("lineno") if stat.size >= len(LONG_TEXT)]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held == []


async def count_iterations(counted):
    while True:
        counted.append(None)
        await asyncio.sleep(0)


@pytest.mark.slow
async def test_the_event_loop_runs_while_many_short_frames_are_parsed():
    iterations = []
    async with running(app, Limits(frames_per_s=10**9)) as host, open_socket(host, "/length") as client:
        counting = asyncio.create_task(count_iterations(iterations))
        client.send(b"\x01\x81\0\0\0\0a" + FRAGMENT * 40_000 + b"\x80" + FRAGMENT[1:])
        assert b"40002" in await client.reader.readuntil(b" characters")
        counting.cancel()
    assert len(iterations) > 40_000 * len(FRAGMENT) / connections.PIECE_BYTES


@asynccontextmanager
async def connected(host, begin):
    """Yield a client whose connection is an HTTP connection or, after a handshake, a WebSocket, and its protocol."""
    known = set(host._server.server_state.connections)
    async with connect_raw(host) as client:
        client.send(begin)
        await client.read_response()
        (protocol,) = host._server.server_state.connections - known
        yield client, protocol


@pytest.mark.parametrize(("begin", "more"), [(GET, GET), (HANDSHAKE, b"\x81\x81\0\0\0\0a")])
async def test_a_connection_rests_after_a_long_step_while_others_are_served(begin, more):
    async with running(app) as host, connected(host, GET) as (other, _), connected(host, begin) as (client, protocol):
        rest_after(0.001, protocol)
        assert not protocol.resting
        rest_after(0.05, protocol)
        assert protocol.resting
        assert not protocol.transport.is_reading()
        client.send(more)
        await auntil(lambda: not protocol.resting)
        assert await client.reader.read(1)
        rest_after(60.0, protocol)
        client.send(more)
        other.send(GET)
        assert (await other.read_response()).startswith(b"HTTP/1.1 200 ")
        assert protocol.resting


async def test_connections_that_send_large_amounts_rest_one_longer_than_the_other():
    async with (
        running(app) as host,
        connected(host, GET) as (_, small),
        connected(host, GET) as (first, one),
        connected(host, GET) as (second, other),
    ):
        for client, protocol in ((first, one), (second, other)):
            client.send((HEAD % (b"/read", 10_000)).ljust(connections.PIECE_BYTES, b"a"))
            await auntil(lambda protocol=protocol: protocol.fills_pieces)
        rest_after(0.05, one)
        assert (one.resting, other.resting, small.resting) == (True, True, False)
        for client in (first, second):
            client.send(b"a" * 10_000)
            assert b"\r\n10000" in await client.read_response()
        assert small.transport.is_reading()


async def test_a_connection_that_was_paused_while_it_rested_stays_paused():
    async with running(app) as host, connected(host, GET) as (_, protocol):
        rest_after(0.01, protocol)
        protocol.flow.pause_reading()
        await auntil(lambda: not protocol.resting)
        assert not protocol.transport.is_reading()


@pytest.mark.slow
async def test_a_websocket_can_be_silent_and_slow():
    limits = replace(SHORT, idle_s=SHORT_S)
    async with running(app, limits) as host, connect(f"ws://127.0.0.1:{host.port}/", proxy=None) as socket:
        await asyncio.sleep(3 * SHORT_S)

        async def slowly():
            for piece in "abc":
                yield piece
                await asyncio.sleep(SHORT_S)

        await socket.send(slowly())
        assert await socket.recv() == "abc"


@pytest.mark.slow
async def test_large_messages_share_a_memory_limit_and_small_ones_are_not_counted():
    size = SMALL_BYTES + 40_000
    go_on = asyncio.Event()

    async def slowly():
        yield "x" * size
        await go_on.wait()
        yield "end"

    async with running(app, Limits(memory_bytes=50_000)) as host:
        url = host.url.replace("http", "ws")
        async with (
            connect(url, proxy=None) as first,
            connect(url, proxy=None) as second,
            connect(url, proxy=None) as third,
        ):
            sending = [asyncio.create_task(first.send(slowly()))]
            await auntil(lambda: held_by(host) >= size)
            sending.append(asyncio.create_task(second.send(slowly())))
            with pytest.raises(ConnectionClosed) as refused:
                await second.recv()
            assert refused.value.rcvd.code == CloseCode.TRY_AGAIN_LATER
            await third.send("hello")
            assert await third.recv() == "hello"
            go_on.set()
            assert await first.recv() == "x" * size + "end"
            assert held_by(host) == 0
            await asyncio.gather(*sending, return_exceptions=True)


def held_by(host):
    sockets = [each for each in host._server.server_state.connections if isinstance(each, WebSocketProtocol)]
    return sum(each.held_bytes for each in sockets)


# Options of sockets


def test_only_peers_on_other_machines_are_remote():
    for host in ("127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", ""):
        assert not connections.is_remote(host), host
    for host in ("192.168.1.7", "::ffff:192.168.1.7", "fe80::1%eth0"):
        assert connections.is_remote(host), host


@contextlib.contextmanager
def socket_pair():
    """Yield the accepted end of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            yield accepted


def test_a_local_connection_has_no_keepalive():
    with socket_pair() as sock:
        connections.enable_keepalive(sock)
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_remote_connection_that_is_lost_is_closed_within_30_s(monkeypatch):
    monkeypatch.setattr(connections, "is_remote", lambda host: True)
    with socket_pair() as sock:
        connections.enable_keepalive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
        names = (idle, "TCP_KEEPINTVL", "TCP_KEEPCNT")
        first, between, times = (sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        # Data sent at the end of the first period starts the second one.
        assert 5 <= first + between * times < 15
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert 5000 <= sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 15_000


async def test_a_server_enables_keepalive_on_its_connections(monkeypatch):
    monkeypatch.setattr(connections, "is_remote", lambda host: True)
    async with running(app) as host, connect_raw(host) as client:
        client.send(GET)
        await client.read_response()
        (connection,) = host._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_connection_that_has_already_closed_is_not_an_error():
    with socket_pair() as sock:
        sock.close()
        connections.enable_keepalive(sock)
