"""Plan slots and context length of a model on llama.cpp, which allocates the whole KV cache when the model is loaded.

Pure: computed from the header of the file.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lmx_lab.errors import OutOfMemoryError, UnusableModelError
from lmx_lab.values.models import KvCacheDtype, LoadSpec, ModelEntry
from lmx_lab.values.plan import (
    CONCURRENCY,
    STEP_TOKENS,
    LargestContext,
    LayerCache,
    LoadPlan,
    kv_bytes_per_token,
    kv_constant_bytes,
)
from lmx_lab.weights.facts import GGUF_ENCODERS, POOLING_LAST
from lmx_lab.weights.gguf.header import MAX_LAYERS, GgufHeader

BATCH_TOKENS = 256
"""Number of prompt tokens that are computed in one step. Cancelling a request waits for the end of the step. On a CPU,
2,048 tokens are not faster."""
BLOCK = 32
"""Number of values in a block of a quantized KV cache. Blocks must not contain values of several heads."""
BLOCK_BYTES: Mapping[KvCacheDtype, int] = {"q8_0": 34, "q4_0": 18}
MIN_CACHE_BYTES = 2**30
"""The KV cache of a chat model may use this size or that of the weights, whichever is larger, but at most half of the
memory that is left, and always what one request needs."""
MIN_TEXTS_BYTES = 512 * 2**20
"""The same for models that embed or rank."""
MIN_SLOT_TOKENS = 4096
"""If memory is short, there are fewer slots rather than slots with a shorter context than this, unless the caller
requests a context length."""
TEXTS_AT_ONCE = 8
"""Number of texts that an embedding model or a reranker computes together; more are not faster (measured)."""
MIN_TOKENS = 256
USUAL_TOKENS = 8192
"""Context length that is used if the model and the memory allow it."""
USUAL_WHOLE_TOKENS = 1024
"""The same for a text that has to be computed in one step."""
WINDOW_PATTERNS: Mapping[str, int] = {
    "afmoe": 4, "cohere2": 4, "exaone-moe": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2,
    "llama4": 4, "olmo2": 4, "smallthinker": 4,
}  # fmt: skip
"""Architectures whose layers have a sliding window, except each n-th layer. A file may contain another pattern."""
CHUNKED_WINDOW = 8192
"""The window of llama4, whose files contain none."""
ATTENTION_INTERVALS: Mapping[str, int] = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
"""Architectures with recurrent layers, except each n-th layer, which has attention."""
BOTH_IN_EACH_LAYER = frozenset({"falcon-h1"})
"""Architectures whose layers have attention and a recurrent state."""
STATE_BYTES = 4
"""Recurrent states are float32."""
STEP_BYTES = 8
"""Bytes for each pair of a token of a step and a token of the vocabulary: scores are stored twice (measured)."""
BATCH_INVARIANT_TYPES = frozenset({"Q4_0", "Q4_1", "Q8_0"})
"""Types of weights whose products do not depend on the number of rows (measured)."""
BASE_BYTES = 64 * 2**20
"""Memory of the process, its libraries and its compute buffers."""


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """How the memory of a model is divided."""

    slots: int
    """Number of simultaneous requests; for embedding models and rerankers, of simultaneous texts."""
    context_length: int
    """Maximum number of tokens of one request, prompt and answer."""
    total_tokens: int
    """Number of tokens that are allocated for all slots together."""
    cache_tokens: int
    """``total_tokens``, and for a chat model those of one more slot, in which grammars are tried."""
    batch_tokens: int
    """Maximum number of tokens computed in one step."""
    one_by_one: bool = False
    """Whether the tokens of a step, and requests, are computed one after the other."""
    unified: bool
    """Whether texts share one cache. Answers of a chat model never do, because other answers would change
    their rounding."""
    bytes: int
    """Estimated memory for weights, cache and everything else that is known in advance."""
    token_bytes: int = 0
    """Size of the KV cache for one token in all layers, including those of a draft model; 0 for an encoder."""


def plan_context(
    entry: ModelEntry,
    header: GgufHeader,
    *,
    slots: int,
    limit_bytes: int,
    spec: LoadSpec | None = None,
    draft: GgufHeader | None = None,
) -> ContextPlan:
    """Return the slots and the context length that fit in the memory limit.

    Args:
        slots: Maximum number of simultaneous requests.
        limit_bytes: Total memory that the model may use.
        spec: How to load the model; None for the default.
        draft: The header of the draft model, whose cache has as many tokens; None if there is none.

    Raises:
        OutOfMemoryError: the weights and the shortest, or the requested, context exceed the limit.
        UnusableModelError: the KV cache of the model cannot have the requested type.
    """
    model_context = entry.context_length or USUAL_TOKENS
    models = [header] if draft is None else [header, draft]
    fixed = _fixed_bytes(entry, models)
    if entry.kind != "chat":
        if header.architecture in GGUF_ENCODERS:
            # An encoder computes a text in one step and keeps no cache of it.
            _require_memory(entry, fixed, limit_bytes)
            total = model_context * TEXTS_AT_ONCE
            return ContextPlan(
                slots=TEXTS_AT_ONCE,
                context_length=model_context,
                total_tokens=total,
                cache_tokens=total,
                batch_tokens=model_context,
                unified=False,
                bytes=fixed,
            )
        return _plan_for_decoder(entry, header, model_context, limit_bytes)
    spec = spec or LoadSpec(model=entry.id)
    if spec.kv_cache_dtype is not None and not can_quantize_cache(header):
        raise UnusableModelError(
            f"kv_cache_dtype is {spec.kv_cache_dtype}, which needs attention heads with a multiple of {BLOCK} numbers; "
            f"those of {entry.id} have {' and '.join(map(str, sorted(set(_head_lengths(header)))))}; leave out "
            "kv_cache_dtype",
            param="kv_cache_dtype",
        )
    return _plan_for_chat(entry, models, model_context, fixed, limit_bytes, spec=spec, slots=slots)


def _plan_for_chat(
    entry: ModelEntry,
    models: Sequence[GgufHeader],
    model_context: int,
    fixed: int,
    limit_bytes: int,
    *,
    spec: LoadSpec,
    slots: int,
) -> ContextPlan:
    """Plan for a chat model, whose cache is divided into slots.

    Args:
        models: The headers of the model and, if there is one, of its draft model.
    """
    layers = _layers(models, spec)

    def slot_bytes(tokens: int) -> int:
        return round(sum(layer.bytes(tokens) for layer in layers))

    def longest_slot(size_bytes: int) -> int:
        """Return the largest context of a slot of this size, up to that of the model."""
        longer = range(STEP_TOKENS, _rounded_up(model_context) + 1, STEP_TOKENS)
        return STEP_TOKENS * bisect_right(longer, size_bytes, key=slot_bytes)

    context_length = spec.context_length
    # Even in steps of one token, llama.cpp computes the tokens of two slots together, so there must be only one slot.
    one_by_one = spec.deterministic and _is_one_by_one(models[0])
    needed = least_bytes(entry, models, spec)
    _require_memory(entry, needed, limit_bytes, context_length)
    room_bytes = limit_bytes - fixed
    usual_bytes = min(max(MIN_CACHE_BYTES, entry.size_bytes), room_bytes // 2)
    wanted_tokens = _rounded_up(context_length or min(MIN_SLOT_TOKENS, model_context))
    # One slot more than requests have, for trials of grammars.
    slots = max(1, min(1 if one_by_one else slots, usual_bytes // max(slot_bytes(wanted_tokens), 1) - 1))
    slot_tokens = wanted_tokens
    if context_length is None:
        longest = max(longest_slot(usual_bytes // (slots + 1)), min(wanted_tokens, longest_slot(room_bytes // 2)))
        slot_tokens = min(_rounded_up(model_context), longest)
    return ContextPlan(
        slots=slots,
        context_length=context_length or min(model_context, slot_tokens),
        total_tokens=slot_tokens * slots,
        cache_tokens=slot_tokens * (slots + 1),
        batch_tokens=BATCH_TOKENS,
        one_by_one=one_by_one,
        unified=False,
        bytes=fixed + slot_bytes(slot_tokens) * (slots + 1),
        token_bytes=round(sum(layer.bytes_per_token for layer in layers)),
    )


def least_bytes(entry: ModelEntry, models: Sequence[GgufHeader], spec: LoadSpec) -> int:
    """Return the memory without which a chat model is not loaded: that of the weights, and of one slot for requests and
    one for trials of grammars, with the requested or the shortest context.

    Args:
        models: The headers of the model and, if there is one, of its draft model.
    """
    tokens = _rounded_up(spec.context_length or min(MIN_TOKENS, entry.context_length or USUAL_TOKENS))
    slot_bytes = sum(layer.bytes(tokens) for layer in _layers(models, spec))
    return _fixed_bytes(entry, models) + 2 * round(slot_bytes)


def _fixed_bytes(entry: ModelEntry, models: Sequence[GgufHeader]) -> int:
    """Return the memory that does not depend on the context."""
    return entry.load_bytes + BASE_BYTES + sum(BATCH_TOKENS * _vocabulary(it) * 4 for it in models)


def _layers(models: Sequence[GgufHeader], spec: LoadSpec) -> list[LayerCache]:
    return [layer for header in models for layer in layer_caches(header, cache_dtype(header, spec))]


def plan_load(
    entry: ModelEntry, header: GgufHeader, *, limit_bytes: int, spec: LoadSpec, draft: GgufHeader | None = None
) -> LoadPlan:
    """Return what a load would use in memory; see ``plan_context`` for the arguments. A model that is too large
    does not raise an error.

    Raises:
        UnusableModelError: see ``plan_context``.
    """
    models = [header] if draft is None else [header, draft]
    plan = partial(LoadPlan, model=entry.id, engine="llama.cpp", kind=entry.kind, file_bytes=entry.load_bytes)
    weights_bytes = sum(tensor.size_bytes for it in models for tensor in it.tensors)
    plan = partial(plan, weights_bytes=weights_bytes, context_length=entry.context_length)
    if entry.kind != "chat":
        needed = _fixed_bytes(entry, models)
        if header.architecture not in GGUF_ENCODERS:
            _, fixed, _, first_slot_bytes = _texts_bytes(entry, header)
            needed = fixed + STEP_TOKENS * first_slot_bytes
        return plan(needed_bytes=needed)

    def is_too_long(context_length: int, requests: int) -> bool:
        wanted = replace(spec, context_length=context_length)
        try:
            found = plan_context(entry, header, slots=requests, limit_bytes=limit_bytes, spec=wanted, draft=draft)
        except OutOfMemoryError:
            return True
        return found.slots != requests

    contexts = []
    # With this option, some models answer one request at a time.
    is_serial = spec.deterministic and _is_one_by_one(header)
    for requests in CONCURRENCY[: 1 if is_serial else None]:
        longer = range(1, (entry.context_length or USUAL_TOKENS) + 1)
        longest = bisect_left(longer, True, key=partial(is_too_long, requests=requests))
        contexts.append(LargestContext(requests=requests, context_length=longest))
    layers = _layers(models, spec)
    # The weights that are read for each token. Of the embeddings, this is one row unless they are also the last layer.
    # Of the experts, it is the part that is used.
    used, experts = _value(header, "expert_used_count") or 0, _value(header, "expert_count") or 0
    is_tied = all(tensor.name != "output.weight" for tensor in header.tensors)
    read_bytes = 0.0
    for tensor in header.tensors:
        if is_tied or tensor.name != "token_embd.weight":
            is_expert = "_exps." in tensor.name and experts > 0
            read_bytes += tensor.size_bytes * (used / experts if is_expert else 1)
    return plan(
        kv_bytes_per_token=kv_bytes_per_token(layers),
        kv_constant_bytes=kv_constant_bytes(layers),
        needed_bytes=least_bytes(entry, models, spec),
        contexts=tuple(contexts),
        read_bytes=round(read_bytes),
    )


def _plan_for_decoder(entry: ModelEntry, header: GgufHeader, model_context: int, limit_bytes: int) -> ContextPlan:
    """Plan for a decoder that embeds or ranks. As for a chat model, llama.cpp allocates a cache and computes scores of
    the vocabulary, which are not used.
    """
    in_steps, fixed, cached, first_slot_bytes = _texts_bytes(entry, header)
    usual = first_slot_bytes * min(model_context, USUAL_TOKENS if in_steps else USUAL_WHOLE_TOKENS)
    room = min(limit_bytes - fixed, max(MIN_TEXTS_BYTES, entry.size_bytes, usual))
    slot_tokens = max(
        STEP_TOKENS, min(_rounded_up(model_context), room // max(first_slot_bytes, 1) // STEP_TOKENS * STEP_TOKENS)
    )
    extra_slots = max(0, room - first_slot_bytes * slot_tokens) // max(cached * slot_tokens, 1)
    slots = 1 + min(extra_slots, TEXTS_AT_ONCE - 1)
    needed = fixed + slot_tokens * (first_slot_bytes + cached * (slots - 1))
    _require_memory(entry, needed, limit_bytes)
    return ContextPlan(
        slots=slots,
        # A text computed in steps leaves room for one more token, which is not computed.
        context_length=max(1, min(model_context, slot_tokens) - in_steps),
        total_tokens=slot_tokens * slots,
        cache_tokens=slot_tokens * slots,
        batch_tokens=BATCH_TOKENS if in_steps else slot_tokens,
        unified=not in_steps,
        bytes=needed,
    )


def _texts_bytes(entry: ModelEntry, header: GgufHeader) -> tuple[bool, int, int, int]:
    """Return, for a decoder that embeds or ranks, whether texts are computed in several steps, the memory that does not
    depend on the texts, that of the cache for one token, and the same for a token of the first slot.
    """
    cached = round(sum(layer.bytes_per_token for layer in layer_caches(header)))
    computed = _vocabulary(header) * STEP_BYTES
    # llama.cpp computes a text in several steps only if just its last token is pooled. If all tokens are pooled, and
    # each text has a cache of its own, it cuts texts to the same length and loses their first pieces.
    in_steps = header.integer(f"{header.architecture}.pooling_type") == POOLING_LAST
    fixed = entry.size_bytes + BASE_BYTES + (BATCH_TOKENS * computed if in_steps else 0)
    first_slot_bytes = cached if in_steps else cached + computed
    return in_steps, fixed, cached, first_slot_bytes


def _is_one_by_one(header: GgufHeader) -> bool:
    """Return whether a deterministic load computes requests one after the other."""
    return not (is_batch_invariant(header) and sys.platform == "linux")


def is_batch_invariant(header: GgufHeader) -> bool:
    """Return whether the products with the weights are bitwise the same for a token in any batch.

    Measured on x86-64: with weights of other types, such as Q4_K and F16, the product of a single row adds its terms in
    a different order than the product of several rows. Attention has such differences with all types of weights; see
    ``INVARIANT_ATTENTION`` in ``engine``.
    """
    return all(tensor.type in BATCH_INVARIANT_TYPES for tensor in header.tensors if len(tensor.shape) > 1)


def layer_caches(header: GgufHeader, dtype: KvCacheDtype | None = None) -> list[LayerCache]:
    """Return the cache of each layer, for one slot: of keys and values of all tokens or of a window, of a compressed
    form of both (latent attention), or a recurrent state. For an unknown architecture, it is an upper bound.
    """
    count = min(_value(header, "block_count") or 0, MAX_LAYERS)
    heads = [_of_layer(header, "attention.head_count_kv", at) for at in range(count)]
    if None in heads:
        heads = [_of_layer(header, "attention.head_count", at) for at in range(count)]
    state_bytes = _state_bytes(header)
    # Layers from here on use the caches of earlier ones.
    shared_from = count - (_value(header, "attention.shared_kv_layers") or 0)
    caches = []
    for at in range(count):
        head_count = 1 if (found := heads[at]) is None else found
        recurrent = state_bytes > 0 and _is_recurrent(header, at, head_count)
        attends = head_count > 0 and at < shared_from and (not recurrent or header.architecture in BOTH_IN_EACH_LAYER)
        window, (keys, values) = _window(header, at), _head_lengths(header)
        if window is not None:
            keys = _value(header, "attention.key_length_swa") or keys
            values = _value(header, "attention.value_length_swa") or values
        if _value(header, "attention.key_length_mla"):
            # Latent attention: the compressed values are a part of the compressed keys.
            values = 0
        numbers = head_count * (keys + values) if attends else 0
        caches.append(
            LayerCache(
                # A number in a cache that is not quantized is a float16.
                bytes_per_token=numbers * 2 if dtype is None else numbers // BLOCK * BLOCK_BYTES[dtype],
                # The window and one step, rounded up as each cache is.
                window_tokens=None if window is None else _rounded_up(window + BATCH_TOKENS),
                fixed_bytes=state_bytes if recurrent else 0,
            )
        )
    return caches


def _window(header: GgufHeader, at: int) -> int | None:
    """Return the number of tokens that a layer attends to; None if it attends to all."""
    window = _value(header, "attention.sliding_window")
    if window is None and header.architecture == "llama4":
        window = CHUNKED_WINDOW
    pattern = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return window if window and pattern and pattern[at % len(pattern)] else None
    period = pattern if isinstance(pattern, int) else WINDOW_PATTERNS.get(header.architecture)
    if not window or period is None:
        return None
    if header.architecture == "smallthinker":
        return window if period == 0 or at % period != 0 else None
    return window if period == 0 or at % period < period - 1 else None


def _is_recurrent(header: GgufHeader, at: int, head_count: int) -> bool:
    """Return whether a layer of a model with recurrent states has one."""
    if header.architecture in BOTH_IN_EACH_LAYER:
        return True
    if (usual := ATTENTION_INTERVALS.get(header.architecture)) is not None:
        return (at + 1) % (_value(header, "full_attention_interval") or usual) != 0
    is_network = isinstance(header.metadata.get(f"{header.architecture}.feed_forward_length"), list) and bool(
        _of_layer(header, "feed_forward_length", at)
    )
    # Layers of nemotron-h are attention, recurrent, or a feed-forward network only.
    return head_count == 0 and not (header.architecture.startswith("nemotron_h") and is_network)


def _state_bytes(header: GgufHeader) -> int:
    """Return the size of the state of a recurrent layer: the last inputs of its convolution, and its matrix; 0 if the
    model has no recurrent layers.
    """
    width = _value(header, "embedding_length") or 0
    if size := _value(header, "wkv.head_size"):
        shifted = 1 if header.architecture == "arwkv7" else 2
        return width * (shifted + size) * STATE_BYTES
    if length := _value(header, "shortconv.l_cache"):
        return width * (length - 1) * STATE_BYTES
    kernel, inner, state, groups = (
        _value(header, f"ssm.{name}") or 0 for name in ("conv_kernel", "inner_size", "state_size", "group_count")
    )
    return (max(0, kernel - 1) * (inner + 2 * groups * state) + state * inner) * STATE_BYTES


def _head_lengths(header: GgufHeader) -> tuple[int, int]:
    """Return how many numbers each head has in the key and in the value of a token."""
    default = (_value(header, "embedding_length") or 0) // (_of_layer(header, "attention.head_count", 0) or 1)
    keys, values = (_value(header, f"attention.{name}_length") or default for name in ("key", "value"))
    return keys, values


def _value(header: GgufHeader, name: str) -> int | None:
    return header.integer(f"{header.architecture}.{name}")


def _of_layer(header: GgufHeader, name: str, at: int) -> int | None:
    """Return a value that may differ between layers."""
    value = header.metadata.get(f"{header.architecture}.{name}")
    if isinstance(value, list):
        value = value[at] if at < len(value) else None
    return int(value) if isinstance(value, int) else None


def can_quantize_cache(header: GgufHeader) -> bool:
    """Return whether the KV cache of a model can be quantized."""
    return all(length % BLOCK == 0 for length in _head_lengths(header))


def cache_dtype(header: GgufHeader, spec: LoadSpec) -> KvCacheDtype | None:
    """Return the type of the KV cache of a model, or of a draft model, which is not quantized if that is impossible."""
    return spec.kv_cache_dtype if can_quantize_cache(header) else None


def _rounded_up(tokens: int) -> int:
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


def _vocabulary(header: GgufHeader) -> int:
    rows = [tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"]
    return rows[0] if rows else 0


def _require_memory(entry: ModelEntry, needed: int, limit_bytes: int, context_length: int | None = None) -> None:
    if needed > limit_bytes:
        context = f" with a context_length of {context_length}" if context_length is not None else ""
        remedy = "a smaller context_length" if context else "a smaller or more quantized model"
        draft = f" and its draft model {entry.draft.id} need" if entry.draft is not None else " needs"
        raise OutOfMemoryError(
            f"{entry.id}{draft} {needed / 1e9:.2f} GB{context}, and {max(0, limit_bytes) / 1e9:.2f} GB are allowed; "
            f"choose {remedy}, or raise memory_limit_bytes"
        )
