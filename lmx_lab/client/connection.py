"""One server over HTTP: requests, whole answers and server-sent events, all bounded, every failure in plain words."""

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
"""A refusal, and an answer of a few fields."""
LONG_BYTES = 64_000_000
"""The list of models, and one text: that is ten million tokens, or 600,000 with the probability of each."""
CONNECT_S = 5.0
QUICK_S = 30.0
"""For the whole of what computes nothing, and between two events, of which there is one a second."""
# The server keeps an idle connection for 30 s: it must not close one that is just being used again.
IDLE_S = 10.0
CONNECTIONS = 256
UPGRADE = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
SWITCHED = 101
RFC_6455 = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
JSON = {"content-type": "application/json"}


class _Key(httpx2.Auth):
    """A key on its way into a request. It is in no other object that a traceback with values would show."""

    def __init__(self, key: str | None) -> None:
        self._headers = bearer(key)

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        request.headers.update(self._headers)
        yield request


class HttpConnection:
    """Requests to one server, on one loop, over connections that are kept for a while.

    Args:
        base_url: With or without a proxy's prefix, a slash or ``/v1`` at its end.
        api_key: It is shown nowhere.
        transport: In the place of the network.
        timeout_s: The longest silence while the server computes; None waits as long as the connection is there.
        server: The server that is expected there.
        read_error: What an answer that is no success means.

    Raises:
        InvalidRequestError: an address or a key that could never do.
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
            # Reading all certificates takes 30 ms and more, which a plain address needs for nothing.
            verify=True if self.url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            # A proxy for the web cannot reach this machine's own server.
            trust_env=not is_loopback(self.url),
        )

    async def aclose(self) -> None:
        """Close all connections, which ends what the server computes for them. Idempotent."""
        await self._http.aclose()

    # Whole answers

    async def get(self, path: str, *, limit: int = SHORT_BYTES) -> tuple[httpx2.Response, bytes]:
        """What a server knows without computing, of at most ``limit`` bytes, within ``QUICK_S``."""
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
        """Whatever is answered, and its body of at most ``limit`` bytes.

        Args:
            within_s: To the last byte of the answer.
            with_key: Without it, it asks as a stranger does.
        """
        timeout = httpx2.Timeout(within_s, connect=CONNECT_S, pool=None)
        headers = {} if content is None else JSON
        request = self._http.build_request(
            method, path, content=content, params=params, headers=headers, timeout=timeout
        )
        try:
            # Also of all bytes together: one that says a little all the time is never silent.
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
        """An answer and its body, of which no more is read than it may have."""
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
        """The body, or of a longer one a little more than the limit."""
        body = bytearray()
        with translated_errors(self.url, begun=True, server=self._server):
            async with aclosing(response.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    body += chunk
                    if len(body) > limit:
                        break
        return bytes(body)

    def whole(self, response: httpx2.Response, text: bytes, shape: type[Shape]) -> Shape:
        if not response.is_success:
            raise self.refused(response, text)
        return self.read(response, text, shape)

    def read(self, response: httpx2.Response, text: bytes, shape: type[Shape]) -> Shape:
        try:
            return shape.model_validate_json(text)
        except ValidationError as exc:
            raise self.refused(response, text) from exc

    # Streams

    async def events(
        self, method: str, path: str, *, content: bytes = b"", whole_bytes: int | None = None, **options: Any
    ) -> AsyncGenerator[str | Remark, None]:
        """The events of a stream and its comments; closing this closes the connection.

        Args:
            whole_bytes: The length that a JSON document may have which comes in the stream's place, and is given as
                its only event. By default none may come.
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
        """A WebSocket for the time of the block. What breaks it later is of ``httpx2.websockets``; its silence is the
        reader's to end.

        Args:
            limit: The bytes of one message.

        Raises:
            LabError: it was not opened: the server's own, or UnreachableError.
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
        """The error of an answer that is no success, or not what was asked for."""
        return self._read_error(self.answer(response, body))

    def answer(self, response: httpx2.Response, body: bytes) -> UnexpectedResponse:
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
        """Of an event that is none of such a server."""
        return wrong_server_error(
            UnexpectedResponse(
                url=self.url, status=200, kind=EVENT_STREAM, retry_after=None, body=b"", server=self._server
            )
        )


def _accepted(key: str) -> str:
    """What RFC 6455, section 4.2.2, has a server answer: whatever else answers 101 is none."""
    return base64.b64encode(hashlib.sha1(f"{key}{RFC_6455}".encode(), usedforsecurity=False).digest()).decode()


def _kind(response: httpx2.Response) -> str:
    content_type: str = response.headers.get("content-type", "")
    return content_type.partition(";")[0].strip().lower()
