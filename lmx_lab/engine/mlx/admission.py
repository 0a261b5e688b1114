"""Which waiting request may begin: by its turn, by the memory it takes, by what others compute for it meanwhile."""

from __future__ import annotations

import time
from functools import partial

from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.batch import Batch
from lmx_lab.engine.mlx.request import Generation
from lmx_lab.engine.scheduler import Scheduler, Verdict
from lmx_lab.values.generation import GenerationReport

WEIGHT = 0.2
"""Of the newest request in the mean time that a slot is held."""


class Admission:
    def __init__(self, scheduler: Scheduler[Generation], *, limit_bytes: int) -> None:
        self._scheduler = scheduler
        self._limit_bytes = limit_bytes
        self.beside_bytes = 0
        """What models beside the one that generates take of it."""
        self._slot_s: float | None = None
        """How long requests that have ended held their slot."""

    def next(self, batch: Batch) -> Generation | None:
        """The request that begins now; it has its slot. Call it until there is none."""
        return self._scheduler.admit(partial(self._judge, batch))

    def ended(self, report: GenerationReport) -> None:
        """A request has ended well."""
        held_s = report.prefill_s + report.decode_s
        self._slot_s = held_s if self._slot_s is None else (1 - WEIGHT) * self._slot_s + WEIGHT * held_s

    def place_free_s(self, batch: Batch | None) -> float:
        """When one of the running requests will likely end: as those before it did, at its last token at the latest."""
        running = self._scheduler.running
        if batch is None or len(running) < self._scheduler.slots:
            return 1.0
        latest_s = min(batch.remaining_s(generation) for generation in running)
        if self._slot_s is None:
            return max(1.0, latest_s)
        oldest_s = time.perf_counter() - min(generation.admitted_at for generation in running)
        return max(1.0, min(latest_s, max(self._slot_s, oldest_s) / len(running)))

    def _judge(self, batch: Batch, generation: Generation) -> Verdict:
        if batch.shares(generation):
            return Verdict.LATER
        return Verdict.TAKE if self._make_room(batch, generation) else Verdict.BLOCKED

    def _make_room(self, batch: Batch, generation: Generation) -> bool:
        """Whether the request fits into memory beside those that run; drops kept prefixes for it."""
        running = self._scheduler.running
        lengths = [it.length for it in (*running, generation)]
        needed = self.beside_bytes + batch.footprint.running_bytes(lengths, chunk=memory.LARGEST_CHUNK_TOKENS)
        # Alone it fits: the context it was checked against is what memory holds.
        if needed > self._limit_bytes and running:
            return False
        batch.prefixes.shrink(max(0, self._limit_bytes - needed))
        return True
