"""Key-value caches of mlx-lm's models: measured, taken out of a batch, cut. Engine thread only."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.memory_plan import Footprint, LayerCache
from lmx_lab.errors import UnusableModelError

TRIAL_PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 4, 3]]
"""Of different lengths, the longer one more than two chunks of four."""
TOLERANCE = 0.05
"""Rounding makes less of a difference to a log-probability, padding more."""


@dataclass(frozen=True, eq=False)
class KvState:
    """The caches of all layers after a number of tokens, apart from any batch; a ``prefix.Kept``.

    A batch that takes it over copies it, so it may be taken any number of times.
    """

    layers: Sequence[Any]

    @classmethod
    def taken(cls, layers: Sequence[Any]) -> Self:
        """Caches as ``BatchGenerator`` hands them out: computed now, or they would keep the whole batch in memory."""
        mx.eval([layer.state for layer in layers])
        return cls(layers)

    @property
    def nbytes(self) -> int:
        return sum(int(layer.nbytes) for layer in self.layers)

    @property
    def can_be_cut(self) -> bool:
        return bool(can_trim_prompt_cache(list(self.layers)))

    def cut(self, tokens: int) -> Self:
        """Without the last ``tokens`` tokens, if it can be cut. Shares the arrays: only an end mark moves."""
        layers = [_fork(layer) for layer in self.layers]
        trim_prompt_cache(layers, tokens)
        return type(self)(layers)


def _fork(layer: Any) -> Any:
    forked = copy.copy(layer)
    if hasattr(forked, "caches"):
        forked.caches = tuple(_fork(inner) for inner in forked.caches)
    return forked


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a model can and cannot do in mlx-lm's batches."""

    footprint: Footprint
    vocabulary_size: int
    """The width of the logits."""
    plain: bool
    """Every layer keeps keys and values of all tokens: caches can always be cut, and any chunk is right."""
    prompts_together: bool
    """Whether prompts of different lengths may be computed in one batch."""


def measure(model: Any, weights_bytes: int) -> Traits:
    """Find out by computing a token, and for models with other caches than keys and values a few more.

    Raises:
        UnusableModelError: mlx-lm cannot batch it.
    """
    cache = make_prompt_cache(model)
    layers = list(_flat(cache))
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    if not all(hasattr(layer, "merge") for layer in layers):
        raise UnusableModelError(f"its cache ({kinds}) cannot be batched by this version of mlx-lm", param="model")
    logits = model(mx.array([[0]]), cache=cache)
    mx.eval(logits, [layer.state for layer in cache])
    plain = all(type(layer) is KVCache for layer in layers)
    together = plain or _agrees(model, prompts=2)
    if not together and not _agrees(model, prompts=1):
        raise UnusableModelError(f"it answers differently in a batch of mlx-lm's ({kinds})", param="model")
    return Traits(
        footprint=_footprint(model, weights_bytes, [_growth(layer) for layer in layers], int(logits.shape[-1])),
        vocabulary_size=int(logits.shape[-1]),
        plain=plain,
        prompts_together=together,
    )


def _agrees(model: Any, *, prompts: int) -> bool:
    """Whether two prompts say the same in one batch as alone, if so many are computed at the same time.

    mlx-lm pads prompts to one length; some recurrent layers take the padding for tokens.
    """
    alone = [_first_logprobs(model, [prompt], prompts=1)[0] for prompt in TRIAL_PROMPTS]
    together = _first_logprobs(model, TRIAL_PROMPTS, prompts=prompts)
    return all(bool(mx.abs(a - b).max() < TOLERANCE) for a, b in zip(alone, together, strict=True))


def _first_logprobs(model: Any, tried: Sequence[list[int]], *, prompts: int) -> list[mx.array]:
    """Of the second token of each answer, which has seen the whole prompt, padding and all."""
    generator = BatchGenerator(model, completion_batch_size=2, prefill_batch_size=prompts, prefill_step_size=4)
    generator.close()
    uids = generator.insert([list(prompt) for prompt in tried], max_tokens=[2] * len(tried))
    found: dict[int, mx.array] = {}
    while len(found) < len(uids):
        for response in generator.next()[1]:
            if response.finish_reason is not None:
                found[response.uid] = response.logprobs.astype(mx.float32)
    return [found[uid] for uid in uids]


def _footprint(model: Any, weights_bytes: int, layers: list[LayerCache], vocabulary_size: int) -> Footprint:
    args = getattr(model, "args", None)
    hidden, intermediate, heads = (
        _number(args, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    return Footprint(
        weights_bytes=weights_bytes,
        layers=tuple(layers),
        # Logits, log-probabilities of this step and the last one, and what sampling makes of them.
        logits_bytes=6 * 4 * vocabulary_size,
        # Residual, norms, queries, keys, values; gate, up and their product: in float32 at most.
        chunk_bytes_per_token=4 * (8 * hidden + 3 * intermediate),
        # On a GPU attention is one kernel; on a CPU scores and their softmax are arrays.
        score_bytes_per_pair=2 * 4 * heads if mx.default_device() == mx.cpu else 0,
    )


def _number(args: Any, name: str) -> int:
    """A size of the model, which models of several parts have one level deeper."""
    inner = getattr(args, "text_config", None)
    found = getattr(args, name, None) or (inner.get(name) if isinstance(inner, dict) else getattr(inner, name, None))
    return found if isinstance(found, int) else 0


def _flat(layers: Sequence[Any]) -> Iterator[Any]:
    for layer in layers:
        if hasattr(layer, "caches"):
            yield from _flat(layer.caches)
        else:
            yield layer


def _growth(layer: Any) -> LayerCache:
    keys = getattr(layer, "keys", None)
    if not isinstance(keys, mx.array):
        return LayerCache(fixed_bytes=int(layer.nbytes))
    # Allocated in steps: by the tokens there is room for, not by those that are in it. A window holds a chunk more.
    window = getattr(layer, "max_size", None)
    return LayerCache(
        bytes_per_token=layer.nbytes / keys.shape[2],
        window_tokens=None if window is None else window + memory.LARGEST_CHUNK_TOKENS,
    )
