"""The portal from blocking callers to async clients, which all run on one background loop of the process."""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.errors import HostingError, LabError
from lmx_lab.portal import LoopThread, loops_serving

T = TypeVar("T")
CLOSE_S = 5.0
"""Maximum time to close a client, including the cancellation of its turns."""
PORTS = {"http": 80, "https": 443}
REMEDIES = (
    "await the async client, put the cell under %%offload, call this in asyncio.to_thread, or serve from a thread: "
    "launch(loop='thread')"
)


class _Background:
    """The loop of this process's blocking clients, in a thread that starts with the first client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None

    @property
    def thread(self) -> LoopThread:
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("lmx-lab-client")
            self._thread.start()
            return self._thread

    def is_at(self, thread: LoopThread) -> bool:
        return self._thread is thread

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    def forget(self) -> None:
        """Called in a forked child, which has no copy of the thread; the lock may have been held."""
        self._lock, self._thread = threading.Lock(), None


_BACKGROUND = _Background()
atexit.register(_BACKGROUND.stop)
os.register_at_fork(after_in_child=_BACKGROUND.forget)


def is_foreign(thread: LoopThread) -> bool:
    """Whether the thread belongs to the parent of a forked process; waiting for it would never end."""
    return not _BACKGROUND.is_at(thread)


class Portal:
    """Runs the coroutines of one async client for blocking callers on any thread.

    An interrupt (Ctrl-C) cancels the coroutine, and is raised when that has ended. Deleting the portal closes the
    client, as does the end of the process.

    Args:
        address: Returns the current address of the client's server.
        close: Closes the client.
    """

    def __init__(self, address: Callable[[], str], close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._address = address
        self._held: list[LoopThread] = []
        self._end = weakref.finalize(self, _close_later, self._held, close)
        self._end.atexit = False
        self._close = close

    @property
    def thread(self) -> LoopThread:
        """The thread of the background loop.

        Raises:
            HostingError: the client was closed, or the process has forked since: both would use one connection.
        """
        if not self._end.alive:
            raise HostingError("this client was closed; make a new one")
        if not self._held:
            self._held.append(_BACKGROUND.thread)
        if not _BACKGROUND.is_at(self._held[0]):
            raise HostingError("this client was made before the process forked; make one in the child, too")
        return self._held[0]

    def check(self, *, also: str | None = None) -> None:
        """Check that the caller would not wait for itself.

        Args:
            also: The address of another server that has to answer while the caller waits.

        Raises:
            HostingError: the server runs on the caller's own event loop.
        """
        here = asyncio._get_running_loop()
        if here is None:
            return
        if self._held and here is self._held[0].loop:
            raise HostingError("a blocking call on the loop of all clients would never return; await the async client")
        for address in (self._address(), also):
            if address is not None and serves(here, address):
                raise HostingError(f"{address} is served by this very loop, which would wait for itself; {REMEDIES}")

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the background and wait for its result.

        Raises:
            HostingError: as ``check``, or the client was closed.
            TimeoutError: after ``timeout_s``; the coroutine was cancelled.
        """
        try:
            self.check()
            thread = self.thread
        except BaseException:
            work.close()
            raise
        return thread.run(work, timeout_s)

    def close(self) -> None:
        """Close the client with its connections. Idempotent."""
        if self._end.detach() is not None and self._held and _BACKGROUND.is_at(self._held[0]):
            with suppress(TimeoutError, HostingError):
                self._held[0].run(self._close(), CLOSE_S)


class _Client(Protocol):
    @property
    def url(self) -> str: ...

    async def aclose(self) -> None: ...


Client = TypeVar("Client", bound=_Client)


class BlockingClient(Generic[Client]):
    """A blocking client: an async client, and the portal to it."""

    def __init__(self, client: Client) -> None:
        self._begin(client)

    def _begin(self, client: Client) -> None:
        self._client = client
        self._portal = Portal(lambda: client.url, client.aclose)

    @property
    def url(self) -> str:
        """The server's address, as of the last request."""
        return self._client.url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    def close(self) -> None:
        """Close all connections; the server stops its work for them. Idempotent."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_upstream(client: DaemonRoutes, portal: Portal) -> None:
    """Check that neither the daemon nor its model's server runs on the caller's own event loop.

    Raises:
        HostingError: one of them does; a turn would wait for its own caller.
    """
    if asyncio._get_running_loop() is None:
        return
    portal.check()
    try:
        upstream = portal.run(client.state()).upstream.url
    except LabError:
        return  # The request for the turn reports the problem, or waits until the daemon is back.
    portal.check(also=upstream)


_CLOSING: set[asyncio.Task[None]] = set()


def _close_later(held: list[LoopThread], close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Called in a finalizer, on any thread at any time, so it must not take a lock."""

    def begin() -> None:
        task = asyncio.get_running_loop().create_task(close())
        _CLOSING.add(task)
        task.add_done_callback(_CLOSING.discard)

    if held and _BACKGROUND.is_at(held[0]):
        with suppress(RuntimeError):  # the loop is closed: the process is about to end
            held[0].loop.call_soon_threadsafe(begin)


def serves(loop: asyncio.AbstractEventLoop, address: str) -> bool:
    """Whether this loop serves the address."""
    where = urlsplit(address)
    port = where.port or PORTS.get(where.scheme, 0)
    return loop in loops_serving(port) and _is_this_machine(where.hostname or "")


def _is_this_machine(host: str) -> bool:
    """Whether a socket can be bound to the host; sends nothing except name lookups."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as bound, suppress(OSError):
                bound.bind(address)
                return True
    return False
