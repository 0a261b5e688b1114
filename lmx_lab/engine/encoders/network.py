"""What every network here is to the rest: layers one after the other over a padded batch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import mlx.core as mx

from lmx_lab.engine.encoders.padding import PaddedBatch
from lmx_lab.errors import UnusableModelError


class Network(Protocol):
    @property
    def hidden_size(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def positions(self) -> int | None:
        """Tokens of one text at most; None if nothing limits them."""
        ...

    def passes(self, batch: PaddedBatch) -> Generator[mx.array, None, mx.array]:
        """Yield the hidden state (rows, length, size) after each layer, not yet computed; return the last one."""
        ...

    def batch_bytes(self, rows: int, length: int) -> int:
        """What computing such a batch takes beside the weights, about."""
        ...


class Head(Protocol):
    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        """(rows, dimensions) or, of a reranker, (rows,)."""
        ...


class Config:
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
