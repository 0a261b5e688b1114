"""Define the services that the daemon's routes use, and count the connections that receive events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.mcp.servers import McpServers
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.store import Store
from lmx_lab.daemon.toolbox import Toolbox
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.daemon.turns.runner import TurnRunner
from lmx_lab.errors import QueueFullError
from lmx_lab.http.streaming import while_connected
from lmx_lab.wire.daemon import Shutdown

T = TypeVar("T")


class Subscribers:
    """Counts the connections that receive events, and ends requests that wait when the daemon stops.

    Used on the daemon's event loop.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._connections: set[asyncio.Future[None]] = set()
        """One future for each connection, which is done when the connection ends."""
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the daemon stops. All connections share it: do not cancel it."""

    def __len__(self) -> int:
        return len(self._connections)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Count one connection within the block.

        Raises:
            QueueFullError: There are too many connections.
        """
        if len(self._connections) >= self._limit:
            raise QueueFullError(
                f"{len(self._connections)} connections receive events already, which is the limit; close one, or poll "
                "GET /v3/events",
                retry_after_s=5.0,
            )
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connections.add(ended)
        try:
            yield
        finally:
            self._connections.discard(ended)
            ended.set_result(None)

    async def close(self, timeout_s: float) -> None:
        """Notify all connections that the daemon stops, and wait until they have ended, at most ``timeout_s``."""
        if not self.closing.done():
            self.closing.set_result(None)
        if self._connections:
            await asyncio.wait(set(self._connections), timeout=timeout_s)

    async def run_while_connected(self, request: Request, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``work``. If the client disconnects or the daemon stops, cancel it and return None."""
        with suppress(ClientDisconnect):
            return await while_connected(request, work, stopping=self.closing)
        return None


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services that the routes use on the daemon's event loop."""

    daemon_id: str
    started_at: str
    limits: Limits
    store: Store
    log: EventLog
    turns: TurnRunner
    servers: McpServers
    toolbox: Toolbox
    upstream: ModelClient
    subscribers: Subscribers
    status: Callable[[], Literal["ok", "stopping"]] = field(repr=False)
    shut_down: Callable[[Shutdown], None] = field(repr=False)
    """Begins to stop the daemon and returns immediately."""
    started_monotonic_s: float = field(default_factory=time.monotonic)
    """The time of ``started_at`` on the monotonic clock, which does not change when the clock is set."""
