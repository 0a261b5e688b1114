"""Connections whose other end may vanish, and WebSocket texts as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from websockets.frames import Frame, Opcode

from lmx_lab.http import protocol
from lmx_lab.http.uvicorn_server import bind, serve


@pytest.mark.parametrize(
    ("host", "elsewhere"),
    [
        ("127.0.0.1", False),
        ("127.8.9.10", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("192.168.1.7", True),
        ("::ffff:192.168.1.7", True),
        ("fe80::1%eth0", True),
        ("", False),
    ],
)
def test_only_another_machine_can_vanish(host: str, elsewhere: bool) -> None:
    assert protocol.is_elsewhere(host) is elsewhere


@contextlib.contextmanager
def connected() -> Iterator[socket.socket]:
    """The accepted end of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            yield accepted


def test_a_connection_of_this_machine_stays_as_it_is() -> None:
    with connected() as sock:
        protocol.notice_vanishing(sock)
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_connection_from_elsewhere_is_cut_within_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "is_elsewhere", lambda host: True)
    with connected() as sock:
        protocol.notice_vanishing(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
        names = (idle, "TCP_KEEPINTVL", "TCP_KEEPCNT")
        first, between, times = (sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        # What is sent in the last moment of the one begins the other.
        assert 5 <= first + between * times < 15
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert 5000 <= sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 15_000


@pytest.mark.anyio
async def test_a_server_watches_over_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "is_elsewhere", lambda host: True)
    host = await serve(_app, bind("127.0.0.1", 0, explicit=True))
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    (connection,) = host._server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    writer.close()
    await host.stop()


@pytest.mark.anyio
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
async def test_a_handshake_that_is_none_is_answered_and_ended(header: str, status: int) -> None:
    name = header.partition(":")[0]
    right = ("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version: 13")
    lines = ("GET / HTTP/1.1", "host: localhost", "upgrade: websocket", "connection: Upgrade", header)
    handshake = "\r\n".join([*lines, *(line for line in right if not line.startswith(f"{name}:")), "", ""])
    answer = await _answered(handshake)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1") == 1
    assert b"x-content-type-options: nosniff\r\n" in answer


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("request_line", "headers"),
    [
        ("POST /", ("upgrade: websocket", "connection: upgrade", "sec-websocket-key: x", "content-length: 0")),
        ("GET /", ("upgrade: websocket", "connection: upgrade")),
    ],
)
async def test_what_is_no_handshake_is_an_ordinary_request(request_line: str, headers: tuple[str, ...]) -> None:
    answer = await _answered("\r\n".join([f"{request_line} HTTP/1.1", "host: localhost", *headers, "", ""]))
    assert answer.startswith(b"HTTP/1.1 204 ")


@pytest.mark.anyio
async def test_head_with_a_broken_body_is_refused_without_one(caplog: pytest.LogCaptureFixture) -> None:
    head = "HEAD / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await _answered(f"{head}x\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\n")
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def _answered(request: str) -> bytes:
    """Everything that comes until the server closes the connection, or the answer's head."""
    host = await serve(_app, bind("127.0.0.1", 0, explicit=True))
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    writer.write(request.encode())
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"\r\n\r\n")
        if b"connection: close" in answer:
            answer += await reader.read()
    writer.close()
    await host.stop()
    return answer


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})
        return
    for what in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{what}.complete"})


def test_a_connection_that_has_ended_already_is_no_error() -> None:
    with connected() as sock:
        sock.close()
        protocol.notice_vanishing(sock)


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_texts_are_framed_as_the_protocol_has_it(size: int) -> None:
    texts = ["x" * size, "é"]
    expected = b"".join(Frame(Opcode.TEXT, text.encode()).serialize(mask=False) for text in texts)
    assert protocol.text_frames(texts) == expected


REQUEST = b"GET /other HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
SOCKET = (
    b"GET /ws HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
FRAGMENT, PING = b"\x00\x81\0\0\0\0a", b"\x89\x80\0\0\0\0"


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body or of the message."""
    if scope["type"] == "http":
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"{size} bytes".encode()})
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": f"{len(message['text'])} characters"})
    else:
        await _app(scope, receive, send)


@contextlib.asynccontextmanager
async def _opened() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host = await serve(_echo, bind("127.0.0.1", 0, explicit=True))
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    try:
        async with asyncio.timeout(30):
            yield reader, writer
    finally:
        writer.close()
        await host.stop()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (CHUNKED + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n", b"chunks of a few bytes"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 5000 + b"\r\n", b"more than 256 lines"),
    ],
)
async def test_what_costs_the_parser_much_for_few_bytes_is_refused(sent: bytes, answer: bytes) -> None:
    async with _opened() as (reader, writer):
        writer.write(sent)
        assert answer in await reader.read()


@pytest.mark.anyio
@pytest.mark.parametrize("sent", [b"\x01\x81\0\0\0\0a" + FRAGMENT * 20_000, PING * 20_000])
async def test_a_flood_of_short_frames_ends_the_socket(sent: bytes) -> None:
    async with _opened() as (reader, writer):
        writer.write(SOCKET)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        assert (1008).to_bytes(2) in await reader.read()


@pytest.mark.anyio
async def test_long_chunks_and_fragments_are_received_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    async with _opened() as (reader, writer):
        writer.write(CHUNKED + chunk * 500 + b"0\r\n\r\n" + REQUEST)
        answer = await reader.read()
        assert b"2048000 bytes" in answer
        assert b"0 bytes" in answer.partition(b"2048000 bytes")[2]
    async with _opened() as (reader, writer):
        writer.write(SOCKET)
        await reader.readuntil(b"\r\n\r\n")
        frame = b"\x81\xff" + (3_000_000).to_bytes(8) + b"\0\0\0\0" + b"a" * 3_000_000
        fragment = b"\xff" + (200_000).to_bytes(8) + b"\0\0\0\0" + b"a" * 200_000
        writer.write(frame + b"\x01" + fragment + (b"\x00" + fragment) * 9 + b"\x80" + fragment)
        for size in (b"3000000", b"2200000"):
            assert size in await reader.readuntil(b" characters")


@pytest.mark.anyio
async def test_the_loop_runs_while_many_short_frames_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "FRAMES_PER_S", 10**9)
    pieces: list[int] = []
    feed = protocol.WebSocketProtocol.feed

    def noting(self: protocol.WebSocketProtocol, data: bytes) -> None:
        pieces.append(len(data))
        feed(self, data)

    monkeypatch.setattr(protocol.WebSocketProtocol, "feed", noting)
    async with _opened() as (reader, writer):
        writer.write(SOCKET)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x01\x81\0\0\0\0a" + FRAGMENT * 40_000 + b"\x80" + FRAGMENT[1:])
        assert b"40002" in await reader.readuntil(b" characters")
    assert sum(pieces) > 40_000 * len(FRAGMENT)
    assert max(pieces) <= protocol.PIECE_BYTES
