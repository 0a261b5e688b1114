"""Plan the context length of a model on llama.cpp, which allocates the whole KV cache when it loads.

Pure: computed from the header of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmx_lab.errors import OutOfMemoryError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.gguf.header import GgufHeader
from lmx_lab.weights.gguf.model import ENCODERS, POOLING_LAST

BATCH_TOKENS = 256
"""Tokens of a prompt that are computed in one step. A cancelled request waits for the end of the step. 2,048 gain
nothing on a CPU."""
CACHE_BYTES = 2
"""Size of a number in the KV cache: float16."""
MIN_CACHE_BYTES = 512 * 2**20
"""The KV cache may use as much as this or as the weights, whichever is more, and always what one request needs."""
TEXTS_AT_ONCE = 8
"""Texts that an embedding model or a reranker computes together; more gain nothing (measured)."""
MIN_TOKENS = 256
USUAL_TOKENS = 8192
"""Context length to aim for, if the model and the memory allow it."""
USUAL_WHOLE_TOKENS = 1024
"""The same for a text that has to be computed in one step."""
TRIAL_TOKENS = 256
"""Context for trials of grammars; more than the one token of a trial needs."""
STEP_TOKENS = 256
"""llama.cpp rounds a context length up to a multiple of this."""
STEP_BYTES = 8
"""Bytes for each token of a step and each word of the vocabulary: the scores are stored twice (measured)."""
BASE_BYTES = 64 * 2**20
"""Memory of the process, its libraries and its compute buffers."""


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    slots: int
    """Requests at once; for embedding models and rerankers, texts at once."""
    context_length: int
    """Tokens of one request, prompt and answer."""
    total_tokens: int
    """Tokens of all requests together."""
    cache_tokens: int
    """Tokens that are allocated: ``total_tokens``, and room for trials of grammars in a slot of their own."""
    batch_tokens: int
    """Tokens computed in one step."""
    unified: bool
    """Whether requests share one cache, because there is not enough memory for one each."""
    bytes: int
    """Weights, cache and everything else that is known in advance."""


def plan_context(entry: ModelEntry, header: GgufHeader, *, slots: int, limit_bytes: int) -> ContextPlan:
    """Choose slots and context length within the memory limit.

    Args:
        limit_bytes: Memory that the model may use in all.

    Raises:
        OutOfMemoryError: the weights, or the shortest context, exceed it.
    """
    own = entry.context_length or USUAL_TOKENS
    fixed = entry.size_bytes + BASE_BYTES + BATCH_TOKENS * _vocabulary(header) * 4
    if entry.kind != "chat":
        if header.architecture in ENCODERS:
            return _plan_for_encoder(entry, own, fixed, limit_bytes)
        return _plan_for_decoder(entry, header, own, limit_bytes)
    per_token = kv_bytes_per_token(header)
    _require(entry, fixed + per_token * (min(MIN_TOKENS, own) + TRIAL_TOKENS), limit_bytes)
    room = (limit_bytes - fixed) // max(per_token, 1)
    share = max(max(MIN_CACHE_BYTES, entry.size_bytes) // max(per_token, 1), min(own, USUAL_TOKENS))
    each = _rounded_up(own)
    unified = each * slots > share or each * (slots + 1) > room
    total = each * slots
    if unified:
        total = max(MIN_TOKENS, min(total, share, room - TRIAL_TOKENS) // STEP_TOKENS * STEP_TOKENS)
    cache = total + (TRIAL_TOKENS if unified else each)
    return ContextPlan(
        slots=slots,
        context_length=min(own, total),
        total_tokens=total,
        cache_tokens=cache,
        batch_tokens=BATCH_TOKENS,
        unified=unified,
        bytes=fixed + per_token * cache,
    )


def _plan_for_encoder(entry: ModelEntry, own: int, fixed: int, limit_bytes: int) -> ContextPlan:
    """Plan for a model that computes a text in one step and keeps no cache of it."""
    _require(entry, fixed, limit_bytes)
    total = own * TEXTS_AT_ONCE
    return ContextPlan(
        slots=TEXTS_AT_ONCE,
        context_length=own,
        total_tokens=total,
        cache_tokens=total,
        batch_tokens=own,
        unified=False,
        bytes=fixed,
    )


def _plan_for_decoder(entry: ModelEntry, header: GgufHeader, own: int, limit_bytes: int) -> ContextPlan:
    """Plan for a decoder that embeds or ranks. llama.cpp allocates a cache for it as for a chat model, and computes
    scores of its vocabulary, which are not used.
    """
    cached, computed = kv_bytes_per_token(header), _vocabulary(header) * STEP_BYTES
    # llama.cpp computes a text in several steps only if its last token alone is pooled. If all tokens are, and each
    # text has a cache of its own, it cuts texts to the same length and loses their first pieces.
    in_steps = header.integer(f"{header.architecture}.pooling_type") == POOLING_LAST
    fixed = entry.size_bytes + BASE_BYTES + (BATCH_TOKENS * computed if in_steps else 0)
    of_first = cached if in_steps else cached + computed
    usual = of_first * min(own, USUAL_TOKENS if in_steps else USUAL_WHOLE_TOKENS)
    room = min(limit_bytes - fixed, max(MIN_CACHE_BYTES, entry.size_bytes, usual))
    each = max(STEP_TOKENS, min(_rounded_up(own), room // max(of_first, 1) // STEP_TOKENS * STEP_TOKENS))
    more = max(0, room - of_first * each) // max(cached * each, 1)
    slots = 1 + min(more, TEXTS_AT_ONCE - 1)
    needed = fixed + each * (of_first + cached * (slots - 1))
    _require(entry, needed, limit_bytes)
    return ContextPlan(
        slots=slots,
        # A text computed in steps leaves room for one more token, which is not computed.
        context_length=max(1, min(own, each) - in_steps),
        total_tokens=each * slots,
        cache_tokens=each * slots,
        batch_tokens=BATCH_TOKENS if in_steps else each,
        unified=not in_steps,
        bytes=needed,
    )


def kv_bytes_per_token(header: GgufHeader) -> int:
    """Return an upper bound: layers with a sliding window, or without attention, use less."""

    def value(name: str) -> int | None:
        return header.integer(f"{header.architecture}.{name}")

    layers, width, heads = value("block_count") or 0, value("embedding_length") or 0, value("attention.head_count") or 1
    key = value("attention.key_length") or width // heads
    of_value = value("attention.value_length") or width // heads
    return layers * (value("attention.head_count_kv") or heads) * (key + of_value) * CACHE_BYTES


def _rounded_up(tokens: int) -> int:
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


def _vocabulary(header: GgufHeader) -> int:
    rows = [tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"]
    return rows[0] if rows else 0


def _require(entry: ModelEntry, needed: int, limit_bytes: int) -> None:
    if needed > limit_bytes:
        raise OutOfMemoryError(
            f"{entry.id} needs {needed / 1e9:.2f} GB, and {max(0, limit_bytes) / 1e9:.2f} GB are allowed; choose a "
            "smaller or more quantized model, or raise memory_limit_bytes"
        )
