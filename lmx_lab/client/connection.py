"""Connect to one server: requests, responses, server-sent events and WebSockets, with limits and translated errors.

``HttpConnection`` sends all requests of the clients. ``bench.http_stream`` has its own HTTP client, because
this one would use too much CPU time of the machine that is measured.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import secrets
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2
from httpx2.websockets import AsyncWebSocketSession
from pydantic import TypeAdapter, ValidationError

from lmx_lab.client.address import authorization_header, is_loopback, normalize_address
from lmx_lab.client.errors import (
    LAB_SERVER,
    ErrorReader,
    ServerDescription,
    UnexpectedResponse,
    lab_server_error,
    translated_errors,
    wrong_server_error,
)
from lmx_lab.client.sse import EVENT_STREAM, EventDecoder, Remark
from lmx_lab.errors import LabError, UnreachableError

Shape = TypeVar("Shape")
SHORT_BYTES = 100_000
"""Maximum size of an error body, and of a response with a few fields."""
LONG_BYTES = 64_000_000
"""Maximum size of a list of models, and of one text: ten million tokens, or 600,000 with log-probabilities."""
CONNECT_S = 5.0
QUICK_S = 30.0
"""Time limit of requests without computation, and between two events of a stream that has one per second."""
KEEPALIVE_S = 10.0
"""Idle time after which a connection is closed. Less than the 30 s of the server, which could otherwise close a
connection at the moment in which it is used again."""
MAX_CONNECTIONS = 256
WEBSOCKET_HEADERS = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
SWITCHING_PROTOCOLS = 101
WEBSOCKET_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""From RFC 6455, section 1.3."""
JSON = {"content-type": "application/json"}


class _Key(httpx2.Auth):
    """Adds the key to requests. No other object stores the key, so that tracebacks with local variables do not show
    it."""

    def __init__(self, key: str | None) -> None:
        self._headers = authorization_header(key)
        self.text = key

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        request.headers.update(self._headers)
        yield request


class HttpConnection:
    """Requests to one server, on one event loop, over pooled connections.

    Args:
        base_url: The address, optionally with a proxy's prefix, a trailing slash or ``/v1``.
        api_key: It is never displayed.
        transport: Replaces the network, for tests.
        timeout_s: Maximum time without data while the server computes; None waits as long as the connection exists.
        headers: Additional headers of each request.
        server: The kind of server that is expected at the address, for error messages.
        read_error: Returns the error for a response that is not a success.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        server: ServerDescription = LAB_SERVER,
        read_error: ErrorReader = lab_server_error,
    ) -> None:
        self.url = normalize_address(base_url)
        self._server = server
        self._key = _Key(api_key)
        self._read_error = read_error
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            auth=self._key,
            headers=headers,
            transport=transport,
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S),
            # Loading all certificates takes 30 ms or more, which plain HTTP does not need.
            verify=True if self.url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            # A proxy cannot reach this machine's loopback interface.
            trust_env=not is_loopback(self.url),
        )

    @property
    def api_key(self) -> str | None:
        """The key that is sent; None if there is none."""
        return self._key.text

    async def aclose(self) -> None:
        """Close all connections; the server stops its work for them. Idempotent."""
        await self._http.aclose()

    # Complete responses

    async def request(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        params: Mapping[str, str | list[str]] | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = SHORT_BYTES,
        within_s: float | None,
        with_key: bool = True,
    ) -> tuple[httpx2.Response, bytes]:
        """Send a request and return the response with its body of at most ``limit`` bytes.

        Args:
            within_s: Time limit up to the last byte of the response. None for requests that may compute for long, for
                which only the time without data is limited, by ``timeout_s``.
            with_key: Whether to send the key.
        """
        options: dict[str, Any] = {}
        if within_s is not None:
            options["timeout"] = httpx2.Timeout(within_s, connect=CONNECT_S, pool=None)
        headers = {**({} if content is None else JSON), **(headers or {})}
        request = self._http.build_request(method, path, content=content, params=params, headers=headers, **options)
        try:
            # The HTTP library limits only the time without data, which a server could extend by single bytes.
            async with asyncio.timeout(within_s):
                response = await self._send(request, with_key=with_key)
                try:
                    return response, await self._body(response, limit)
                finally:
                    await response.aclose()
        except TimeoutError:
            if within_s is None:
                raise
            message = f"the response of {self.url} was not complete within {within_s:g} s; {self._server.check}"
            raise UnreachableError(message) from None

    async def fetch(
        self,
        method: str,
        path: str,
        shape: type[Shape],
        *,
        content: bytes | None = None,
        params: Mapping[str, str | list[str]] | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = SHORT_BYTES,
        within_s: float | None = None,
        with_key: bool = True,
    ) -> Shape:
        """Send a request and parse the response. The arguments are those of ``request``.

        Raises:
            LabError: the response is not a success, or its body does not have this shape.
        """
        response, body = await self.request(
            method,
            path,
            content=content,
            params=params,
            headers=headers,
            limit=limit,
            within_s=within_s,
            with_key=with_key,
        )
        if not response.is_success:
            raise self.error_for(response, body)
        try:
            return TypeAdapter(shape).validate_json(body)
        except ValidationError as exc:
            raise self.error_for(response, body) from exc

    async def _send(self, request: httpx2.Request, *, with_key: bool = True) -> httpx2.Response:
        with translated_errors(self.url, server=self._server):
            return await self._http.send(request, stream=True, auth=self._key if with_key else None)

    async def _body(self, response: httpx2.Response, limit: int) -> bytes:
        body = await self._read_limited(response, limit if response.is_success else SHORT_BYTES)
        if response.is_success and len(body) > limit:
            raise UnreachableError(
                f"{self.url} answered with more than {limit} bytes, the limit for this request; {self._server.check}"
            )
        return body

    async def _read_limited(self, response: httpx2.Response, limit: int) -> bytes:
        """Read the body. Reading stops after the first piece that exceeds the limit."""
        body = bytearray()
        with translated_errors(self.url, has_begun=True, server=self._server):
            async with aclosing(response.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    body += chunk
                    if len(body) > limit:
                        break
        return bytes(body)

    # Streams

    async def events(
        self,
        method: str,
        path: str,
        *,
        content: bytes = b"",
        document_bytes: int | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> AsyncGenerator[str | Remark, None]:
        """Yield the events of a stream and its comments; closing the generator closes the connection.

        Args:
            document_bytes: Accept a JSON document of at most this size instead of a stream, and yield it as the only
                event. By default, a document is an error.
        """
        headers = {"accept": EVENT_STREAM, **(JSON if content else {}), **(headers or {})}
        # An absolute URL, because joining a relative one takes as long as the rest of building the request.
        request = self._http.build_request(
            method, _parse_url(self.url + path), content=content, headers=headers, **options
        )
        response = await self._send(request)
        try:
            if document_bytes is not None and response.is_success and _media_type(response).endswith("json"):
                yield (await self._body(response, document_bytes)).decode(errors="replace")
                return
            if not response.is_success or _media_type(response) != EVENT_STREAM:
                raise self.error_for(response, await self._read_limited(response, SHORT_BYTES))
            decoder = EventDecoder()
            with translated_errors(self.url, has_begun=True, server=self._server):
                async for chunk in response.aiter_bytes():
                    try:
                        events = decoder.feed(chunk)
                    except ValueError as exc:
                        raise self.invalid_event_error() from exc
                    for event in events:
                        yield event
        finally:
            await response.aclose()

    @asynccontextmanager
    async def websocket(
        self, path: str, params: Mapping[str, str | list[str]] | None = None, *, limit: int = LONG_BYTES
    ) -> AsyncGenerator[AsyncWebSocketSession, None]:
        """Open a WebSocket for the duration of the block.

        Failures after the opening raise exceptions of ``httpx2.websockets``. The time without data is not limited here.

        Args:
            limit: Maximum size of one message in bytes.

        Raises:
            LabError: the WebSocket was not opened: the server's own error, or UnreachableError.
        """
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        # RFC 6455, section 4.2.2.
        accept = base64.b64encode(hashlib.sha1(f"{key}{WEBSOCKET_GUID}".encode(), usedforsecurity=False).digest())
        request = self._http.build_request(
            "GET",
            path,
            params=params,
            headers={**WEBSOCKET_HEADERS, "sec-websocket-key": key},
            timeout=httpx2.Timeout(QUICK_S, connect=CONNECT_S, pool=None),
        )
        response = await self._send(request)
        try:
            accepted = response.headers.get("sec-websocket-accept") == accept.decode()
            if response.status_code != SWITCHING_PROTOCOLS or not accepted:
                raise self.error_for(response, await self._read_limited(response, SHORT_BYTES))
            stream = response.extensions["network_stream"]
            async with AsyncWebSocketSession(
                stream, max_message_size_bytes=limit, keepalive_ping_interval_seconds=None, response=response
            ) as socket:
                yield socket
        finally:
            await response.aclose()

    # Errors

    def error_for(self, response: httpx2.Response, body: bytes) -> LabError:
        """Return the error for a response that is not a success, or not the requested document."""
        return self._read_error(self.describe_response(response, body))

    def describe_response(self, response: httpx2.Response, body: bytes) -> UnexpectedResponse:
        """Return the facts about a response that error messages contain."""
        headers: Mapping[str, str] = response.headers
        return UnexpectedResponse(
            url=self.url,
            status=response.status_code,
            content_type=headers.get("content-type", ""),
            retry_after=headers.get("retry-after"),
            body=body,
            server=self._server,
        )

    def invalid_event_error(self) -> UnreachableError:
        """Return the error for an event that this kind of server does not send."""
        return wrong_server_error(
            UnexpectedResponse(
                url=self.url, status=200, content_type=EVENT_STREAM, retry_after=None, body=b"", server=self._server
            )
        )


class AsyncClientBase(ABC):
    """The part that all async clients share: ``async with`` closes the connections at its end."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The server's address."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close all connections. Idempotent."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


@functools.lru_cache(maxsize=64)
def _parse_url(url: str) -> httpx2.URL:
    return httpx2.URL(url)


def _media_type(response: httpx2.Response) -> str:
    content_type: str = response.headers.get("content-type", "")
    return content_type.partition(";")[0].strip().lower()
