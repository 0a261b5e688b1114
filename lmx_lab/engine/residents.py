"""Describe the models in memory, and end the requests of a model before it is unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from lmx_lab.engine.admission import AdmissionControl
from lmx_lab.engine.interface import InferenceEngine
from lmx_lab.engine.model_lookup import entries_in_memory
from lmx_lab.errors import NotLoadedError
from lmx_lab.values.engine import ModelChange, UnloadCause
from lmx_lab.values.models import LoadSpec, ModelEntry

MAIN = "main"
"""The slot of the main model. The other slots have the names of kinds and hold the pinned models."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Resident:
    """A model in memory."""

    entry: ModelEntry
    spec: LoadSpec
    engine: InferenceEngine
    admission: AdmissionControl

    @property
    def in_memory(self) -> bool:
        """Whether the engine still has the model: the engine may have run out of memory, or died."""
        return any(entry is self.entry for entry in entries_in_memory(self.engine.snapshot))

    @property
    def pinned_bytes(self) -> int:
        """Memory of a pinned model."""
        pinned = self.engine.snapshot.pinned
        return next((model.memory_bytes for model in pinned if model.entry is self.entry), 0)

    async def drain(self, reason: str, *, timeout_s: float, finish_queued: bool, end: asyncio.Event) -> None:
        """Accept no more requests, and wait until the accepted ones have ended; end the rest after ``timeout_s``.

        Args:
            reason: Beginning of the error messages of requests that end with an error.
            finish_queued: Whether queued requests are also answered, instead of ending at once.
            end: Ends the wait when it is set.
        """
        queued_error = NotLoadedError(f"{reason} before this request started; try again when a model is loaded")
        self.admission.close(None if finish_queued else queued_error)
        if not finish_queued:
            await self.engine.end_requests(self.admission, queued_error, queued_only=True)
        await _first_of(self.admission.until_idle(), end.wait(), timeout_s=timeout_s)
        if self.admission.active:
            self.admission.close(queued_error)
            await self.engine.end_requests(self.admission, NotLoadedError(f"{reason} before this request ended"))


@dataclass(frozen=True, kw_only=True)
class Residents:
    """The models in memory at one moment. A new object replaces it after each change."""

    main: Resident | None = None
    pinned: tuple[Resident, ...] = ()
    stable: bool = True
    """Whether the main model stays: no load or unload is under way, and no request waits for another model."""
    engine: InferenceEngine | None = None
    """The engine of the main model, or of the last one."""
    change: ModelChange | None = None
    unloaded: tuple[str, UnloadCause] | None = None
    """The model that was unloaded last, and why."""

    def __iter__(self) -> Iterator[Resident]:
        """Iterate over the pinned models, then the main one."""
        yield from self.pinned
        if self.main is not None:
            yield self.main


async def _first_of(*works: Coroutine[Any, Any, object], timeout_s: float) -> None:
    """Wait until one of the coroutines has ended, or for ``timeout_s``; then cancel the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
