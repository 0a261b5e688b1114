"""Plan slots and context length of a model on llama.cpp, which allocates the whole KV cache when the model is loaded.

Pure: computed from the header of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmx_lab.errors import OutOfMemoryError, UnusableModelError
from lmx_lab.values.models import KvCacheDtype, LoadSpec, ModelEntry
from lmx_lab.weights.facts import GGUF_ENCODERS, POOLING_LAST
from lmx_lab.weights.gguf.header import GgufHeader

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
STEP_TOKENS = 256
"""llama.cpp rounds a context length up to a multiple of this."""
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
    """Size of the KV cache for one token, including that of a draft model; 0 for an encoder."""


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
    fixed = entry.load_bytes + BASE_BYTES + sum(BATCH_TOKENS * _vocabulary(it) * 4 for it in models)
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
    per_token = sum(kv_bytes_per_token(it, cache_dtype(it, spec)) for it in models)
    context_length = spec.context_length
    # Even in steps of one token, llama.cpp computes the tokens of two slots together, so there must be only one slot.
    one_by_one = spec.deterministic and not (is_batch_invariant(models[0]) and sys.platform == "linux")
    # At least one slot for requests, and one for trials of grammars.
    least_tokens = 2 * _rounded_up(context_length or min(MIN_TOKENS, model_context))
    _require_memory(entry, fixed + per_token * least_tokens, limit_bytes, context_length)
    room_bytes = limit_bytes - fixed
    usual_bytes = min(max(MIN_CACHE_BYTES, entry.size_bytes), room_bytes // 2)
    usual_tokens, room_tokens = (size // max(per_token, 1) for size in (usual_bytes, room_bytes))
    wanted_tokens = _rounded_up(context_length or min(MIN_SLOT_TOKENS, model_context))
    slots = max(1, min(1 if one_by_one else slots, usual_tokens // wanted_tokens - 1))
    slot_tokens = wanted_tokens
    if context_length is None:
        longest = max(usual_tokens // (slots + 1), min(wanted_tokens, room_tokens // 2))
        slot_tokens = min(_rounded_up(model_context), longest // STEP_TOKENS * STEP_TOKENS)
    return ContextPlan(
        slots=slots,
        context_length=context_length or min(model_context, slot_tokens),
        total_tokens=slot_tokens * slots,
        cache_tokens=slot_tokens * (slots + 1),
        batch_tokens=BATCH_TOKENS,
        one_by_one=one_by_one,
        unified=False,
        bytes=fixed + per_token * slot_tokens * (slots + 1),
        token_bytes=per_token,
    )


def _plan_for_decoder(entry: ModelEntry, header: GgufHeader, model_context: int, limit_bytes: int) -> ContextPlan:
    """Plan for a decoder that embeds or ranks. As for a chat model, llama.cpp allocates a cache and computes scores of
    the vocabulary, which are not used.
    """
    cached, computed = kv_bytes_per_token(header), _vocabulary(header) * STEP_BYTES
    # llama.cpp computes a text in several steps only if just its last token is pooled. If all tokens are pooled, and
    # each text has a cache of its own, it cuts texts to the same length and loses their first pieces.
    in_steps = header.integer(f"{header.architecture}.pooling_type") == POOLING_LAST
    fixed = entry.size_bytes + BASE_BYTES + (BATCH_TOKENS * computed if in_steps else 0)
    first_slot_bytes = cached if in_steps else cached + computed
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


def is_batch_invariant(header: GgufHeader) -> bool:
    """Return whether the products with the weights are bitwise the same for a token in any batch.

    Measured on x86-64: with weights of other types, such as Q4_K and F16, the product of a single row adds its terms in
    a different order than the product of several rows. Attention has such differences with all types of weights; see
    ``INVARIANT_ATTENTION`` in ``engine``.
    """
    return all(tensor.type in BATCH_INVARIANT_TYPES for tensor in header.tensors if len(tensor.shape) > 1)


def kv_bytes_per_token(header: GgufHeader, dtype: KvCacheDtype | None = None) -> int:
    """Return an upper bound of the KV cache for one token. Layers with a sliding window, or no attention, use less."""
    layers = _value(header, "block_count") or 0
    heads = _value(header, "attention.head_count_kv") or _value(header, "attention.head_count") or 1
    values = layers * heads * sum(_head_lengths(header))
    # A number in a cache that is not quantized is a float16.
    return values * 2 if dtype is None else values // BLOCK * BLOCK_BYTES[dtype]


def _head_lengths(header: GgufHeader) -> tuple[int, int]:
    """Return how many numbers each head has in the key and in the value of a token."""
    default = (_value(header, "embedding_length") or 0) // (_value(header, "attention.head_count") or 1)
    keys, values = (_value(header, f"attention.{name}_length") or default for name in ("key", "value"))
    return keys, values


def _value(header: GgufHeader, name: str) -> int | None:
    return header.integer(f"{header.architecture}.{name}")


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
