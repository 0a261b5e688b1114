"""The messages of one WebSocket as a stream that may be left in any way, on any task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from httpx2.websockets import HTTPXWSException

from lmx_lab.client.connection import HttpConnection
from lmx_lab.errors import ConnectionLostError, LabError, UnreachableError

CLOSE_S = 2.0
"""So long one waits for the close of a connection whose other end does not take it."""


async def messages(
    connection: HttpConnection, path: str, first: str, *, silence_s: float | None = None
) -> AsyncGenerator[str, None]:
    """What a server answers to this first message, text by text; closing this closes the connection.

    Args:
        silence_s: The longest time between two of them.

    Raises:
        ConnectionLostError: the server has closed it, or went away: the one who reads knows when it is complete.
        LabError: the server's own, in the place of the connection.
    """
    # Of the library's connections a task of their own: they end on the task that began them, or not at all.
    handed: asyncio.Queue[str | Exception] = asyncio.Queue(1)
    reading = asyncio.create_task(_read(connection, path, first, silence_s, handed), name="read a WebSocket")
    try:
        while isinstance(message := await handed.get(), str):
            yield message
        raise message
    finally:
        reading.cancel()
        await asyncio.wait({reading}, timeout=CLOSE_S)


async def _read(
    connection: HttpConnection,
    path: str,
    first: str,
    silence_s: float | None,
    handed: asyncio.Queue[str | Exception],
) -> None:
    """All messages, and at last why there are no more."""
    end: Exception | None = None
    try:
        async with connection.websocket(path) as socket:
            try:
                await socket.send_text(first)
                while True:
                    async with asyncio.timeout(silence_s):
                        message = await socket.receive_text()
                    await handed.put(message)
            except Exception as exc:
                end = exc
    except Exception as exc:
        # Where there is a reason already, this is about the close, and no news.
        end = end or exc
    assert end is not None
    await handed.put(_in_plain_words(end, connection.url))


def _in_plain_words(exc: Exception, url: str) -> Exception:
    while isinstance(exc, ExceptionGroup):
        exc = exc.exceptions[0]
    if isinstance(exc, TimeoutError):
        end: LabError = UnreachableError(f"{url} said nothing within its time limit; ask again, or raise timeout_s")
    elif isinstance(exc, LabError):
        return exc
    elif isinstance(exc, HTTPXWSException):
        end = ConnectionLostError(f"{url} closed the connection before the answer's end; ask again")
    else:
        # Bytes that are no WebSocket's are told by classes of a library beneath.
        end = ConnectionLostError(f"{url} broke the connection ({type(exc).__name__}: {exc!s:.200}); ask again")
    end.__cause__ = exc
    return end
