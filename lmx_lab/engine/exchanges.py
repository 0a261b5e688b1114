"""Loads that take the main model from one engine to another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lmx_lab.engine.loads import Load, Loads
from lmx_lab.portal import LoopThread
from lmx_lab.values.models import ModelEntry

T = TypeVar("T")
STOP_S = 5.0


class Exchanges:
    """Runs exchanges one after the other, on their own loop. An exchange continues when its caller leaves."""

    def __init__(self) -> None:
        self._thread = LoopThread("lmx-lab-models")
        self._thread.start()
        self._loads = Loads()
        self._turn = asyncio.Lock()

    def submit(self, entry: ModelEntry, work: Callable[[Load], Coroutine[Any, Any, T]]) -> asyncio.Future[T]:
        """Do this work, which loads ``entry``, after the exchanges before it.

        Raises:
            NotLoadedError: an unload, or the load of another model, was asked for before it began.
        """
        future = asyncio.wrap_future(self._thread.submit(self._in_order(entry, work)))
        # The result of work that continues without its caller is not read.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    async def _in_order(self, entry: ModelEntry, work: Callable[[Load], Coroutine[Any, Any, T]]) -> T:
        with self._loads.begun(entry) as load:
            async with self._turn:
                load.check()
                return await work(load)

    def give_up(self, why: str) -> None:
        """Cancel the exchanges that have not ended. Returns at once."""
        with contextlib.suppress(RuntimeError):  # the loop and all exchanges have ended
            self._thread.loop.call_soon_threadsafe(self._loads.give_up, why)

    def stop(self) -> None:
        """Wait until cancelled exchanges have ended, then end the loop."""
        with contextlib.suppress(TimeoutError):
            self._thread.submit(self._turn.acquire()).result(STOP_S)
        self._thread.stop()
