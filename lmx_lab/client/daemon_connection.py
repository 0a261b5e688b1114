"""Connect to one daemon, check its identity, and find it again after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import httpx2
from pydantic import BaseModel

from lmx_lab.client.connection import LONG_BYTES, QUICK_S, HttpConnection
from lmx_lab.client.credentials import Credentials, DaemonEndpoint
from lmx_lab.client.errors import DAEMON, was_sent
from lmx_lab.errors import (
    ConnectionLostError,
    InvalidRequestError,
    LabError,
    UnauthorizedError,
    UnreachableError,
    WrongServerError,
)
from lmx_lab.wire.daemon import Health

T = TypeVar("T")
Shape = TypeVar("Shape", bound=BaseModel)
HEALTH_PATH = "/v3/health"
HEALTH_S = 10.0
NO_CONTENT = 204
ResponseReader = Callable[[HttpConnection, httpx2.Response, bytes], T]


@dataclass(frozen=True, kw_only=True)
class DaemonRequest:
    """One request to the daemon."""

    method: str
    path: str
    content: bytes | None = None
    params: Mapping[str, str | list[str]] = field(default_factory=dict)
    within_s: float = QUICK_S
    """Time limit up to the last byte of the response."""
    repeatable: bool = False
    """Whether the request is idempotent, so that it can be sent again after a lost connection."""


class DaemonConnection:
    """Sends requests to the daemon that the credentials describe, on one event loop.

    The token is sent to an address from a state file only after the server there has identified itself as the daemon of
    that file. This check is repeated after each lost connection. If the daemon does not answer, or refuses the token,
    the state file is read again, and the request is sent to the new address.
    """

    def __init__(self, credentials: Credentials, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self.credentials = credentials
        self._transport = transport
        self._lock = asyncio.Lock()
        self._connection: HttpConnection | None = None
        self._endpoint: DaemonEndpoint | None = None
        """The daemon to which ``_connection`` leads."""
        self._is_verified = False
        self._closed = False

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()
        if self._transport is not None:
            await self._transport.aclose()

    async def connection(self) -> HttpConnection:
        """Check the daemon's identity, and return a connection to it.

        Raises:
            UnreachableError: no daemon answers, or a daemon other than that of the state file.
        """
        self._is_verified = False
        connection, _ = await self._connect()
        return connection

    async def request(self, request: DaemonRequest, shape: type[Shape]) -> Shape:
        """Send a request and return the parsed response.

        Raises:
            LabError: the daemon's error, of the class for its code; UnreachableError if it does not answer.
        """
        return await self._send(
            request, lambda connection, response, body: connection.parse_success(response, body, shape)
        )

    async def request_without_content(self, request: DaemonRequest) -> None:
        """Send a request whose response is empty.

        Raises:
            LabError: as ``request``.
        """
        await self._send(request, _check_no_content)

    async def health(self) -> Health:
        """Identify the daemon; needs no token."""
        connection, _ = await self._connect()
        return await _health(connection)

    async def _send(self, request: DaemonRequest, read: ResponseReader[T]) -> T:
        """Send a request, and send it again if another address is known or a connection that was kept open failed."""
        connection, endpoint = await self._connect()
        try:
            return await _send_once(connection, request, read)
        except (UnauthorizedError, UnreachableError) as exc:
            if not self._should_send_again(exc, endpoint, repeatable=request.repeatable):
                raise
            first = exc
        try:
            connection, _ = await self._connect()
            return await _send_once(connection, request, read)
        except UnreachableError as exc:
            if isinstance(first, UnreachableError) and was_sent(first) and not was_sent(exc):
                # The first request may have been executed, which the second error would hide.
                raise first from None
            raise

    def _should_send_again(self, error: LabError, endpoint: DaemonEndpoint, *, repeatable: bool) -> bool:
        if isinstance(error, UnauthorizedError):
            return self._has_moved(endpoint)
        self._is_verified = False
        if was_sent(error) and not repeatable:
            return False
        # The server may close an idle connection at the moment in which it is used again.
        return self._has_moved(endpoint) or (repeatable and isinstance(error, ConnectionLostError))

    def _has_moved(self, endpoint: DaemonEndpoint) -> bool:
        """Whether the daemon has another endpoint now. May read the state file."""
        return self.credentials.endpoint != endpoint or self.credentials.refresh()

    async def _connect(self) -> tuple[HttpConnection, DaemonEndpoint]:
        """Return a connection to the daemon's current address, and that address."""
        async with self._lock:
            endpoint = self.credentials.endpoint
            try:
                return await self._verified_connection(endpoint), endpoint
            except UnreachableError:
                if not self._has_moved(endpoint):
                    raise
            endpoint = self.credentials.endpoint
            return await self._verified_connection(endpoint), endpoint

    async def _verified_connection(self, endpoint: DaemonEndpoint) -> HttpConnection:
        connection = await self._open(endpoint)
        if endpoint.daemon_id is not None and not self._is_verified:
            await _check_identity(connection, endpoint.daemon_id)
            self._is_verified = True
        return connection

    async def _open(self, endpoint: DaemonEndpoint) -> HttpConnection:
        if self._closed:
            raise InvalidRequestError("this client was closed; create a new one")
        if self._connection is not None and self._endpoint == endpoint:
            return self._connection
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()
        self._is_verified = False
        transport = None if self._transport is None else _SharedTransport(self._transport)
        self._connection = HttpConnection(endpoint.url, api_key=endpoint.token, transport=transport, server=DAEMON)
        self._endpoint = endpoint
        return self._connection


class _SharedTransport(httpx2.AsyncBaseTransport):
    """A transport that stays open when a connection over it is closed; its owner closes it."""

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self._transport.handle_async_request(request)


async def _send_once(connection: HttpConnection, request: DaemonRequest, read: ResponseReader[T]) -> T:
    response, body = await connection.request(
        request.method,
        request.path,
        content=request.content,
        params=request.params,
        limit=LONG_BYTES,
        within_s=request.within_s,
    )
    return read(connection, response, body)


def _check_no_content(connection: HttpConnection, response: httpx2.Response, body: bytes) -> None:
    if response.status_code != NO_CONTENT:
        raise connection.error_for(response, body)


async def _health(connection: HttpConnection) -> Health:
    response, body = await connection.request("GET", HEALTH_PATH, within_s=HEALTH_S, with_key=False)
    return connection.parse_success(response, body, Health)


async def _check_identity(connection: HttpConnection, daemon_id: str) -> None:
    """Check that the server at this address is the daemon with this id.

    Raises:
        UnreachableError: it is another server, or does not answer.
    """
    try:
        found = (await _health(connection)).daemon_id
    except WrongServerError as exc:
        # Retryable: the daemon may be started again at another port.
        raise UnreachableError(f"{exc.message}. The token was not sent; start a daemon with {DAEMON.start}") from exc
    if found != daemon_id:
        raise UnreachableError(
            f"the daemon at {connection.url} is {found!r:.80}, but the state file is of {daemon_id}; the token was not "
            f"sent. It may belong to another user or another LMX_LAB_HOME; start your own with {DAEMON.start}"
        )
