"""End the stream of a client that accepts no data, so that it does not keep its slot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

CHECK_S = 0.25
"""Interval between two checks whether the client accepts data."""


class SendWatch:
    """An async context manager that ends its block with ``TimeoutError`` if the client accepts no data.

    Time in which the event loop is busy does not count, because the server cannot send data then.

    Args:
        limit_s: Returns the time for which the client may accept no data. Called at each check while ``send`` waits,
            because computing it may be expensive.
    """

    def __init__(self, limit_s: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._sending = 0
        """Number of ``send`` calls that wait for the client."""
        self.blocked_s = 0.0
        """Time in seconds for which the client has accepted no data; 0 if no ``send`` has waited."""

    @property
    def expired(self) -> bool:
        """Whether this watch has ended the block."""
        return self._timeout.expired()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        # There is one timer for the whole stream, because a timer for each token would be too expensive.
        self._timer = self._loop.call_later(CHECK_S, self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, value, trace)

    async def send(self, sending: Awaitable[None]) -> None:
        """Await the call that sends data and returns once the connection accepts more."""
        self._sending += 1
        try:
            await sending
        finally:
            self._sending -= 1
        self.blocked_s = 0.0

    def _check(self) -> None:
        if self._sending:
            self.blocked_s += CHECK_S
            if self.blocked_s >= self._limit_s():
                self._timeout.reschedule(self._loop.time())
                return
        self._timer = self._loop.call_later(CHECK_S, self._check)
