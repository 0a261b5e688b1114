"""Store key-value caches of ended requests, and reuse them for later prompts with the same prefix.

Each turn of a session repeats the turns before it, and many requests share a system prompt. mlx-lm has a prefix cache
too; this one is limited in bytes, counts a hit as a use, and always leaves one token to compute. Pure, except for the
stored ``KvState`` values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmx_lab.engine.mlx.kv_cache import KvState
from lmx_lab.engine.prefix_files import Tokens, common_prefix
from lmx_lab.engine.requests import SHARED

MIN_TOKENS = 8
"""Shorter prefixes are not stored, since the copy would cost more than it saves."""
MAX_ENTRIES = 256


@dataclass(frozen=True)
class CacheHit:
    tokens: int
    """Number of prompt tokens that need not be computed; always less than the length of the prompt."""
    state: KvState


@dataclass(eq=False)
class Entry:
    """A stored state."""

    tokens: Tokens
    state: KvState
    variant: str
    scope: str
    used_at: float
    """When it was last used (``time.perf_counter``)."""


class PrefixCache:
    """Stores states of at most ``limit_bytes``. The least recently used one is dropped first.

    A state has a *variant*: the name of a dependency other than its tokens, such as vectors that were added to the
    residual stream. A state is only used for prompts of the same variant. Its *scope* is that of the request that it
    comes from (``GenerationRequest.scope``); it is used for requests of the same scope, or of all if it is shared.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._entries: list[Entry] = []
        """In the order of their last use."""

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, prompt: Tokens, variant: str = "", *, scope: str = "") -> int:
        """Return how many tokens of the prompt ``find`` would save."""
        return self._best(prompt, variant, scope)[1]

    def find(self, prompt: Tokens, variant: str = "", *, scope: str = "") -> CacheHit | None:
        """Return the state of the longest stored prefix of a prompt, and count this as a use; None if there is none."""
        at, length = self._best(prompt, variant, scope)
        if at is None:
            return None
        entry = self._use(at)
        unused = len(entry.tokens) - length
        return CacheHit(length, entry.state.trimmed(unused) if unused else entry.state)

    def _use(self, at: int) -> Entry:
        entry = self._entries.pop(at)
        entry.used_at = time.perf_counter()
        self._entries.append(entry)
        return entry

    def _best(self, prompt: Tokens, variant: str, scope: str) -> tuple[int | None, int]:
        best, length = None, 0
        for at, entry in enumerate(self._entries):
            if entry.variant != variant or entry.scope not in (scope, SHARED):
                continue
            # At least one token must be computed, to have logits to sample from.
            shared = min(common_prefix(entry.tokens, prompt), len(prompt) - 1)
            is_whole = shared == len(entry.tokens)
            if shared > max(length, MIN_TOKENS - 1) and (is_whole or entry.state.can_be_trimmed):
                best, length = at, shared
        return best, length

    def store(self, tokens: Sequence[int] | Tokens, state: KvState, variant: str = "", *, scope: str = "") -> bool:
        """Store the state after these tokens, unless a stored one covers it. Drops a state that the new one covers.

        Returns whether it was stored.
        """
        key = np.asarray(tokens, dtype=np.int32)
        if len(key) < MIN_TOKENS or state.nbytes > self.limit_bytes:
            return False
        for at, other in enumerate(self._entries):
            if (other.variant, other.scope) != (variant, scope):
                continue
            shared = common_prefix(other.tokens, key)
            if shared == len(key) and (other.state.can_be_trimmed or len(other.tokens) == len(key)):
                self._use(at)
                return False
            if shared == len(other.tokens) and state.can_be_trimmed:
                # The state of a session grows with each turn. Another prefix of it is dropped by a later turn.
                self._drop(at)
                break
        self._entries.append(Entry(key, state, variant, scope, time.perf_counter()))
        self.nbytes += state.nbytes
        self.shrink(self.limit_bytes)
        return True

    def shrink(self, limit_bytes: int) -> None:
        """Drop the least recently used states until at most ``limit_bytes`` are stored."""
        while self._entries and (self.nbytes > limit_bytes or len(self._entries) > MAX_ENTRIES):
            self.drop_oldest()

    @property
    def oldest_at(self) -> float:
        """When the least recently used state was used; there must be one."""
        return self._entries[0].used_at

    def drop_oldest(self) -> None:
        """Drop the least recently used state; there must be one."""
        self._drop(0)

    def _drop(self, at: int) -> None:
        self.nbytes -= self._entries.pop(at).state.nbytes
