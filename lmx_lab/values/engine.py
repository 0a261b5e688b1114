"""The models in memory and the state of their engines at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lmx_lab.values.models import ModelEntry, Unloading

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
    """Counts of tokens."""

    output_tokens: int = _counter("Tokens generated.")
    prompt_tokens: int = _counter("Tokens of prompts, cached ones included.")
    cached_tokens: int = _counter("Tokens of prompts that were taken from the prefix cache.")
    disk_cached_tokens: int = _counter("Cached tokens whose state was read from disk.")
    prefix_disk_written_bytes: int = _counter("Bytes that the prefix cache has written to disk.")
    drafted_tokens: int = _counter("Tokens drafted by prompt lookup or a draft model and verified.")
    accepted_tokens: int = _counter("Drafted tokens that became part of an answer.")
    encoded_tokens: int = _counter("Tokens of texts that were embedded or scored.")

    def add(self, other: TokenTotals) -> None:
        """Add the counts of ``other``."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTERS: Mapping[str, str] = {each.name: each.metadata["counter"] for each in fields(TokenTotals)}
"""The counts of ``TokenTotals``, with what they count."""


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """A model in memory at one moment. Numbers of requests and tokens count from its load."""

    entry: ModelEntry
    memory_bytes: int
    pinned: bool = False
    """Whether it stays in memory until it is unloaded by request."""
    ttl_s: float | None = None
    """Time without requests after which it is unloaded; None if it stays."""
    idle_since: float | None = None
    """When its last request ended (``time.perf_counter``); None while it has requests."""
    unloading: Unloading | None = None
    """Set while its unload waits for its requests to end."""
    context_length: int | None = None
    """Maximum number of tokens of a request, prompt and answer; None if there is no limit."""
    slots: int | None = None
    """Number of requests that it decodes in parallel; None for encoders."""
    active_requests: int = 0
    queued_requests: int = 0
    prefix_cache_bytes: int = 0
    progress_at: float = 0.0
    """When it last computed something, or a request received something (``time.perf_counter``)."""
    totals: TokenTotals = field(default_factory=TokenTotals)

    @property
    def requests(self) -> int:
        """Requests that were accepted and have not ended."""
        return self.active_requests + self.queued_requests


@dataclass(frozen=True, kw_only=True)
class ModelChange:
    """A load or an unload of a model that is under way."""

    kind: Literal["load", "unload"]
    model: str
    """Id of the model that is loaded or unloaded."""
    stage: Literal["checking", "draining", "unloading", "loading"]
    """``draining`` waits for the requests of a model in memory to end."""
    since: float
    """As ``time.perf_counter``."""


@dataclass(frozen=True, kw_only=True)
class PressureEvent:
    """The beginning or the end of a shortage of memory on the machine or in the container. Also an event of
    ``/admin/events``, sent only with ``include=pressure``."""

    type: Literal["pressure"] = "pressure"
    active: bool
    """Whether memory is short. The limit of models and caches is lower while it is."""
    reason: str | None
    """What the system reports; None at the end of the shortage."""
    limit_bytes: int
    """How much the process, with those of llama.cpp, may use now."""
    footprint_bytes: int
    """How much they use now."""

    def __str__(self) -> str:
        what = f"memory is short: {self.reason}" if self.active else "memory is no longer short"
        used, limit = self.footprint_bytes / 1e9, self.limit_bytes / 1e9
        return f"{what}; {used:.2f} GB are in use, and {limit:.2f} GB are allowed now"


EngineState = Literal["empty", "loading", "ready", "dead"]

UnloadCause = Literal["requested", "idle", "memory"]
"""``requested``: by a caller. ``idle``: no request came for ``idle_unload_s``. ``memory``: memory ran out."""


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """The models in memory and the state of their engines at one moment."""

    state: EngineState = "empty"
    models: tuple[ModelState, ...] = ()
    """All models in memory."""
    main: ModelState | None = None
    """The main model, one of ``models``: the one that was loaded last. It answers requests that name none."""
    change: ModelChange | None = None
    """The load or unload that is under way."""
    unloaded_model: str | None = None
    """Id of the model that was loaded last, while none is."""
    unload_cause: UnloadCause | None = None
    totals: TokenTotals = field(default_factory=TokenTotals)
    """Counts of all models since the start, those that were unloaded included."""
    memory_used_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_total_bytes: int = 0
    memory_footprint_bytes: int = 0
    """Physical memory of the process and of those of llama.cpp, without files that are mapped."""
    memory_limit_bytes: int = 0
    """The value that ``memory_footprint_bytes`` should not exceed. It is lower while ``memory_pressure`` is set."""
    memory_pressure: str | None = None
    """Why the machine or the container is short of memory; None if it is not."""
    memory_freed_bytes: int = 0
    """How much less memory models and requests use than at the beginning of ``memory_pressure``."""
    blas: BlasReport | None = None
    """The BLAS behind MLX; None until that engine has started."""

    @property
    def entries(self) -> list[ModelEntry]:
        """All models in memory."""
        return [model.entry for model in self.models]

    @property
    def entry(self) -> ModelEntry | None:
        """The main model; None if none is loaded."""
        return self.main.entry if self.main is not None else None

    @property
    def model(self) -> str | None:
        """Id of the main model."""
        return self.main.entry.id if self.main is not None else None

    @property
    def model_memory_bytes(self) -> int:
        """Memory of the main model; 0 without one."""
        return self.main.memory_bytes if self.main is not None else 0

    @property
    def slots(self) -> int | None:
        """Number of requests that the main model decodes in parallel; None for encoders, and without a model."""
        return self.main.slots if self.main is not None else None

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of a request to the main model; None if there is no limit, and without a model."""
        return self.main.context_length if self.main is not None else None

    @property
    def pinned(self) -> tuple[ModelState, ...]:
        """The models that stay in memory until they are unloaded by request."""
        return tuple(model for model in self.models if model.pinned)

    @property
    def active_requests(self) -> int:
        return sum(model.active_requests for model in self.models)

    @property
    def queued_requests(self) -> int:
        return sum(model.queued_requests for model in self.models)

    @property
    def prefix_cache_bytes(self) -> int:
        return sum(model.prefix_cache_bytes for model in self.models)

    @property
    def idle_model(self) -> str | None:
        """Id of the model that was unloaded because it was idle: in swap mode the next request loads it again."""
        return self.unloaded_model if self.model is None and self.unload_cause == "idle" else None

    @property
    def unloading(self) -> Unloading | None:
        """The state of the main model if its unload waits for its requests to end; None otherwise."""
        return self.main.unloading if self.main is not None else None

    @property
    def requests(self) -> int:
        """Requests that were accepted and have not ended."""
        return self.active_requests + self.queued_requests

    def stalled(self, now: float, limit_s: float) -> bool:
        """Return whether requests of a model wait, and it made no progress for longer than ``limit_s``."""
        return any(model.requests > 0 and now - model.progress_at > limit_s for model in self.models)
