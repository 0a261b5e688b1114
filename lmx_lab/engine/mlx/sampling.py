"""From logits to tokens, for the engine thread only: what cuts, what draws, what penalizes.

mlx-lm's own samplers are compiled anew for every value of every parameter, and never forgotten: two thousand
temperatures take minutes and 90 MB (measured). These are plain operations.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from lmx_lab.engine.grammar.mask import Constraint
from lmx_lab.engine.requests import Sampling

Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities (rows, vocabulary) to one token for each row."""
Processor = Callable[[mx.array, mx.array], mx.array]
"""All tokens so far and logits (1, vocabulary) to changed logits."""
KEPT_SAMPLERS = 256
FEW = 1024
"""So many tokens or fewer are drawn from by themselves, which is faster than from the whole vocabulary."""
COLDEST = 1e-4
"""Lower temperatures are greedy: a token that is a thousandth likelier is drawn twenty thousand times as often here."""


class Samplers:
    """Interned: ``BatchGenerator`` samples all rows in one call only when they share the sampler object."""

    def __init__(self) -> None:
        # MLX's random state is per thread and starts equal in every new one.
        mx.random.seed(int.from_bytes(os.urandom(8), "little"))
        self._made: OrderedDict[Cut, Sampler] = OrderedDict()

    def get(self, sampling: Sampling, *, choice: int) -> Sampler:
        """The sampler of the ``choice``-th answer to a request. A seeded one is new and draws from its own key."""
        if sampling.temperature < COLDEST:
            return _likeliest
        cut = Cut(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        if sampling.seed is not None:
            return SeededSampler(cut, sampling.seed, choice)
        sampler = self._made.pop(cut, None) or cut.sample
        self._made[cut] = sampler
        if len(self._made) > KEPT_SAMPLERS:
            self._made.popitem(last=False)
        return sampler


@dataclass(frozen=True)
class Cut:
    """Which tokens may be drawn at all, and how flat their probabilities are made."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float

    def sample(self, logprobs: mx.array, key: mx.array | None = None) -> mx.array:
        # Measured from the likeliest and in float32, dividing by a small temperature overflows only where no chance is.
        likeliest = logprobs.max(axis=-1, keepdims=True)
        chances = self.apply(logprobs.astype(mx.float32)) - likeliest
        chances = chances * (1 / self.temperature)
        if key is None:
            return mx.random.categorical(chances)
        # Gumbel's way (arXiv 1411.0030), since MLX's own draws by cumulated chances: there a rounding anywhere in the
        # vocabulary, by what else is in the batch, moves the draw to a neighbour (a few in a hundred, with OpenBLAS).
        return mx.argmax(chances + mx.random.gumbel(chances.shape, key=key), axis=-1)

    def apply(self, logprobs: mx.array) -> mx.array:
        if self.top_p < 1:
            logprobs = _top_p(logprobs, self.top_p)
        if self.min_p > 0:
            least = logprobs.max(axis=-1, keepdims=True) + math.log(self.min_p)
            logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
        if 0 < self.top_k < logprobs.shape[-1]:
            least = mx.topk(logprobs, self.top_k, axis=-1).min(axis=-1, keepdims=True)
            logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
        return logprobs


class SeededSampler:
    """Draws with a key that only this request splits, so its neighbours in the batch change nothing."""

    def __init__(self, cut: Cut, seed: int, choice: int) -> None:
        self._cut = cut
        # Any integer has a key, and different ones very likely different keys.
        digest = hashlib.blake2b(f"{seed:x}:{choice}".encode(), digest_size=8).digest()
        self._key = mx.random.key(int.from_bytes(digest, "little"))

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return self._cut.sample(logprobs, key)


def _likeliest(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def _top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """The likeliest tokens that together have at least ``top_p`` (arXiv 1904.09751); ties stay."""
    ordered = mx.sort(logprobs, axis=-1)
    likelier = mx.cumsum(mx.exp(ordered.astype(mx.float32)), axis=-1, reverse=True, inclusive=False)
    cut = (likelier >= top_p).sum(axis=-1, keepdims=True)
    # The likeliest one stays, however small top_p is.
    least = mx.take_along_axis(ordered, mx.minimum(cut, logprobs.shape[-1] - 1), axis=-1)
    return mx.where(logprobs < least, -mx.inf, logprobs)


def processors(sampling: Sampling) -> list[Processor]:
    """What changes this request's logits; new objects, since they count its output. Empty for most requests."""
    made: list[Processor] = []
    if sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        made.append(OutputPenalties(sampling))
    if sampling.logit_bias:
        made.append(_bias(dict(sampling.logit_bias)))
    return made


class OutputPenalties:
    """The three penalties over the whole output so far; the prompt is not counted."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._counts: mx.array | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._counts is None:
            # Called first with the prompt, whose last token is no output.
            self._counts = mx.zeros((1, logits.shape[-1]), dtype=mx.float32)
            return logits
        self._counts = self._counts.at[:, tokens[-1:]].add(1.0)
        met = self._counts > 0
        penalty = self._sampling.repetition_penalty
        logits = mx.where(met, mx.where(logits > 0, logits / penalty, logits * penalty), logits)
        taken = self._sampling.presence_penalty * met + self._sampling.frequency_penalty * self._counts
        # In the model's own type: a wider row would widen, and so change, its neighbours in the batch.
        return logits - taken.astype(logits.dtype)


def _bias(biases: dict[int, float]) -> Processor:
    tokens, values = mx.array(list(biases)), mx.array(list(biases.values()), dtype=mx.float32)

    def add_bias(_: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, tokens].add(values.astype(logits.dtype))

    return add_bias


class ConstrainedSampler:
    """Draws among the tokens that a constraint allows. It is one row's, and remembers what it drew.

    Args:
        sampler: Draws from log-probabilities, of which those of forbidden tokens are minus infinity.
        normalize: It needs probabilities that sum to one.
    """

    def __init__(self, constraint: Constraint, sampler: Sampler, *, normalize: bool) -> None:
        self._constraint = constraint
        self._sampler = sampler
        self._normalize = normalize
        self._drawn: mx.array | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        # The forward pass begins here, and runs on while the last token is read and the mask is computed.
        mx.async_eval(logprobs)  # type: ignore[no-untyped-call]
        if self._drawn is not None:
            self._constraint.advance(cast("int", self._drawn.item()))
        self._drawn = self._draw(logprobs)
        return self._drawn

    def _draw(self, logprobs: mx.array) -> mx.array:
        if (forced := self._constraint.forced) is not None:
            return mx.array([forced], dtype=mx.uint32)
        mask = self._constraint.mask(logprobs.shape[-1])
        if mask is None:
            return self._sampler(logprobs)
        if np.count_nonzero(mask) > FEW:
            return self._sampler(self._normalized(mx.where(mx.array(mask), logprobs, -mx.inf)))
        tokens = mx.array(np.flatnonzero(mask).astype(np.uint32))
        return tokens if tokens.size == 1 else tokens[self._sampler(self._normalized(logprobs[:, tokens]))]

    def _normalized(self, logprobs: mx.array) -> mx.array:
        return logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True) if self._normalize else logprobs
