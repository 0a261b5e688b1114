"""Long answers over HTTP: server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

T = TypeVar("T")
DONE = "[DONE]"


class EventStream(StreamingResponse):
    """``text/event-stream`` of ``data:`` lines. When the client leaves, the iterator is cancelled and closed."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        super().__init__(
            (f"data: {line}\n\n" async for line in lines),
            media_type="text/event-stream",
            # Proxies would otherwise collect tokens until a buffer is full.
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, gone):
            future.cancel()
        # The work frees its slot in its own cleanup: wait for that.
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
