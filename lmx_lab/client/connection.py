"""Connect to one server: addresses, requests, responses, server-sent events and WebSockets, with limits and errors.

``HttpConnection`` sends all requests of the clients. ``bench.http_stream`` has its own HTTP client, because
this one would use too much CPU time of the machine that is measured.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import ipaddress
import secrets
import ssl
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, Protocol, Self, TypeVar, cast, get_args

import httpx2
import pydantic_core
from httpx2.websockets import AsyncWebSocketSession
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from lmx_lab.errors import (
    ERROR_CLASSES,
    ConnectionLostError,
    CursorExpiredError,
    InvalidRequestError,
    LabError,
    UnauthorizedError,
    UnreachableError,
    WrongServerError,
)
from lmx_lab.wire.errors import Expiry

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
CLOSE_S = 2.0
"""Maximum wait for closing a WebSocket whose other end does not respond."""
JSON = {"content-type": "application/json"}
EVENT_STREAM = "text/event-stream"


# Addresses and keys


def normalize_address(text: str) -> str:
    """Return the address of a server: scheme, host, port and a proxy's prefix, without a trailing slash.

    ``http://`` may be missing. ``/v1`` at the end, as other chat clients expect it, is removed.

    Raises:
        InvalidRequestError: the text is not an address, or contains a password or a query. The message shows neither
            of these.
    """
    given = text.strip()
    if len(given) > 2000:
        raise _invalid(f"the address has {len(given)} characters; the limit is 2000")
    if "?" in given or "#" in given:
        raise _invalid(
            "the address has a part after '?' or '#'; remove that part, and give a key or Jupyter's token as api_key"
        )
    if "@" in given:
        raise _invalid("the address has a name or a password before '@'; remove it, and give the key as api_key")
    try:
        url = httpx2.URL(given if "://" in given else f"http://{given}")
    except httpx2.InvalidURL as exc:
        raise _invalid(f"{given[:200]!r} is not an address: {exc}; give one such as http://127.0.0.1:8400") from None
    if url.scheme not in ("http", "https") or not url.host or not (url.port is None or 0 < url.port < 65536):
        raise _invalid(f"{given[:200]!r} is not the address of a web server, such as http://127.0.0.1:8400")
    return str(url.copy_with(path=url.path.rstrip("/").removesuffix("/v1").rstrip("/") or "/")).rstrip("/")


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"url: {message}", param="url")


def is_loopback(address: str) -> bool:
    """Whether the address is on this machine's loopback interface."""
    host = httpx2.URL(address).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def authorization_header(key: str | None, *, name: str = "api_key") -> dict[str, str]:
    """Return the header that sends the key; no header without a key.

    Args:
        name: The argument with which the caller gave the key, for the error message.

    Raises:
        InvalidRequestError: the key cannot be sent in a header. The message does not show it.
    """
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable() and key.split() == [key]):
        raise InvalidRequestError(
            f"{name} must consist of printable ASCII characters without spaces; omit it to send no key", param=name
        )
    return {"authorization": f"Bearer {key}"}


# Errors


@dataclass(frozen=True, kw_only=True)
class ServerDescription:
    """The kind of server that is expected at an address, as error messages describe it."""

    kind: str = "an LMX Lab server"
    start: str = "lmx-lab serve"
    """The command that starts it."""
    check: str = "check the address; the lab's server prints it when it starts"
    """The next step if the server runs but does not answer."""
    key: str = "api_key=KEY"
    """The argument with which Python callers give its key."""


LAB_SERVER = ServerDescription()


@dataclass(frozen=True, kw_only=True)
class UnexpectedResponse:
    """A response that is an error, or not the requested document."""

    url: str
    """The server's address."""
    status: int
    content_type: str
    retry_after: str | None
    body: bytes
    server: ServerDescription = LAB_SERVER


ErrorReader = Callable[[UnexpectedResponse], LabError]


def lab_server_error(response: UnexpectedResponse) -> LabError:
    """Return the error for an unexpected response of an LMX Lab server."""
    error = parse_error(response.body, retry_after=response.retry_after, server=response.server)
    return error or wrong_server_error(response)


def parse_error(
    text: str | bytes, *, retry_after: str | None = None, server: ServerDescription = LAB_SERVER
) -> LabError | None:
    """Parse an error body, or the error event of a stream. Returns None if the text is neither."""
    try:
        body: Any = pydantic_core.from_json(text)
    except ValueError:
        return None
    detail = body.get("error") if isinstance(body, Mapping) else None
    message = detail.get("message") if isinstance(detail, Mapping) else None
    if not isinstance(detail, Mapping) or not isinstance(message, str):
        return None
    code, param = detail.get("code"), detail.get("param")
    kind = ERROR_CLASSES.get(code) if isinstance(code, str) else None
    if kind is None and code is not None:
        message = f"{message} ({code!s:.80})"
    if kind is UnauthorizedError:
        message = f"{message}; in Python, give {server.key}"
    param = param if isinstance(param, str) else None
    retry_after_s = read_retry_after(retry_after)
    if kind is CursorExpiredError and (reason := detail.get("reason")) in get_args(Expiry):
        return CursorExpiredError(message, reason=cast(Expiry, reason), param=param, retry_after_s=retry_after_s)
    return (kind or LabError)(message, param=param, retry_after_s=retry_after_s)


def read_retry_after(text: str | None) -> float | None:
    """Return the seconds in a Retry-After header. A date, which a proxy may send, is ignored."""
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def wrong_server_error(response: UnexpectedResponse) -> UnreachableError:
    """Return the error for a response of another program, a proxy or a login page."""
    content_type = response.content_type.partition(";")[0].strip()[:200] or "no content type"
    if 300 <= response.status < 400 or response.status in (401, 403):
        hint = "a proxy or login page before the server asks for a login: give its token as the key, or use the "
        hint += "server's own address"
    elif response.status in (500, 502, 503, 504):
        hint = "a proxy answers, but not the server behind it; check that the server is running"
    else:
        hint = response.server.check
    message = f"{response.url} answered {response.status} with {content_type}, unlike {response.server.kind}; {hint}"
    error = UnreachableError if response.status >= 500 else WrongServerError
    return error(message, retry_after_s=read_retry_after(response.retry_after))


@contextmanager
def translated_errors(url: str, *, has_begun: bool = False, server: ServerDescription = LAB_SERVER) -> Iterator[None]:
    """Translate errors of the HTTP library raised in the block, to errors with the address and the next step.

    Args:
        has_begun: Whether part of the response has been received.

    Raises:
        UnreachableError: there is no complete response.
        InvalidRequestError: the request cannot be sent.
    """
    try:
        yield
    # The causes are suppressed: the HTTP library's traceback has a hundred lines, and the message contains the reason.
    except httpx2.ConnectTimeout:
        message = f"{url} did not accept the connection in time; check the address, and that its machine is reachable"
        raise UnreachableError(message) from None
    except (httpx2.ConnectError, httpx2.ProxyError, httpx2.UnsupportedProtocol) as exc:
        message = f"nothing answers at {url} ({exc!s:.200}); start the server ({server.start}), or {server.check}"
        raise UnreachableError(message) from None
    except httpx2.TimeoutException:
        raise UnreachableError(f"{url} sent nothing within the time limit; try again, or raise timeout_s") from None
    except httpx2.LocalProtocolError:
        # Without the library's message, which may contain the value of a field, such as a key.
        raise InvalidRequestError(
            f"the request to {url} cannot be sent: the name or value of a header field has a character that HTTP does "
            "not allow, such as a line break; correct the additional headers"
        ) from None
    except httpx2.DecodingError as exc:
        raise UnreachableError(f"the response of {url} cannot be decoded ({exc!s:.200}); {server.check}") from exc
    except httpx2.TransportError as exc:
        when = "during the response" if has_begun else "before the response"
        reason = f"{exc!s:.200}" or type(exc).__name__
        raise ConnectionLostError(
            f"{url} closed the connection {when} ({reason}); try again when the server is back"
        ) from None


def was_sent(error: LabError) -> bool:
    """Whether a request that ended with this error may have reached a server."""
    return not isinstance(error.__context__, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError)


# Bodies of requests


def encode_body(body: BaseModel) -> bytes:
    """Return the body as JSON, with only the fields that were set: an older server may not know new ones.

    Raises:
        InvalidRequestError: a value cannot be written as JSON.
    """
    try:
        # pydantic warns about unions whose members are chosen by a validator, but serializes them correctly.
        return body.model_dump_json(by_alias=True, exclude_unset=True, warnings="none").encode()
    except PydanticSerializationError as exc:
        raise InvalidRequestError(
            f"the request cannot be written as JSON: {exc!s:.200}; give plain Python values"
        ) from None


# Server-sent events


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A comment in the stream: the state of a request that has no output yet, such as ``prompt 512/7000 tokens``."""

    text: str


class EventDecoder:
    """Decodes the data of events, and comments. Event names, ids and retry times are ignored.

    An event is complete when the blank line after it has arrived. Only LF and CRLF end a line: JSON may contain the
    other characters that are line ends elsewhere. The benchmark decodes each token, so this has to be fast.

    Args:
        max_event_bytes: Maximum size of one event.
    """

    def __init__(self, max_event_bytes: int = 4_000_000) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._pending_bytes = 0

    def feed(self, chunk: bytes) -> list[str | Remark]:
        """Add bytes, and return the events and comments that are complete.

        Raises:
            ValueError: an event is larger than ``max_event_bytes``.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found: list[str | Remark] = []
        for line in lines:
            text = line[:-1] if line.endswith(b"\r") else line
            if not text:
                if self._data:
                    found.append(b"\n".join(self._data).decode(errors="replace"))
                    self._data.clear()
                    self._pending_bytes = 0
            elif text.startswith(b"data:"):
                self._add_data(text[6:] if text.startswith(b"data: ") else text[5:])
            elif text.startswith(b":"):
                found.append(Remark(text=text[1:].removeprefix(b" ").decode(errors="replace")))
            elif text == b"data":
                self._add_data(b"")
        if self._pending_bytes + len(self._rest) > self._max_event_bytes:
            raise ValueError(f"a server-sent event has more than {self._max_event_bytes} bytes")
        return found

    def _add_data(self, data: bytes) -> None:
        self._data.append(data)
        # Counting the line end limits the number of empty lines as well.
        self._pending_bytes += len(data) + 1


# Connections


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
            limits=httpx2.Limits(max_connections=256, keepalive_expiry=KEEPALIVE_S),
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
        content: BaseModel | bytes | None = None,
        params: Mapping[str, str | list[str]] | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = SHORT_BYTES,
        within_s: float | None,
        with_key: bool = True,
    ) -> tuple[httpx2.Response, bytes]:
        """Send a request and return the response with its body of at most ``limit`` bytes.

        Args:
            content: The body, or its bytes.
            within_s: Time limit up to the last byte of the response. None for requests that may compute for long, for
                which only the time without data is limited, by ``timeout_s``.
            with_key: Whether to send the key.
        """
        options: dict[str, Any] = {}
        if within_s is not None:
            options["timeout"] = httpx2.Timeout(within_s, connect=CONNECT_S, pool=None)
        headers = {**({} if content is None else JSON), **(headers or {})}
        sent = encode_body(content) if isinstance(content, BaseModel) else content
        request = self._http.build_request(method, path, content=sent, params=params, headers=headers, **options)
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
        content: BaseModel | bytes | None = None,
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
            if document_bytes is not None and response.is_success and media_type(response.headers).endswith("json"):
                yield (await self._body(response, document_bytes)).decode(errors="replace")
                return
            if not response.is_success or media_type(response.headers) != EVENT_STREAM:
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
        # RFC 6455, sections 1.3 and 4.2.2.
        hashed = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode(), usedforsecurity=False)
        accept = base64.b64encode(hashed.digest())
        request = self._http.build_request(
            "GET",
            path,
            params=params,
            headers={
                "connection": "upgrade",
                "upgrade": "websocket",
                "sec-websocket-version": "13",
                "sec-websocket-key": key,
            },
            timeout=httpx2.Timeout(QUICK_S, connect=CONNECT_S, pool=None),
        )
        response = await self._send(request)
        try:
            accepted = response.headers.get("sec-websocket-accept") == accept.decode()
            if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS or not accepted:
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


class Connection(Protocol):
    """Connections to one server."""

    @property
    def url(self) -> str: ...

    async def aclose(self) -> None: ...


ConnectionType = TypeVar("ConnectionType", bound=Connection)


class AsyncClientBase(Generic[ConnectionType]):
    """The part that all async clients share: ``async with`` closes the connections at its end."""

    def __init__(self, connection: ConnectionType) -> None:
        self._connection = connection

    @property
    def url(self) -> str:
        """The server's address at the time of the last request."""
        return self._connection.url

    async def aclose(self) -> None:
        """Close all connections; the server stops its work for them. Idempotent."""
        await self._connection.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


_parse_url = functools.lru_cache(maxsize=64)(httpx2.URL)


def media_type(headers: httpx2.Headers) -> str:
    """Return the media type of a response without its parameters, in lower case."""
    content_type: str = headers.get("content-type", "")
    return content_type.partition(";")[0].strip().lower()
