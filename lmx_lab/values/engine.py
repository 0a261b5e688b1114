"""The state of an engine at one moment, and the rule that merges the states of several engines into one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal

from lmx_lab.values.models import LoadReport, ModelEntry, Unloading

BlasName = Literal["openblas", "reference", "system", "unused"]


@dataclass(frozen=True, kw_only=True)
class BlasReport:
    """The BLAS that computes MLX's matrix products."""

    name: BlasName
    """``reference``: the one in MLX's wheel. ``system``: another BLAS that MLX already used. ``unused``: on a GPU."""
    detail: str
    """For display: version and processor kernels, or the reason why OpenBLAS is not used."""
    threads: int | None = None
    gflops: float | None = None
    """Measured speed of a float32 matrix product in MLX."""
    gemv: bool = False
    """Whether products with a single row are computed by ``sgemv``."""
    fma_exp: bool = False
    """Whether MLX's ``exp`` is replaced by one with fused multiply-add."""
    threads_fixed: bool = True
    """Whether the number of threads was set explicitly. If not, ``ThreadChoice`` adapts it to the load."""


def _counter(text: str) -> Any:
    """Return the field of a count. ``/metrics`` shows it with this text."""
    return field(default=0, metadata={"counter": text})


@dataclass(kw_only=True)
class TokenTotals:
    """Counts since an engine started."""

    output_tokens: int = _counter("Tokens generated.")
    prompt_tokens: int = _counter("Tokens of prompts, cached ones included.")
    cached_tokens: int = _counter("Tokens of prompts that were taken from the prefix cache.")
    disk_cached_tokens: int = _counter("Cached tokens whose state was read from disk.")
    prefix_disk_written_bytes: int = _counter("Bytes that the prefix cache has written to disk.")
    drafted_tokens: int = _counter("Tokens drafted by prompt lookup or a draft model and verified.")
    accepted_tokens: int = _counter("Drafted tokens that became part of an answer.")
    encoded_tokens: int = _counter("Tokens of texts that were embedded or scored.")


COUNTERS: Mapping[str, str] = {each.name: each.metadata["counter"] for each in fields(TokenTotals)}
"""The counts of ``TokenTotals``, with what they count."""


def _sum(totals: Sequence[TokenTotals]) -> TokenTotals:
    return TokenTotals(**{name: sum(getattr(each, name) for each in totals) for name in COUNTERS})


@dataclass(frozen=True, kw_only=True)
class PinnedModel:
    """An encoder that is kept in memory in addition to the main model."""

    entry: ModelEntry
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelChange:
    """A load or an unload of the main model that is under way. Times are seconds of ``time.perf_counter``."""

    kind: Literal["load", "unload"]
    model: str
    """Id of the model that is loaded or unloaded."""
    stage: Literal["checking", "draining", "unloading", "loading"]
    """``draining`` waits for the requests of the model in memory to end."""
    since: float
    drain_until: float | None = None
    """When the requests that are left end with an error; None without a time limit, or in another stage."""
    requests_left: int = 0
    """Requests of the model in memory that have not ended."""


EngineState = Literal["empty", "loading", "ready", "dead"]

UnloadCause = Literal["requested", "idle", "memory"]
"""``requested``: by a caller. ``idle``: no request came for ``idle_unload_s``. ``memory``: memory ran out."""


Merge = Mapping[str, Callable[[list[Any]], Any]]
# How the values of a field are merged for several engines. Fields without such metadata take the first value.
SUM: Merge = {"merge": sum}
MAXIMUM: Merge = {"merge": max}
CONCATENATION: Merge = {"merge": lambda values: tuple(chain.from_iterable(values))}
FIRST_SET: Merge = {"merge": lambda values: next((value for value in values if value is not None), None)}


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """The state of an engine as of its last step. It is replaced whole, so any thread may read it."""

    state: EngineState = "empty"
    entry: ModelEntry | None = None
    """The main model; None if none is loaded."""
    model_memory_bytes: int = 0
    context_length: int | None = None
    """Maximum number of tokens of a request to the main model, prompt and answer; None if there is no limit."""
    slots: int | None = None
    """Number of requests that the main model decodes in parallel; None for encoders."""
    batch_invariant: bool = True
    """Whether the tokens of an answer of the main model do not depend on other requests."""
    pinned: tuple[PinnedModel, ...] = field(default=(), metadata=CONCATENATION)
    change: ModelChange | None = None
    """The load or unload that is under way."""
    active_requests: int = field(default=0, metadata=SUM)
    queued_requests: int = field(default=0, metadata=SUM)
    encode_requests: int = field(default=0, metadata=SUM)
    """Embedding and rerank requests among the active and queued ones."""
    totals: TokenTotals = field(default_factory=TokenTotals, metadata={"merge": _sum})
    prefix_cache_bytes: int = field(default=0, metadata=SUM)
    slot_free_s: float = 1.0
    """Estimated seconds until a running request of the main model ends and frees its slot."""
    unloaded_model: str | None = None
    """Id of the model that was loaded last, while none is."""
    unload_cause: UnloadCause | None = None
    memory_used_bytes: int = field(default=0, metadata=SUM)
    memory_peak_bytes: int = field(default=0, metadata=SUM)
    memory_total_bytes: int = field(default=0, metadata=MAXIMUM)
    memory_is_of_device: bool = False
    """Whether this memory belongs to a GPU, so that engines on the CPU do not use it."""
    progress_at: float = 0.0
    """Last time that the engine took a step or a request received something (``time.perf_counter``)."""
    blas: BlasReport | None = field(default=None, metadata=FIRST_SET)
    """The BLAS behind MLX; None until that engine has started."""

    @property
    def model(self) -> str | None:
        """Id of the main model."""
        return self.entry.id if self.entry else None

    def load_report(self, load_s: float) -> LoadReport:
        """Return the report of the load of the main model, which took this many seconds."""
        return LoadReport(
            model=self.model or "",
            load_time_ms=load_s * 1e3,
            vram_gb=self.model_memory_bytes / 1e9,
            slots=self.slots,
            context_length=self.context_length,
        )

    @property
    def idle_model(self) -> str | None:
        """Id of the model that was unloaded because it was idle: in swap mode the next request loads it again."""
        return self.unloaded_model if self.model is None and self.unload_cause == "idle" else None

    @property
    def unloading(self) -> Unloading | None:
        """The state of the main model if its unload waits for its requests to end; None otherwise."""
        change = self.change
        if self.entry is None or change is None or change.stage != "draining":
            return None
        left_s = None if change.drain_until is None else change.drain_until - time.perf_counter()
        return Unloading(
            answers_left=change.requests_left,
            seconds_left=None if left_s is None else max(0, math.ceil(left_s)),
            replaced_by=change.model if change.kind == "load" else None,
        )

    @property
    def requests(self) -> int:
        """Requests that were accepted and have not ended."""
        return self.active_requests + self.queued_requests

    def stalled(self, now: float, limit_s: float) -> bool:
        """Return whether requests wait and the engine made no progress for longer than ``limit_s``."""
        return self.requests > 0 and now - self.progress_at > limit_s


def merged(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """Merge the states of several engines into one.

    Args:
        snapshots: At least one; the main model of the first is the main model of all.
    """
    values = {
        each.name: each.metadata["merge"]([getattr(snapshot, each.name) for snapshot in snapshots])
        for each in fields(EngineSnapshot)
        if "merge" in each.metadata
    }
    working = [snapshot.progress_at for snapshot in snapshots if snapshot.requests]
    progress_at = min(working, default=max(snapshot.progress_at for snapshot in snapshots))
    return replace(snapshots[0], progress_at=progress_at, **values)
