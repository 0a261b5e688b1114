"""Key-value caches of mlx-lm's models: measured, taken out of a batch, cut. Engine thread only."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from lmx_lab.engine.footprint import Footprint, LayerCache
from lmx_lab.errors import UnusableModelError


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
        """Shares the arrays: cutting only moves an end mark."""
        layers = [_fork(layer) for layer in self.layers]
        trim_prompt_cache(layers, tokens)
        return type(self)(layers)


def _fork(layer: Any) -> Any:
    forked = copy.copy(layer)
    if hasattr(forked, "caches"):
        forked.caches = tuple(_fork(inner) for inner in forked.caches)
    return forked


def measure(model: Any, weights_bytes: int) -> tuple[Footprint, int]:
    """What requests to this model take, and the width of its logits, by computing one token.

    Raises:
        UnusableModelError: mlx-lm cannot batch it.
    """
    cache = make_prompt_cache(model)
    if not all(hasattr(layer, "merge") for layer in cache):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache}))
        raise UnusableModelError(f"its cache ({kinds}) cannot be batched by this version of mlx-lm", param="model")
    logits = model(mx.array([[0]]), cache=cache)
    mx.eval(logits, [layer.state for layer in cache])
    hidden, intermediate, heads = (
        int(getattr(getattr(model, "args", None), name, None) or 0)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    footprint = Footprint(
        weights_bytes=weights_bytes,
        layers=tuple(_growth(layer) for layer in _flat(cache)),
        # Logits, log-probabilities of this step and the last one, and what sampling makes of them.
        logits_bytes=6 * 4 * int(logits.shape[-1]),
        # Residual, norms, queries, keys, values; gate, up and their product: in float32 at most.
        chunk_bytes_per_token=4 * (8 * hidden + 3 * intermediate),
        # On a GPU attention is one kernel; on a CPU scores and their softmax are arrays.
        score_bytes_per_pair=2 * 4 * heads if mx.default_device() == mx.cpu else 0,
    )
    return footprint, int(logits.shape[-1])


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
    # Allocated in steps: by the tokens there is room for, not by those that are in it.
    return LayerCache(bytes_per_token=layer.nbytes / keys.shape[2], window_tokens=getattr(layer, "max_size", None))
