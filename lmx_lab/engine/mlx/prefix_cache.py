"""The prefix cache: key-value caches of ended requests, for later prompts that begin alike.

The next turn of a session repeats the turns before it, and many requests share a system prompt: what was computed for
one is taken for the other. Pure but for the ``Kept`` values, which know how to be cut. mlx-lm has such a cache too;
this one is bounded in bytes, counts a hit as a use, and always leaves a token to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

MIN_TOKENS = 8
"""Shorter beginnings are not worth a copy."""
MAX_ENTRIES = 256
Tokens = NDArray[np.int32]


class Kept(Protocol):
    """The key-value cache of a number of tokens."""

    @property
    def nbytes(self) -> int: ...

    @property
    def can_be_cut(self) -> bool: ...

    def cut(self, tokens: int) -> Self:
        """Without the last ``tokens`` tokens, if it can be cut; the value itself stays as it is."""


K = TypeVar("K", bound=Kept)


@dataclass(frozen=True)
class Hit(Generic[K]):
    tokens: int
    """How many tokens of the prompt need not be computed; always fewer than it has."""
    kept: K


class PrefixCache(Generic[K]):
    """At most ``limit_bytes`` of ``Kept`` values; the one used longest ago goes first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._entries: list[tuple[Tokens, K]] = []
        """Used longest ago first."""

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, prompt: Tokens) -> int:
        """How many tokens of ``prompt`` ``take`` would spare."""
        return self._best(prompt)[1]

    def take(self, prompt: Tokens) -> Hit[K] | None:
        """The longest usable beginning of ``prompt`` that is kept; it counts as used."""
        at, length = self._best(prompt)
        if at is None:
            return None
        tokens, kept = entry = self._entries.pop(at)
        self._entries.append(entry)
        return Hit(length, kept.cut(len(tokens) - length) if length < len(tokens) else kept)

    def _best(self, prompt: Tokens) -> tuple[int | None, int]:
        best, length = None, 0
        for at, (tokens, kept) in enumerate(self._entries):
            # An exact hit would leave nothing to compute, and no logits to sample from.
            shared = min(common_prefix(tokens, prompt), len(prompt) - 1)
            if shared > max(length, MIN_TOKENS - 1) and (shared == len(tokens) or kept.can_be_cut):
                best, length = at, shared
        return best, length

    def keep(self, tokens: Sequence[int] | Tokens, kept: K) -> None:
        """Keep the cache of these tokens, unless a longer one serves as well; drop what it makes superfluous."""
        key = np.asarray(tokens, dtype=np.int32)
        if len(key) < MIN_TOKENS or kept.nbytes > self.limit_bytes:
            return
        for at, (other, value) in enumerate(self._entries):
            shared = common_prefix(other, key)
            if shared == len(key) and (value.can_be_cut or len(other) == len(key)):
                self._entries.append(self._entries.pop(at))
                return
            if shared == len(other) and kept.can_be_cut:
                # A session's cache grows with each turn; what else is a beginning of it goes with the next one.
                self._drop(at)
                break
        self._entries.append((key, kept))
        self.nbytes += kept.nbytes
        self.shrink(self.limit_bytes)

    def shrink(self, limit_bytes: int) -> None:
        """Drop entries, those used longest ago first, until at most ``limit_bytes`` are kept."""
        while self._entries and (self.nbytes > limit_bytes or len(self._entries) > MAX_ENTRIES):
            self._drop(0)

    def _drop(self, at: int) -> None:
        _, kept = self._entries.pop(at)
        self.nbytes -= kept.nbytes


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens both begin with."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size
