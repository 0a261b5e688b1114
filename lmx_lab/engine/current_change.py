"""Allow one load or unload of the main model at a time, and describe the one in progress. Belongs to the control loop
of ``ModelManager``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

from lmx_lab.errors import ModelBusyError
from lmx_lab.values.engine import EngineSnapshot, ModelChange


class CurrentChange:
    """The load or unload of the main model that is in progress.

    Args:
        on_change: Called when ``value`` has changed.
        on_end: Called after a load or unload has ended.
    """

    def __init__(self, *, on_change: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.value: ModelChange | None = None
        """None if no load or unload is in progress."""
        self._lock = asyncio.Lock()
        self._on_change = on_change
        self._on_end = on_end

    def in_progress(self) -> bool:
        """Return whether a load or unload is in progress."""
        return self._lock.locked()

    def check_free(self, now: EngineSnapshot) -> None:
        """Check that no load or unload is in progress.

        Raises:
            ModelBusyError: one is in progress.
        """
        if not self._lock.locked():
            return
        change = self.value
        doing = f"{change.model} is being loaded" if change and change.kind == "load" else "the model is being unloaded"
        remedy = "try again when that is done"
        if now.unloading is not None:
            doing = f"{doing} ({now.model}: {now.unloading})"
            remedy += (
                f", or stop its answers now: lmx-lab unload {now.model} --now, lab.unload({now.model!r}, wait=False)"
            )
        raise ModelBusyError(f"{doing}; {remedy}", retry_after_s=2)

    async def wait(self) -> None:
        """Wait until the loads and unloads that are in progress have ended."""
        async with self._lock:
            pass

    @asynccontextmanager
    async def begin(self, kind: Literal["load", "unload"], model: str) -> AsyncIterator[None]:
        """Wait until others have ended, and be the load or unload in progress within the block."""
        await self._lock.acquire()
        try:
            self._set(ModelChange(kind=kind, model=model, stage="checking", since=time.perf_counter()))
            yield
        finally:
            self.value = None
            self._lock.release()
            self._on_change()
            self._on_end()

    def enter_stage(
        self, stage: Literal["draining", "unloading", "loading"], *, drain_until: float | None = None
    ) -> None:
        """Set the stage, and for ``draining`` its end; see ``ModelChange``."""
        if self.value is not None:
            self._set(replace(self.value, stage=stage, drain_until=drain_until))

    def name_model(self, model: str) -> None:
        """Set the model that is unloaded, which may have changed during the wait for others."""
        if self.value is not None:
            self._set(replace(self.value, model=model))

    def _set(self, value: ModelChange) -> None:
        self.value = value
        self._on_change()
