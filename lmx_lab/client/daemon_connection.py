"""Connects to one daemon, checks its identity, and finds it again after a restart."""

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
HEALTH = "/v3/health"
HEALTH_S = 10.0
NO_CONTENT = 204
Read = Callable[[HttpConnection, httpx2.Response, bytes], T]


@dataclass(frozen=True, kw_only=True)
class DaemonRequest:
    """One request to the daemon."""

    method: str
    path: str
    content: bytes | None = None
    params: Mapping[str, str | list[str]] = field(default_factory=dict)
    within_s: float = QUICK_S
    repeatable: bool = False
    """Whether the request is idempotent."""


class DaemonConnection:
    """Sends requests to the daemon that the credentials name, on one event loop.

    The token is sent to an address from a state file only after the server there has identified itself as the daemon of
    that file; this check is repeated after each lost connection. If the daemon does not answer, or refuses the token,
    the state file is read again, and the request is sent to the new address.
    """

    def __init__(self, credentials: Credentials, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self.credentials = credentials
        self._transport = transport
        self._gate = asyncio.Lock()
        self._connection: HttpConnection | None = None
        self._endpoint: DaemonEndpoint | None = None
        """Target of the connection."""
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
        """Return a connection to the daemon, whose identity was checked just now.

        Raises:
            UnreachableError: no daemon answers, or another one than the state file names.
        """
        self._is_verified = False
        connection, _ = await self._reach()
        return connection

    async def ask(self, request: DaemonRequest, shape: type[Shape]) -> Shape:
        """Send a request and return the answer.

        Raises:
            LabError: the daemon's own, by its code; UnreachableError if it does not answer.
        """
        return await self._ask(request, lambda connection, response, text: connection.whole(response, text, shape))

    async def send(self, request: DaemonRequest) -> None:
        """Send a request whose answer is empty."""
        await self._ask(request, _nothing)

    async def health(self) -> Health:
        """Return which daemon answers; needs no token."""
        connection, _ = await self._reach()
        return await _health(connection)

    # Addresses

    async def _ask(self, request: DaemonRequest, read: Read[T]) -> T:
        connection, endpoint = await self._reach()
        try:
            return await _send(connection, request, read)
        except (UnauthorizedError, UnreachableError) as exc:
            if not self._is_worth_another(exc, endpoint, repeatable=request.repeatable):
                raise
            first = exc
        try:
            connection, _ = await self._reach()
            return await _send(connection, request, read)
        except UnreachableError as exc:
            if isinstance(first, UnreachableError) and was_sent(first) and not was_sent(exc):
                # The first request may have arrived, so the second error must not hide it.
                raise first from first.__cause__
            raise

    def _is_worth_another(self, error: LabError, endpoint: DaemonEndpoint, *, repeatable: bool) -> bool:
        if isinstance(error, UnauthorizedError):
            return self._is_elsewhere(endpoint)
        self._is_verified = False
        if was_sent(error) and not repeatable:
            return False
        # A kept connection may be closed by the server just when it is used again.
        return self._is_elsewhere(endpoint) or (repeatable and isinstance(error, ConnectionLostError))

    def _is_elsewhere(self, endpoint: DaemonEndpoint) -> bool:
        return self.credentials.endpoint != endpoint or self.credentials.refresh()

    async def _reach(self) -> tuple[HttpConnection, DaemonEndpoint]:
        """Return a connection to the daemon's current address, and that address."""
        async with self._gate:
            endpoint = self.credentials.endpoint
            try:
                return await self._verified_connection(endpoint), endpoint
            except UnreachableError:
                if not self._is_elsewhere(endpoint):
                    raise
            endpoint = self.credentials.endpoint
            return await self._verified_connection(endpoint), endpoint

    async def _verified_connection(self, endpoint: DaemonEndpoint) -> HttpConnection:
        connection = await self._connected(endpoint)
        if endpoint.daemon_id is not None and not self._is_verified:
            await _check(connection, endpoint.daemon_id)
            self._is_verified = True
        return connection

    async def _connected(self, endpoint: DaemonEndpoint) -> HttpConnection:
        if self._closed:
            raise InvalidRequestError("this client is closed; make a new one")
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
    """A transport that is closed by its owner, not with the connection."""

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self._transport.handle_async_request(request)


async def _send(connection: HttpConnection, request: DaemonRequest, read: Read[T]) -> T:
    response, text = await connection.ask(
        request.method,
        request.path,
        content=request.content,
        params=request.params,
        limit=LONG_BYTES,
        within_s=request.within_s,
    )
    return read(connection, response, text)


def _nothing(connection: HttpConnection, response: httpx2.Response, text: bytes) -> None:
    if response.status_code != NO_CONTENT:
        raise connection.refused(response, text)


async def _health(connection: HttpConnection) -> Health:
    response, text = await connection.ask("GET", HEALTH, within_s=HEALTH_S, with_key=False)
    return connection.whole(response, text, Health)


async def _check(connection: HttpConnection, daemon_id: str) -> None:
    try:
        found = (await _health(connection)).daemon_id
    except WrongServerError as exc:
        # Retryable: the daemon may be started again at another port.
        raise UnreachableError(f"{exc.message}. The token was not sent; start a daemon with {DAEMON.start}") from exc
    if found != daemon_id:
        raise UnreachableError(
            f"{connection.url} is another daemon, {found!r:.80}, than the state file says, {daemon_id}; the token was "
            f"not sent. Is it of another user, or another LMX_LAB_HOME? Start your own with {DAEMON.start}"
        )
