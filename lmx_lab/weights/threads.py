"""Work on the disk for an event loop, on daemon threads.

A disk that does not answer then holds up neither other work nor the end of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Begin the work on a daemon thread of its own. The future cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def in_thread(work: Callable[[], T], *, name: str = "lmx-lab-disk") -> T:
    """The result of blocking work. Unlike ``asyncio.to_thread`` it takes no thread of the shared pool, for which the
    process would wait when it ends; cancelling leaves the thread alone."""
    return await asyncio.wrap_future(start_in_thread(work, name=name))
