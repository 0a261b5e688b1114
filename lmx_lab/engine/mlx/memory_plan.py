"""Estimate the memory of a model and its requests, in bytes, from measured sizes. Pure.

On Metal, running out of memory usually ends the process, so requests wait or are refused according to these estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNBOUNDED_TOKENS = 2**31 - 1
STEP_TOKENS = 256
"""Number of tokens by which the caches of mlx-lm grow."""


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The key-value cache of one layer, which grows with the tokens, up to a window if there is one, or not at all."""

    bytes_per_token: float = 0.0
    window_tokens: int | None = None
    fixed_bytes: int = 0

    def bytes(self, tokens: int) -> float:
        """Return the size after this number of tokens."""
        allocated = -(-tokens // STEP_TOKENS) * STEP_TOKENS
        if self.window_tokens is not None:
            allocated = min(allocated, self.window_tokens)
        return self.fixed_bytes + self.bytes_per_token * allocated


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Sizes from which the memory of a model and its requests is estimated."""

    weights_bytes: int
    layers: tuple[LayerCache, ...]
    draft_layers: tuple[LayerCache, ...] = ()
    """The caches of the draft model, which has those of one request at a time."""
    logits_bytes: int
    """Memory of each request that decodes: logits, and log-probabilities of two steps."""
    chunk_bytes_per_token: int
    """Temporary memory for the activations of each prompt token that is computed in one step."""
    score_bytes_per_pair: int
    """Temporary memory for the attention score of each pair of a computed and a cached token; 0 if a GPU computes
    attention in one kernel, which does not store them."""

    def kv_bytes(self, lengths: Sequence[int]) -> int:
        """Return the size of the key-value caches of requests in one batch, which pads all of them to the longest.

        Args:
            lengths: Number of tokens of each request.
        """
        return len(lengths) * round(sum(layer.bytes(max(lengths)) for layer in self.layers)) if lengths else 0

    def transient_bytes(self, *, chunk: int, longest: int) -> int:
        """Return the temporary memory while ``chunk`` prompt tokens are computed. It includes the copy of one layer's
        cache, made when the cache grows.
        """
        grown = max((layer.bytes(longest) for layer in self.layers), default=0.0)
        return round(chunk * (self.chunk_bytes_per_token + self.score_bytes_per_pair * longest) + grown)

    def running_bytes(self, lengths: Sequence[int], *, chunk: int) -> int:
        """Return the memory of the weights and of requests that have grown to these lengths."""
        longest = max(lengths, default=0)
        transient = self.transient_bytes(chunk=chunk, longest=longest)
        transient += round(sum(layer.bytes(longest) for layer in self.draft_layers))
        return self.weights_bytes + self.kv_bytes(lengths) + len(lengths) * self.logits_bytes + transient

    def longest_request(self, limit_bytes: int, *, chunk: int) -> int:
        """Return the number of tokens, prompt and answer, of the longest single request that fits; 0 if none does."""
        low, high = 0, UNBOUNDED_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self.running_bytes([middle], chunk=min(chunk, middle)) <= limit_bytes:
                low = middle
            else:
                high = middle - 1
        return low
