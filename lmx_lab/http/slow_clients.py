"""End the stream of a client that accepts no data, so that it does not keep its slot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

CHECK_S = 0.25
"""Time between two checks whether a client still accepts nothing."""


class SendWatch:
    """An async context manager that ends its block with ``TimeoutError`` if the client accepts no data.

    Time in which the event loop was busy does not count: the client could not be served meanwhile.

    Args:
        limit_s: Returns the time that a client may accept nothing. Called while it accepts nothing.
    """

    def __init__(self, limit_s: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._sending = 0
        """Number of ``send`` calls that wait for the client."""
        self.blocked_s = 0.0
        """Time since the last data that the client accepted, if a ``send`` is waiting."""

    @property
    def expired(self) -> bool:
        """Whether this watch has ended the block."""
        return self._timeout.expired()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        # A single timer for the whole stream: one for each token would cost more than its text.
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
        else:
            self._timer = self._loop.call_later(CHECK_S, self._check)
