"""Small ASGI applications, and clients that send them raw bytes at any speed, valid or not."""

import asyncio
import contextlib
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from lmx_lab.errors import InvalidRequestError
from lmx_lab.http import Limits
from lmx_lab.http.uvicorn_server import bind, serve
from lmx_lab.wire.errors import ErrorBody
from tests.support.waiting import WAIT_S

SHORT_S = 0.2
READ_LATER_S = 3.5 * SHORT_S
SHORT = Limits(head_s=SHORT_S, body_s=SHORT_S, body_bytes=10**9, late_s=SHORT_S / 4, linger_s=SHORT_S)
"""Very short deadlines, and a minimum speed that only complete bodies reach."""
GET = b"GET /read HTTP/1.1\r\nhost: localhost\r\n\r\n"
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@dataclass(frozen=True)
class RawClient:
    """A client connection that sends and receives raw bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data):
        self.writer.write(data)

    async def read_response(self):
        """Read one response with a Content-Length."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            sizes = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            return head + await self.reader.readexactly(int(sizes[0] if sizes else 0))

    async def read_to_end(self, drip=b""):
        """Read until the server closes the connection, and send ``drip`` repeatedly meanwhile.

        If ``drip`` is sent when the server has closed the connection, the system resets it.
        """
        received = b""

        async def read():
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
async def running(app, limits=None, **options):
    host = await serve(app, bind("127.0.0.1", 0, explicit=True), limits=limits, **options)
    try:
        yield host
    finally:
        await host.stop()


@asynccontextmanager
async def connect_raw(host):
    client = RawClient(*await asyncio.open_connection("127.0.0.1", host.port))
    try:
        yield client
    finally:
        client.writer.close()
        with suppress(OSError):
            await client.writer.wait_closed()


@asynccontextmanager
async def open_socket(host, path="/"):
    """Open a WebSocket. The block has a time limit."""
    async with connect_raw(host) as client, asyncio.timeout(3 * WAIT_S):
        client.send(HANDSHAKE.replace(b"/", path.encode(), 1))
        await client.reader.readuntil(b"\r\n\r\n")
        yield client


def check_timeout_error(answer):
    """Check that an answer is the error of a request that arrives too slowly, and return its message."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nx-content-type-options: nosniff\r\n" in head
    error = ErrorBody.model_validate_json(body).error
    assert (error.code, error.type, error.retryable) == (InvalidRequestError.code, "invalid_request_error", False)
    return error.message


async def lifespan(receive, send):
    for what in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{what}.complete"})


async def respond(send, text=b"", status=200):
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def app(scope, receive, send):
    """Respond with the number of bytes of a body, and to messages of a WebSocket with their text or, at ``/length``,
    with their number of characters.
    """
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            text = message["text"]
            await send(
                {"type": "websocket.send", "text": f"{len(text)} characters" if scope["path"] == "/length" else text}
            )
    elif scope["path"] == "/refuse":
        await respond(send, b"no", 403)
    elif scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(6):
            await asyncio.sleep(SHORT_S / 2)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body"})
    else:
        await asyncio.sleep(READ_LATER_S if scope["path"] == "/read-later" else 0)
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        await respond(send, str(size).encode())


async def answer_to(*pieces):
    """Send a request in pieces, and read until the connection is closed, or until the end of the response head."""
    async with running(app) as host, connect_raw(host) as client:
        for piece in pieces:
            client.send(piece.encode())
            await asyncio.sleep(SHORT_S if len(pieces) > 1 else 0)
        async with asyncio.timeout(WAIT_S):
            answer = await client.reader.readuntil(b"\r\n\r\n")
            if b"connection: close" in answer:
                answer += await client.reader.read()
    return answer
