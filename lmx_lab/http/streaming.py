"""Stream responses as server-sent events, and end work whose client disconnects or accepts no data."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:
    # uvicorn is not imported by the modules of routes.
    from lmx_lab.http.connections import HttpProtocol

log = logging.getLogger(__name__)
T = TypeVar("T")
DONE = "[DONE]"
CHECK_S = 0.25
"""Interval between two checks whether the client accepts data."""


def data_line(data: str) -> str:
    """Return an event without a name."""
    return f"data: {data}\n\n"


def named_event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


class EventStream(StreamingResponse):
    """A ``text/event-stream`` response, or one of another type that is sent in the same way.

    When the client disconnects, the iterator is cancelled and closed.

    Args:
        texts: The texts to send: JSON, or comments.
        headers: Additional headers of the response.
        media_type: Type of the response, if it is another stream of text that is written item by item.
        keep_alive: Returns what to send whenever nothing was sent for ``Limits.keep_alive_s``, such as a comment.
        blocked_limit_s: Returns how long the client may accept no data before the iterator is closed and the client is
            disconnected. Called repeatedly; by default there is no limit.
    """

    def __init__(
        self,
        texts: AsyncIterator[str],
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        media_type: str = "text/event-stream",
        keep_alive: Callable[[], str] | None = None,
        blocked_limit_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        super().__init__(
            texts,
            media_type=media_type,
            # Without these headers, proxies would collect tokens until a buffer is full.
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
        )
        self._texts = texts
        self._keep_alive = keep_alive
        self._blocked_limit_s = blocked_limit_s
        self._request_id = ""
        self._connection: HttpProtocol | None = None
        self._sending: asyncio.Task[None] | None = None
        """Sends the last keep-alive on another server."""
        self._lost: OSError | None = None
        """What ``send`` raised for a keep-alive, because the client has disconnected."""
        self._watch: SendWatch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request_id = scope.get("lmx_lab.request_id", "")
        # None if a server other than ``uvicorn_server`` runs the application, such as that of Ray.
        self._connection = (scope.get("extensions") or {}).get("lmx_lab.connection")
        silence_s, write = math.inf, partial(self._write_keep_alive, send)
        if self._keep_alive is not None:
            silence_s = scope["app"].state.limits.keep_alive_s
            if self._connection is not None:
                self._connection.keep_alive = write
        self._watch = SendWatch(self._blocked_limit_s, on_silence=write, silence_s=silence_s)
        await super().__call__(scope, receive, send)

    def write(self, texts: Iterable[str]) -> bool:
        """Send additional texts while the iterator is waiting. Call this in a callback of the event loop.

        Returns whether the texts can be sent now. If not, none of them is read.
        """
        connection = self._connection
        if connection is None or not connection.accepts_parts:
            return False
        if text := "".join(texts):
            connection.write_part(escape_line_ends(text).encode())
            self._watch.silent_s = 0.0
        return True

    def _write_keep_alive(self, send: Send) -> None:
        assert self._keep_alive is not None
        if self._connection is not None:
            self.write([self._keep_alive()])
        else:
            # Another server has no function that writes without waiting.
            body = escape_line_ends(self._keep_alive()).encode()

            async def write() -> None:
                try:
                    await self._watch.send(send({"type": "http.response.body", "body": body, "more_body": True}))
                except OSError as exc:
                    self._lost = exc
                    self._watch.end()

            self._sending = asyncio.create_task(write(), name="lmx-lab keep-alive")

    async def stream_response(self, send: Send) -> None:
        watch = self._watch
        try:
            async with watch.watching():
                head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                await watch.send(send(head))
                try:
                    async for text in self._texts:
                        body = escape_line_ends(text).encode()
                        await watch.send(send({"type": "http.response.body", "body": body, "more_body": True}))
                finally:
                    # If sending a text was interrupted, the iterator has not been notified yet.
                    if isinstance(self._texts, AsyncGenerator):
                        await self._texts.aclose()
                    if self._connection is not None:
                        self._connection.keep_alive = None
                    if self._sending is not None:
                        self._sending.cancel()
                        await asyncio.gather(self._sending, return_exceptions=True)
                await watch.send(send({"type": "http.response.body", "body": b"", "more_body": False}))
        except TimeoutError:
            if not watch.expired:
                raise
            if self._lost is not None:
                raise self._lost from None
            log.warning(
                "%s: cancelled, because the client has accepted no data for %g s", self._request_id, watch.blocked_s
            )
            if self._connection is not None:
                self._connection.transport.abort()
            # The server is notified of the lost connection before this returns.
            await asyncio.sleep(0)


def escape_line_ends(text: str) -> str:
    """Escape U+0085, U+2028 and U+2029 in JSON.

    JSON allows them, but clients that split a stream into lines as ``str.splitlines`` does, such as httpx and
    ollama-python, would end a line within a string.
    """
    if text.isascii():
        return text
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def comment(text: str) -> str:
    """Return a comment, which clients ignore."""
    return f": {text}\n\n"


async def while_connected(
    request: Request, work: Coroutine[Any, Any, T], *, stopping: asyncio.Future[None] | None = None
) -> T:
    """Return the result of ``work``, which is cancelled if the client disconnects.

    Args:
        stopping: Also cancels it when this future is done.

    Raises:
        ClientDisconnect: the client disconnected, or ``stopping`` is done.
    """
    task = asyncio.ensure_future(work)

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    disconnected = asyncio.ensure_future(wait_for_disconnect())
    try:
        ends: set[asyncio.Future[Any]] = {task, disconnected, *([] if stopping is None else [stopping])}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, disconnected):
            future.cancel()
        # The work frees its slot in its own cleanup, so wait for that.
        with suppress(asyncio.CancelledError, Exception):
            await task


# Clients that accept no data


class SendWatch:
    """Ends the block of ``watching`` with ``TimeoutError`` if the client accepts no data.

    Time in which the event loop is busy does not count, because the server cannot send data then.

    Args:
        limit_s: Returns the time for which the client may accept no data. Called at each check while ``send`` waits,
            because computing it may be expensive.
        on_silence: Called at each check if no data have been sent for ``silence_s``, unless ``send`` waits.
    """

    def __init__(
        self,
        limit_s: Callable[[], float],
        *,
        on_silence: Callable[[], object] = lambda: None,
        silence_s: float = math.inf,
    ) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._on_silence = on_silence
        self._silence_s = silence_s
        self._check_s = min(CHECK_S, silence_s)
        self.silent_s = 0.0
        """Seconds without data, up to the last check. Code that sends data without ``send`` sets it to 0."""
        self._sending = 0
        """Number of ``send`` calls that wait for the client."""
        self.blocked_s = 0.0
        """Time in seconds for which the client has accepted no data; 0 if no ``send`` has waited."""

    @property
    def expired(self) -> bool:
        """Whether this watch has ended the block."""
        return self._timeout.expired()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch ``send`` in the block."""
        async with self._timeout:
            # There is one timer for the whole stream, because a timer for each token would be too expensive.
            self._timer = self._loop.call_later(self._check_s, self._check)
            try:
                yield
            finally:
                self._timer.cancel()

    def end(self) -> None:
        """End the block with ``TimeoutError`` now."""
        self._timeout.reschedule(self._loop.time())

    async def send(self, sending: Awaitable[None]) -> None:
        """Await the call that sends data and returns once the connection accepts more."""
        self.silent_s = 0.0
        self._sending += 1
        try:
            await sending
        finally:
            self._sending -= 1
        self.blocked_s = 0.0

    def _check(self) -> None:
        self.silent_s += self._check_s
        if self._sending:
            self.blocked_s += self._check_s
            if self.blocked_s >= self._limit_s():
                self.end()
                return
        elif self.silent_s >= self._silence_s:
            self._on_silence()
        self._timer = self._loop.call_later(self._check_s, self._check)
