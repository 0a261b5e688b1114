"""Who watches the events, or waits for something: counted, and told when the daemon ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request

from lmx_lab.errors import QueueFullError

T = TypeVar("T")
RETRY_S = 5.0


class Subscribers:
    """On the daemon's loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left: set[asyncio.Future[None]] = set()
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the daemon ends. Everybody's: do not cancel it."""

    def __len__(self) -> int:
        return len(self._left)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block it is one more.

        Raises:
            QueueFullError: there are as many as there may be.
        """
        if len(self._left) >= self._limit:
            raise QueueFullError(
                f"{len(self._left)} connections watch the events already, the limit; close one, or ask GET /v3/events",
                retry_after_s=RETRY_S,
            )
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left.add(left)
        try:
            yield
        finally:
            self._left.discard(left)
            left.set_result(None)

    async def close(self, patience_s: float) -> None:
        """Tell all of them, and wait until they have left."""
        if not self.closing.done():
            self.closing.set_result(None)
        if self._left:
            await asyncio.wait(set(self._left), timeout=patience_s)

    async def unless_left(self, request: Request, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``; None, and the work is cancelled, when its client leaves or the daemon ends."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
        ends: set[asyncio.Future[Any]] = {task, gone, self.closing}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
