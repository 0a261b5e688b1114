"""What a model and its requests take in memory, before they take it. Pure arithmetic on measured sizes, in bytes.

On Metal, running out of memory usually ends the process: requests wait, or are refused, by these estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNBOUNDED_TOKENS = 2**31 - 1
STEP_TOKENS = 256
"""mlx-lm's caches grow by so many tokens at a time."""


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The key-value cache of one layer: grows with the tokens up to a window, or not at all."""

    bytes_per_token: float = 0.0
    window_tokens: int | None = None
    fixed_bytes: int = 0

    def bytes(self, tokens: int) -> float:
        held = -(-tokens // STEP_TOKENS) * STEP_TOKENS
        kept = held if self.window_tokens is None else min(held, self.window_tokens)
        return self.fixed_bytes + self.bytes_per_token * kept


@dataclass(frozen=True, kw_only=True)
class Footprint:
    weights_bytes: int
    layers: tuple[LayerCache, ...]
    logits_bytes: int
    """Of each request in the batch while it decodes: logits, and their log-probabilities of two steps."""
    chunk_bytes_per_token: int
    """Transient, for each token of a prompt that is computed in one step: activations."""
    score_bytes_per_pair: int
    """Transient, for each pair of a computed and a kept token, where attention scores are written out (on a CPU)."""

    def kv_bytes(self, lengths: Sequence[int]) -> int:
        """The key-value caches of requests of these lengths (tokens) in one batch, which pads all to the longest."""
        return len(lengths) * round(sum(layer.bytes(max(lengths)) for layer in self.layers)) if lengths else 0

    def transient_bytes(self, *, chunk: int, longest: int) -> int:
        """What computing ``chunk`` prompt tokens takes beside the caches, which grow by copying one layer at a time."""
        grown = max((layer.bytes(longest) for layer in self.layers), default=0.0)
        return round(chunk * (self.chunk_bytes_per_token + self.score_bytes_per_pair * longest) + grown)

    def running_bytes(self, lengths: Sequence[int], *, chunk: int) -> int:
        """Everything: weights, and requests that will have grown to these lengths."""
        transient = self.transient_bytes(chunk=chunk, longest=max(lengths, default=0))
        return self.weights_bytes + self.kv_bytes(lengths) + len(lengths) * self.logits_bytes + transient

    def longest_request(self, limit_bytes: int, *, chunk: int) -> int:
        """The tokens, prompt and answer, of the longest single request that fits within the limit; 0 when none does."""
        low, high = 0, UNBOUNDED_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self.running_bytes([middle], chunk=min(chunk, middle)) <= limit_bytes:
                low = middle
            else:
                high = middle - 1
        return low
