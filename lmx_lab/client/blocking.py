"""Run the async clients for blocking callers, on one background event loop of the process."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

from lmx_lab.blocking import Portal
from lmx_lab.client.connection import AsyncClientBase
from lmx_lab.errors import HostingError
from lmx_lab.portal import BACKGROUND, LoopThread


class ClientPortal(Portal):
    """The portal of one async client. The client is closed when the portal is deleted, and at the end of the process.

    Args:
        close: Closes the client.
    """

    def __init__(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._used: list[LoopThread] = []
        """The thread of the background loop, once it was used."""
        self._finalizer = weakref.finalize(self, _close_later, self._used, close)
        self._finalizer.atexit = False
        self._close = close

    @property
    def thread(self) -> LoopThread:
        """The thread of the background loop.

        Raises:
            HostingError: the client was closed, or the caller runs on the background loop, which would wait for itself.
        """
        if not self._finalizer.alive:
            raise HostingError("this client was closed; create a new one")
        if not self._used:
            self._used.append(BACKGROUND.thread)
        if asyncio._get_running_loop() is self._used[0].loop:
            raise HostingError(
                "a blocking call on the event loop of the blocking clients would never return; await the async client"
            )
        return self._used[0]

    def close(self) -> None:
        """Close the client with its connections. Idempotent."""
        if self._finalizer.detach() is not None and self._used:
            with suppress(TimeoutError, HostingError):
                # Closing includes the cancellation of the client's turns.
                self._used[0].run(self._close(), 5.0)


_CLOSING: set[asyncio.Task[None]] = set()


def _close_later(used: list[LoopThread], close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start to close a client. Called in a finalizer, on any thread at any time, so it must not take a lock."""

    def start() -> None:
        task = asyncio.get_running_loop().create_task(close())
        _CLOSING.add(task)
        task.add_done_callback(_CLOSING.discard)

    if used and not used[0].is_of_parent:
        with suppress(RuntimeError):  # The loop is closed, because the process is about to end.
            used[0].loop.call_soon_threadsafe(start)


Client = TypeVar("Client", bound=AsyncClientBase[Any])


class BlockingClient(Generic[Client]):
    """A blocking client: an async client, and the portal to it."""

    def __init__(self, client: Client) -> None:
        self._async = client
        self._portal = ClientPortal(client.aclose)

    @property
    def url(self) -> str:
        """The server's address at the time of the last request."""
        return self._async.url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    def close(self) -> None:
        """Close all connections; the server stops its work for them. Idempotent."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
