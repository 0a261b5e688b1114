"""Store key-value caches of ended requests, and reuse them for later prompts with the same prefix.

Each turn of a session repeats the turns before it, and many requests share a system prompt. mlx-lm has a prefix cache
too; this one is limited in bytes, counts a hit as a use, and always leaves one token to compute. Pure, except for the
stored ``CachedState`` values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np

from lmx_lab.engine.prefix_files import Tokens, common_prefix

MIN_TOKENS = 8
"""Shorter prefixes are not stored, since the copy would cost more than it saves."""
MAX_ENTRIES = 256


class CachedState(Protocol):
    """The key-value cache of a number of tokens."""

    @property
    def nbytes(self) -> int: ...

    @property
    def can_be_trimmed(self) -> bool: ...

    def trimmed(self, tokens: int) -> Self:
        """Return a copy without the last ``tokens`` tokens. Called only if it can be trimmed."""


State = TypeVar("State", bound=CachedState)


@dataclass(frozen=True)
class CacheHit(Generic[State]):
    tokens: int
    """Number of prompt tokens that need not be computed; always less than the length of the prompt."""
    state: State


class PrefixCache(Generic[State]):
    """Stores states of at most ``limit_bytes``. The least recently used one is dropped first.

    A state has a *variant*: the name of a dependency other than its tokens, such as vectors that were added to the
    residual stream. A state is only used for prompts of the same variant.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._entries: list[tuple[Tokens, State, str]] = []
        """In the order of their last use."""

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, prompt: Tokens, variant: str = "") -> int:
        """Return how many tokens of the prompt ``find`` would save."""
        return self._best(prompt, variant)[1]

    def find(self, prompt: Tokens, variant: str = "") -> CacheHit[State] | None:
        """Return the state of the longest stored prefix of a prompt, and count this as a use; None if there is none."""
        at, length = self._best(prompt, variant)
        if at is None:
            return None
        tokens, state, _ = entry = self._entries.pop(at)
        self._entries.append(entry)
        return CacheHit(length, state.trimmed(len(tokens) - length) if length < len(tokens) else state)

    def _best(self, prompt: Tokens, variant: str) -> tuple[int | None, int]:
        best, length = None, 0
        for at, (tokens, state, of) in enumerate(self._entries):
            if of != variant:
                continue
            # At least one token must be computed, to have logits to sample from.
            shared = min(common_prefix(tokens, prompt), len(prompt) - 1)
            if shared > max(length, MIN_TOKENS - 1) and (shared == len(tokens) or state.can_be_trimmed):
                best, length = at, shared
        return best, length

    def store(self, tokens: Sequence[int] | Tokens, state: State, variant: str = "") -> bool:
        """Store the state after these tokens, unless a stored one covers it. Drops a state that the new one covers.

        Returns whether it was stored.
        """
        key = np.asarray(tokens, dtype=np.int32)
        if len(key) < MIN_TOKENS or state.nbytes > self.limit_bytes:
            return False
        for at, (other, value, of) in enumerate(self._entries):
            if of != variant:
                continue
            shared = common_prefix(other, key)
            if shared == len(key) and (value.can_be_trimmed or len(other) == len(key)):
                self._entries.append(self._entries.pop(at))
                return False
            if shared == len(other) and state.can_be_trimmed:
                # The state of a session grows with each turn. Another prefix of it is dropped by a later turn.
                self._drop(at)
                break
        self._entries.append((key, state, variant))
        self.nbytes += state.nbytes
        self.shrink(self.limit_bytes)
        return True

    def shrink(self, limit_bytes: int) -> None:
        """Drop the least recently used states until at most ``limit_bytes`` are stored."""
        while self._entries and (self.nbytes > limit_bytes or len(self._entries) > MAX_ENTRIES):
            self._drop(0)

    def _drop(self, at: int) -> None:
        _, state, _ = self._entries.pop(at)
        self.nbytes -= state.nbytes
