"""Run the coroutines of async clients for blocking callers, on one background event loop of the process."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from lmx_lab.errors import HostingError
from lmx_lab.portal import LoopThread

T = TypeVar("T")
CLOSE_S = 5.0
"""Maximum time for closing a client, including the cancellation of its turns."""


class _Background:
    """The event loop of this process's blocking clients, in a thread that starts with the first client."""

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

    def owns(self, thread: LoopThread) -> bool:
        """Whether this is the thread of this process."""
        return self._thread is thread

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    def reset(self) -> None:
        """Called in a forked child, which has no copy of the thread and may have a copy of a held lock."""
        self._lock, self._thread = threading.Lock(), None


_BACKGROUND = _Background()
atexit.register(_BACKGROUND.stop)
os.register_at_fork(after_in_child=_BACKGROUND.reset)


def belongs_to_parent(thread: LoopThread) -> bool:
    """Whether the thread belongs to the parent of this forked process, so that waiting for it would never end."""
    return not _BACKGROUND.owns(thread)


class Portal:
    """Runs the coroutines of one async client for blocking callers on any thread.

    An interrupt (Ctrl-C) cancels the coroutine, and is raised when the coroutine has ended. The client is closed when
    the portal is deleted, and at the end of the process.

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
            HostingError: the client was closed; or the process has forked since the client was created, so that parent
                and child would use the same connection; or the caller runs on the background loop, which would wait for
                itself.
        """
        if not self._finalizer.alive:
            raise HostingError("this client was closed; create a new one")
        if not self._used:
            self._used.append(_BACKGROUND.thread)
        if not _BACKGROUND.owns(self._used[0]):
            raise HostingError("this client was created before the process forked; create another one in the child")
        if asyncio._get_running_loop() is self._used[0].loop:
            raise HostingError(
                "a blocking call on the event loop of the blocking clients would never return; await the async client"
            )
        return self._used[0]

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the background and wait for its result.

        Raises:
            HostingError: as ``thread``.
            TimeoutError: after ``timeout_s``; the coroutine was cancelled.
        """
        try:
            thread = self.thread
        except BaseException:
            work.close()
            raise
        return thread.run(work, timeout_s)

    def close(self) -> None:
        """Close the client with its connections. Idempotent."""
        if self._finalizer.detach() is not None and self._used and _BACKGROUND.owns(self._used[0]):
            with suppress(TimeoutError, HostingError):
                self._used[0].run(self._close(), CLOSE_S)


_CLOSING: set[asyncio.Task[None]] = set()


def _close_later(used: list[LoopThread], close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start to close a client. Called in a finalizer, on any thread at any time, so it must not take a lock."""

    def start() -> None:
        task = asyncio.get_running_loop().create_task(close())
        _CLOSING.add(task)
        task.add_done_callback(_CLOSING.discard)

    if used and _BACKGROUND.owns(used[0]):
        with suppress(RuntimeError):  # The loop is closed, because the process is about to end.
            used[0].loop.call_soon_threadsafe(start)
