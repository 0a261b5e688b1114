"""Send one streamed request over a separate connection, in plain asyncio, and record the time of each event.

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
from lmx_lab.client.plain_http import ReceiveBuffer, ResponseHead
from lmx_lab.client.sse import EVENT_STREAM, EventDecoder, Remark
from lmx_lab.errors import ConnectionLostError, UnreachableError, WrongServerError


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedEvent:
    """A server-sent event with its time of arrival."""

    at_s: float
    """Time at which its last byte was received, from ``time.perf_counter``."""
    data: str | None
    """The event's data; None for a comment."""


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
                    ReceiveBuffer, endpoint.host, endpoint.port, ssl=endpoint.context
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
            head, received = await self._buffer.take_head()
            if (coding := head.fields.get("content-encoding", "identity")) != "identity":
                raise ValueError(f"it is compressed ({coding[:40]}), which was not requested")
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
        except EOFError as exc:
            raise ConnectionLostError(
                f"{self._endpoint.url} closed the connection before the response; try again when the server is back"
            ) from exc
        except OSError as exc:
            raise ConnectionLostError(
                f"{self._endpoint.url} closed the connection during the response ({exc!s:.200}); try again when the "
                "server is back"
            ) from exc
        except ValueError as exc:
            raise WrongServerError(
                f"the response of {self._endpoint.url} is not valid ({exc!s:.200}), unlike {CHAT_SERVER.kind}; {CHECK}"
            ) from exc

    async def _read_document(self, head: ResponseHead, start: bytes) -> TimedEvent:
        """Read the complete body.

        Raises:
            LabError: the response is an error.
        """
        limit = LONG_BYTES if head.status == 200 else SHORT_BYTES
        body = bytearray(head.decode(start))
        while not head.ended and len(body) < limit and (received := await self._buffer.take()):
            body += b"".join(head.decode(data) for _, data in received)
        if head.status == 200 and head.media_type.endswith("json"):
            return TimedEvent(at_s=time.perf_counter(), data=body.decode(errors="replace"))
        raise chat_server_error(
            UnexpectedResponse(
                url=self._endpoint.url,
                status=head.status,
                content_type=head.fields.get("content-type", ""),
                retry_after=head.fields.get("retry-after"),
                body=bytes(body),
                server=CHAT_SERVER,
            )
        )
