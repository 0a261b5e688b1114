"""What every network here is to the rest: layers one after the other over a padded batch."""

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
    """Rows of token ids, padded on the right to the longest."""

    ids: NDArray[np.int32]
    """(rows, length)"""
    lengths: NDArray[np.int32]
    """(rows,), without padding."""
    skipped_tokens: NDArray[np.int32]
    """(rows,), leading tokens that are left out of pooling."""
    second_start: NDArray[np.int32]
    """(rows,), where the second segment begins; the row's length where there is none."""
    mask: mx.array | None
    """(rows, length), False for padding; None if there is no padding."""

    @classmethod
    def of(cls, texts: Sequence[TextTokens]) -> Self:
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

    def last(self, hidden: mx.array) -> mx.array:
        """(rows, size): of (rows, length, size) what stands at each row's last token."""
        return hidden[mx.arange(len(self.lengths)), mx.array(self.lengths - 1)]


class Network(Protocol):
    @property
    def hidden_size(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def positions(self) -> int | None:
        """Tokens of one text at most; None if nothing limits them."""
        ...

    def forward(self, batch: PaddedBatch) -> Generator[mx.array, None, mx.array]:
        """Yield the hidden state (rows, length, size) after each layer, not yet computed; return the last one."""
        ...

    def batch_bytes(self, rows: int, length: int) -> int:
        """What computing such a batch takes beside the weights, about."""
        ...


class Head(Protocol):
    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        """(rows, dimensions) or, of a reranker, (rows,)."""
        ...


class ModelConfig:
    """A ``config.json``, its values checked when they are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnusableModelError(f"config.json gives {key} as {value!r}; it must be a number from 1 up")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnusableModelError(f"config.json gives {key} as {value!r}; it must be a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.values.get(key, default))

    def head_size(self) -> int:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            raise UnusableModelError(f"config.json gives hidden_size {hidden}, no multiple of its {heads} heads")
        return hidden // heads
