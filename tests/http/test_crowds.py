"""More connections than there is room for: each of them is told so, and the others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode

from lmx_lab.client.errors import parse_error
from lmx_lab.errors import QueueFullError
from lmx_lab.http import protocol
from lmx_lab.http.error_bodies import status_for
from lmx_lab.http.protocol import WebSocketProtocol
from lmx_lab.http.uvicorn_server import Host
from lmx_lab.wire.errors import ErrorBody
from tests.conftest import ROOT
from tests.http.serving import GET, WAIT_S, app, connected, running, until

FULL = status_for(QueueFullError)


@pytest.mark.anyio
async def test_a_connection_too_many_is_told_so_whatever_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CONNECTIONS", 2)
    async with running(app) as host, httpx2.AsyncClient(base_url=host.url, trust_env=False, timeout=WAIT_S) as http:
        async with connect(host.url.replace("http", "ws"), proxy=None) as socket_, connected(host) as line:
            await until(lambda: len(host._server.server_state.connections) == 2)
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
            # Those that are there go on.
            await socket_.send("hello")
            assert await socket_.recv() == "hello"
            line.send(GET)
            assert (await line.answer()).startswith(b"HTTP/1.1 200 ")
        await until(lambda: not host._server.server_state.connections)
        assert (await http.get("/read")).status_code == 200


@pytest.mark.anyio
async def test_large_messages_share_their_room_and_small_ones_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNFINISHED_BYTES", 50_000)
    size = protocol.SMALL_BYTES + 40_000
    go_on = asyncio.Event()

    async def slowly() -> AsyncIterator[str]:
        yield "x" * size
        await go_on.wait()
        yield "end"

    async with running(app) as host:
        url = host.url.replace("http", "ws")
        async with (
            connect(url, proxy=None) as first,
            connect(url, proxy=None) as second,
            connect(url, proxy=None) as third,
        ):
            sending = [asyncio.create_task(first.send(slowly()))]
            await until(lambda: held_by(host) >= size)
            sending.append(asyncio.create_task(second.send(slowly())))
            with pytest.raises(ConnectionClosed) as refused:
                await second.recv()
            assert refused.value.rcvd is not None
            assert refused.value.rcvd.code == CloseCode.TRY_AGAIN_LATER
            await third.send("hello")
            assert await third.recv() == "hello"
            go_on.set()
            assert await first.recv() == "x" * size + "end"
            assert held_by(host) == 0
            await asyncio.gather(*sending, return_exceptions=True)


def held_by(host: Host) -> int:
    sockets = [each for each in host._server.server_state.connections if isinstance(each, WebSocketProtocol)]
    return sum(each.held_bytes for each in sockets)


@pytest.mark.parametrize(
    ("limit", "descriptor", "reserved"),
    [(1024, 895, False), (1024, 896, True), (256, 191, False), (256, 192, True), (-1, 10**6, False)],
)
def test_the_last_descriptors_are_for_the_process_itself(
    limit: int, descriptor: int, reserved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert protocol.nearly_last(descriptor) is reserved


@pytest.mark.anyio
async def test_many_may_wait_for_a_loop_that_is_busy() -> None:
    async with running(app) as host:
        with contextlib.ExitStack() as crowd:
            # The loop does not run meanwhile; where the queue is full, a connection is not made.
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
from tests.http.serving import lifespan, respond

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


def test_a_crowd_that_has_waited_leaves_the_process_its_last_descriptors() -> None:
    """It is accepted in one go, before any of it can be counted; asyncio would log thousands of errors."""
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
        # Who is refused was there after all who are not.
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
