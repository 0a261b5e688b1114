"""Send requests to HTTP/1.1 servers (RFC 9112) and decode their responses with plain asyncio, without TLS or proxies.

The benchmark and the daemon use it to read streams of tokens, because httpx2 takes three times as much CPU time for
each piece. Its transport also writes a request in several steps and passes each piece of a response through ten
generators, which delays a turn of the daemon by a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import httpx2

MAX_UNREAD_BYTES = 1_000_000
"""Unread bytes of one connection above which reading from the socket is paused."""
MAX_HEAD_BYTES = 65_536
"""Maximum size of a response's head, and of the size field of a chunk."""
BLANK_LINE = b"\r\n\r\n"
WITHOUT_BODY = (204, 304)
"""Statuses of responses that have no body, regardless of their header fields."""
FORBIDDEN = (b"\r", b"\n", b"\0")
"""Bytes that no header field can contain: they would begin another field or request."""


class ChunkedDecoder:
    """Decodes HTTP/1.1 chunked transfer coding (RFC 9112, 7.1)."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        """Remaining bytes of the current chunk, with the CRLF after it."""
        self.ended = False
        """Whether the last chunk was read."""
        self.is_clean = False
        """Whether the body ended immediately after the last chunk, without trailer fields or other bytes."""

    def feed(self, data: bytes) -> bytes:
        """Decode the next bytes of the body.

        Raises:
            ValueError: the bytes are not in chunked coding.
        """
        data, out = self._rest + data if self._rest else data, []
        at, self._rest = 0, b""
        while at < len(data) and not self.ended:
            if self._left:
                piece = data[at : at + self._left]
                out.append(piece[: max(0, self._left - 2)])
                at, self._left = at + len(piece), self._left - len(piece)
            elif (end := data.find(b"\r\n", at)) >= 0:
                size = int(data[at:end].partition(b";")[0], 16)
                if size < 0:
                    raise ValueError(f"the size of a chunk is {size}")
                at, self._left, self.ended = end + 2, size + 2, size == 0
            else:
                self._rest = data[at:]
                if len(self._rest) > MAX_HEAD_BYTES:
                    raise ValueError(f"the size field of a chunk is longer than {MAX_HEAD_BYTES} bytes")
                break
        self.is_clean = self.ended and data[at:] == b"\r\n"
        return b"".join(out)


class ReceiveBuffer(asyncio.Protocol):
    """Records received bytes with their time of arrival, which does not depend on when the reader runs."""

    def __init__(self) -> None:
        self._received: list[tuple[float, bytes]] = []
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received.append((time.perf_counter(), data))
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES:
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

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and all received bytes were taken."""
        return not (self._ended or self._received or self.transport.is_closing())

    async def take(self) -> list[tuple[float, bytes]]:
        """Wait for bytes, and return those received since the last call with their times. Empty at the end.

        Raises:
            OSError: the connection was broken.
        """
        if not self._received and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        received, self._received = self._received, []
        if self._unread_bytes > MAX_UNREAD_BYTES and not self._ended:
            self.transport.resume_reading()
        self._unread_bytes = 0
        if not received and isinstance(self._error, OSError):
            raise self._error
        return received

    async def take_head(self) -> tuple[ResponseHead, list[tuple[float, bytes]]]:
        """Wait for the head of the response, and return it with the bytes after it and their times.

        Raises:
            EOFError: the connection was closed before the end of the head.
            OSError: the connection was broken.
            ValueError: the bytes are not the head of a response.
        """
        data = b""
        while received := await self.take():
            for number, (at_s, piece) in enumerate(received):
                data += piece
                head, blank, rest = data.partition(BLANK_LINE)
                if blank:
                    return ResponseHead(head), [(at_s, rest), *received[number + 1 :]]
            if len(data) > MAX_HEAD_BYTES:
                raise ValueError(f"its head is longer than {MAX_HEAD_BYTES} bytes")
        raise EOFError("the head of the response is incomplete")


class ResponseHead:
    """The status and header fields of a response, and the decoder of its body.

    Raises:
        ValueError: the response is not HTTP.
    """

    def __init__(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"it starts with {first[:40]!r}")
        self.status = int(rest[:3])
        self.fields = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self.media_type = self.fields.get("content-type", "").partition(";")[0].strip().lower()
        self._is_persistent = version == "HTTP/1.1" and self.fields.get("connection", "").lower() != "close"
        self._chunked = ChunkedDecoder() if self.fields.get("transfer-encoding", "").lower() == "chunked" else None
        length = "0" if self.status in WITHOUT_BODY else self.fields.get("content-length")
        self._left = int(length) if self._chunked is None and length is not None else None
        self._has_more = False
        """Whether bytes after the body were received."""

    def decode(self, data: bytes) -> bytes:
        """Decode received bytes and return those of the body."""
        if self._chunked is not None:
            return self._chunked.feed(data)
        if self._left is not None:
            self._has_more = len(data) > self._left
            data = data[: self._left]
            self._left -= len(data)
        return data

    @property
    def ended(self) -> bool:
        """Whether the body is complete, according to its coding or length."""
        return self._chunked.ended if self._chunked is not None else self._left == 0

    @property
    def may_end(self) -> bool:
        """Whether the body ends with the connection, because it has neither chunked coding nor a length."""
        return self._chunked is None and self._left is None

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can be used for another request after this body."""
        if self._chunked is not None:
            return self._is_persistent and self._chunked.is_clean
        return self._is_persistent and self.ended and not self._has_more


# The transport


class PlainTransport(httpx2.AsyncBaseTransport):
    """A transport for ``http://`` addresses that reuses connections.

    Args:
        keepalive_s: Idle time after which a connection is not reused.
    """

    def __init__(self, *, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._idle: dict[tuple[str, int], list[tuple[float, ReceiveBuffer]]] = {}
        """Open connections without a request, each with the time until which it may be used. The newest are last."""
        self._busy: set[ReceiveBuffer] = set()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and return the response as soon as its head is received."""
        timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
        fields = request.headers.raw
        if any(byte in name or byte in value for name, value in fields for byte in FORBIDDEN):
            raise httpx2.LocalProtocolError("a header field contains a line break or a null byte")
        lines = [request.method.encode() + b" " + request.url.raw_path + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in fields]
        data = b"\r\n".join([*lines, b"", b""]) + await request.aread()
        address = (request.url.host, request.url.port or 80)
        connection = self._take_idle(address)
        if connection is None:
            try:
                async with asyncio.timeout(timeouts.get("connect")):
                    _, connection = await asyncio.get_running_loop().create_connection(ReceiveBuffer, *address)
            except TimeoutError:
                raise httpx2.ConnectTimeout("") from None
            except OSError as exc:
                raise httpx2.ConnectError(exc.strerror or str(exc)) from exc
        self._busy.add(connection)
        read_s = timeouts.get("read")
        try:
            connection.transport.write(data)
            with _translated_errors():
                async with asyncio.timeout(read_s):
                    head, received = await connection.take_head()
        except BaseException:
            await self._close(connection)
            raise

        async def end() -> None:
            await self._end(connection, head, address)

        body = _Body(connection, head, [data for _, data in received], read_s=read_s, end=end)
        return httpx2.Response(head.status, headers=head.fields, stream=body)

    def _take_idle(self, address: tuple[str, int]) -> ReceiveBuffer | None:
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

    async def _end(self, connection: ReceiveBuffer, head: ResponseHead, address: tuple[str, int]) -> None:
        """Keep the connection if the response is complete; otherwise close it, so that the server stops generating."""
        if connection not in self._busy:
            return
        if head.is_reusable and connection.is_idle:
            self._busy.discard(connection)
            until_s = asyncio.get_running_loop().time() + self._keepalive_s
            self._idle.setdefault(address, []).append((until_s, connection))
        else:
            await self._close(connection)

    async def _close(self, connection: ReceiveBuffer) -> None:
        self._busy.discard(connection)
        await connection.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        idle = [connection for connections in self._idle.values() for _, connection in connections]
        self._idle.clear()
        for connection in [*idle, *self._busy]:
            await self._close(connection)


class _Body(httpx2.AsyncByteStream):
    """The body of a response, as it is received."""

    def __init__(
        self,
        connection: ReceiveBuffer,
        head: ResponseHead,
        received: list[bytes],
        *,
        read_s: float | None,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._head = head
        self._received = received
        self._read_s = read_s
        self._end = end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        head, received = self._head, self._received
        while True:
            with _translated_errors():
                pieces = [piece for data in received if (piece := head.decode(data))]
            for piece in pieces:
                yield piece
            if head.ended:
                return
            with _translated_errors():
                async with asyncio.timeout(self._read_s):
                    received = [data for _, data in await self._connection.take()]
                if not received and not head.may_end:
                    raise EOFError("the connection was closed before the end of the response")
            if not received:
                return

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
