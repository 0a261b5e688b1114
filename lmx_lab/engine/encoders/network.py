"""Interfaces of networks and heads, padded batches of texts, and ``config.json``. Engine thread only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.encoders.tokenizer import TextTokens
from lmx_lab.errors import UnusableModelError


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Token ids of several texts as one array, padded on the right to the longest."""

    ids: NDArray[np.int32]
    """(rows, length)"""
    lengths: NDArray[np.int32]
    """(rows,), number of tokens without padding."""
    skipped_tokens: NDArray[np.int32]
    """(rows,), number of leading tokens that are left out of pooling."""
    second_start: NDArray[np.int32]
    """(rows,), index where the second segment begins; the length of the row if there is none."""
    mask: mx.array | None
    """(rows, length), False for padding; None if there is no padding."""

    @classmethod
    def from_texts(cls, texts: Sequence[TextTokens]) -> Self:
        lengths = np.array([len(text.tokens) for text in texts], np.int32)
        ids = np.zeros((len(texts), int(lengths.max())), np.int32)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text.tokens)] = text.tokens
        starts = [len(text.tokens) if text.second_start is None else text.second_start for text in texts]
        padded = bool((lengths < ids.shape[1]).any())
        return cls(
            ids=ids,
            lengths=lengths,
            skipped_tokens=np.array([text.skipped_tokens for text in texts], np.int32),
            second_start=np.array(starts, np.int32),
            mask=mx.array(np.arange(ids.shape[1]) < lengths[:, None]) if padded else None,
        )

    def last_token(self, hidden: mx.array) -> mx.array:
        """Return the hidden states (rows, size) of the last tokens, of (rows, length, size)."""
        return hidden[mx.arange(len(self.lengths)), mx.array(self.lengths - 1)]


class Network(Protocol):
    """A model without its head: token ids to hidden states."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def positions(self) -> int | None:
        """The largest number of tokens of one text; None if it is not limited."""
        ...

    def forward(self, batch: PaddedBatch) -> Generator[mx.array, None, mx.array]:
        """Yield the hidden state (rows, length, size) after each layer, not evaluated; return the last one."""
        ...

    def batch_bytes(self, rows: int, length: int) -> int:
        """Estimate the memory that a batch takes in addition to the weights."""
        ...


class Head(Protocol):
    """Computes vectors or scores from hidden states."""

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        """Return vectors (rows, dimensions) or, for a reranker, scores (rows,)."""
        ...


class ModelConfig:
    """A model's ``config.json``; values are checked when they are read.

    Every method raises ``UnusableModelError`` if a value is invalid.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def size(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnusableModelError(f"config.json: {key} is {value!r}; it must be an integer of at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnusableModelError(f"config.json: {key} is {value!r}; it must be a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a value as a boolean."""
        return bool(self.values.get(key, default))

    def head_size(self) -> int:
        """Return the size of one attention head."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            raise UnusableModelError(f"config.json: hidden_size {hidden} is not a multiple of its {heads} heads")
        return hidden // heads
