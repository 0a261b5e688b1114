"""The way to one daemon: it is who it should be, and is found again where it was started anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import httpx2
from pydantic import BaseModel

from lmx_lab.client.connection import QUICK_S, HttpConnection
from lmx_lab.client.credentials import Credentials, DaemonEndpoint
from lmx_lab.client.errors import DAEMON, was_sent
from lmx_lab.client.limits import LONG_BYTES
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
    method: str
    path: str
    content: bytes | None = None
    params: Mapping[str, str | list[str]] = field(default_factory=dict)
    within_s: float = QUICK_S
    repeatable: bool = False
    """Whether sending it twice does no more than sending it once."""


class DaemonConnection:
    """Requests to the daemon that ``access`` names, on one loop.

    The token goes to an address out of a state file only after that has said to be the daemon of the file; it is asked
    again after each break. Where the daemon does not answer, or not to this token, the file is read again, and if it
    has something new, the request is sent there.
    """

    def __init__(self, access: Credentials, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self.access = access
        self._transport = transport
        self._gate = asyncio.Lock()
        self._connection: HttpConnection | None = None
        self._place: DaemonEndpoint | None = None
        """Where the connection goes."""
        self._vouched = False
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
        """To where the daemon is by now; it has just said that it is there, whatever was known before.

        Raises:
            UnreachableError: nobody is, or somebody else than the daemon of the state file.
        """
        self._vouched = False
        connection, _ = await self._reach()
        return connection

    async def ask(self, request: DaemonRequest, shape: type[Shape]) -> Shape:
        """
        Raises:
            LabError: the daemon's own, by its code; UnreachableError where it does not answer.
        """
        return await self._ask(request, lambda connection, response, text: connection.whole(response, text, shape))

    async def do(self, request: DaemonRequest) -> None:
        """The same where nothing is to be answered."""
        await self._ask(request, _nothing)

    async def health(self) -> Health:
        """Of whoever is there; needs no token."""
        connection, _ = await self._reach()
        return await _health(connection)

    # Ways

    async def _ask(self, request: DaemonRequest, read: Read[T]) -> T:
        connection, place = await self._reach()
        try:
            return await _send(connection, request, read)
        except (UnauthorizedError, UnreachableError) as exc:
            if not self._is_worth_another(exc, place, repeatable=request.repeatable):
                raise
            first = exc
        try:
            connection, _ = await self._reach()
            return await _send(connection, request, read)
        except UnreachableError as exc:
            if isinstance(first, UnreachableError) and was_sent(first) and not was_sent(exc):
                # What may have arrived must not look as if it had not.
                raise first from first.__cause__
            raise

    def _is_worth_another(self, error: LabError, place: DaemonEndpoint, *, repeatable: bool) -> bool:
        if isinstance(error, UnauthorizedError):
            return self._is_elsewhere(place)
        self._vouched = False
        if was_sent(error) and not repeatable:
            return False
        # A connection that was kept may have been closed just when it was used again.
        return self._is_elsewhere(place) or (repeatable and isinstance(error, ConnectionLostError))

    def _is_elsewhere(self, place: DaemonEndpoint) -> bool:
        return self.access.place != place or self.access.refresh()

    async def _reach(self) -> tuple[HttpConnection, DaemonEndpoint]:
        """A connection to where the daemon is by now, and where that is."""
        async with self._gate:
            place = self.access.place
            try:
                return await self._vouched_for(place), place
            except UnreachableError:
                if not self._is_elsewhere(place):
                    raise
            place = self.access.place
            return await self._vouched_for(place), place

    async def _vouched_for(self, place: DaemonEndpoint) -> HttpConnection:
        connection = await self._connected(place)
        if place.daemon_id is not None and not self._vouched:
            await _check(connection, place.daemon_id)
            self._vouched = True
        return connection

    async def _connected(self, place: DaemonEndpoint) -> HttpConnection:
        if self._closed:
            raise InvalidRequestError("this client is closed; make a new one")
        if self._connection is not None and self._place == place:
            return self._connection
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()
        self._vouched = False
        transport = None if self._transport is None else _Lent(self._transport)
        self._connection = HttpConnection(place.url, api_key=place.token, transport=transport, server=DAEMON)
        self._place = place
        return self._connection


class _Lent(httpx2.AsyncBaseTransport):
    """Somebody else's transport: closing this does not close that."""

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
        # Not for good: the daemon may be started again, at another port.
        raise UnreachableError(f"{exc.message}. The token was not sent; start a daemon with {DAEMON.start}") from exc
    if found != daemon_id:
        raise UnreachableError(
            f"{connection.url} is another daemon, {found!r:.80}, than the state file says, {daemon_id}; the token was "
            f"not sent. Is it of another user, or another LMX_LAB_HOME? Start your own with {DAEMON.start}"
        )
