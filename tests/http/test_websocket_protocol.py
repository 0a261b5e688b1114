"""WebSocket connections: handshakes, limits on messages and frames, and clients that read nothing."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode, Frame, Opcode

from lmx_lab.http import websocket_protocol
from lmx_lab.http.uvicorn_server import RunningServer, bind, serve
from lmx_lab.http.websocket_protocol import WebSocketProtocol
from tests.support.sockets import SHORT_S, WAIT_S, answer_to, app, connect_raw, lifespan, opened, running
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
SOCKET = (
    b"GET /ws HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
FRAGMENT, PING = b"\x00\x81\0\0\0\0a", b"\x89\x80\0\0\0\0"
LONG_TEXT = b"a" * 1_000_000


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
async def test_an_invalid_handshake_is_answered_and_closed(header: str, status: int) -> None:
    name = header.partition(":")[0]
    right = ("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version: 13")
    lines = ("GET / HTTP/1.1", "host: localhost", "upgrade: websocket", "connection: Upgrade", header)
    handshake = "\r\n".join([*lines, *(line for line in right if not line.startswith(f"{name}:")), "", ""])
    answer = await answer_to(handshake)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1") == 1
    assert b"x-content-type-options: nosniff\r\n" in answer


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_texts_are_framed_as_the_websocket_protocol_defines(size: int) -> None:
    texts = ["x" * size, "é"]
    expected = b"".join(Frame(Opcode.TEXT, text.encode()).serialize(mask=False) for text in texts)
    assert websocket_protocol.encode_text_frames(texts) == expected


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"\x01\x81\0\0\0\0a" + FRAGMENT * 20_000, PING * 20_000])
async def test_a_flood_of_short_frames_closes_the_websocket(sent: bytes) -> None:
    async with opened() as (reader, writer):
        writer.write(SOCKET)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        assert (1008).to_bytes(2) in await reader.read()


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_disconnected_after_an_unanswered_ping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

    async def send_without_end(send: Any) -> None:
        while True:
            await send({"type": "websocket.send", "text": "a" * 10_000})

    monkeypatch.setattr(websocket_protocol, "LINGER_S", SHORT_S)
    host = await serve(flood, bind("127.0.0.1", 0, explicit=True), ws_pong_s=SHORT_S)
    client = socket.create_connection(("127.0.0.1", host.port))
    client.sendall(SOCKET)
    async with asyncio.timeout(WAIT_S):
        await ended.wait()
        await auntil(lambda: not host._server.server_state.connections)
    client.close()
    await host.stop()


async def test_long_frames_and_fragments_are_received_completely() -> None:
    async with opened() as (reader, writer):
        writer.write(SOCKET)
        await reader.readuntil(b"\r\n\r\n")
        frame = b"\x81\xff" + (3_000_000).to_bytes(8) + b"\0\0\0\0" + b"a" * 3_000_000
        fragment = b"\xff" + (200_000).to_bytes(8) + b"\0\0\0\0" + b"a" * 200_000
        writer.write(frame + b"\x01" + fragment + (b"\x00" + fragment) * 9 + b"\x80" + fragment)
        for size in (b"3000000", b"2200000"):
            assert size in await reader.readuntil(b" characters")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([Frame(Opcode.TEXT, LONG_TEXT)], id="whole"),
        pytest.param([Frame(Opcode.BINARY, LONG_TEXT, fin=False)], id="incomplete"),
        pytest.param([Frame(Opcode.TEXT, b"a", fin=False), Frame(Opcode.CONT, LONG_TEXT)], id="fragments"),
        pytest.param(None, id="incomplete frame"),
    ],
)
async def test_a_message_does_not_stay_in_memory_after_a_disconnect(
    frames: list[Frame] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        async with running(app) as host, connect_raw(host) as client:
            client.send(SOCKET)
            await client.read_response()
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


@pytest.mark.slow
async def test_the_event_loop_runs_while_many_short_frames_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_protocol, "FRAMES_PER_S", 10**9)
    pieces: list[int] = []
    feed = WebSocketProtocol.feed

    def noting(self: WebSocketProtocol, data: bytes) -> None:
        pieces.append(len(data))
        feed(self, data)

    monkeypatch.setattr(WebSocketProtocol, "feed", noting)
    async with opened() as (reader, writer):
        writer.write(SOCKET)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x01\x81\0\0\0\0a" + FRAGMENT * 40_000 + b"\x80" + FRAGMENT[1:])
        assert b"40002" in await reader.readuntil(b" characters")
    assert sum(pieces) > 40_000 * len(FRAGMENT)
    assert max(pieces) <= websocket_protocol.PIECE_BYTES


@pytest.mark.slow
@pytest.mark.usefixtures("short")
async def test_a_websocket_can_be_silent_and_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(app) as host:
        monkeypatch.setattr(host._server.config, "timeout_keep_alive", SHORT_S)
        async with connect(f"ws://127.0.0.1:{host.port}/", proxy=None) as socket:
            await asyncio.sleep(3 * SHORT_S)

            async def slowly() -> Any:
                for piece in "abc":
                    yield piece
                    await asyncio.sleep(SHORT_S)

            await socket.send(slowly())
            assert await socket.recv() == "abc"


@pytest.mark.slow
async def test_large_messages_share_a_memory_limit_and_small_ones_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket_protocol, "UNFINISHED_BYTES", 50_000)
    size = websocket_protocol.SMALL_BYTES + 40_000
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
            await auntil(lambda: held_by(host) >= size)
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


def held_by(host: RunningServer) -> int:
    sockets = [each for each in host._server.server_state.connections if isinstance(each, WebSocketProtocol)]
    return sum(each.held_bytes for each in sockets)
