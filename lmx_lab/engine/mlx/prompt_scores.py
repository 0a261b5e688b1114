"""How likely a model holds a prompt: a prefill that keeps what the batch throws away. Engine thread only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from lmx_lab.engine.mlx.logprobs import as_rows, prompt_token
from lmx_lab.engine.mlx.model import LoadedModel
from lmx_lab.engine.mlx.request import MlxGeneration
from lmx_lab.values.generation import PromptScores, TokenLogprob

CHUNK_TOKENS = 64
"""Tokens scored in one step: the logits of each are a whole row of the vocabulary."""


class Scoring:
    """Scores the prompt of one request, a chunk a step; its cache then serves to generate."""

    def __init__(self, generation: MlxGeneration, model: LoadedModel) -> None:
        self.generation = generation
        self._model = model
        self.layers: list[Any] = make_prompt_cache(model.model)
        """The caches of all tokens scored so far but the last, which is not computed."""
        self._scores = [self._first()]

    @property
    def done(self) -> bool:
        return len(self._scores) == len(self.generation.prompt)

    @property
    def scores(self) -> PromptScores:
        return PromptScores(tokens=tuple(self._scores))

    def advance(self, chunk: int) -> int:
        """Score at most ``chunk`` more tokens; returns how many."""
        prompt, at = self.generation.prompt, len(self._scores) - 1
        inputs = prompt[at : min(at + min(chunk, CHUNK_TOKENS), len(prompt) - 1)]
        if not inputs:
            return 0
        logits = self._model.model(mx.array([inputs]), cache=self.layers)[0]
        mx.eval(logits, [layer.state for layer in self.layers])
        top = self.generation.request.top_logprobs or 0
        targets = prompt[at + 1 : at + 1 + len(inputs)]
        for row, token in zip(as_rows(logits), targets, strict=True):
            self._scores.append(prompt_token(self._model.vocabulary, row, token, top))
        return len(inputs)

    def _first(self) -> TokenLogprob:
        token, vocabulary = self.generation.prompt[0], self._model.vocabulary
        return TokenLogprob(token=token, text=vocabulary.text_of(token), bytes=vocabulary.bytes_of(token), logprob=None)
