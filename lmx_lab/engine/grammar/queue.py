"""Check and compile the grammars of requests one after the other, and refuse those that would wait too long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from lmx_lab.engine.grammar.sandbox import LIMIT_S, GrammarSandbox
from lmx_lab.errors import QueueFullError

T = TypeVar("T")
WAIT_S = 10.0
"""Time that a grammar may wait for others: enough for a hundred usual schemas that are sent together. A slow grammar
is refused after ``sandbox.SHARE_S`` if others wait."""
WAIT_BEHIND_SLOW_S = 1.5
"""Time that a grammar may wait if a slow one is refused while it waits. After each refusal, the sandbox is started
again."""
POLL_S = 0.1
"""Interval at which the time limit of a waiting grammar is checked."""


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
        self._refused_at = 0.0
        """Time at which a slow grammar was last refused."""
        self.sandbox = GrammarSandbox(lambda: self._unfinished > 1, compile_s=compile_s)

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on the thread, and return its result. Cancelling the caller removes work that has not started.

        Raises:
            QueueFullError: the work has not started within ``WAIT_S``, or within ``WAIT_BEHIND_SLOW_S`` if slow work
                was refused.
        """
        self._count(1)
        try:
            future = self._executor.submit(self._work, work)
            done = asyncio.wrap_future(future)
            try:
                await self._wait_for_start(future, done)
                return await done
            finally:
                done.cancel()
        finally:
            self._count(-1)

    async def _wait_for_start(self, future: Future[T], done: asyncio.Future[T]) -> None:
        """Wait until the thread has started the work.

        Args:
            done: The future of the event loop that completes with ``future``.

        Raises:
            QueueFullError: it has not started within the time limit, and was removed.
        """
        began = time.monotonic()
        while not done.done() and not future.running():
            await asyncio.wait([done], timeout=POLL_S)
            limit_s = WAIT_BEHIND_SLOW_S if self._refused_at > began else WAIT_S
            # Only work that has not started can be cancelled.
            if time.monotonic() - began >= limit_s and not done.done() and future.cancel():
                raise QueueFullError(
                    f"the check of the grammar did not start within {limit_s:g} s, because other grammars and "
                    "schemas were checked first; try again in 1 s",
                    retry_after_s=1,
                )

    def close(self) -> None:
        """Stop the running work and cancel the queued work, without waiting for either to end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.sandbox.close()

    def _work(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except QueueFullError:
            self._refused_at = time.monotonic()
            raise

    def _count(self, change: int) -> None:
        with self._counting:
            self._unfinished += change
