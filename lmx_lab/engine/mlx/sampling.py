"""Sample tokens from logits, with penalties and grammars, and compute log-probabilities as numbers. Runs on the engine
thread.

The samplers of mlx-lm are compiled for every value of every parameter and never released: two thousand temperatures
take minutes and 90 MB (measured). These are plain operations.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.distribution import GREEDY_BELOW
from lmx_lab.engine.grammar.mask import Constraint
from lmx_lab.engine.requests import Sampling
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.values.outputs import TokenLogprob

Sampler = Callable[[mx.array], mx.array]
"""Maps log-probabilities (rows, vocabulary) to one token for each row."""
Processor = Callable[[mx.array, mx.array], mx.array]
"""Maps all tokens so far and logits (1, vocabulary) to changed logits."""
Row = NDArray[np.float32]
FEW_TOKENS = 1024
"""If a grammar allows at most this many tokens, only these are used for sampling, which is faster."""


class Samplers:
    """Returns one sampler object for equal parameters, because ``BatchGenerator`` samples rows in one call only if they
    share the object.
    """

    def __init__(self) -> None:
        # MLX has a random state for each thread, which is the same in every new thread.
        mx.random.seed(int.from_bytes(os.urandom(8), "little"))
        self._samplers: OrderedDict[RandomSampler, Sampler] = OrderedDict()

    def get(self, sampling: Sampling, *, choice: int) -> Sampler:
        """Return the sampler of an answer. With a seed it is a new one, which has its own random state.

        Args:
            choice: Index of the answer among those of its request.
        """
        if sampling.temperature < GREEDY_BELOW:
            return _greedy
        random = RandomSampler(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        if sampling.seed is not None:
            return SeededSampler(random, sampling.seed, choice)
        sampler = self._samplers.pop(random, None) or random.sample
        self._samplers[random] = sampler
        if len(self._samplers) > 256:
            self._samplers.popitem(last=False)
        return sampler


@dataclass(frozen=True)
class RandomSampler:
    """Samples with a temperature from the tokens that top-p, top-k and min-p leave."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float

    def sample(self, logprobs: mx.array, key: mx.array | None = None) -> mx.array:
        """Return one token for each row.

        Args:
            key: Random key; without one, MLX's random state is used.
        """
        # Relative to the most likely token and in float32, so that dividing by a small temperature overflows only for
        # tokens whose probability is zero anyway.
        largest = logprobs.max(axis=-1, keepdims=True)
        scores = self.filtered(logprobs.astype(mx.float32)) - largest
        scores = scores * (1 / self.temperature)
        if key is None:
            return mx.random.categorical(scores)
        # The Gumbel-max trick (arXiv 1411.0030). MLX samples by cumulative sums, where a rounding error anywhere in the
        # vocabulary, which depends on the rest of the batch, selects a neighbouring token (a few in a hundred, with
        # OpenBLAS).
        return mx.argmax(scores + mx.random.gumbel(scores.shape, key=key), axis=-1)

    def filtered(self, logprobs: mx.array) -> mx.array:
        """Return the log-probabilities, with minus infinity for tokens that must not be sampled."""
        if self.top_p < 1:
            # The most likely tokens whose probabilities sum to at least ``top_p`` (arXiv 1904.09751), and ties.
            ordered = mx.sort(logprobs, axis=-1)
            higher = mx.cumsum(mx.exp(ordered.astype(mx.float32)), axis=-1, reverse=True, inclusive=False)
            removed = (higher >= self.top_p).sum(axis=-1, keepdims=True)
            # The most likely token is always kept.
            least = mx.take_along_axis(ordered, mx.minimum(removed, logprobs.shape[-1] - 1), axis=-1)
            logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
        if self.min_p > 0:
            least = logprobs.max(axis=-1, keepdims=True) + math.log(self.min_p)
            logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
        if 0 < self.top_k < logprobs.shape[-1]:
            least = mx.topk(logprobs, self.top_k, axis=-1).min(axis=-1, keepdims=True)
            logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
        return logprobs


class SeededSampler:
    """Samples with its own random key, so that the result does not depend on other requests of the batch."""

    def __init__(self, random: RandomSampler, seed: int, choice: int) -> None:
        self._random = random
        # Any integer is a valid seed, and different seeds very likely have different keys.
        digest = hashlib.blake2b(f"{seed:x}:{choice}".encode(), digest_size=8).digest()
        self._key = mx.random.key(int.from_bytes(digest, "little"))

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return self._random.sample(logprobs, key)


def _greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def processors(sampling: Sampling, start: Sequence[int] = ()) -> list[Processor]:
    """Return the functions that change the logits of a request; most requests have none. They are new objects, which
    count the output of this request.

    Args:
        start: Tokens with which the answer begins.
    """
    functions: list[Processor] = []
    if sampling.has_penalties:
        functions.append(OutputPenalties(sampling, start))
    if sampling.logit_bias:
        # A token that is named twice has its last bias.
        biases = dict(sampling.logit_bias)
        tokens, values = mx.array(list(biases)), mx.array(list(biases.values()), dtype=mx.float32)
        functions.append(lambda _, logits: logits.at[:, tokens].add(values.astype(logits.dtype)))
    return functions


class OutputPenalties:
    """Applies the three penalties to tokens of the output so far; tokens of the prompt are not counted."""

    def __init__(self, sampling: Sampling, start: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._start = list(start)
        self._counts: mx.array | None = None
        self._counted: deque[mx.array] | None = None if sampling.repeat_last_n < 0 else deque()
        """The tokens that are counted, oldest first; None if all are."""

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._counts is None:
            # The first call is for the prompt.
            self._counts = mx.zeros((1, logits.shape[-1]), dtype=mx.float32)
            if not self._start:
                return logits
            for token in self._start:
                self._count(mx.array([token]))
        else:
            self._count(tokens[-1:])
        occurred = self._counts > 0
        penalty = self._sampling.repetition_penalty
        logits = mx.where(occurred, mx.where(logits > 0, logits / penalty, logits * penalty), logits)
        reduction = self._sampling.presence_penalty * occurred + self._sampling.frequency_penalty * self._counts
        # In the type of the model: a row of a wider type would change the type, and so the values, of the whole batch.
        return logits - reduction.astype(logits.dtype)

    def _count(self, token: mx.array) -> None:
        assert self._counts is not None
        self._counts = self._counts.at[:, token].add(1.0)
        if self._counted is None:
            return
        self._counted.append(token)
        if len(self._counted) > self._sampling.repeat_last_n:
            self._counts = self._counts.at[:, self._counted.popleft()].add(-1.0)


class MinimumLength:
    """Prevents an answer from ending within its first tokens.

    The logits of end tokens become the lowest finite number, because a grammar may allow only these tokens.
    """

    def __init__(self, tokens: int, ends: Sequence[int]) -> None:
        self._left = tokens
        self._ends = mx.array(list(ends))

    def __call__(self, _: mx.array, logits: mx.array) -> mx.array:
        if self._left <= 0:
            return logits
        self._left -= 1
        is_end = (mx.arange(logits.shape[-1])[:, None] == self._ends).any(axis=-1)
        return mx.where(is_end, mx.array(mx.finfo(logits.dtype).min, dtype=logits.dtype), logits)


class ConstrainedSampler:
    """Samples for one request among the tokens that a constraint allows.

    Args:
        sampler: Samples from log-probabilities, which are minus infinity for forbidden tokens.
        normalize: Whether the sampler needs probabilities that sum to one.
    """

    def __init__(self, constraint: Constraint, sampler: Sampler, *, normalize: bool) -> None:
        self._constraint = constraint
        self._sampler = sampler
        self._normalize = normalize
        self._sampled: mx.array | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the constraint is satisfied or has failed, so that the answer ends with the last recorded token."""
        return self._constraint.complete or self._constraint.failure is not None

    def __call__(self, logprobs: mx.array) -> mx.array:
        # Starts the forward pass, which runs while the last token is read and the mask is computed.
        mx.async_eval(logprobs)  # type: ignore[no-untyped-call]
        if self._sampled is not None:
            self._constraint.advance(cast("int", self._sampled.item()))
        if (forced := self._constraint.forced) is not None:
            self._sampled = mx.array([forced], dtype=mx.uint32)
        elif (mask := self._constraint.mask(logprobs.shape[-1])) is None:
            self._sampled = self._sampler(logprobs)
        elif np.count_nonzero(mask) > FEW_TOKENS:
            self._sampled = self._sampler(self._normalized(mx.where(mx.array(mask), logprobs, -mx.inf)))
        else:
            tokens = mx.array(np.flatnonzero(mask).astype(np.uint32))
            only = tokens.size == 1
            self._sampled = tokens if only else tokens[self._sampler(self._normalized(logprobs[:, tokens]))]
        return self._sampled

    def _normalized(self, logprobs: mx.array) -> mx.array:
        return logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True) if self._normalize else logprobs


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
