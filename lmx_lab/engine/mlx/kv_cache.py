"""Measure the key-value caches of a model, copy them from a batch, and trim them. Runs on the engine thread.

The memory of a model and its requests is estimated from the measured sizes, in bytes. On Metal, running out of memory
usually ends the process, so requests wait or are refused according to these estimates.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from lmx_lab.engine.mlx import memory
from lmx_lab.errors import UnusableModelError
from lmx_lab.values.plan import LayerCache

UNBOUNDED_TOKENS = 2**31 - 1
TRIAL_PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 4, 3]]
"""Two prompts of different lengths; the longer one has more than two chunks of four tokens."""
CUDNN_HEAD_SIZE = 128
TOLERANCE = 0.05
"""Largest difference of log-probabilities that rounding can cause. Padding that is treated as tokens causes more."""


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
        if not lengths:
            return 0
        return len(lengths) * round(sum(layer.bytes(max(lengths)) for layer in self.layers))

    def running_bytes(self, lengths: Sequence[int], *, chunk: int) -> int:
        """Return the memory of the weights and of requests that have grown to these lengths, while ``chunk`` prompt
        tokens are computed.
        """
        longest = max(lengths, default=0)
        # The temporary memory includes the copy of one layer's cache, made when the cache grows.
        grown = max((layer.bytes(longest) for layer in self.layers), default=0.0)
        transient = round(chunk * (self.chunk_bytes_per_token + self.score_bytes_per_pair * longest) + grown)
        drafted = round(sum(layer.bytes(longest) for layer in self.draft_layers))
        return self.weights_bytes + self.kv_bytes(lengths) + len(lengths) * self.logits_bytes + transient + drafted

    def longest_request(self, limit_bytes: int, *, chunk: int, requests: int = 1) -> int:
        """Return the number of tokens, prompt and answer, of the longest request that fits, if there are ``requests``
        of this length; 0 if none does.
        """

        def needed_bytes(tokens: int) -> int:
            return self.running_bytes([tokens] * requests, chunk=min(chunk, tokens))

        return bisect_right(range(1, UNBOUNDED_TOKENS + 1), limit_bytes, key=needed_bytes)


@dataclass(frozen=True, eq=False)
class KvState:
    """The caches of all layers after a number of tokens, outside of a batch.

    A batch copies it, so it can be used any number of times.
    """

    layers: Sequence[Any]

    @classmethod
    def evaluated(cls, layers: Sequence[Any]) -> Self:
        """Return the state of caches from ``BatchGenerator``. They are evaluated, since they would otherwise keep the
        whole batch in memory.
        """
        mx.eval([layer.state for layer in layers])
        return cls(layers)

    @property
    def nbytes(self) -> int:
        return sum(int(layer.nbytes) for layer in self.layers)

    @property
    def can_be_trimmed(self) -> bool:
        return bool(can_trim_prompt_cache(list(self.layers)))

    def trimmed(self, tokens: int) -> Self:
        """Return the state without the last ``tokens`` tokens; it must be possible to trim it. Arrays are shared."""
        layers = [_shallow_copy(layer) for layer in self.layers]
        trim_prompt_cache(layers, tokens)
        return type(self)(layers)

    def copied_layers(self) -> list[Any]:
        """Return caches that can be changed while others use this state. Arrays are copied on the first change."""
        return copy.deepcopy(list(self.layers))


def _shallow_copy(layer: Any) -> Any:
    copied = copy.copy(layer)
    if hasattr(copied, "caches"):
        copied.caches = tuple(_shallow_copy(inner) for inner in copied.caches)
    return copied


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Sizes of a model, and what is possible with it in the batches of mlx-lm."""

    footprint: Footprint
    vocabulary_size: int
    """Number of logits for each token."""
    plain: bool
    """Whether every layer caches keys and values of all tokens: caches can be trimmed, and chunks may have any size."""
    prompts_together: bool
    """Whether prompts of different lengths may be computed in one batch."""


def describe(model: Any) -> Traits:
    """Describe a model by the caches that mlx-lm makes for it. Nothing is computed and no weights are read, because the
    sizes of arrays are known before they are evaluated.

    Raises:
        UnusableModelError: mlx-lm cannot compute it in batches.
    """
    cache = make_prompt_cache(model)
    layers = list(_flat(cache))
    if not all(hasattr(layer, "merge") for layer in layers):
        raise UnusableModelError(f"this version of mlx-lm cannot batch its cache ({_kinds(layers)})", param="model")
    logits = model(mx.array([[0]]), cache=cache)
    plain = all(type(layer) is KVCache for layer in layers)
    sizes = []
    for layer in layers:
        keys, window = getattr(layer, "keys", None), getattr(layer, "max_size", None)
        if not isinstance(keys, mx.array):
            sizes.append(LayerCache(fixed_bytes=int(layer.nbytes)))
            continue
        # Caches are allocated in steps, so the size is divided by the tokens that there is room for. A cache with a
        # window stores one chunk more.
        sizes.append(
            LayerCache(
                bytes_per_token=layer.nbytes / keys.shape[2],
                window_tokens=window,
                chunk_tokens=0 if window is None else memory.MAX_CHUNK_TOKENS,
            )
        )
    hidden, intermediate, heads = (
        number_of(model, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    # Counted, because other models use and release memory during a load.
    parameters: Any = tree_flatten(model.parameters())
    return Traits(
        footprint=Footprint(
            weights_bytes=sum(value.nbytes for _, value in parameters),
            layers=tuple(sizes),
            # Logits, log-probabilities of this step and the previous one, and arrays of sampling.
            logits_bytes=6 * 4 * int(logits.shape[-1]),
            # Residual, norms, queries, keys and values; gate, up and their product; at most float32.
            chunk_bytes_per_token=4 * (8 * hidden + 3 * intermediate),
            # Scores and their softmax.
            score_bytes_per_pair=2 * 4 * heads if stores_scores(layers) else 0,
        ),
        vocabulary_size=int(logits.shape[-1]),
        plain=plain,
        prompts_together=plain,
    )


def try_batches(model: Any, traits: Traits) -> Traits:
    """Compute one token with a model whose weights were read; a few more if it has caches other than plain key-value
    caches. Return its traits.

    Raises:
        UnusableModelError: mlx-lm computes it wrongly in batches.
    """
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=cache), [layer.state for layer in cache])
    together = traits.plain or _agrees(model, prompts=2)
    if not together and not _agrees(model, prompts=1):
        kinds = _kinds(_flat(cache))
        raise UnusableModelError(f"this version of mlx-lm computes it wrongly in batches ({kinds})", param="model")
    return replace(traits, prompts_together=together)


def _kinds(layers: Iterable[Any]) -> str:
    return ", ".join(sorted({type(layer).__name__ for layer in layers}))


def _agrees(model: Any, *, prompts: int) -> bool:
    """Return whether two prompts have the same answers in one batch as alone.

    mlx-lm pads prompts to one length, and some recurrent layers treat the padding as tokens.

    Args:
        prompts: Number of prompts that are computed at the same time.
    """
    alone = [_first_logprobs(model, [prompt], prompts=1)[0] for prompt in TRIAL_PROMPTS]
    together = _first_logprobs(model, TRIAL_PROMPTS, prompts=prompts)
    return all(bool(mx.abs(a - b).max() < TOLERANCE) for a, b in zip(alone, together, strict=True))


def _first_logprobs(model: Any, tried: Sequence[list[int]], *, prompts: int) -> list[mx.array]:
    """Return the log-probabilities of the second token of each answer, which depend on the whole padded prompt."""
    generator = BatchGenerator(model, completion_batch_size=2, prefill_batch_size=prompts, prefill_step_size=4)
    generator.close()
    uids = generator.insert([list(prompt) for prompt in tried], max_tokens=[2] * len(tried))
    logprobs: dict[int, mx.array] = {}
    while len(logprobs) < len(uids):
        for response in generator.next()[1]:
            if response.finish_reason is not None:
                logprobs[response.uid] = response.logprobs.astype(mx.float32)
    return [logprobs[uid] for uid in uids]


def stores_scores(layers: Sequence[Any]) -> bool:
    """Return whether attention stores its scores in arrays: on a CPU, and on an NVIDIA GPU with float32 or large heads,
    which cuDNN does not support. Otherwise attention is one kernel.
    """
    if mx.default_device() == mx.cpu:
        return True
    keys = [layer.keys for layer in layers if isinstance(getattr(layer, "keys", None), mx.array)]
    return memory.is_of_device() and any(key.dtype == mx.float32 or key.shape[-1] > CUDNN_HEAD_SIZE for key in keys)


def number_of(model: Any, name: str) -> int:
    """Return a size from the model's configuration; models with several parts have it one level deeper."""
    args = getattr(model, "args", None)
    inner = getattr(args, "text_config", None)
    found = getattr(args, name, None) or (inner.get(name) if isinstance(inner, dict) else getattr(inner, name, None))
    return found if isinstance(found, int) else 0


def _flat(layers: Sequence[Any]) -> Iterator[Any]:
    for layer in layers:
        if hasattr(layer, "caches"):
            yield from _flat(layer.caches)
        else:
            yield layer
