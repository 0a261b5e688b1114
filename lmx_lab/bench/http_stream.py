"""One streamed request on a connection of its own, over plain asyncio, with the time of each event.

At 64 streams and 5,000 tokens per second in total, httpx2 uses 0.6 of a core of the machine that it measures, and this
module 0.2. It follows no redirects and uses no proxy.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from urllib.parse import urlsplit

from lmx_lab.client.address import authorization_header, normalize_address
from lmx_lab.client.connection import CONNECT_S, LONG_BYTES, SHORT_BYTES
from lmx_lab.client.errors import CHAT_SERVER, CHECK, UnexpectedResponse, chat_server_error
from lmx_lab.client.sse import EVENT_STREAM, EventDecoder, Remark
from lmx_lab.errors import ConnectionLostError, LabError, UnreachableError, WrongServerError

HELD_BYTES = 1_000_000
"""Unread bytes of one connection above which reading from the socket pauses."""
HEAD_BYTES = 65_536
BLANK = b"\r\n\r\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """The data of a server-sent event, or None for a comment."""

    at_s: float
    """When its last byte was received, by ``time.perf_counter``."""
    data: str | None


class Dechunker:
    """Decodes HTTP/1.1 chunked transfer coding (RFC 9112, 7.1)."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        """Remaining bytes of the current chunk, including the CRLF after it."""
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """Decode bytes.

        Raises:
            ValueError: the bytes are not in this coding.
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
                    raise ValueError(f"a chunk has the size {size}")
                at, self._left, self.ended = end + 2, size + 2, size == 0
            else:
                self._rest = data[at:]
                if len(self._rest) > HEAD_BYTES:
                    raise ValueError("a chunk's size has no end")
                break
        return b"".join(out)


class _Inbox(asyncio.Protocol):
    """Records bytes with their times on arrival; the reader may run later."""

    def __init__(self) -> None:
        self._arrived: list[tuple[float, bytes]] = []
        self._held = 0
        self._changed = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrived.append((time.perf_counter(), data))
        self._held += len(data)
        if self._held > HELD_BYTES:
            self.transport.pause_reading()
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._error = True, exc
        self._changed.set()

    async def take(self) -> list[tuple[float, bytes]]:
        """Return what was received since the last call; nothing at the end.

        Raises:
            OSError: the connection broke.
        """
        if not self._arrived and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        arrived, self._arrived = self._arrived, []
        if self._held > HELD_BYTES and not self._ended:
            self.transport.resume_reading()
        self._held = 0
        if not arrived and isinstance(self._error, OSError):
            raise self._error
        return arrived


class Address:
    """The target of requests, and the key, which is never displayed.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = normalize_address(url)
        parts = urlsplit(self.url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path = f"{parts.path}/v1/chat/completions"
        # Created once, because loading the certificates takes as long as many tokens.
        self.context = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = "".join(
            f"{name}: {value}\r\n"
            for name, value in {
                "host": parts.netloc,
                "connection": "close",
                "accept": EVENT_STREAM,
                "accept-encoding": "identity",
                "content-type": "application/json",
                **authorization_header(api_key),
            }.items()
        )

    def request(self, body: bytes) -> bytes:
        """The bytes of a request."""
        return f"POST {self.path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode() + body


class Exchange:
    """One request as a context manager, which connects on entry, before any time is measured, and closes the connection
    on exit, which stops the server's work.

    Raises:
        UnreachableError: no server accepts the connection.
    """

    def __init__(self, address: Address, body: bytes) -> None:
        self._address = address
        self._body = body

    async def __aenter__(self) -> Exchange:
        place, loop = self._address, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, self._inbox = await loop.create_connection(_Inbox, place.host, place.port, ssl=place.context)
        except (OSError, TimeoutError) as exc:
            reason = f"{exc!s:.200}" or f"no connection within {CONNECT_S:g} s"
            raise UnreachableError(
                f"nothing answers at {place.url} ({reason}); is the server running? If so, {CHECK}"
            ) from exc
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._inbox.transport.abort()

    def send(self) -> float:
        """Send the request; returns the time by ``time.perf_counter``."""
        at_s = time.perf_counter()
        self._inbox.transport.write(self._address.request(self._body))
        return at_s

    async def events(self) -> AsyncGenerator[Event, None]:
        """Return the events of the answer up to its end; a JSON document in place of a stream is the only event.

        Raises:
            ConnectionLostError: the connection ended before the answer did.
            LabError: the server's own, or the answer is not from a chat-format server.
        """
        try:
            head, arrived = await self._head()
            if not (head.status == 200 and head.kind == EVENT_STREAM):
                yield await self._document(head, b"".join(data for _, data in arrived))
                return
            decoder = EventDecoder()
            while arrived:
                for at_s, data in arrived:
                    for found in decoder.feed(head.decoded(data)):
                        yield Event(at_s=at_s, data=None if isinstance(found, Remark) else found)
                if head.ended:
                    return
                arrived = await self._inbox.take()
            if not head.may_end:
                raise ConnectionResetError("the connection was closed")
        except OSError as exc:
            raise ConnectionLostError(
                f"{self._address.url} went away in the middle of its answer ({exc!s:.200}); ask again once it is back"
            ) from exc
        except ValueError as exc:
            raise WrongServerError(
                f"the answer of {self._address.url} cannot be read ({exc!s:.200}), unlike {CHAT_SERVER.kind}; {CHECK}"
            ) from exc

    async def _document(self, head: _Head, rest: bytes) -> Event:
        """Read the complete body.

        Raises:
            LabError: the body is an error.
        """
        body = await self._whole(head, rest)
        if head.status != 200 or not head.kind.endswith("json"):
            raise self._refused(head, body)
        return Event(at_s=time.perf_counter(), data=body.decode(errors="replace"))

    async def _head(self) -> tuple[_Head, list[tuple[float, bytes]]]:
        """The head of the answer, and the bytes after it with their times."""
        data = b""
        while True:
            arrived = await self._inbox.take()
            if not arrived:
                raise ConnectionLostError(
                    f"{self._address.url} went away before it answered; ask again once it is back"
                )
            for number, (at_s, piece) in enumerate(arrived):
                data += piece
                head, blank, rest = data.partition(BLANK)
                if blank:
                    return _Head(head), [(at_s, rest), *arrived[number + 1 :]]
            if len(data) > HEAD_BYTES:
                raise ValueError("its head has no end")

    async def _whole(self, head: _Head, rest: bytes) -> bytes:
        limit = LONG_BYTES if head.status == 200 else SHORT_BYTES
        body = bytearray(head.decoded(rest))
        while not head.ended and len(body) < limit and (arrived := await self._inbox.take()):
            body += b"".join(head.decoded(data) for _, data in arrived)
        return bytes(body)

    def _refused(self, head: _Head, body: bytes) -> LabError:
        return chat_server_error(
            UnexpectedResponse(
                url=self._address.url,
                status=head.status,
                content_type=head.fields.get("content-type", ""),
                retry_after=head.fields.get("retry-after"),
                body=body,
                server=CHAT_SERVER,
            )
        )


class _Head:
    """Status and header fields of an answer, and the state of its body.

    Raises:
        ValueError: it is not HTTP, or is compressed.
    """

    def __init__(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"it begins with {first[:40]!r}")
        self.status = int(rest[:3])
        self.fields = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        if self.fields.get("content-encoding", "identity") != "identity":
            raise ValueError(f"it is compressed ({self.fields['content-encoding'][:40]}), which it was asked not to be")
        self.kind = self.fields.get("content-type", "").partition(";")[0].strip().lower()
        self._dechunker = Dechunker() if self.fields.get("transfer-encoding", "").lower() == "chunked" else None
        length = self.fields.get("content-length")
        self._left = int(length) if self._dechunker is None and length is not None else None

    def decoded(self, data: bytes) -> bytes:
        """The body in received bytes."""
        if self._dechunker is not None:
            return self._dechunker.feed(data)
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        return data

    @property
    def ended(self) -> bool:
        """Whether the body is complete, by its coding or length."""
        return self._dechunker.ended if self._dechunker is not None else self._left == 0

    @property
    def may_end(self) -> bool:
        """Whether the end of the connection ends the body."""
        return self._dechunker is None and self._left is None
