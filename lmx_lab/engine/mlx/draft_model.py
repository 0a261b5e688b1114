"""A draft model: a smaller model with the same vocabulary drafts the next tokens. Runs on the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from lmx_lab.engine.mlx.speculative import Drafter
from lmx_lab.engine.prefix_files import common_prefix

CHUNK_TOKENS = 256
"""Maximum number of tokens of a prompt that are computed between two decode steps, which delays requests and
cancellations."""


class DraftModel:
    """Continues one text at a time. Its KV cache remains for the next answer with the same prefix.

    Args:
        tokens: Number of tokens that both models know.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self._model = model
        self._largest = tokens - 1
        self._cache: list[Any] = []
        self._computed: list[int] = []
        """The tokens whose keys and values are in the cache."""

    def continue_text(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the ``count`` most likely next tokens, each after the ones before it; none if the cache lacks so many
        tokens that only a part of them was computed.
        """
        missing = self._trim_to(tokens)
        if len(missing) > CHUNK_TOKENS:
            self._forward(missing[:CHUNK_TOKENS])
            mx.eval([layer.state for layer in self._cache])
            return []
        drafted = [self._forward(missing)]
        while len(drafted) < count:
            drafted.append(self._next(drafted[-1]))
        known = cast("list[int]", mx.concatenate(drafted).tolist())
        # The last token was drafted but not computed.
        self._computed += known[:-1]
        return known

    def _trim_to(self, tokens: Sequence[int]) -> Sequence[int]:
        """Remove tokens from the cache that are not in this text, and return those of the text that are missing."""
        text, computed = (np.asarray(each, dtype=np.int32) for each in (tokens, self._computed))
        # At least one token must be computed, to have logits.
        shared = min(common_prefix(text, computed), len(tokens) - 1)
        if not shared:
            self._cache = make_prompt_cache(self._model)
        elif shared < len(computed):
            trim_prompt_cache(self._cache, len(computed) - shared)
        del self._computed[shared:]
        return tokens[shared:]

    def _forward(self, tokens: Sequence[int]) -> mx.array:
        """Compute tokens of the text, and return the most likely next one."""
        self._computed += tokens
        return self._next(mx.array(list(tokens)))

    def _next(self, tokens: mx.array) -> mx.array:
        # Vocabularies may be padded to different sizes. An index outside of the embeddings would not be checked.
        known = mx.minimum(tokens, self._largest)
        logits = self._model(known[None], cache=self._cache)
        return mx.argmax(logits[:, -1, : self._largest + 1], axis=-1)


class ModelDrafter(Drafter):
    """Drafts the tokens of one answer with a draft model."""

    drafts_always = True

    def __init__(self, model: DraftModel) -> None:
        super().__init__()
        self._model = model

    def propose(self, tokens: Sequence[int], sampled: Callable[[], int], *, limit: int) -> list[int]:
        """See ``Drafter``."""
        if len(tokens) < self._resume_at:
            return []
        text = [*tokens, sampled()]
        started = time.perf_counter()
        draft = self._model.continue_text(text, min(self._length, limit))
        self.draft_s = time.perf_counter() - started
        return draft
