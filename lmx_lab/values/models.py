"""Models on this disk, how to load one, and what a load reports."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, TypedDict, cast

from lmx_lab.errors import counted, format_bytes
from lmx_lab.values.bodies import Body, Limits, whole

Kind = Literal["chat", "embedding", "rerank"]

KINDS_IN_WORDS: Mapping[Kind, str] = {"chat": "a chat model", "embedding": "an embedding model", "rerank": "a reranker"}

Format = Literal["mlx", "gguf", "echo"]

EngineName = Literal["mlx", "llama.cpp", "echo"]

EngineChoice = Literal["auto", "mlx", "llama.cpp"]
"""Engines that a caller may choose; ``auto`` selects the fastest one that can run the model."""

KvCacheDtype = Literal["q8_0", "q4_0"]
"""Types of a quantized KV cache: blocks of 32 numbers of 8 or 4 bits, with one float16 scale each."""

Source = Literal["store", "hub", "folder", "ollama", "lm-studio", "llama.cpp", "path", "built-in"]

LoadStage = Literal["download", "verify", "convert", "store", "load", "loaded", "unloading", "unloaded", "failed"]


def _check_time_to_live(value: object) -> object:
    if value == "never" or (isinstance(value, float | int) and not isinstance(value, bool)):
        return value
    raise ValueError('must be a number of seconds, or "never"')


TimeToLive: TypeAlias = Annotated[
    Annotated[float, Limits(ge=0, le=30 * 86_400, allow_inf_nan=False)] | Literal["never"], Limits(_check_time_to_live)
]
"""Seconds without requests after which a model is unloaded."""


class LoadOptions(TypedDict, total=False):
    """The fields of ``LoadSpec`` that a caller may set, as keyword arguments of ``load`` of labs and clients."""

    engine: EngineChoice
    context_length: int | None
    deterministic: bool
    prompt_lookup: bool | None
    kv_cache_dtype: KvCacheDtype | None
    draft: str | os.PathLike[str] | None
    wait: bool | None
    pin: bool | None
    ttl_s: TimeToLive | None


OPTIONS_OF_STAY = frozenset({"wait", "pin", "ttl_s"})
"""The options that change when models leave memory, and not how a model is loaded."""


@dataclass(frozen=True, kw_only=True)
class LoadSpec(Body):
    """A model to load and how to load it: the body of ``POST /admin/models/load``. The value travels unchanged from the
    caller to the engine.
    """

    __pydantic_config__: ClassVar = {
        **Body.__pydantic_config__,
        "json_schema_extra": {"examples": [{"model": "smollm2-135m"}]},
    }

    model: Annotated[str, Limits(min_length=1, max_length=4096)]
    """Id, hub id, or for callers on the server's machine a path. The id ``echo`` is reserved for the built-in model of
    the echo engine."""
    engine: EngineChoice = "auto"
    """Engine that must run the model; ``auto`` selects the fastest one for the formats in which the model is on the
    disk."""
    context_length: Annotated[int, Limits(whole, ge=1)] | None = None
    """Maximum number of tokens of a request, prompt and answer; without it, the engine chooses. llama.cpp decodes fewer
    requests at once if memory is too small for this context in each slot."""
    deterministic: bool = False
    """Compute each answer so that no bit of it depends on other requests and on the prefix cache. Slower, and only on
    llama.cpp."""
    prompt_lookup: bool | None = None
    """Whether an answer that repeats earlier text may be decoded several tokens at a time. It never changes the answer.
    The default is to use it on MLX, where it pauses while it saves no time, but not on llama.cpp."""
    kv_cache_dtype: KvCacheDtype | None = None
    """Type of the numbers in the KV cache, for a longer context in the same memory; only on llama.cpp. The default is
    float16 there, and the type of the weights on MLX."""
    draft: Annotated[str, Limits(min_length=1, max_length=4096)] | None = None
    """Id, hub id, or for callers on the server's machine a path, of a smaller model with the same vocabulary, which
    drafts tokens that the model verifies several at a time. It never changes the answer."""
    wait: bool | None = None
    """Whether running answers of the replaced model may finish: true without a time limit, false not at all; by default
    within the limit of the server (``LMX_LAB_DRAIN_S``)."""
    pin: bool | None = None
    """Whether the model stays in memory until it is unloaded by request, in addition to the models that loads replace.
    A pinned encoder does not become the main model, and no other model is unloaded for it. By default a model that is
    in memory stays as it is, and another one is not pinned."""
    ttl_s: TimeToLive | None = None
    """Seconds without requests after which the model is unloaded, or ``never``. By default a model that is in memory
    stays as it is, and the server's setting (``LMX_LAB_IDLE_UNLOAD_S``) holds for others."""

    @property
    def options(self) -> LoadOptions:
        """The options that do not have their default value. A server of an older version may not know the others."""
        changed = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name in LoadOptions.__annotations__ and getattr(self, each.name) != each.default
        }
        return cast(LoadOptions, changed)


# A TypedDict has no defaults. ``help(lab.load)`` shows these.
LoadOptions.defaults_of = LoadSpec  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Unloading:
    """The state of a model whose unload waits for its running answers to end."""

    answers_left: int
    """Answers, embeddings and rankings that have not ended."""
    seconds_left: int | None
    """Seconds until the rest are ended with an error; None if there is no time limit."""
    replaced_by: str | None = None
    """Id of the model that is loaded next; None if there is none."""

    def __str__(self) -> str:
        limit = {None: "no time limit", 0: "stopping now"}.get(self.seconds_left, f"{self.seconds_left} s")
        return f"unloading, {counted(self.answers_left, 'answer')} left ({limit})"


@dataclass(frozen=True, kw_only=True)
class ModelEvent:
    """A step of a load or unload, also as an event of ``/admin/events``, sent only with ``include=models``."""

    type: Literal["model"] = "model"
    model: str
    stage: LoadStage
    done_bytes: int | None = None
    total_bytes: int | None = None
    message: str | None = None
    """Why a load failed, why a model was unloaded without a request to do so, or on which engine it is loaded."""
    unloading: Unloading | None = None
    """The state of the model in the stage ``unloading``: sent when it begins, when an answer has ended, and when the
    time limit has changed."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadReport:
    """The result of a load, also as the response to ``POST /admin/models/load``."""

    success: Literal[True] = True
    model: str
    load_time_ms: float
    """Milliseconds to check and load the model, without a download; 0 if it was loaded already."""
    vram_gb: float
    """Measured memory of the model; 1 GB is 10^9 bytes."""
    engine: EngineName | None = None
    """The engine that runs the model; None if the server does not report it."""
    engine_reason: str = ""
    """Why this engine was chosen; empty if there was no choice."""
    slots: int | None = None
    """Number of requests that are decoded in parallel; None for encoders."""
    context_length: int | None = None
    """Maximum number of tokens of one of these requests, prompt and answer; None if there is no limit, and for
    encoders."""
    kv_cache_dtype: KvCacheDtype | None = None
    """Type of the KV cache; None if it is not quantized."""
    draft: str | None = None
    """Id of the draft model; None if there is none."""
    warning: str = ""
    """Why the load options are probably a mistake, or the answers may be worse than expected; empty if neither."""

    @property
    def load_s(self) -> float:
        return self.load_time_ms / 1e3

    @property
    def memory_bytes(self) -> int:
        return round(self.vram_gb * 1e9)

    def __repr__(self) -> str:
        loaded = f"{self.model} loaded in {self.load_s:.1f} s, {format_bytes(self.vram_gb * 1e9)} of memory"
        if self.engine is not None:
            loaded += f", on {with_reason(self.engine, self.engine_reason)}"
        capacity = capacity_in_words(self.slots, self.context_length)
        cache = f"KV cache {self.kv_cache_dtype}" if self.kv_cache_dtype else ""
        draft = f"drafts by {self.draft}" if self.draft else ""
        return "; ".join(filter(None, [loaded, capacity, cache, draft, self.warning]))


def with_reason(engine: str, reason: str) -> str:
    """Return the name of an engine with the reason why it was chosen, for display."""
    return f"{engine} ({reason})" if reason else engine


def capacity_in_words(slots: int | None, context_length: int | None) -> str:
    """Return how many requests a loaded model decodes in parallel, and their maximum length; empty if unknown."""
    if slots is None:
        return ""
    length = f", of up to {counted(context_length, 'token')} each" if context_length is not None else ""
    return f"{counted(slots, 'request')} at once{length}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Properties of a model that its files contain, independent of where the files are."""

    kind: Kind
    format: Format
    """Format of the files. It selects the engine: MLX for ``mlx``, llama.cpp for ``gguf``, the built-in engine for
    ``echo``. ``Catalog.convert`` converts ``gguf`` to ``mlx``."""
    architecture: str
    """``model_type`` of ``config.json``, or ``general.architecture`` of a GGUF file."""
    size_bytes: int
    """Size of the weight files on disk; for a split model, of all parts."""
    quantization: str | None
    """``4-bit, group 32``; for a GGUF file ``Q4_1``; for unquantized weights their type, ``float16``; ``None`` if
    unknown."""
    context_length: int | None
    """Tokens that the model was trained for; ``None`` if its files do not contain this number."""
    more_kinds: tuple[Kind, ...] = ()
    """Kinds of requests that the model answers in addition to ``kind``."""
    warning: str = field(default="", compare=False)
    """Why the answers of the model may be worse than expected, although it can be loaded; empty if nothing is known."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """All kinds of requests that the model answers."""
        return (self.kind, *self.more_kinds)

    def answers(self, kinds: Container[Kind]) -> bool:
        """Return whether the model answers requests of one of these kinds."""
        return any(kind in kinds for kind in self.kinds)


@dataclass(frozen=True, kw_only=True)
class FileMark:
    """Properties of a file that change when the file does."""

    name: str
    inode: tuple[int, int]
    """Device and inode: another file of the same name has another inode."""
    size_bytes: int
    changed_ns: int


QuantizedType = Literal["Q8_0", "Q4_0", "IQ4_NL"]
"""Types of weights that llama.cpp computes with fast kernels on a CPU."""

MAX_AUTO_KL = 0.01
"""Largest mean KL divergence with which a quantized copy is loaded instead of its original without a request."""
MIN_AUTO_PREFILL, MIN_AUTO_DECODE = 1.2, 0.8
"""Smallest speeds of such a copy, as multiples of the original's: for prompts, and for a single answer."""


@dataclass(frozen=True, kw_only=True)
class QuantizedCopy:
    """The measurements of a quantized copy relative to the original: loss on a fixed text, and speed on one thread."""

    type: QuantizedType
    """Type of the weights."""
    original: str
    """Type of most weights of the original, such as ``Q4_1``."""
    tokens: int
    """Number of tokens of the text."""
    mean_kl: float
    """Mean of the Kullback-Leibler divergence of the next token's distribution from the original's, in nats."""
    perplexity: float
    original_perplexity: float
    prefill_speed: float
    """Speed of a prompt of 128 tokens, as a multiple of the original's."""
    batch_speed: float
    """Speed of a step with 8 tokens, such as one for each of 8 answers, as a multiple of the original's."""
    decode_speed: float
    """Speed of a step with one token, as a multiple of the original's."""

    @property
    def automatic(self) -> bool:
        """Whether the copy is loaded instead of the original without a request."""
        is_faster = self.prefill_speed >= MIN_AUTO_PREFILL and self.decode_speed >= MIN_AUTO_DECODE
        return is_faster and self.mean_kl <= MAX_AUTO_KL

    @property
    def title(self) -> str:
        """The types of the copy and of the original, for display."""
        return f"{self.type} copy of {self.original}"

    def __str__(self) -> str:
        return (
            f"{self.title}: {self.prefill_speed:.2g} x its speed for prompts, {self.batch_speed:.2g} x for 8 answers, "
            f"{self.decode_speed:.2g} x for one; mean KL {self.mean_kl:.2g} per token, "
            f"perplexity {self.perplexity:.4g} instead of {self.original_perplexity:.4g}"
        )

    def describe(self, model: str) -> str:
        """Return the measurements of the copy, and how it is loaded.

        Args:
            model: Id of the model.
        """
        use = "loaded by default" if self.automatic else f"loaded only as {model}:{self.type}"
        return f"{model} has a {self}; {use}"


@dataclass(frozen=True, kw_only=True)
class ModelLocation:
    """A place where a model may be. Nothing in it was read yet."""

    id: str
    """``smollm2-135m`` or ``org/name``; for a GGUF file of the hub ``org/name:Q4_K_M``; in extra folders the name of
    the folder or file; ``llama3.2:1b`` for a model of Ollama; for other models their path. The entries of a model in
    several formats have the same id."""
    path: Path
    """A folder with ``config.json`` and safetensors, or a GGUF file; for a split model, its first part."""
    source: Source
    aliases: tuple[str, ...] = field(default=(), compare=False)
    """Other names for the model in this format, which apply if no model has them as its id. Case does not matter."""
    copy: QuantizedCopy | None = None
    """Set if the file is a quantized copy of the model's own file."""
    converted_from: Path | None = field(default=None, compare=False, repr=False)
    """The GGUF file from which the model was converted, if the file has not changed since."""
    family: str | None = field(default=None, compare=False, repr=False)
    """The origin that the formats of one model share: the starter, or the file that was converted. Other models with
    the same id are different models."""

    def has_alias(self, name: str) -> bool:
        """Whether the name is the id or one of the aliases, apart from case and from ``:latest``, which Ollama's
        clients append to names without a tag.
        """
        meant = name.casefold().removesuffix(":latest")
        return any(meant == other.casefold().removesuffix(":latest") for other in (self.id, *self.aliases))

    def is_format_of(self, other: ModelLocation) -> bool:
        """Whether both are the same model, in the same or in different formats."""
        return self == other or (self.family is not None and (self.id, self.family) == (other.id, other.family))


@dataclass(frozen=True, kw_only=True)
class ModelEntry(ModelLocation, Facts):
    """One usable model on this disk."""

    engine_reason: str = field(default="", compare=False)
    """For a model to load, why the engine of this format was chosen; empty if there was no choice."""
    modified_at: int = field(default=0, compare=False)
    """Seconds since 1970."""
    marks: tuple[FileMark, ...] = field(default=(), compare=False, repr=False)
    """For a loaded model, its files as they were when it was read."""
    draft: ModelEntry | None = field(default=None, compare=False, repr=False)
    """For a model to load, its draft model; None if there is none."""

    @property
    def load_bytes(self) -> int:
        """Size of the weight files that a load reads, including those of the draft model."""
        return self.size_bytes + (self.draft.size_bytes if self.draft is not None else 0)


def by_model(entries: Iterable[ModelEntry]) -> dict[str, list[ModelEntry]]:
    """Return the entries of each model, by its id: one for each format."""
    models: dict[str, list[ModelEntry]] = {}
    for entry in entries:
        models.setdefault(entry.id, []).append(entry)
    return models


HUB_MODEL = "model in the hub cache"
LISTED_FILES = 5
"""Files of an item that ``ModelFiles`` lists."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Something that takes space on the disk: a model, results, or files of another program."""

    name: str
    """Its name for ``remove_stored``: the id of a model, or another name that is unique in the list."""
    what: str
    """The kind of item, in a few words."""
    path: Path
    files: tuple[tuple[str, int], ...] = field(repr=False)
    """The name and the size in bytes of each file, the largest first. In a folder, the names are relative to it."""
    remedy: str = ""
    """How it is removed, if this package does not remove it; otherwise empty."""
    parts: tuple[Path, ...] = field(default=(), repr=False)
    """The files of a split model; empty for everything that is one file or one folder."""

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files)


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """What is deleted with a model."""

    model: str
    items: tuple[Stored, ...]
    """Its files in every format that the name means, with quantized copies."""
    links: tuple[Path, ...] = ()
    """Models in other folders that link to these files, and cannot be loaded without them."""
    kept: tuple[str, ...] = ()
    """Files of the same model that are not deleted here, such as those of Ollama, each with the reason."""
    unknown: tuple[str, ...] = ()
    """Running labs that did not list the models that they use, each with the reason."""
    deleted: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)

    def lines(self) -> list[str]:
        """Return the files, their sizes, and who else uses them, as lines of text."""
        lines = []
        for item in self.items:
            lines.append(f"{item.name}: {item.what}, {format_bytes(item.size_bytes)} at {item.path}")
            lines += [f"  {format_bytes(size):>9}  {name}" for name, size in item.files[:LISTED_FILES]]
            if (more := len(item.files) - LISTED_FILES) > 0:
                lines.append(f"  and {counted(more, 'smaller file')}")
        if any(item.what == HUB_MODEL for item in self.items):
            lines.append("other programs, such as transformers, may use files in the hub cache")
        lines += [f"{path} links to these files, and cannot be loaded without them" for path in self.links]
        return [*lines, *(f"kept: {text}" for text in self.kept), *self.unknown]

    def __repr__(self) -> str:
        size = format_bytes(self.size_bytes)
        if self.deleted:
            return "\n".join([f"deleted {self.model}: {size}", *self.lines()])
        hint = f"nothing was deleted; lab.delete_model({self.model!r}, yes=True) deletes this: {size}"
        return "\n".join([*self.lines(), hint])


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """What a lab stores, and the space that is left."""

    items: tuple[Stored, ...]
    """Models and results on the disk, the largest first. Damaged and unfinished models are included."""
    free_bytes: int
    """Free space on the disk of the lab's home."""


ECHO = ModelEntry(
    id="echo",
    path=Path("echo"),
    source="built-in",
    kind="chat",
    more_kinds=("embedding",),
    format="echo",
    architecture="echo",
    size_bytes=0,
    quantization=None,
    context_length=32_768,
)
"""The model of the echo engine, which has no files: see ``docs/echo.md``. Its id is reserved."""
