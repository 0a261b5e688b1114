"""Track an unload of the main model, and end the requests of a model before it is unloaded. Used on the control loop of
``ModelManager``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from lmx_lab.engine.residents import Resident
from lmx_lab.errors import NotLoadedError
from lmx_lab.values.models import ModelEntry


class Drain:
    """The time in which the requests of a model may end before the model is unloaded.

    Args:
        reason: Beginning of the error messages of requests that end with an error.
        limit_s: Time that running requests have to end.
        finish_queued: Whether queued requests are also answered, instead of ending immediately.
        on_change: Called when a request has ended, and when the time limit has changed.
    """

    def __init__(
        self,
        resident: Resident,
        reason: str,
        *,
        limit_s: float,
        finish_queued: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._resident = resident
        self._reason = reason
        self._finish_queued = finish_queued
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._why_ended = f"running requests had {limit_s:g} s to end"
        self.until: float | None = time.perf_counter() + limit_s
        """When the requests that are left end with an error (``time.perf_counter``); None without a time limit."""

    def set_wait(self, wait: bool | None) -> None:
        """Let the requests end without a time limit, or end them now. None changes nothing, but the state is reported
        again, for the caller.
        """
        if wait is not None:
            self.until = None if wait else time.perf_counter()
            self._why_ended = "it was requested to stop running requests immediately"
        self._changed.set()

    async def run(self) -> None:
        """Accept no more requests, wait until the accepted ones have ended, and end the rest at the time limit."""
        admission, engine = self._resident.admission, self._resident.engine
        queued_error = NotLoadedError(f"{self._reason} before this request started; try again when a model is loaded")
        admission.close(None if self._finish_queued else queued_error)
        reported = 0
        # Reported before queued requests end, because the engine may be in a long step.
        if admission.active:
            reported = admission.active
            self._on_change()
        if not self._finish_queued:
            await engine.end_requests(admission, queued_error, queued_only=True)
        while admission.active:
            if self._changed.is_set() or admission.active != reported:
                self._changed.clear()
                reported = admission.active
                self._on_change()
            left_s = None if self.until is None else self.until - time.perf_counter()
            if left_s is not None and left_s <= 0:
                break
            await _first_of(admission.until_at_most(admission.active - 1), self._changed.wait(), timeout_s=left_s)
        if admission.active:
            admission.close(queued_error)
            message = f"{self._reason} before this request ended, because {self._why_ended}; try again when a model is"
            await engine.end_requests(admission, NotLoadedError(f"{message} loaded"))


@dataclass(eq=False, kw_only=True)
class UnloadOperation:
    """One unload of the main model. Any number of callers wait for ``done``."""

    done: asyncio.Future[int | None]
    """The bytes that the unload released; None if the model stays in memory, because the load that needed its room was
    cancelled."""
    requested: bool
    """Whether a caller has requested the unload. Otherwise, it is part of a load, or the model was idle."""
    wait: bool | None = None
    """See ``ModelManager.unload``."""
    entry: ModelEntry | None = None
    """The model; None if no model is loaded, and for a load until the unload begins."""
    drain: Drain | None = None

    def set_wait(self, wait: bool | None) -> None:
        """Change how long running requests may take; None changes nothing."""
        self.wait = self.wait if wait is None else wait
        if self.drain is not None:
            self.drain.set_wait(wait)

    def finish(self, outcome: int | BaseException | None) -> None:
        """Pass the result or the error to the callers. Only the first call has an effect."""
        if self.done.done():
            return
        if isinstance(outcome, BaseException):
            self.done.set_exception(outcome)
            self.done.exception()  # retrieved, because all callers may have left
        else:
            self.done.set_result(outcome)


async def _first_of(*works: Coroutine[Any, Any, object], timeout_s: float | None) -> None:
    """Wait until one of the coroutines has ended, or for ``timeout_s``; then cancel the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
