"""Track a load of a model from its request to its end. Used on the control loop of ``ModelManager``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lmx_lab.errors import LabError
from lmx_lab.values.models import LoadReport, LoadSpec, ModelEntry

T = TypeVar("T")
IfBusy = Literal["refuse", "wait", "replace"]
"""What a load or unload does while another one is in progress: fail, wait for it, or cancel it if that is possible."""


@dataclass(eq=False, kw_only=True)
class LoadOperation:
    """One load of a model. Any number of callers wait for ``done``."""

    spec: LoadSpec
    entry: ModelEntry | None
    done: asyncio.Future[LoadReport]
    reached_engine: bool = False
    """Whether the files were found, and the engine is loading them or is about to."""
    cancellable: bool = False
    """Whether the engine can cancel the load."""
    _error: LabError | None = field(default=None, init=False)
    _task: asyncio.Task[Any] | None = field(default=None, init=False)
    """The current part of the load, which may take long."""

    def check(self) -> None:
        """Check that the load was not cancelled.

        Raises:
            LabError: the load was cancelled.
        """
        if self._error is not None:
            raise self._error

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a part of the load that may take long, and return its result. Cancelling the load cancels this part and
        waits for its end.

        Raises:
            LabError: the load was cancelled.
        """
        if self._error is not None:
            work.close()
            raise self._error
        task = asyncio.create_task(work, name=f"lmx-lab load of {self.spec.model:.80}")
        self._task = task
        try:
            return await task
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._task = None

    def cancel(self, error: LabError) -> None:
        """Cancel the load; its callers get this error."""
        self._error = self._error or error
        if self._task is not None:
            self._task.cancel()

    def finish(self, outcome: LoadReport | BaseException) -> None:
        """Pass the report or the error to the callers. Only the first call has an effect."""
        if self.done.done():
            return
        if isinstance(outcome, LoadReport):
            self.done.set_result(outcome)
        else:
            self.done.set_exception(outcome)
            self.done.exception()  # retrieved, because all callers may have left
