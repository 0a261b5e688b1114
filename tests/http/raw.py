"""Small ASGI applications, and clients that send them raw bytes at any speed, valid or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lmx_lab.http import Limits
from lmx_lab.http.uvicorn_server import RunningServer, bind, serve
from tests.support.waiting import WAIT_S

SHORT_S = 0.2
READ_LATER_S = 3.5 * SHORT_S
SHORT = Limits(head_s=SHORT_S, body_s=SHORT_S, body_bytes=10**9, late_s=SHORT_S / 4, linger_s=SHORT_S)
"""Very short deadlines, and a minimum speed that only complete bodies reach."""
GET = b"GET /read HTTP/1.1\r\nhost: localhost\r\n\r\n"
App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True)
class RawClient:
    """A client connection that sends and receives raw bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read_response(self) -> bytes:
        """Read one response with a Content-Length."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            sizes = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            return head + await self.reader.readexactly(int(sizes[0] if sizes else 0))

    async def read_to_end(self, drip: bytes = b"") -> bytes:
        """Read until the server closes the connection, and send ``drip`` repeatedly meanwhile.

        If ``drip`` is sent when the server has closed the connection, the system resets it.
        """
        received = b""

        async def read() -> None:
            nonlocal received
            with contextlib.suppress(ConnectionResetError):
                while piece := await self.reader.read(2**16):
                    received += piece

        async with asyncio.timeout(WAIT_S):
            reading = asyncio.ensure_future(read())
            while not (await asyncio.wait({reading}, timeout=0.02))[0]:
                self.send(drip)
        reading.result()
        return received


@asynccontextmanager
async def running(app: App, limits: Limits | None = None) -> AsyncIterator[RunningServer]:
    host = await serve(app, bind("127.0.0.1", 0, explicit=True), limits=limits)
    try:
        yield host
    finally:
        await host.stop()


@asynccontextmanager
async def connect_raw(host: RunningServer) -> AsyncIterator[RawClient]:
    client = RawClient(*await asyncio.open_connection("127.0.0.1", host.port))
    try:
        yield client
    finally:
        client.writer.close()
        with suppress(OSError):
            await client.writer.wait_closed()


async def lifespan(receive: Any, send: Any) -> None:
    for what in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{what}.complete"})


async def respond(send: Any, text: bytes = b"", status: int = 200) -> None:
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
    else:
        await {"/read": read, "/read-later": read_later, "/refuse": refuse, "/stream": stream}[scope["path"]](
            receive, send
        )


async def read(receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await respond(send, str(size).encode())


async def read_later(receive: Any, send: Any) -> None:
    await asyncio.sleep(READ_LATER_S)
    await read(receive, send)


async def refuse(receive: Any, send: Any) -> None:
    await respond(send, b"no", 403)


async def stream(receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(6):
        await asyncio.sleep(SHORT_S / 2)
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await send({"type": "http.response.body"})


async def no_content(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def answer_to(*pieces: str) -> bytes:
    """Send a request in pieces, and read until the connection is closed, or until the end of the response head."""
    async with running(no_content) as host, connect_raw(host) as client:
        for piece in pieces:
            client.send(piece.encode())
            await asyncio.sleep(SHORT_S if len(pieces) > 1 else 0)
        async with asyncio.timeout(WAIT_S):
            answer = await client.reader.readuntil(b"\r\n\r\n")
            if b"connection: close" in answer:
                answer += await client.reader.read()
    return answer


async def report_length(scope: Any, receive: Any, send: Any) -> None:
    """Respond with the length of the body or message."""
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
        await lifespan(receive, send)


@asynccontextmanager
async def opened(limits: Limits | None = None) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with running(report_length, limits) as host, connect_raw(host) as client, asyncio.timeout(30):
        yield client.reader, client.writer
