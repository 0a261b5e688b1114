"""HTTP connections: limits on heads and bodies, deadlines, and the number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import time

import httpx2
import pytest
from fastapi import FastAPI
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from lmx_lab.client.errors import parse_error
from lmx_lab.errors import InvalidRequestError, QueueFullError
from lmx_lab.http import protocol
from lmx_lab.http.error_bodies import on_bug, status_for
from lmx_lab.http.uvicorn_server import RunningServer
from lmx_lab.wire.errors import ErrorBody
from tests.support.programs import ROOT
from tests.support.sockets import (
    GET,
    READ_LATER_S,
    SHORT_S,
    WAIT_S,
    answer_to,
    app,
    connect_raw,
    disconnected,
    opened,
    running,
)
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("lines", "body", "split", "status"),
    [
        (300, "", None, 431),
        (300, "", 900, 431),
        (20, "\n" * 1000, None, 204),
        (20, "\n" * 1000, -1002, 204),
    ],
)
async def test_the_lines_of_a_head_are_limited_and_those_of_a_body_are_not_counted(
    lines: int, body: str, split: int | None, status: int
) -> None:
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
async def test_a_request_without_an_upgrade_is_an_ordinary_request(request_line: str, headers: tuple[str, ...]) -> None:
    answer = await answer_to("\r\n".join([f"{request_line} HTTP/1.1", "host: localhost", *headers, "", ""]))
    assert answer.startswith(b"HTTP/1.1 204 ")


async def test_the_error_for_a_head_request_with_an_invalid_body_has_no_body(caplog: pytest.LogCaptureFixture) -> None:
    head = "HEAD / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await answer_to(f"{head}x\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\n")
    assert not [record for record in caplog.records if record.name == "asyncio"]


REQUEST = b"GET /other HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (CHUNKED + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n", b"only a few bytes"),
        (CHUNKED + (b"1;" + b"x" * 9000 + b"\r\na\r\n") * 20 + b"0\r\n\r\n", b"long extensions"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 5000 + b"\r\n", b"more than 256 lines"),
    ],
)
async def test_tiny_chunks_long_extensions_and_many_lines_are_rejected(sent: bytes, answer: bytes) -> None:
    async with opened() as (reader, writer):
        writer.write(sent)
        assert answer in await reader.read()


async def test_long_chunks_are_received_completely() -> None:
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    async with opened() as (reader, writer):
        writer.write(CHUNKED + chunk * 500 + b"0\r\n\r\n" + REQUEST)
        answer = await reader.read()
        assert b"2048000 bytes" in answer
        assert b"0 bytes" in answer.partition(b"2048000 bytes")[2]


HEAD = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
CHUNKED_READ = b"POST /read HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


def check_timeout_error(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nx-content-type-options: nosniff\r\n" in head
    assert b"connection: close" in head.lower()
    error = ErrorBody.model_validate_json(body).error
    assert (error.code, error.type, error.retryable) == (InvalidRequestError.code, "invalid_request_error", False)
    return error.message


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("drip", [b"", b"y"])
@pytest.mark.parametrize("kept", [False, True])
async def test_an_incomplete_head_is_answered_with_408(kept: bool, drip: bytes) -> None:
    async with running(app) as host, connect_raw(host) as client:
        if kept:
            client.send(GET)
            assert (await client.read_response()).endswith(b"0")
        client.send(b"GET /read HTTP/1.1\r\nx: ")
        assert "head" in check_timeout_error(await client.read_to_end(drip))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("drip", [b"", b"y"])
@pytest.mark.parametrize("begin", [HEAD % (b"/read", 10**6) + b"y", CHUNKED_READ + b"ffff\r\ny"])
async def test_an_incomplete_body_is_answered_with_408_and_the_application_sees_a_disconnect(
    begin: bytes, drip: bytes
) -> None:
    async with running(app) as host, connect_raw(host) as client:
        client.send(begin)
        assert "body" in check_timeout_error(await client.read_to_end(drip))
        await auntil(lambda: disconnected == ["/read"])


@pytest.mark.usefixtures("short")
async def test_a_body_that_fills_the_buffer_for_a_moment_still_has_its_deadline() -> None:
    async with running(app) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/read", 10**9))
        assert "body" in check_timeout_error(await client.read_to_end(b"y" * 70_000))


@pytest.mark.usefixtures("short")
async def test_the_408_for_a_head_request_has_no_body() -> None:
    async with running(app) as host, connect_raw(host) as client:
        client.send(b"HEAD" + (HEAD % (b"/read", 9)).removeprefix(b"POST"))
        answer = await client.read_to_end()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.usefixtures("short")
async def test_the_rest_of_a_rejected_body_is_read_only_for_a_limited_time() -> None:
    async with running(app) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/refuse", 10**6))
        assert (await client.read_response()).startswith(b"HTTP/1.1 403 ")
        assert await client.read_to_end(b"y") == b""


def idle_for(host: RunningServer, after_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host._server.config, "timeout_keep_alive", after_s)


async def test_an_idle_connection_is_closed_without_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(app) as host:
        idle_for(host, SHORT_S, monkeypatch)
        async with connect_raw(host) as client:
            assert await client.read_to_end() == b""


async def test_a_connection_that_is_idle_after_a_rejected_body_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(app) as host:
        idle_for(host, SHORT_S, monkeypatch)
        async with connect_raw(host) as client:
            client.send(HEAD % (b"/refuse", 2) + b"y")
            assert (await client.read_response()).endswith(b"no")
            client.send(b"y")
            assert await client.read_to_end() == b""


@pytest.mark.slow
async def test_a_slow_client_that_is_fast_enough_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "BODY_S", 0.6)
    monkeypatch.setattr(protocol, "BODY_BYTES", 3)
    monkeypatch.setattr(protocol, "LATE_S", 0.05)
    async with running(app) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/read", 15))
        for _ in range(15):
            await asyncio.sleep(0.1)
            client.send(b"y")
        assert (await client.read_response()).endswith(b"\r\n15")


@pytest.mark.slow
async def test_time_in_which_the_server_was_busy_does_not_count_against_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", SHORT_S)
    monkeypatch.setattr(protocol, "LATE_S", SHORT_S / 5)
    async with running(app) as host, connect_raw(host) as client:
        client.send(GET[:9])
        await auntil(lambda: bool(host._server.server_state.connections))
        (connection,) = host._server.server_state.connections
        assert isinstance(connection, protocol.HttpProtocol)
        await auntil(lambda: bool(connection.conn.trailing_data[0]))
        time.sleep(3 * SHORT_S)  # noqa: ASYNC251 (that is the case)
        # Data that arrives in the next moment counts too.
        await asyncio.sleep(SHORT_S / 10)
        client.send(GET[9:])
        assert (await client.read_response()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
@pytest.mark.usefixtures("short")
async def test_a_body_that_the_application_does_not_read_yet_has_no_deadline() -> None:
    body = b"y" * 400_000
    async with running(app) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/read-later", len(body)) + body)
        assert (await client.read_response()).endswith(b"\r\n400000")


@pytest.mark.slow
@pytest.mark.usefixtures("short")
async def test_the_deadline_of_a_body_begins_when_the_application_reads_it() -> None:
    body = b"y" * 400_000
    async with running(app) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/read-later", len(body)) + body[:100_000])
        await asyncio.sleep(READ_LATER_S + 0.75 * SHORT_S)
        client.send(body[100_000:])
        assert (await client.read_response()).endswith(b"\r\n400000")


@pytest.mark.slow
@pytest.mark.usefixtures("short")
async def test_a_body_after_expect_continue_has_no_deadline_before_it_is_read() -> None:
    async with running(app) as host, connect_raw(host) as client:
        client.send((HEAD % (b"/read-later", 3)).replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
        assert (await client.read_response()).startswith(b"HTTP/1.1 100 ")
        client.send(b"yyy")
        assert (await client.read_response()).endswith(b"\r\n3")


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("size", [0, 5])
async def test_a_response_can_take_any_time(size: int) -> None:
    """Also the response to a request that announces a body and never sends it."""
    async with running(app) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/stream", size))
        async with asyncio.timeout(20):
            answer = await client.reader.readuntil(b"\r\n0\r\n\r\n")
    assert answer.count(b"1\r\nx\r\n") == 6


@pytest.mark.slow
@pytest.mark.usefixtures("short")
async def test_a_response_can_begin_at_any_time() -> None:
    async with running(app) as host, connect_raw(host) as client:
        client.send(HEAD % (b"/read-later", 0))
        assert (await client.read_response()).endswith(b"\r\n0")


FULL = status_for(QueueFullError)


async def test_connections_beyond_the_limit_are_rejected_with_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 2)
    async with running(app) as host, httpx2.AsyncClient(base_url=host.url, trust_env=False, timeout=WAIT_S) as http:
        async with connect(host.url.replace("http", "ws"), proxy=None) as socket_, connect_raw(host) as client:
            await auntil(lambda: len(host._server.server_state.connections) == 2)
            answer = await http.get("/read")
            assert answer.status_code == FULL
            ErrorBody.model_validate_json(answer.content)
            error = parse_error(answer.content, retry_after=answer.headers["retry-after"])
            assert isinstance(error, QueueFullError)
            assert error.retry_after_s == protocol.FULL_RETRY_S
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
def test_the_last_file_descriptors_are_reserved_for_the_process(
    limit: int, descriptor: int, reserved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert protocol.is_reserved(descriptor) is reserved


@pytest.mark.slow
async def test_many_connections_can_wait_for_a_busy_event_loop() -> None:
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
from tests.support.sockets import lifespan, respond

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


async def test_the_response_to_an_internal_error_says_that_the_connection_is_closed() -> None:
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
def test_many_waiting_connections_leave_the_reserved_file_descriptors() -> None:
    """They are accepted in one step, before they can be counted. Asyncio alone would log thousands of errors."""
    command = [sys.executable, "-c", SERVER]
    piped = subprocess.PIPE
    with (
        subprocess.Popen(command, text=True, cwd=ROOT, stdin=piped, stdout=piped, stderr=piped) as process,
        contextlib.ExitStack() as crowd,
    ):
        crowd.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
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
