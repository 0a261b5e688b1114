"""Models on this disk, and the report on loading one."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    model: str
    load_s: float
    memory_bytes: int
    """What the model takes in memory, measured."""


Kind = Literal["chat", "embedding", "rerank"]

KINDS_IN_WORDS: Mapping[Kind, str] = {"chat": "a chat model", "embedding": "an embedding model", "rerank": "a reranker"}

Format = Literal["mlx", "gguf", "echo"]

EngineName = Literal["mlx", "llama.cpp", "echo"]

EngineChoice = Literal["auto", "mlx", "llama.cpp"]
"""Engines that a caller may choose; ``auto`` selects the engine by the format of the model."""


Source = Literal["store", "hub", "folder", "path", "built-in"]


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """A model to load and how to load it. The value travels unchanged from the caller to the engine."""

    model: str
    """Id, path or hub id. The id ``echo`` is reserved for the built-in model of the echo engine."""
    engine: EngineChoice = "auto"
    """Engine that must run the model; ``auto`` selects it by the model's format."""
    pin: Kind | None = None
    """Keep the model in memory beside the main one as the pinned model of this kind; None loads the main model."""
    dtype: str | None = None
    """Data type of the weights in memory, as in ``Settings.dtype``; None uses that setting."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the files of a model say about it, wherever they lie."""

    kind: Kind
    format: Format
    """Which engine runs it: ``mlx`` that on MLX, ``gguf`` llama.cpp, ``echo`` the one without a model.
    ``Catalog.convert`` makes ``mlx`` of ``gguf``."""
    architecture: str
    """``model_type`` of ``config.json``, or ``general.architecture`` of a GGUF file."""
    size_bytes: int
    """The weight files alone, as they are on disk; of a split model all parts."""
    quantization: str | None
    """``4-bit, group 32``; of a GGUF file ``Q4_1``; of plain weights their type, ``float16``; ``None`` if unknown."""
    context_length: int | None
    """Tokens the model was made for; ``None`` if its files do not say."""
    more_kinds: tuple[Kind, ...] = ()
    """Kinds of requests that it answers beside those of ``kind``."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """All kinds of requests that it answers."""
        return (self.kind, *self.more_kinds)

    def answers(self, kinds: Container[Kind]) -> bool:
        """Whether it answers requests of one of these kinds."""
        return any(kind in kinds for kind in self.kinds)


@dataclass(frozen=True, kw_only=True)
class FileMark:
    """What changes when a file does."""

    name: str
    inode: tuple[int, int]
    """With its device: another file under the same name has another one."""
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True, kw_only=True)
class ModelEntry(Facts):
    """One usable model on this disk."""

    id: str
    """``smollm2-135m`` or ``org/name``, of a GGUF of the hub ``org/name:Q4_K_M``; in extra folders the name of the
    folder or file; for others their path."""
    path: Path
    """A folder with ``config.json`` and safetensors, or a ``.gguf`` file: of a split model the first part."""
    source: Source
    modified_at: int = field(default=0, compare=False)
    """Seconds since 1970."""
    marks: tuple[FileMark, ...] = field(default=(), compare=False, repr=False)
    """Of a loaded model: its files as they were when it was read."""


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
"""Answers without a model: see ``docs/echo.md``. The id is reserved."""
