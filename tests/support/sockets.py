"""Servers and clients that send raw bytes at any speed, valid or not, and a proxy that cuts connections."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import httpx2


class HealthApp:
    """Responds to /healthz as the lab does, hangs on /hang, echoes over WebSocket; its lifespan can fail."""

    def __init__(self, *, fail_at: str | None = None, name: str = "lmx-lab") -> None:
        self.fail_at = fail_at
        self.name = name
        self.hanging = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.ended = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["type"] == "websocket":
            await self.echo(receive, send)
        else:
            await self.answer(scope, send)

    async def live(self, receive: Any, send: Any) -> None:
        await receive()
        if self.fail_at == "startup":
            raise ValueError("no such model")
        if self.fail_at == "startup.failed":
            await send({"type": "lifespan.startup.failed", "message": "Traceback…\nValueError: no such model\n"})
            return
        if self.fail_at == "exit":
            sys.exit(7)
        if self.fail_at == "never":
            await asyncio.Event().wait()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.fail_at == "shutdown hangs":
            await asyncio.Event().wait()
        self.ended = True
        await send({"type": "lifespan.shutdown.complete"})

    async def echo(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})

    async def answer(self, scope: Any, send: Any) -> None:
        body = json.dumps({"status": "ok", "name": self.name}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/hang":
            self.hanging.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        await send({"type": "http.response.body", "body": body})


def fetch(port: int, host: str = "127.0.0.1") -> Any:
    """Return the status in the JSON of ``/healthz``."""
    return httpx2.get(f"http://{host}:{port}/healthz", timeout=60, trust_env=False).json()["status"]


Reply = bytes | Iterable[bytes]
# The connection is closed. Without the header, a client could reuse it at the moment in which it is closed.
HEAD = "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: {kind}\r\nx-lmx-lab: 0\r\n"


@dataclass
class RawServer:
    url: str
    requests: list[str] = field(default_factory=list)
    """Heads and bodies of the requests."""


@contextmanager
def answering(*answers: Reply | Callable[[str], Reply]) -> Iterator[RawServer]:
    """Serve each connection with the next answer, and close it. After the last answer, all get the last one.

    An answer in pieces may be endless: it is sent until the client closes the connection. A function returns the answer
    for a request; then the client closes the connection first.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = RawServer(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=_serve, args=(listener, server, answers))
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, server: RawServer, answers: tuple[Reply | Callable[[str], Reply], ...]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        # A client may close the connection at any time, even before its request.
        with connection, suppress(OSError):
            answer = answers[min(len(server.requests), len(answers) - 1)]
            server.requests.append(_request(connection))
            pieces = answer(server.requests[-1]) if callable(answer) else answer
            for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                connection.sendall(piece)
            if callable(answer):
                # Everything that was sent arrives if the client closes the connection first.
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass


def _request(connection: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _receive(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    sizes = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < int(sizes[0] if sizes else 0):
        body += _receive(connection)
    return f"{head.decode()}\r\n\r\n{body.decode()}"


def _receive(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise ConnectionError("the client closed the connection during its request")
    return piece


def whole(text: str, *, status: str = "200 OK", kind: str = "application/json", extra: str = "") -> bytes:
    """A complete response."""
    head = HEAD.format(status=status, kind=kind)
    return f"{head}{extra}content-length: {len(text.encode())}\r\n\r\n{text}".encode()


def streamed(*chunks: str, end: bool = True) -> bytes:
    """Server-sent events in HTTP chunks. Without ``end``, the connection is closed before the last chunk."""
    head = HEAD.format(status="200 OK", kind="text/event-stream; charset=utf-8")
    body = "".join(f"{len(chunk.encode()):x}\r\n{chunk}\r\n" for chunk in chunks)
    tail = "0\r\n\r\n" if end else ""
    return f"{head}transfer-encoding: chunked\r\n\r\n{body}{tail}".encode()


class Endless:
    """An endless response: its head, then the same piece again and again.

    Args:
        every_s: Time between two pieces.
    """

    def __init__(
        self, piece: bytes, *, status: str = "200 OK", head: bytes | None = None, every_s: float = 0.0
    ) -> None:
        self._head = f"{HEAD.format(status=status, kind='application/json')}\r\n".encode() if head is None else head
        self._piece = piece
        self._every_s = every_s

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        while True:
            time.sleep(self._every_s)
            yield self._piece


RAW_WAIT_S = 30.0
HANDSHAKE = (
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
)


@dataclass(frozen=True)
class Answer:
    status: int
    head: str
    body: bytes

    @property
    def code(self) -> str:
        """Error code of the response; empty if it is not an error."""
        return str(json.loads(self.body)["error"]["code"]) if self.status >= 400 else ""

    def header(self, name: str) -> str | None:
        found = [line.partition(":")[2].strip() for line in self.head.split("\r\n") if line.lower().startswith(name)]
        return found[0] if found else None


def send(
    port: int, request: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b"", *, host: str | None = ""
) -> Answer:
    """Send one request on a new connection, and read the response until the server closes the connection.

    Args:
        request: The method and target, as in ``GET /path``.
        host: The Host header; empty for the right one, None for no header.
    """
    hosts = [] if host is None else [("Host", host or f"127.0.0.1:{port}")]
    length = [("Content-Length", str(len(body)))] if body else []
    # A WebSocket handshake has its own Connection header. If it succeeds, only the head is read.
    is_handshake = any(name == "Upgrade" for name, _ in headers)
    lines = [f"{name}: {value}" for name, value in [*hosts, *headers, *length]] + (
        [] if is_handshake else ["Connection: close"]
    )
    with socket.create_connection(("127.0.0.1", port), RAW_WAIT_S) as sock:
        sock.sendall("\r\n".join([f"{request} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body)
        response = http.client.HTTPResponse(sock, method=request.partition(" ")[0])
        response.begin()
        received = [f"{name}: {value}" for name, value in response.getheaders()]
        return Answer(response.status, "\r\n".join(received), response.read())


def post(
    port: int, path: str, content: Any, headers: Sequence[tuple[str, str]] = (), *, host: str | None = ""
) -> Answer:
    """Send JSON with the JSON content type."""
    named = [("Content-Type", "application/json"), *headers]
    return send(port, f"POST {path}", named, json.dumps(content).encode(), host=host)


PIECE = 4096


Sending = Callable[[httpx2.Request], Awaitable[httpx2.Response]]


class Network(httpx2.AsyncBaseTransport):
    """An HTTP transport over the network.

    Args:
        handle: Sends each request by the function that it is given; it can delay, change or lose requests and answers.
    """

    def __init__(self, handle: Callable[[httpx2.Request, Sending], Awaitable[httpx2.Response]]) -> None:
        self._network = httpx2.AsyncHTTPTransport()
        self._handle = handle
        self.closings = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self._handle(request, self._network.handle_async_request)

    async def aclose(self) -> None:
        self.closings += 1
        await self._network.aclose()


class Through(Network):
    """An HTTP transport whose connections go through the proxy. Requests still name the daemon as their host."""

    def __init__(self, proxy: Proxy) -> None:
        async def handle(request: httpx2.Request, send: Sending) -> httpx2.Response:
            request.url = request.url.copy_with(port=proxy.port)
            return await send(request)

        super().__init__(handle)


class Proxy:
    """Accepts connections at ``port`` and forwards their bytes to the port that ``target`` returns.

    Args:
        target: Returns the current port of the daemon on this computer.
        idle_s: Time without data from the daemon after which a connection is closed.
    """

    def __init__(self, target: Callable[[], int], *, idle_s: float | None = None) -> None:
        self._target = target
        self._idle_s = idle_s
        self._open: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.is_shut = False
        """Whether new connections are refused."""
        self.connections = 0
        self.closed_as_idle = 0
        self.halves = 0
        """Number of pieces of which only a part was delivered before a cut."""
        self._cutting: dict[asyncio.Task[None], random.Random] = {}

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        self.cut()
        if self._open:
            await asyncio.wait(self._open)

    def cut(self) -> int:
        """Cut all connections and return their number."""
        for task in self._open:
            task.cancel()
        return len(self._open)

    def cut_within_next_piece(self, chance: random.Random) -> int:
        """Cut all connections within the next piece from the daemon, and return their number."""
        for task in self._open:
            self._cutting[task] = chance
        return len(self._open)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                if not self.is_shut:
                    await self._pass_on(task, reader, writer)
        finally:
            self._open.discard(task)
            self._cutting.pop(task, None)
            writer.transport.abort()

    async def _pass_on(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target())
        up = asyncio.create_task(_copy(reader, back))
        try:
            while piece := await self._read(there):
                if (chance := self._cutting.get(task)) is not None:
                    self.halves += 1
                    writer.write(piece[: chance.randrange(len(piece))])
                    await writer.drain()
                    return
                writer.write(piece)
                await writer.drain()
        finally:
            up.cancel()
            back.transport.abort()

    async def _read(self, there: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._idle_s):
                return await there.read(PIECE)
        except TimeoutError:
            self.closed_as_idle += 1
            return b""


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
