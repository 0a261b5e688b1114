"""How much context llama.cpp gets, which allocates the KV cache whole when it loads. Pure, from a file's header."""

from __future__ import annotations

from dataclasses import dataclass

from lmx_lab.errors import OutOfMemoryError
from lmx_lab.weights import ModelEntry
from lmx_lab.weights.gguf_header import GgufHeader

BATCH_TOKENS = 256
"""Of a prompt, computed in one step: a cancelled request waits for its end. 2,048 gain nothing on a CPU."""
CACHE_BYTES = 2
"""Of a number in the KV cache: float16."""
LEAST_CACHE_BYTES = 512 * 2**20
"""The KV cache takes at most as much as this or the weights, whichever is more, and what one request needs."""
LEAST_TOKENS = 256
USUAL_TOKENS = 8192
"""One request shall hold as many, if the model and memory do."""
TRIAL_TOKENS = 256
"""More than the one token of a trial needs."""
STEP_TOKENS = 256
"""llama.cpp rounds a context up to such."""
BASE_BYTES = 64 * 2**20
"""Of the process, its libraries and buffers of computation."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    slots: int
    context_length: int
    """Tokens of one request, prompt and answer."""
    total_tokens: int
    """Of all requests together."""
    cache_tokens: int
    """What is allocated: the same and room for trials of forms, in a slot of their own."""
    unified: bool
    """Requests share one cache, since there is not enough for each to have its own."""
    bytes: int
    """Weights, cache and what else is known beforehand."""


def plan(entry: ModelEntry, header: GgufHeader, *, slots: int, limit_bytes: int) -> Plan:
    """
    Args:
        limit_bytes: What the model may take in all.

    Raises:
        OutOfMemoryError: the weights, or the least context, are more than that.
    """
    own = entry.context_length or USUAL_TOKENS
    fixed = entry.size_bytes + BASE_BYTES + BATCH_TOKENS * _vocabulary(header) * 4
    if entry.kind != "chat":
        _require(entry, fixed, limit_bytes)
        return Plan(slots=1, context_length=own, total_tokens=own, cache_tokens=own, unified=False, bytes=fixed)
    per_token = kv_bytes_per_token(header)
    _require(entry, fixed + per_token * (min(LEAST_TOKENS, own) + TRIAL_TOKENS), limit_bytes)
    room = (limit_bytes - fixed) // max(per_token, 1)
    share = max(max(LEAST_CACHE_BYTES, entry.size_bytes) // max(per_token, 1), min(own, USUAL_TOKENS))
    each = -(-own // STEP_TOKENS) * STEP_TOKENS
    unified = each * slots > share or each * (slots + 1) > room
    total = each * slots
    if unified:
        total = max(LEAST_TOKENS, min(total, share, room - TRIAL_TOKENS) // STEP_TOKENS * STEP_TOKENS)
    cache = total + (TRIAL_TOKENS if unified else each)
    return Plan(
        slots=slots,
        context_length=min(own, total),
        total_tokens=total,
        cache_tokens=cache,
        unified=unified,
        bytes=fixed + per_token * cache,
    )


def kv_bytes_per_token(header: GgufHeader) -> int:
    """An upper bound: layers with a window, or without attention, take less."""

    def value(name: str) -> int | None:
        return header.integer(f"{header.architecture}.{name}")

    layers, width, heads = value("block_count") or 0, value("embedding_length") or 0, value("attention.head_count") or 1
    key = value("attention.key_length") or width // heads
    of_value = value("attention.value_length") or width // heads
    return layers * (value("attention.head_count_kv") or heads) * (key + of_value) * CACHE_BYTES


def _vocabulary(header: GgufHeader) -> int:
    rows = [tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"]
    return rows[0] if rows else 0


def _require(entry: ModelEntry, needed: int, limit_bytes: int) -> None:
    if needed > limit_bytes:
        raise OutOfMemoryError(
            f"{entry.id} needs {needed / 1e9:.2f} GB, {max(0, limit_bytes) / 1e9:.2f} GB are allowed: choose a smaller "
            "or more quantized model, or raise memory_limit_bytes"
        )
