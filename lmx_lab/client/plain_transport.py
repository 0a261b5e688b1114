"""A transport for httpx2 that sends requests to servers on this machine with plain asyncio, without TLS or proxies.

httpx2's own transport writes a request in several steps and passes each piece of a response through ten generators,
which delays a turn of the daemon by a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import httpx2

from lmx_lab.client.http_response import ReceiveBuffer, ResponseHead

FORBIDDEN = (b"\r", b"\n", b"\0")
"""Bytes that no header field can contain: they would begin another field or request."""


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
        data = _encode_head(request) + await request.aread()
        address = (request.url.host, request.url.port or 80)
        connection = self._take_idle(address) or await _connect(*address, timeout_s=timeouts.get("connect"))
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
            if now < until_s and connection.is_idle and not _is_readable(connection):
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


def _encode_head(request: httpx2.Request) -> bytes:
    fields = request.headers.raw
    if any(byte in name or byte in value for name, value in fields for byte in FORBIDDEN):
        raise httpx2.LocalProtocolError("a header field contains a line break or a null byte")
    lines = [request.method.encode() + b" " + request.url.raw_path + b" HTTP/1.1"]
    return b"\r\n".join([*lines, *(name + b": " + value for name, value in fields), b"", b""])


def _is_readable(connection: ReceiveBuffer) -> bool:
    """Whether the server has closed an idle connection or sent data, which the event loop has not yet noticed."""
    poll = select.poll()
    poll.register(connection.transport.get_extra_info("socket"), select.POLLIN)
    return bool(poll.poll(0))


async def _connect(host: str, port: int, *, timeout_s: float | None) -> ReceiveBuffer:
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(ReceiveBuffer, host, port)
    except TimeoutError:
        raise httpx2.ConnectTimeout("") from None
    except OSError as exc:
        raise httpx2.ConnectError(exc.strerror or str(exc)) from exc
    return connection


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
