"""Model management, health and metrics: specification sections 2.7-2.9 and 4.2-4.3. 1 GB is 10^9 bytes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from lmx_lab.values.models import EngineChoice, EngineName
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.generation import RequestShape


class ModelRecord(BaseModel):
    id: str
    path: str
    loaded: bool
    vram_gb: float | None
    """Null when not loaded."""
    format: Literal["mlx", "gguf", "echo"]
    engine: EngineName = "mlx"
    """What runs it; servers that do not say so have MLX only."""
    problem: str | None = None
    """Why it cannot be loaded where the server runs, and what to do: its engine is not installed there."""
    kind: Literal["chat", "embedding", "rerank"]
    size_gb: float
    quantization: str | None
    context_length: int | None
    pinned: bool = False


class Compute(BaseModel):
    """What multiplies MLX's matrices."""

    blas: str
    """``openblas``, ``reference`` (slow), ``system`` or, where a GPU computes, ``unused``."""
    detail: str
    threads: int | None
    gflops: float | None
    """Of a float32 product, measured when the server started."""


class EngineRecord(BaseModel):
    name: EngineName
    version: str | None
    """Null where it is not installed."""
    tokens_per_second: float | None
    """Of one stream of the model that ``Preference`` names; null as long as nobody has measured it."""


class Preference(BaseModel):
    """Which engine decodes faster on the server's machine, by about a second of each with the same model."""

    engine: EngineName | None
    """Null if neither is clearly faster, or other programs kept the machine too busy to say."""
    model: str
    measured_at: float
    """Seconds since 1970."""
    detail: str
    """All of it in a sentence."""


class ModelRecords(BaseModel):
    models: list[ModelRecord]
    compute: Compute | None = None
    engines: list[EngineRecord] = []
    preference: Preference | None = None
    """Null as long as nobody has measured it: ``lmx-lab doctor --measure`` does."""
    problem: str | None = None
    """Why ``models`` may be incomplete or out of date, such as a disk that does not answer."""


class LoadRequest(RequestShape):
    """The fields of ``values.models.LoadSpec`` that a request may set."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """Id, hub id, or for callers on the server's machine a path."""
    engine: EngineChoice = "auto"
    """Engine that must run the model; ``auto`` selects it by the model's format."""


class LoadAnswer(BaseModel):
    success: Literal[True] = True
    model: str
    load_time_ms: float
    vram_gb: float


class UnloadRequest(RequestShape):
    """May be left out, or be empty."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    """The loaded model, if it is named at all; another one is refused."""


class UnloadAnswer(BaseModel):
    success: Literal[True] = True
    freed_vram_gb: float


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    ready: bool
    model: str
    vram_gb: float


class NotReady(Ready):
    error: ErrorDetail


class Throughput(BaseModel):
    type: Literal["throughput"] = "throughput"
    tokens_per_second: float
    active_requests: int
    """All that were accepted and have not ended."""
    queued_requests: int
    """Those of them that wait for a slot."""


class Memory(BaseModel):
    type: Literal["memory"] = "memory"
    vram_used_gb: float
    vram_total_gb: float
    pct: float
    """Percent, 0 to 100."""


class Sample(BaseModel):
    """All live figures of one moment; only for watchers who ask with ``include=samples``. GB are 10^9 bytes."""

    model_config = ConfigDict(allow_inf_nan=False)

    type: Literal["sample"] = "sample"
    at: float
    """Seconds since 1970."""
    decode_tokens_per_second: float
    prompt_tokens_per_second: float
    """Of prompts, those that were computed and not found in the cache."""
    encoded_tokens_per_second: float
    """Of texts that were embedded or scored."""
    active_requests: int
    """Those that run."""
    queued_requests: int
    """Those that wait."""
    memory_active_gb: float
    memory_cache_gb: float
    """Of the active memory, what the prefix cache keeps."""
    memory_peak_gb: float
    memory_total_gb: float
    """What the machine has."""


class Heartbeat(BaseModel):
    type: Literal["heartbeat"] = "heartbeat"
    uptime: float
    """Seconds."""


class ModelEvent(BaseModel):
    """Progress of a load; only for watchers who ask with ``include=models``."""

    type: Literal["model"] = "model"
    model: str
    stage: Literal["download", "verify", "convert", "store", "load", "loaded", "unloaded", "failed"]
    done_bytes: int | None = None
    total_bytes: int | None = None
    message: str | None = None


class RequestEvent(BaseModel):
    """The end of a generation, an embedding or a rerank, good or bad; for watchers who ask with ``include=requests``.

    A chat request with several choices has one for each, one that is refused has one. Speeds and times of what did not
    end well are 0.
    """

    type: Literal["request"] = "request"
    kind: Literal["chat", "embedding", "rerank"] = "chat"
    """``chat`` is plain completions too. The others generate nothing: their ``finish_reason`` is ``stop`` if all went
    well, their speed is that of reading, and ``ttft_ms`` is the time to the whole result."""
    request_id: str
    index: int = 0
    """The number of the choice in its answer; of a refusal, the first that it refuses."""
    model: str
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled", "error"]
    code: str | None = None
    """The error's."""
    prompt_tokens: int
    completion_tokens: int
    tokens_per_second: float
    ttft_ms: float


class ModelCard(BaseModel):
    """A row of GET /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["lmx-lab"] = "lmx-lab"


class ModelCards(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    problem: str | None = None
    """As in ``ModelRecords``."""
