"""Send requests to HTTP/1.1 servers with plain asyncio and h11, without proxies, and read their responses.

The benchmark and the daemon use it to read streams of tokens. The transport of httpx2 writes a request in several steps
and passes each piece of a response through ten generators: the first of three tokens arrives after 0.67 ms instead of
0.46 ms, and 200 tokens that arrive one by one take 33 ms of CPU time instead of 26 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import select
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import h11
import httpx2

MAX_UNREAD_BYTES = 1_000_000
"""Unread bytes of one connection above which reading from the socket is paused."""
MAX_HEAD_BYTES = 65_536
"""Maximum size of a response's head, and of the size field of a chunk."""


class PlainConnection(asyncio.Protocol):
    """One connection, over which one request at a time is sent.

    Received bytes are recorded with their time of arrival, which does not depend on when the reader runs.
    """

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, MAX_HEAD_BYTES)
        self._received: deque[tuple[float, bytes]] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._at_s = 0.0
        """Time of arrival of the bytes that h11 has received last."""
        self.transport: asyncio.Transport
        self.unread_bytes = 0
        """Number of received bytes that the reader has not taken."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received.append((time.perf_counter(), data))
        self.unread_bytes += len(data)
        if self.unread_bytes > MAX_UNREAD_BYTES:
            self.transport.pause_reading()
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._error = True, exc
        self._changed.set()

    async def aclose(self) -> None:
        """Close the connection immediately, and wait until the socket is closed. Idempotent."""
        self.transport.abort()
        while not self._ended:
            self._changed.clear()
            await self._changed.wait()

    def send(self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> float:
        """Send a request, and return the time from ``time.perf_counter``.

        Raises:
            ValueError: the request contains a character that would begin another header field or request.
        """
        try:
            request = h11.Request(method=method, target=target, headers=headers)
        except h11.LocalProtocolError:
            # The message of h11 contains the value, which may be a key.
            raise ValueError("the address or a header field contains a line break or a null byte") from None
        data = b"".join(self._http.send(part) for part in (request, h11.Data(data=body), h11.EndOfMessage()))
        at_s = time.perf_counter()
        self.transport.write(data)
        return at_s

    async def head(self) -> tuple[int, httpx2.Headers]:
        """Wait for the head of the response, and return its status and header fields.

        Raises:
            EOFError: the connection was closed before the end of the head.
            OSError: the connection was broken.
            ValueError: the bytes are not the head of a response.
        """
        await self._receive()
        start = self._http.trailing_data[0][:40]
        if not b"HTTP/1.".startswith(start[:7]):
            raise ValueError(f"it starts with {start.decode('latin-1')!r}")
        while True:
            event = self._next_event()
            if type(event) is h11.Response:
                return event.status_code, httpx2.Headers(list(event.headers))
            if event is h11.NEED_DATA:
                await self._receive()

    async def body(self) -> tuple[float, bytes]:
        """Wait for the next bytes of the response's body, and return them with their time of arrival.

        No bytes are returned after the end of the body.

        Raises:
            EOFError: the connection was closed before the end of the body.
            OSError: the connection was broken.
            ValueError: the body is not encoded as the head states.
        """
        pieces: list[bytes] = []
        while self._http.their_state is h11.SEND_BODY:
            event = self._next_event()
            if type(event) is h11.Data:
                pieces.append(event.data)
            elif event is h11.NEED_DATA:
                if pieces:
                    break
                await self._receive()
        return self._at_s, b"".join(pieces)

    def can_send_again(self) -> bool:
        """Whether another request can be sent. If so, the connection is prepared for it."""
        states = self._http.states
        if states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE} or self._http.trailing_data[0] or not self.is_idle:
            return False
        self._http.start_next_cycle()
        return True

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and all received bytes were taken."""
        return not (self._ended or self._received or self.transport.is_closing())

    async def _receive(self) -> None:
        """Wait for bytes, or for the end of the connection, and pass them to h11."""
        if self._received:
            # Other tasks run between two pieces: h11 takes 0.2 s for 256 KiB in chunks of one byte.
            await asyncio.sleep(0)
        elif not self._ended:
            self._changed.clear()
            await self._changed.wait()
        if self._received:
            self._at_s, data = self._received.popleft()
            self.unread_bytes -= len(data)
            if not self._received and not self._ended:
                self.transport.resume_reading()
            self._http.receive_data(data)
        elif isinstance(self._error, OSError):
            raise self._error
        else:
            self._http.receive_data(b"")

    def _next_event(self) -> object:
        is_head = self._http.their_state is not h11.SEND_BODY
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as exc:
            has_closed = self._http.trailing_data[1]
            if has_closed and is_head:
                raise EOFError("the head of the response is incomplete") from exc
            if has_closed:
                raise EOFError("the connection was closed before the end of the response") from exc
            # The status with which a server responds to a head that is too large.
            if exc.error_status_hint == 431:
                part = "its head" if is_head else "the size field of a chunk"
                raise ValueError(f"{part} is longer than {MAX_HEAD_BYTES} bytes") from exc
            raise ValueError(str(exc)) from exc


# The transport


class PlainTransport(httpx2.AsyncBaseTransport):
    """A transport for ``http://`` addresses that reuses connections.

    Args:
        keepalive_s: Idle time after which a connection is not reused.
    """

    def __init__(self, *, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._idle: dict[tuple[str, int], list[tuple[float, PlainConnection]]] = {}
        """Open connections without a request, each with the time until which it may be used. The newest are last."""
        self._busy: set[PlainConnection] = set()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and return the response as soon as its head is received."""
        timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
        body = await request.aread()
        address = (request.url.host, request.url.port or 80)
        connection = self._take_idle(address)
        if connection is None:
            try:
                async with asyncio.timeout(timeouts.get("connect")):
                    _, connection = await asyncio.get_running_loop().create_connection(PlainConnection, *address)
            except TimeoutError:
                raise httpx2.ConnectTimeout("") from None
            except OSError as exc:
                raise httpx2.ConnectError(exc.strerror or str(exc)) from exc
        self._busy.add(connection)
        read_s = timeouts.get("read")
        try:
            try:
                connection.send(request.method.encode(), request.url.raw_path, request.headers.raw, body)
            except ValueError as exc:
                raise httpx2.LocalProtocolError(str(exc)) from None
            with _translated_errors():
                async with asyncio.timeout(read_s):
                    status, headers = await connection.head()
        except BaseException:
            await self._end(connection, address)
            raise
        end = functools.partial(self._end, connection, address)
        return httpx2.Response(status, headers=headers, stream=_Body(connection, read_s=read_s, end=end))

    def _take_idle(self, address: tuple[str, int]) -> PlainConnection | None:
        """Return an open connection to the address, and close those that were idle for too long."""
        idle, now = self._idle.get(address, []), asyncio.get_running_loop().time()
        while idle:
            until_s, connection = idle.pop()
            if now < until_s and connection.is_idle:
                # It is readable if the server has closed it or sent data, which the loop may not have noticed yet.
                poll = select.poll()
                poll.register(connection.transport.get_extra_info("socket"), select.POLLIN)
                if not poll.poll(0):
                    return connection
            connection.transport.abort()
        return None

    async def _end(self, connection: PlainConnection, address: tuple[str, int]) -> None:
        """Keep the connection if the response is complete; otherwise close it, so that the server stops generating."""
        if connection not in self._busy:
            return
        self._busy.remove(connection)
        if connection.can_send_again():
            until_s = asyncio.get_running_loop().time() + self._keepalive_s
            self._idle.setdefault(address, []).append((until_s, connection))
        else:
            await connection.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        idle = [connection for connections in self._idle.values() for _, connection in connections]
        self._idle.clear()
        for connection in [*idle, *self._busy]:
            await connection.aclose()


class _Body(httpx2.AsyncByteStream):
    """The body of a response, as it is received."""

    def __init__(
        self, connection: PlainConnection, *, read_s: float | None, end: Callable[[], Awaitable[None]]
    ) -> None:
        self._connection = connection
        self._read_s = read_s
        self._end = end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            with _translated_errors():
                async with asyncio.timeout(self._read_s):
                    _, data = await self._connection.body()
            if not data:
                return
            yield data

    async def aclose(self) -> None:
        await self._end()


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    """Translate the errors of an open connection to those of httpx2."""
    try:
        yield
    except TimeoutError:
        raise httpx2.ReadTimeout("") from None
    except OSError as exc:
        raise httpx2.ReadError(exc.strerror or str(exc)) from exc
    except EOFError as exc:
        raise httpx2.RemoteProtocolError(str(exc)) from exc
    except ValueError as exc:
        raise httpx2.RemoteProtocolError(f"the response is not valid HTTP: {exc}") from exc
