"""Check and compile the grammars of requests one after the other, and refuse those that would wait too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lmx_lab.engine.grammar.sandbox import LIMIT_S, GrammarSandbox
from lmx_lab.errors import QueueFullError

T = TypeVar("T")
WAIT_S = 10.0
"""Time that a grammar may wait for others: enough for a hundred usual schemas that are sent together. A slow grammar
is refused after ``sandbox.SHARE_S`` if others wait."""


class GrammarQueue:
    """A thread for the grammars of an engine, and the sandbox in which it checks them. Thread-safe.

    Args:
        thread_name: Name of the thread.
        compile_s: See ``GrammarSandbox``.
    """

    def __init__(self, thread_name: str, *, compile_s: float = LIMIT_S) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._unfinished = 0
        self._counting = threading.Lock()
        self.sandbox = GrammarSandbox(lambda: self._unfinished > 1, compile_s=compile_s)

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on the thread, and return its result. Cancelling the caller removes work that has not started.

        Raises:
            QueueFullError: the work has not started within ``WAIT_S``.
        """
        self._count(1)
        try:
            future = self._executor.submit(work)
            done = asyncio.wrap_future(future)
            try:
                await asyncio.wait([done], timeout=WAIT_S)
                # Only work that has not started can be cancelled.
                if not done.done() and future.cancel():
                    raise QueueFullError(
                        f"the grammar was not checked within {WAIT_S:g} s, because other grammars and schemas were; "
                        "try again in 1 s",
                        retry_after_s=1,
                    )
                return await done
            finally:
                done.cancel()
        finally:
            self._count(-1)

    def close(self) -> None:
        """Stop the running work and cancel the queued work, without waiting for either to end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.sandbox.close()

    def _count(self, change: int) -> None:
        with self._counting:
            self._unfinished += change
