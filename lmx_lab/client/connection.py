"""HTTP to one server: requests, answers, server-sent events and WebSockets, with limits and translated errors."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import httpx2
from httpx2.websockets import AsyncWebSocketSession
from pydantic import BaseModel, ValidationError

from lmx_lab.client.address import bearer, is_loopback, server_address
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

Shape = TypeVar("Shape", bound=BaseModel)
SHORT_BYTES = 100_000
"""Maximum size of an error body, and of an answer with a few fields."""
LONG_BYTES = 64_000_000
"""Maximum size of a list of models, and of one text: ten million tokens, or 600,000 with log-probabilities."""
CONNECT_S = 5.0
QUICK_S = 30.0
"""Time limit of requests without computation, and between two events of a stream that has one per second."""
# Less than the 30 s of the server, which must not close a connection that is just being used again.
IDLE_S = 10.0
CONNECTIONS = 256
UPGRADE = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
SWITCHED = 101
RFC_6455 = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
JSON = {"content-type": "application/json"}


class _Key(httpx2.Auth):
    """Adds the key to requests. No other object holds it, so that tracebacks with values do not show it."""

    def __init__(self, key: str | None) -> None:
        self._headers = bearer(key)

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
        server: The server that is expected there.
        read_error: Makes an error from a response that is not a success.

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
        server: ServerDescription = LAB_SERVER,
        read_error: ErrorReader = lab_server_error,
    ) -> None:
        self.url = server_address(base_url)
        self._server = server
        self._key = _Key(api_key)
        self._read_error = read_error
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            auth=self._key,
            transport=transport,
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_S),
            # Loading all certificates takes 30 ms or more, which plain HTTP does not need.
            verify=True if self.url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            # A proxy cannot reach this machine's loopback interface.
            trust_env=not is_loopback(self.url),
        )

    async def aclose(self) -> None:
        """Close all connections; the server stops its work for them. Idempotent."""
        await self._http.aclose()

    # Complete answers

    async def get(self, path: str, *, limit: int = SHORT_BYTES) -> tuple[httpx2.Response, bytes]:
        """GET an answer of at most ``limit`` bytes within ``QUICK_S``, for requests without computation."""
        return await self.ask("GET", path, limit=limit, within_s=QUICK_S)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        params: Mapping[str, str | list[str]] | None = None,
        limit: int = SHORT_BYTES,
        within_s: float,
        with_key: bool = True,
    ) -> tuple[httpx2.Response, bytes]:
        """Send a request and return the response with its body of at most ``limit`` bytes.

        Args:
            within_s: Time limit up to the last byte of the answer.
            with_key: Whether the key is sent.
        """
        timeout = httpx2.Timeout(within_s, connect=CONNECT_S, pool=None)
        headers = {} if content is None else JSON
        request = self._http.build_request(
            method, path, content=content, params=params, headers=headers, timeout=timeout
        )
        try:
            # A limit for the whole answer: a server that sends a byte now and then is never silent.
            async with asyncio.timeout(within_s):
                return await self._fetch(request, limit, with_key=with_key)
        except TimeoutError as exc:
            said = f"{self.url} has not answered whole within {within_s:g} s; {self._server.check}"
            raise UnreachableError(said) from exc

    async def post(self, path: str, content: bytes, shape: type[Shape], *, limit: int = SHORT_BYTES) -> Shape:
        response, text = await self._fetch(self._http.build_request("POST", path, content=content, headers=JSON), limit)
        return self.whole(response, text, shape)

    async def _fetch(
        self, request: httpx2.Request, limit: int, *, with_key: bool = True
    ) -> tuple[httpx2.Response, bytes]:
        """Return a response and its body; no more than ``limit`` bytes are read."""
        response = await self._send(request, with_key=with_key)
        try:
            return response, await self._body(response, limit)
        finally:
            await response.aclose()

    async def _send(self, request: httpx2.Request, *, with_key: bool = True) -> httpx2.Response:
        with translated_errors(self.url, server=self._server):
            return await self._http.send(request, stream=True, auth=self._key if with_key else None)

    async def _body(self, response: httpx2.Response, limit: int) -> bytes:
        text = await self.beginning(response, limit if response.is_success else SHORT_BYTES)
        if response.is_success and len(text) > limit:
            raise UnreachableError(
                f"{self.url} answered with more than {limit} bytes, which no answer to this request can have; "
                f"{self._server.check}"
            )
        return text

    async def beginning(self, response: httpx2.Response, limit: int) -> bytes:
        """Read the body; of a longer one a little more than the limit."""
        body = bytearray()
        with translated_errors(self.url, begun=True, server=self._server):
            async with aclosing(response.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    body += chunk
                    if len(body) > limit:
                        break
        return bytes(body)

    def whole(self, response: httpx2.Response, text: bytes, shape: type[Shape]) -> Shape:
        """Parse the body of a successful response; raises the error of any other."""
        if not response.is_success:
            raise self.refused(response, text)
        return self.read(response, text, shape)

    def read(self, response: httpx2.Response, text: bytes, shape: type[Shape]) -> Shape:
        """Parse the body of a response, whatever its status."""
        try:
            return shape.model_validate_json(text)
        except ValidationError as exc:
            raise self.refused(response, text) from exc

    # Streams

    async def events(
        self, method: str, path: str, *, content: bytes = b"", whole_bytes: int | None = None, **options: Any
    ) -> AsyncGenerator[str | Remark, None]:
        """Return the events of a stream and its comments; closing the generator closes the connection.

        Args:
            whole_bytes: Maximum size of a JSON document in place of a stream, which is returned as its only event. By
                default a document is an error.
        """
        headers = {"accept": EVENT_STREAM, **(JSON if content else {})}
        request = self._http.build_request(method, path, content=content, headers=headers, **options)
        response = await self._send(request)
        try:
            if whole_bytes is not None and response.is_success and _kind(response).endswith("json"):
                yield (await self._body(response, whole_bytes)).decode(errors="replace")
                return
            await self._check_stream(response)
            decoder = EventDecoder()
            with translated_errors(self.url, begun=True, server=self._server):
                async for chunk in response.aiter_bytes():
                    for event in self._fed(decoder, chunk):
                        yield event
        finally:
            await response.aclose()

    @asynccontextmanager
    async def websocket(
        self, path: str, params: Mapping[str, str | list[str]] | None = None, *, limit: int = LONG_BYTES
    ) -> AsyncGenerator[AsyncWebSocketSession, None]:
        """Open a WebSocket for the duration of the block.

        Later failures are exceptions of ``httpx2.websockets``; the reader has to limit the time without data.

        Args:
            limit: Maximum size of one message in bytes.

        Raises:
            LabError: the WebSocket was not opened: the server's own error, or UnreachableError.
        """
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        request = self._http.build_request(
            "GET",
            path,
            params=params,
            headers={**UPGRADE, "sec-websocket-key": key},
            timeout=httpx2.Timeout(QUICK_S, connect=CONNECT_S, pool=None),
        )
        response = await self._send(request)
        try:
            if response.status_code != SWITCHED or response.headers.get("sec-websocket-accept") != _accepted(key):
                raise self.refused(response, await self.beginning(response, SHORT_BYTES))
            stream = response.extensions["network_stream"]
            async with AsyncWebSocketSession(
                stream, max_message_size_bytes=limit, keepalive_ping_interval_seconds=None, response=response
            ) as socket:
                yield socket
        finally:
            await response.aclose()

    async def _check_stream(self, response: httpx2.Response) -> None:
        if response.is_success and _kind(response) == EVENT_STREAM:
            return
        raise self.refused(response, await self.beginning(response, SHORT_BYTES))

    def _fed(self, decoder: EventDecoder, chunk: bytes) -> list[str | Remark]:
        try:
            return decoder.feed(chunk)
        except ValueError as exc:
            raise self.unreadable() from exc

    # Failures

    def refused(self, response: httpx2.Response, body: bytes) -> LabError:
        """The error for a response that is not a success, or not the requested document."""
        return self._read_error(self.unexpected(response, body))

    def unexpected(self, response: httpx2.Response, body: bytes) -> UnexpectedResponse:
        """Describe a response for an error."""
        headers: Mapping[str, str] = response.headers
        return UnexpectedResponse(
            url=self.url,
            status=response.status_code,
            kind=headers.get("content-type", ""),
            retry_after=headers.get("retry-after"),
            body=body,
            server=self._server,
        )

    def unreadable(self) -> UnreachableError:
        """The error for an event that such a server does not send."""
        return wrong_server_error(
            UnexpectedResponse(
                url=self.url, status=200, kind=EVENT_STREAM, retry_after=None, body=b"", server=self._server
            )
        )


def _accepted(key: str) -> str:
    """The value that RFC 6455, section 4.2.2, requires in the server's answer."""
    return base64.b64encode(hashlib.sha1(f"{key}{RFC_6455}".encode(), usedforsecurity=False).digest()).decode()


def _kind(response: httpx2.Response) -> str:
    content_type: str = response.headers.get("content-type", "")
    return content_type.partition(";")[0].strip().lower()
