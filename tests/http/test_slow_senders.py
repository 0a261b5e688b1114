"""Who sends a head or a body too slowly is told so and let go; who takes, or waits, may take any time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from websockets.asyncio.client import connect

from lmx_lab.errors import InvalidRequestError
from lmx_lab.http import protocol
from lmx_lab.http.uvicorn_server import Host
from lmx_lab.wire.errors import ErrorBody
from tests.http.serving import GET, READ_LATER_S, SHORT_S, app, connected, gone, running, until

pytestmark = pytest.mark.anyio
HEAD = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
CHUNKED = b"POST /read HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a moment, and no body that is fast enough without its end."""
    monkeypatch.setattr(protocol, "HEAD_S", SHORT_S)
    monkeypatch.setattr(protocol, "BODY_S", SHORT_S)
    monkeypatch.setattr(protocol, "BODY_BYTES", 10**9)
    monkeypatch.setattr(protocol, "LATE_S", SHORT_S / 4)
    gone.clear()


def check_told(answer: bytes) -> str:
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
async def test_a_head_that_does_not_end_is_told_so(kept: bool, drip: bytes) -> None:
    async with running(app) as host, connected(host) as line:
        if kept:
            line.send(GET)
            assert (await line.answer()).endswith(b"0")
        line.send(b"GET /read HTTP/1.1\r\nx: ")
        assert "head" in check_told(await line.rest(drip))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("drip", [b"", b"y"])
@pytest.mark.parametrize("begin", [HEAD % (b"/read", 10**6) + b"y", CHUNKED + b"ffff\r\ny"])
async def test_a_body_that_does_not_end_is_told_so_and_the_application_too(begin: bytes, drip: bytes) -> None:
    async with running(app) as host, connected(host) as line:
        line.send(begin)
        assert "body" in check_told(await line.rest(drip))
        await until(lambda: gone == ["/read"])


@pytest.mark.usefixtures("short")
async def test_a_body_that_fills_the_buffer_for_an_instant_is_not_excused_by_that() -> None:
    async with running(app) as host, connected(host) as line:
        line.send(HEAD % (b"/read", 10**9))
        assert "body" in check_told(await line.rest(b"y" * 70_000))


@pytest.mark.usefixtures("short")
async def test_to_head_goes_no_body_when_its_own_does_not_end() -> None:
    async with running(app) as host, connected(host) as line:
        line.send(b"HEAD" + (HEAD % (b"/read", 9)).removeprefix(b"POST"))
        answer = await line.rest()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.usefixtures("short")
async def test_the_rest_of_a_refused_body_is_not_read_for_ever() -> None:
    async with running(app) as host, connected(host) as line:
        line.send(HEAD % (b"/refuse", 10**6))
        assert (await line.answer()).startswith(b"HTTP/1.1 403 ")
        assert await line.rest(b"y") == b""


def idle_for(host: Host, after_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host._server.config, "timeout_keep_alive", after_s)


async def test_who_says_nothing_is_let_go_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(app) as host:
        idle_for(host, SHORT_S, monkeypatch)
        async with connected(host) as line:
            assert await line.rest() == b""


async def test_who_says_nothing_after_the_rest_of_a_refused_body_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(app) as host:
        idle_for(host, SHORT_S, monkeypatch)
        async with connected(host) as line:
            line.send(HEAD % (b"/refuse", 2) + b"y")
            assert (await line.answer()).endswith(b"no")
            line.send(b"y")
            assert await line.rest() == b""


async def test_a_slow_sender_that_goes_on_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "BODY_S", 0.6)
    monkeypatch.setattr(protocol, "BODY_BYTES", 3)
    monkeypatch.setattr(protocol, "LATE_S", 0.05)
    async with running(app) as host, connected(host) as line:
        line.send(HEAD % (b"/read", 15))
        for _ in range(15):
            await asyncio.sleep(0.1)
            line.send(b"y")
        assert (await line.answer()).endswith(b"\r\n15")


async def test_a_server_that_was_busy_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", SHORT_S)
    monkeypatch.setattr(protocol, "LATE_S", SHORT_S / 5)
    async with running(app) as host, connected(host) as line:
        line.send(GET[:9])
        await until(lambda: bool(host._server.server_state.connections))
        (connection,) = host._server.server_state.connections
        assert isinstance(connection, protocol.HttpProtocol)
        await until(lambda: bool(connection.conn.trailing_data[0]))
        time.sleep(3 * SHORT_S)  # noqa: ASYNC251 (that is the case)
        # What comes in the next moment counts, too.
        await asyncio.sleep(SHORT_S / 10)
        line.send(GET[9:])
        assert (await line.answer()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("short")
async def test_a_body_that_is_not_read_yet_may_wait() -> None:
    body = b"y" * 400_000
    async with running(app) as host, connected(host) as line:
        line.send(HEAD % (b"/read-later", len(body)) + body)
        assert (await line.answer()).endswith(b"\r\n400000")


@pytest.mark.usefixtures("short")
async def test_when_a_body_is_read_at_last_it_has_its_whole_time() -> None:
    body = b"y" * 400_000
    async with running(app) as host, connected(host) as line:
        line.send(HEAD % (b"/read-later", len(body)) + body[:100_000])
        await asyncio.sleep(READ_LATER_S + 0.75 * SHORT_S)
        line.send(body[100_000:])
        assert (await line.answer()).endswith(b"\r\n400000")


@pytest.mark.usefixtures("short")
async def test_a_body_that_is_not_asked_for_yet_may_wait() -> None:
    async with running(app) as host, connected(host) as line:
        line.send((HEAD % (b"/read-later", 3)).replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
        assert (await line.answer()).startswith(b"HTTP/1.1 100 ")
        line.send(b"yyy")
        assert (await line.answer()).endswith(b"\r\n3")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("size", [0, 5])
async def test_an_answer_may_take_any_time(size: int) -> None:
    """Also to one that announces a body and never sends it."""
    async with running(app) as host, connected(host) as line:
        line.send(HEAD % (b"/stream", size))
        async with asyncio.timeout(20):
            answer = await line.reader.readuntil(b"\r\n0\r\n\r\n")
    assert answer.count(b"1\r\nx\r\n") == 6


@pytest.mark.usefixtures("short")
async def test_an_answer_may_begin_at_any_time() -> None:
    async with running(app) as host, connected(host) as line:
        line.send(HEAD % (b"/read-later", 0))
        assert (await line.answer()).endswith(b"\r\n0")


@pytest.mark.usefixtures("short")
async def test_a_websocket_may_be_silent_and_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(app) as host:
        idle_for(host, SHORT_S, monkeypatch)
        async with connect(f"ws://127.0.0.1:{host.port}/", proxy=None) as socket:
            await asyncio.sleep(3 * SHORT_S)

            async def slowly() -> Any:
                for piece in "abc":
                    yield piece
                    await asyncio.sleep(SHORT_S)

            await socket.send(slowly())
            assert await socket.recv() == "abc"
