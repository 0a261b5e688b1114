"""Compute log-probabilities of answers and prompts as numbers. Runs on the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from lmx_lab.engine.mlx.model import LoadedModel
from lmx_lab.engine.mlx.request import MlxGeneration
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.values.outputs import PromptScores, TokenLogprob

SCORED_CHUNK_TOKENS = 64
"""Maximum number of tokens scored in one step. The logits of each are a whole row of the vocabulary."""
Row = NDArray[np.float32]


def as_rows(scores: mx.array) -> Row:
    """Return scores as an array (rows, vocabulary) in float32. A single row may come without its axis."""
    return np.atleast_2d(np.array(scores.astype(mx.float32), copy=False))


def prompt_token(vocabulary: Vocabulary, logits: Row, token: int, top: int) -> TokenLogprob:
    """Return the log-probability of a prompt token, from the logits of the position before it."""
    # In numpy, whose exponential is ten times as fast as MLX's on a CPU.
    largest = logits.max()
    total = float(largest + np.log(np.exp(logits - largest).sum()))
    return _with_distribution(_entry(vocabulary, logits, token, top, total), logits, total)


def answer_token(
    vocabulary: Vocabulary, logprobs: Row, token: int, top: int, *, named: Sequence[int] = (), ends: bool
) -> TokenLogprob:
    """Return the log-probability of an answer token. Special tokens have no bytes, since answers do not show them."""
    entry = _with_distribution(_entry(vocabulary, logprobs, token, top, 0.0), logprobs, 0.0)
    if named:
        entry = replace(entry, named=tuple(_entry(vocabulary, logprobs, other, 0, 0.0) for other in named))
    if ends or vocabulary.is_special(token):
        return replace(entry, bytes=b"", ends=ends)
    return entry


def _entry(vocabulary: Vocabulary, scores: Row, token: int, top: int, total: float) -> TokenLogprob:
    """Return the log-probability of a token, with those of the ``top`` most likely tokens in descending order."""
    return TokenLogprob(
        token=token,
        text=vocabulary.text_of(token),
        bytes=vocabulary.bytes_of(token),
        logprob=float(scores[token]) - total,
        top=tuple(_entry(vocabulary, scores, other, 0, total) for other in _most_likely(scores, top)),
    )


def _with_distribution(entry: TokenLogprob, scores: Row, total: float) -> TokenLogprob:
    """Return an entry with the rank of its token, and the entropy of the distribution.

    Args:
        total: Logarithm of the sum of the exponentials of all scores.
    """
    rank = 1 + int(np.count_nonzero(scores > scores[entry.token]))
    logprobs = scores - np.float32(total)
    # Minus infinity, the log-probability of impossible tokens, contributes nothing.
    terms = np.exp(logprobs) * np.maximum(logprobs, np.finfo(np.float32).min)
    return replace(entry, rank=rank, entropy=-float(terms.sum(dtype=np.float64)))


def _most_likely(scores: Row, count: int) -> list[int]:
    """Return the most likely tokens. For the few that a request may ask for, this is many times faster than a partition
    of the vocabulary.
    """
    rest, tokens = scores.copy() if count > 1 else scores, []
    for _ in range(min(count, len(scores))):
        at = int(rest.argmax())
        tokens.append(at)
        if count > 1:
            rest[at] = -np.inf
            if not np.isfinite(rest.max()):
                break
    return tokens


class PromptScoring:
    """Scores the prompt of one request in chunks. Its cache is then used for generation."""

    def __init__(self, generation: MlxGeneration, model: LoadedModel) -> None:
        self.generation = generation
        self._model = model
        self.layers: list[Any] = make_prompt_cache(model.model)
        """The caches of all tokens that were scored, except the last one."""
        self._scores = [self._unscored(0)]

    @property
    def is_done(self) -> bool:
        return len(self._scores) == len(self.generation.prompt)

    @property
    def scores(self) -> PromptScores:
        return PromptScores(tokens=tuple(self._scores))

    def skip(self, tokens: int, layers: list[Any]) -> None:
        """Leave out the scores of the first tokens, whose caches are known. Called before the first chunk.

        Args:
            tokens: Number of tokens in the caches. The first score is that of the second token after them.
            layers: The caches, which this object changes.
        """
        self.layers = layers
        self._scores = [self._unscored(at) for at in range(tokens + 1)]

    def advance(self, chunk: int) -> int:
        """Score at most ``chunk`` more tokens, and return how many."""
        prompt, at = self.generation.prompt, len(self._scores) - 1
        inputs = prompt[at : min(at + min(chunk, SCORED_CHUNK_TOKENS), len(prompt) - 1)]
        if not inputs:
            return 0
        logits = self._model.model(mx.array([inputs]), cache=self.layers)[0]
        mx.eval(logits, [layer.state for layer in self.layers])
        top = self.generation.request.top_logprobs or 0
        targets = prompt[at + 1 : at + 1 + len(inputs)]
        for row, token in zip(as_rows(logits), targets, strict=True):
            self._scores.append(prompt_token(self._model.vocabulary, row, token, top))
        return len(inputs)

    def _unscored(self, at: int) -> TokenLogprob:
        token, vocabulary = self.generation.prompt[at], self._model.vocabulary
        return TokenLogprob(token=token, text=vocabulary.text_of(token), bytes=vocabulary.bytes_of(token), logprob=None)
