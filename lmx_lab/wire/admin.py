"""Pydantic models of model management, health, metrics, timelines and traces.

1 GB is 10^9 bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, model_validator

from lmx_lab.errors import ArgumentError
from lmx_lab.values.models import (
    EngineName,
    Format,
    Kind,
    LoadOptions,
    LoadSpec,
    QuantizedCopy,
    Source,
    TimeToLive,
    Unloading,
)
from lmx_lab.values.plan import Fit
from lmx_lab.values.timeline import ModelTimeline, RequestTimeline
from lmx_lab.values.tracing import Activations, Attribution, HookNames, LogitLens, Patching
from lmx_lab.wire.base import ANY_MODEL, AnyModel, RequestModel
from lmx_lab.wire.errors import ErrorDetail, validated
from lmx_lab.wire.tokens import ChatMessages, TokenList

PAGE_REQUESTS = 64
"""Maximum number of requests on a page."""


class ModelRecord(BaseModel):
    """A model on the server's disk. If it is there in several formats, the other fields describe ``format``."""

    id: str
    path: str
    loaded: bool
    vram_gb: float | None
    """Null if it is not loaded."""
    format: Format
    """The loaded format, otherwise the format that is loaded by default."""
    formats: list[Format] = []
    """All formats in which it can be loaded, the one that is loaded by default first."""
    engine: EngineName = "mlx"
    """The engine that runs it. Servers that do not send this field have only MLX."""
    source: Source | None = None
    """Where its files are: in the lab's own folder (``store``), the hub's cache, an additional folder, the folder of
    another program, or at the path by which it was loaded. Null if the server is too old to send it."""
    engine_reason: str = ""
    """For a loaded model, why this engine was chosen; empty if there was no choice."""
    problem: str | None = None
    """Why the server cannot load it, and what to do about it: its engine is not installed there."""
    warning: str = ""
    """Why its answers may be worse than expected, although it can be loaded; empty if nothing is known."""
    kind: Kind
    size_gb: float
    quantization: str | None
    quantized_copy: QuantizedCopy | None = None
    """Set if the other fields describe a quantized copy of the model's file."""
    quantized_copies: list[QuantizedCopy] = []
    """All quantized copies on the disk. ``<id>:<type>`` loads one of them."""
    context_length: int | None
    """Number of tokens that the model was trained for; null if its files do not say."""
    loaded_context_length: int | None = None
    """Maximum number of tokens of a request, prompt and answer, as the model is loaded; null if it is not loaded, or a
    pinned encoder next to the main model."""
    slots: int | None = None
    """Number of requests that it decodes in parallel; null if it is not loaded, and for encoders."""
    main: bool = False
    """Whether it is the main model, which answers requests that name none: the one that was loaded last."""
    pinned: bool = False
    """Whether it stays in memory until it is unloaded by request."""
    ttl_s: float | None = None
    """Seconds without requests after which it is unloaded; null if it stays, or is not loaded."""
    idle_since: float | None = None
    """When its last request ended, in seconds since 1970; null while it has requests, or is not loaded."""
    fits: Fit | None = None
    """Whether a load fits in memory, as in ``LoadPlan``; null for a loaded model, and until it is known."""
    unloading: Unloading | None = None
    """Set while the unload of the model waits for its running answers to end."""


class Compute(BaseModel):
    """The BLAS that computes MLX's matrix products."""

    blas: str
    """``openblas``, ``reference`` (slow), ``system``, or ``unused`` if MLX uses a GPU."""
    detail: str
    threads: int | None
    gflops: float | None
    """Speed of a float32 product, measured at the start of the server."""


class EngineRecord(BaseModel):
    """An engine of the server."""

    name: EngineName
    version: str | None
    """Null if it is not installed."""
    tokens_per_second: float | None
    """Speed of one stream of the model in ``Preference``; null if it was not measured."""


class Preference(BaseModel):
    """The engine that decodes faster on the server's machine, measured for about a second each with the same model."""

    engine: EngineName | None
    """Null if neither is clearly faster, or if other programs kept the machine too busy to measure."""
    model: str
    measured_at: float
    """Seconds since 1970."""
    detail: str
    """The result as a sentence."""


class ModelRecords(BaseModel):
    """The models and engines of a server."""

    models: list[ModelRecord]
    compute: Compute | None = None
    engines: list[EngineRecord] = []
    preference: Preference | None = None
    """Null if it was not measured; ``lmx-lab doctor --measure`` measures it."""
    problem: str | None = None
    """Why ``models`` may be incomplete or out of date, such as a disk that does not respond."""
    in_use: dict[str, str] | None = None
    """The files of models in memory or being loaded and of their draft models: for each path, the id of the model to
    unload. Null for callers on other machines."""


def load_spec(model: str, options: LoadOptions) -> LoadSpec:
    """Return the load of a model with the options of a Python caller, checked as the body of POST /admin/models/load.

    Raises:
        ArgumentError: there is no such option.
        InvalidRequestError: an option is invalid.
    """
    if unknown := options.keys() - LoadOptions.__annotations__.keys():
        raise ArgumentError.unknown("load", min(unknown), ["model", *LoadOptions.__annotations__])
    values = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in options.items()}
    return validated(LoadSpec, {"model": model, **values})


class UnloadRequest(RequestModel):
    """The body of POST /admin/models/unload. It may be missing or empty."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    """The model to unload, or whose load is cancelled; by default the main model. If it is not in memory, the request
    is refused."""
    wait: bool | None = None
    """Whether running answers may finish: true without a time limit, false not at all, null within the limit of the
    server (``LMX_LAB_DRAIN_S``). Also applies to an unload that is in progress, which the request joins."""


class UnloadAnswer(BaseModel):
    """The result of an unload."""

    success: Literal[True] = True
    freed_vram_gb: float


class KeepRequest(RequestModel):
    """The body of POST /admin/models/keep. Fields that are missing or null change nothing."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "smollm2-135m", "ttl_s": 600}]})

    model: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """A model in memory."""
    pin: bool | None = None
    """Whether it stays in memory until it is unloaded by request."""
    ttl_s: TimeToLive | None = None
    """Seconds without requests after which it is unloaded, or ``never``."""


class KeepAnswer(BaseModel):
    """How long a model stays in memory."""

    success: Literal[True] = True
    model: str
    pinned: bool
    ttl_s: float | None
    """Null if it stays."""

    def __repr__(self) -> str:
        if self.pinned:
            return f"{self.model} stays in memory until it is unloaded by request"
        if self.ttl_s is not None:
            return f"{self.model} is unloaded after {self.ttl_s:g} s without requests"
        return f"{self.model} stays in memory until the room is needed"


class CancelLoadRequest(RequestModel):
    """The body of POST /admin/models/cancel."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "smollm2-135m"}]})

    model: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """The model whose load is cancelled: its id, or the name that the request for the load used."""
    shared: bool = True
    """Whether to cancel the load even if several callers wait for it; if not, this is refused with 409."""


class CancelLoadAnswer(BaseModel):
    """The result of cancelling a load."""

    success: Literal[True] = True


RequestKind = Kind | Literal["internal"]
"""The kind of a request. Internal ones are steps of the lab's own work, such as scoring the tokens of an answer."""


class RunningRequest(BaseModel):
    """A request that waits or runs."""

    id: str
    """The id of the response in the header ``x-request-id``; ``lab_1`` and so on for requests of the notebook that runs
    the server."""
    client: str | None
    """Address of the client; null for the notebook that runs the server."""
    kind: RequestKind
    model: str
    state: Literal["queued", "running"]
    """``queued``: it waits for a slot, or for its model."""
    age_s: float
    prompt_tokens: int
    """0 while the request waits for its model, and for other kinds than ``chat``."""
    completion_tokens: int


class RunningRequests(BaseModel):
    """The answer of GET /admin/requests."""

    requests: list[RunningRequest]


class StopRequest(RequestModel):
    """The body of POST /admin/requests/stop."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "req_0123456789abcdef"}]})

    id: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    """The id of a request that waits or runs, or a unique beginning of it."""


class StopRequestAnswer(BaseModel):
    """The result of stopping a request."""

    success: Literal[True] = True
    id: str


class Alive(BaseModel):
    """The answer of GET /healthz."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The answer of GET /readyz."""

    ready: bool
    model: str
    vram_gb: float
    unloading: Unloading | None = None
    """Set while the unload of the model waits for its running answers to end; new requests are refused or wait."""
    recorded: bool | None = None
    """True if the requests of all clients are recorded; absent otherwise."""
    swap: bool | None = None
    """True if a request for another model on disk loads that model; absent otherwise."""
    resident: list[str] | None = None
    """All models in memory, if several may be; absent otherwise."""


class NotReady(Ready):
    """The answer of GET /readyz if no model is ready."""

    error: ErrorDetail


class Throughput(BaseModel):
    """An event with the current speed and the number of requests."""

    type: Literal["throughput"] = "throughput"
    tokens_per_second: float
    active_requests: int
    """Number of requests that were accepted and have not ended."""
    queued_requests: int
    """Number of active requests that wait in the queue."""


class Memory(BaseModel):
    """An event with the current memory use."""

    type: Literal["memory"] = "memory"
    vram_used_gb: float
    vram_total_gb: float
    pct: float
    """Percent, 0 to 100."""


class Sample(BaseModel):
    """An event with all current metrics, sent only with ``include=samples``. 1 GB is 10^9 bytes."""

    model_config = ConfigDict(allow_inf_nan=False)

    type: Literal["sample"] = "sample"
    at: float
    """Seconds since 1970."""
    decode_tokens_per_second: float
    prompt_tokens_per_second: float
    """Prompt tokens that were computed, without those in the cache."""
    encoded_tokens_per_second: float
    """Tokens of texts that were embedded or scored."""
    active_requests: int
    """Requests that are running."""
    queued_requests: int
    """Requests that are waiting."""
    memory_active_gb: float
    memory_cache_gb: float
    """Part of the active memory that the prefix cache uses."""
    memory_peak_gb: float
    memory_total_gb: float
    """Memory of the machine."""
    memory_pressure: str | None = None
    """Why the machine or the container is short of memory; null if it is not."""
    memory_freed_gb: float = 0.0
    """How much less memory models and requests use than at the beginning of this shortage."""


class Heartbeat(BaseModel):
    """An event that shows that the stream is alive."""

    type: Literal["heartbeat"] = "heartbeat"
    uptime: float
    """Seconds since the start of the server."""


class RequestEvent(BaseModel):
    """An event for the end of a generation, an embedding or a rerank, sent only with ``include=requests``.

    A chat request with several choices sends one for each choice, and a refused request sends one. If a request did not
    succeed, its speeds and times are 0.
    """

    type: Literal["request"] = "request"
    kind: RequestKind = "chat"
    """``chat`` includes plain completions. ``embedding`` and ``rerank`` generate nothing: their ``finish_reason`` is
    ``stop`` if they succeeded, their speed is that of the input, and ``ttft_ms`` is the time to the whole result."""
    scope: str = Field(default="", exclude=True, repr=False)
    """The caller; see ``engine.requests.Caller``. It is not sent."""
    request_id: str
    index: int = 0
    """Index of the choice in its answer; of a refused request, the first refused choice."""
    model: str
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled", "error"]
    code: str | None = None
    """Code of the error."""
    prompt_tokens: int
    completion_tokens: int
    tokens_per_second: float
    ttft_ms: float


class ModelCard(BaseModel):
    """An entry of GET /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["lmx-lab"] = "lmx-lab"
    format: Format | None = None
    formats: list[Format] = []
    """As in ``ModelRecord``."""
    context_length: int | None = None
    """Maximum number of tokens of a request, prompt and answer, as the model is loaded; for a model that is not loaded,
    the number that it was trained for."""
    slots: int | None = None
    """Number of requests that the loaded model decodes in parallel; null for other models."""
    root: str | None = None
    """The id of the model, if ``id`` is an alias from ``model_aliases``; null otherwise."""


class ModelCards(BaseModel):
    """The answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    problem: str | None = None
    """Why ``data`` may be incomplete or out of date, as in ``ModelRecords``."""


# Timelines


class TimelinePage(BaseModel):
    """The answer of GET /admin/timeline."""

    requests: list[RequestTimeline]
    """The newest first."""
    models: list[ModelTimeline]
    """Loads and unloads, oldest first. Only the first page has them."""
    before: int | None
    """Value of ``before`` for the next page; null on the last page."""


# Traces. The response is a safetensors document; see ``values.tracing.Trace``.


class TracedText(RequestModel):
    """The text to trace; exactly one of the fields."""

    text: str | None = None
    messages: ChatMessages | None = None
    tokens: TokenList | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in ("text", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"has {' and '.join(given) or 'no text'}; send exactly one of text, messages and tokens")
        return self


@dataclass(frozen=True, kw_only=True)
class HookNamesBody(HookNames):
    """Lists the names of the model's hooks."""

    kind: Literal["hooks"]


@dataclass(frozen=True, kw_only=True)
class ActivationsBody(Activations):
    """Returns the values of hooks."""

    kind: Literal["activations"]
    input: TracedText


@dataclass(frozen=True, kw_only=True)
class LogitLensBody(LogitLens):
    """Returns the tokens that the model would predict after each block."""

    kind: Literal["logit_lens"]
    input: TracedText


@dataclass(frozen=True, kw_only=True)
class PatchingBody(Patching):
    """Returns the logits of two tokens after a text in which single values are replaced by those of a clean text."""

    kind: Literal["patching"]
    input: TracedText
    clean: TracedText


@dataclass(frozen=True, kw_only=True)
class AttributionBody(Attribution):
    """Attributes the logit of the token after a text to the parts of the model."""

    kind: Literal["attribution"]
    input: TracedText


AnyTrace = Annotated[
    HookNamesBody | ActivationsBody | LogitLensBody | PatchingBody | AttributionBody, Discriminator("kind")
]


class TraceBody(RequestModel):
    """The body of POST /admin/trace."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "trace": {
                        "kind": "activations",
                        "input": {"text": "The sea is"},
                        "hooks": ["blocks.*.hook_resid_post"],
                    }
                }
            ]
        }
    )

    model: AnyModel = ANY_MODEL
    trace: AnyTrace
