"""Long answers over HTTP: server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Send

T = TypeVar("T")
DONE = "[DONE]"
KEEP_ALIVE_S = 5.0
"""Proxies and clients give up on connections that are silent for longer, some after 10 s."""


class EventStream(StreamingResponse):
    """``text/event-stream`` of ``data:`` lines. When the client leaves, the iterator is cancelled and closed.

    Args:
        remark: Gives a comment to send whenever nothing was sent for ``KEEP_ALIVE_S``; clients ignore comments.
    """

    def __init__(self, lines: AsyncIterator[str], *, remark: Callable[[], str] | None = None) -> None:
        super().__init__(
            lines,
            media_type="text/event-stream",
            # Proxies would otherwise collect tokens until a buffer is full.
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._lines = lines
        self._remark = remark

    async def stream_response(self, send: Send) -> None:
        wire = _Wire(send)
        await wire.send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        beat = asyncio.create_task(_keep_alive(wire, self._remark)) if self._remark else None
        try:
            async for line in self._lines:
                await wire.send_body(f"data: {line}\n\n")
        finally:
            # Cut off while a line was being sent, the iterator knows nothing of it yet.
            if isinstance(self._lines, AsyncGenerator):
                await self._lines.aclose()
            if beat is not None:
                beat.cancel()
                # A connection that is gone is the other task's to notice.
                await asyncio.gather(beat, return_exceptions=True)
        await wire.send({"type": "http.response.body", "body": b"", "more_body": False})


class _Wire:
    """A connection that knows when something was last sent on it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._now = asyncio.get_running_loop().time
        self._sent_at = self._now()

    @property
    def silent_s(self) -> float:
        return self._now() - self._sent_at

    async def send(self, message: Message) -> None:
        self._sent_at = self._now()
        await self._send(message)

    async def send_body(self, text: str) -> None:
        await self.send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _keep_alive(wire: _Wire, remark: Callable[[], str]) -> None:
    """A task beside the one that sends: a timer for each token would cost more than its text."""
    while True:
        if (rest_s := KEEP_ALIVE_S - wire.silent_s) > 0:
            await asyncio.sleep(rest_s)
        else:
            await wire.send_body(f": {remark()}\n\n")


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
