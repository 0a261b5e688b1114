"""The state of an engine at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmx_lab.values.models import ModelEntry

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
    threads_fixed: bool = True
    """Whether the number of threads was set explicitly. If not, ``ThreadChoice`` adapts it to the load."""


@dataclass(frozen=True, kw_only=True)
class PinnedModel:
    """An encoder that is kept in memory beside the loaded model."""

    entry: ModelEntry
    memory_bytes: int


EngineState = Literal["empty", "loading", "ready", "dead"]

UnloadCause = Literal["asked", "idle", "memory"]


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """The engine as of its last step; replaced whole, so any thread may read it."""

    state: EngineState = "empty"
    entry: ModelEntry | None = None
    """The loaded model."""
    model_memory_bytes: int = 0
    context_length: int | None = None
    pinned: tuple[PinnedModel, ...] = ()
    active_requests: int = 0
    queued_requests: int = 0
    encode_requests: int = 0
    """Of both, those for embeddings and reranking."""
    output_tokens: int = 0
    """Since the engine started, like the next two."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had; part of ``prompt_tokens``."""
    encoded_tokens: int = 0
    """Of texts that were embedded or scored."""
    prefix_cache_bytes: int = 0
    place_free_s: float = 1.0
    """In how long a running request is likely to end, and a place in the queue to be free."""
    unloaded_model: str | None = None
    """The model that was loaded before, while none is."""
    unload_cause: UnloadCause | None = None
    memory_used_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_total_bytes: int = 0
    progress_at: float = 0.0
    """When the engine last came round, or a request got something."""
    blas: BlasReport | None = None
    """What multiplies matrices on a CPU; None until the engine has started."""

    @property
    def model(self) -> str | None:
        """The loaded model's id."""
        return self.entry.id if self.entry else None

    @property
    def resting_model(self) -> str | None:
        """That was unloaded for want of requests, and neither by somebody nor for lack of memory: it may come back."""
        return self.unloaded_model if self.model is None and self.unload_cause == "idle" else None

    def stalled(self, now: float, limit_s: float) -> bool:
        """Whether work waits and nothing has moved for longer than ``limit_s``."""
        return self.active_requests + self.queued_requests > 0 and now - self.progress_at > limit_s
