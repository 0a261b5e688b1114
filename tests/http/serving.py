"""A server of a few routes on a socket, and clients that send what they like, as slowly as they like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lmx_lab.http.uvicorn_server import RunningServer, bind, serve

WAIT_S = 20.0
SHORT_S = 0.2
READ_LATER_S = 3.5 * SHORT_S
GET = b"GET /read HTTP/1.1\r\nhost: localhost\r\n\r\n"
App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True)
class Line:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> bytes:
        """One answer with a Content-Length."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            sizes = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            return head + await self.reader.readexactly(int(sizes[0] if sizes else 0))

    async def rest(self, drip: bytes = b"") -> bytes:
        """Everything that comes until the server closes, while ``drip`` is sent again and again."""
        async with asyncio.timeout(WAIT_S):
            reading = asyncio.ensure_future(self.reader.read())
            while not (await asyncio.wait({reading}, timeout=0.02))[0]:
                self.send(drip)
        return reading.result()


@asynccontextmanager
async def running(app: App) -> AsyncIterator[RunningServer]:
    host = await serve(app, bind("127.0.0.1", 0, explicit=True))
    try:
        yield host
    finally:
        await host.stop()


@asynccontextmanager
async def connected(host: RunningServer) -> AsyncIterator[Line]:
    line = Line(*await asyncio.open_connection("127.0.0.1", host.port))
    try:
        yield line
    finally:
        line.writer.close()
        with suppress(OSError):
            await line.writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (it is the other side's to change)
            await asyncio.sleep(0.01)


async def lifespan(receive: Any, send: Any) -> None:
    for what in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{what}.complete"})


async def respond(send: Any, text: bytes = b"", status: int = 200) -> None:
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


gone: list[str] = []
"""Where clients have left, as the application was told."""


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
        if message["type"] == "http.disconnect":
            gone.append("/read")
            return
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
