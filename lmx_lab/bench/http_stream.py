"""Send one streamed request over a connection of its own, in plain asyncio, and record the time of each event.

At 64 streams and 5,000 tokens per second in total, httpx2 uses 0.6 cores of the machine that it measures, and this
module 0.2. It does not follow redirects or use proxies.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from lmx_lab.client.address import authorization_header, normalize_address
from lmx_lab.client.connection import CONNECT_S, LONG_BYTES, SHORT_BYTES
from lmx_lab.client.errors import CHAT_SERVER, CHECK, UnexpectedResponse, chat_server_error
from lmx_lab.client.sse import EVENT_STREAM, EventDecoder, Remark
from lmx_lab.errors import ConnectionLostError, LabError, UnreachableError, WrongServerError

MAX_UNREAD_BYTES = 1_000_000
"""Unread bytes of one connection above which reading from the socket is paused."""
MAX_HEAD_BYTES = 65_536
"""Maximum size of a response's head, and of the size field of a chunk."""
BLANK_LINE = b"\r\n\r\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedEvent:
    """A server-sent event with its time of arrival."""

    at_s: float
    """Time at which its last byte was received, from ``time.perf_counter``."""
    data: str | None
    """The event's data; None for a comment."""


class ChunkedDecoder:
    """Decodes HTTP/1.1 chunked transfer coding (RFC 9112, 7.1)."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        """Remaining bytes of the current chunk, with the CRLF after it."""
        self.ended = False
        """Whether the last chunk was read."""

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
        return b"".join(out)


class _ReceiveBuffer(asyncio.Protocol):
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


class ChatEndpoint:
    """The address for chat requests, and the key, which is never displayed.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = normalize_address(url)
        parts = urlsplit(self.url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path = f"{parts.path}/v1/chat/completions"
        # Created once: loading the certificates takes as long as the generation of many tokens.
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
        """Return the bytes of a request with this body."""
        return f"POST {self.path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode() + body


class TimedRequest:
    """One request, as a context manager.

    Entering it opens the connection, before any time is measured. Leaving it closes the connection, which stops the
    server's work.

    Raises:
        UnreachableError: no server accepts the connection.
    """

    def __init__(self, endpoint: ChatEndpoint, body: bytes) -> None:
        self._endpoint = endpoint
        self._body = body

    async def __aenter__(self) -> Self:
        endpoint, loop = self._endpoint, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, self._buffer = await loop.create_connection(
                    _ReceiveBuffer, endpoint.host, endpoint.port, ssl=endpoint.context
                )
        except (OSError, TimeoutError) as exc:
            reason = f"{exc!s:.200}" or f"no connection within {CONNECT_S:g} s"
            raise UnreachableError(
                f"nothing answers at {endpoint.url} ({reason}); start the server, or {CHECK}"
            ) from exc
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._buffer.transport.abort()

    def send(self) -> float:
        """Send the request; return the time from ``time.perf_counter``."""
        at_s = time.perf_counter()
        self._buffer.transport.write(self._endpoint.request(self._body))
        return at_s

    async def events(self) -> AsyncGenerator[TimedEvent, None]:
        """Yield the events of the response up to its end. A JSON document instead of a stream is the only event.

        Raises:
            ConnectionLostError: the connection was closed before the end of the response.
            LabError: the server's error, or the server is not a chat-format server.
        """
        try:
            head, received = await self._read_head()
            if not (head.status == 200 and head.media_type == EVENT_STREAM):
                yield await self._read_document(head, b"".join(data for _, data in received))
                return
            decoder = EventDecoder()
            while received:
                for at_s, data in received:
                    for event in decoder.feed(head.decode(data)):
                        yield TimedEvent(at_s=at_s, data=None if isinstance(event, Remark) else event)
                if head.ended:
                    return
                received = await self._buffer.take()
            if not head.may_end:
                raise ConnectionResetError("the connection was closed")
        except OSError as exc:
            raise ConnectionLostError(
                f"{self._endpoint.url} closed the connection during the response ({exc!s:.200}); try again when the "
                "server is back"
            ) from exc
        except ValueError as exc:
            raise WrongServerError(
                f"the response of {self._endpoint.url} is not valid ({exc!s:.200}), unlike {CHAT_SERVER.kind}; {CHECK}"
            ) from exc

    async def _read_document(self, head: _ResponseHead, start: bytes) -> TimedEvent:
        """Read the complete body.

        Raises:
            LabError: the response is an error.
        """
        body = await self._read_body(head, start)
        if head.status != 200 or not head.media_type.endswith("json"):
            raise self._error_for(head, body)
        return TimedEvent(at_s=time.perf_counter(), data=body.decode(errors="replace"))

    async def _read_head(self) -> tuple[_ResponseHead, list[tuple[float, bytes]]]:
        """Return the head of the response, and the bytes after it with their times."""
        data = b""
        while True:
            received = await self._buffer.take()
            if not received:
                raise ConnectionLostError(
                    f"{self._endpoint.url} closed the connection before the response; try again when the server is back"
                )
            for number, (at_s, piece) in enumerate(received):
                data += piece
                head, blank, rest = data.partition(BLANK_LINE)
                if blank:
                    return _ResponseHead(head), [(at_s, rest), *received[number + 1 :]]
            if len(data) > MAX_HEAD_BYTES:
                raise ValueError(f"its head is longer than {MAX_HEAD_BYTES} bytes")

    async def _read_body(self, head: _ResponseHead, start: bytes) -> bytes:
        limit = LONG_BYTES if head.status == 200 else SHORT_BYTES
        body = bytearray(head.decode(start))
        while not head.ended and len(body) < limit and (received := await self._buffer.take()):
            body += b"".join(head.decode(data) for _, data in received)
        return bytes(body)

    def _error_for(self, head: _ResponseHead, body: bytes) -> LabError:
        return chat_server_error(
            UnexpectedResponse(
                url=self._endpoint.url,
                status=head.status,
                content_type=head.fields.get("content-type", ""),
                retry_after=head.fields.get("retry-after"),
                body=body,
                server=CHAT_SERVER,
            )
        )


class _ResponseHead:
    """The status and header fields of a response, and the state of decoding its body.

    Raises:
        ValueError: the response is not HTTP, or is compressed.
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
        if self.fields.get("content-encoding", "identity") != "identity":
            raise ValueError(f"it is compressed ({self.fields['content-encoding'][:40]}), which was not requested")
        self.media_type = self.fields.get("content-type", "").partition(";")[0].strip().lower()
        self._chunked = ChunkedDecoder() if self.fields.get("transfer-encoding", "").lower() == "chunked" else None
        length = self.fields.get("content-length")
        self._left = int(length) if self._chunked is None and length is not None else None

    def decode(self, data: bytes) -> bytes:
        """Return the bytes of the body in received bytes."""
        if self._chunked is not None:
            return self._chunked.feed(data)
        if self._left is not None:
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
