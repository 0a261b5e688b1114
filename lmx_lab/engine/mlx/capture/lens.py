"""Compute the logits of inner values of a model: its prediction after each of its blocks (the logit lens of
nostalgebraist, 2020), and the parts that add to a logit (direct logit attribution).

The attributed logit is the dot product of the normalized residual stream and a row of the head. With the scale of the
final norm held constant, it is the sum of the dot products of all terms of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.normalization import LayerNorm

from lmx_lab.engine.mlx.capture.activations import (
    VOCABULARY_ROWS,
    Array,
    Steps,
    TraceContext,
    in_requested_order,
    read_rows,
    resolve_positions,
)
from lmx_lab.engine.mlx.capture.install import HookPoint
from lmx_lab.engine.mlx.capture.points import ATTN_OUT, MLP_OUT, RESID_POST, RESID_PRE, HookPoints, logits_of
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.values.tracing import LogitLens

MAX_ROWS = 4 * VOCABULARY_ROWS
"""Maximum number of rows of the vocabulary that are computed together."""
MAX_TOP = 100
GROUP_SIZE = 64
"""Number of logits whose maximum is computed together to find the largest logits."""
TOLERANCE = 1e-3
"""Maximum relative rounding error."""
Direction = Callable[[mx.array], mx.array]
"""Returns the contribution to the logit of each term of the residual stream, of shape (terms, width)."""


def compute_logit_lens(context: TraceContext, tokens: Sequence[int], work: LogitLens) -> Steps:
    """Return the arrays ``ids`` and ``logprobs``, of shape (blocks, positions, top), by descending probability."""
    if not 1 <= work.top <= MAX_TOP:
        raise InvalidRequestError(f"top is {work.top}; it must be from 1 to {MAX_TOP}", param="top")
    context.require_tail()
    found = context.found
    positions, order = resolve_positions(work.positions, len(tokens))
    names = [f"blocks.{at}.{RESID_POST}" for at in range(len(found.parts.blocks))]
    shape = len(names), len(positions), work.top
    width = found.sizes[names[0]][0]
    context.check_bytes(
        4 * len(names) * len(positions) * (2 * work.top + width),
        f"the residual stream and the tokens of {counted(len(names), 'block')} at "
        f"{counted(len(positions), 'position')}",
        "name fewer positions, or shorten the text",
    )
    residual = np.zeros((len(names), len(positions), width), np.float32)

    def keep(first: int, end: int, values: Mapping[str, Array]) -> None:
        for at, name in enumerate(names):
            residual[at, first : first + len(values[name])] = values[name]

    yield from read_rows(found, names, tokens, positions, keep)
    ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    flat, flat_ids, flat_logprobs = (
        residual.reshape(-1, width),
        ids.reshape(-1, work.top),
        logprobs.reshape(-1, work.top),
    )
    texts: dict[str, str] = {}
    is_known: Array | None = None
    limit = yield 0
    at = 0
    while at < len(flat):
        end = min(len(flat), at + max(VOCABULARY_ROWS, min(limit, MAX_ROWS)))
        logits = logits_of(found.parts, mx.array(flat[at:end])).astype(mx.float32)
        flat_ids[at:end], flat_logprobs[at:end] = most_likely(np.array(logits, copy=False), work.top)
        is_known = np.zeros(logits.shape[-1], bool) if is_known is None else is_known
        new = np.unique(flat_ids[at:end][~is_known[flat_ids[at:end]]])
        is_known[new] = True
        texts |= {str(token): context.text_of(token) for token in new.tolist()}
        limit, at = (yield 0), end
    arrays = {"ids": in_requested_order(ids, order, 1), "logprobs": in_requested_order(logprobs, order, 1)}
    return arrays, {"positions": [positions[at] for at in order], "texts": texts}


def most_likely(logits: Array, top: int) -> tuple[Array, Array]:
    """Return the most likely tokens of each row, and their log-probabilities, in descending order."""
    ids, logprobs = np.empty((len(logits), top), np.int32), np.empty((len(logits), top), np.float32)
    # Row by row, so that the intermediate values of a row stay in the processor's cache.
    for at, row in enumerate(logits):
        # The candidates are the values that reach the smallest of the ``top`` largest maxima of groups. Finding them is
        # faster than partitioning all values.
        groups, found = len(row) // GROUP_SIZE, np.empty(0, np.int64)
        if groups >= top:
            maxima = row[: groups * GROUP_SIZE].reshape(GROUP_SIZE, groups).max(axis=0)
            found = np.flatnonzero(row >= np.partition(maxima, -top)[-top])
        if len(found) < top:  # A row is short, or a value is NaN.
            found = np.argpartition(row, -top)[-top:]
        best = row[found]
        order = np.argsort(-best)[:top]
        ids[at] = found[order]
        largest = best[order[0]]
        shifted = row - largest
        logprobs[at] = best[order] - (largest + np.log(np.exp(shifted, out=shifted).sum()))
    return ids, logprobs


def compute_attribution(context: TraceContext, tokens: Sequence[int], token: int, other: int | None) -> Steps:
    """Return the contributions to the logit of a token after the text, or to the difference between two logits.

    The arrays are ``attention`` and ``mlp``, of shape (blocks), and ``heads``, of shape (blocks, heads). The heads of a
    block are NaN if the output of its attention is not their sum.
    """
    context.require_tail()
    found, blocks = context.found, context.found.parts.blocks
    names = [f"blocks.{at}.{end}" for at in range(len(blocks)) for end in (ATTN_OUT, MLP_OUT)]
    if missing := next((name for name in names if name not in found.points), None):
        raise InvalidRequestError(
            f"{found.model} has no {missing}: the outputs of its blocks are not sums of attention and MLP, so a "
            "logit cannot be attributed to them; use a model of another family",
            param="model",
        )
    inputs = {f"heads.{at}": block.attention_output for at, block in enumerate(blocks)}
    joined = {name: HookPoint(module, "input") for name, module in inputs.items() if module is not None}
    first, last = f"blocks.0.{RESID_PRE}", f"blocks.{len(blocks) - 1}.{RESID_POST}"
    values: dict[str, Array] = {}

    def keep(_: int, end: int, read: Mapping[str, Array]) -> None:
        values.update({name: np.array(value[0]) for name, value in read.items()})

    yield from read_rows(found, [first, *names, last], tokens, [len(tokens) - 1], keep, extra=joined)
    direction, bias = _direction(context, mx.array(values[last]), token, other)
    yield 0
    products = {name: _number(direction(mx.array(values[name])[None])) for name in (first, *names)}
    heads = [_heads(found, at, values, direction) for at in range(len(blocks))]
    count = max((len(row) for row in heads), default=0)
    arrays = {
        "attention": np.array([products[f"blocks.{at}.{ATTN_OUT}"] for at in range(len(blocks))], np.float32),
        "mlp": np.array([products[f"blocks.{at}.{MLP_OUT}"] for at in range(len(blocks))], np.float32),
        "heads": np.array([[*row, *[np.nan] * (count - len(row))] for row in heads], np.float32),
    }
    logit = _number(direction(mx.array(values[last])[None])) + bias
    return arrays, {"embedding": products[first], "bias": bias, "logit": logit}


def _direction(context: TraceContext, residual: mx.array, token: int, other: int | None) -> tuple[Direction, float]:
    """Return the function that computes contributions, and the contribution of the biases of the norm and the head.

    The function holds the scale of the norm constant, as it is for this value.

    Args:
        residual: The residual stream after the last block at the last position.
    """
    parts = context.found.parts
    norm = parts.norm
    assert norm is not None

    def logit(normalized: mx.array) -> mx.array:
        logits = logits_of(parts, normalized[None], "output")[0]
        return logits[token] - (0 if other is None else logits[other])

    row: mx.array = mx.grad(logit)(mx.zeros_like(residual))
    normalized, width = _float32(norm(residual[None]))[0], len(residual)
    epsilon = getattr(norm, "eps", 0.0)
    # Some families add 1 to the weight.
    gain = _float32(norm(mx.full((1, width), 1000.0)))[0]
    scale = mx.rsqrt(mx.mean(residual**2) + epsilon)

    def root_mean_square(terms: mx.array) -> mx.array:
        return terms * scale * gain

    def centered(terms: mx.array) -> mx.array:
        weight = _float32(norm.weight) * mx.rsqrt(mx.var(residual) + epsilon)
        return (terms - terms.mean(axis=-1, keepdims=True)) * weight

    if _is_close(root_mean_square(residual), normalized):
        scaled = root_mean_square
    elif isinstance(norm, LayerNorm) and _is_close(centered(residual) + norm.get("bias", 0.0), normalized):
        scaled = centered
    else:
        raise InvalidRequestError(
            f"the final norm of {context.found.model} is neither an RMSNorm nor a LayerNorm, so a logit cannot be "
            "attributed to the parts; use a model of another family",
            param="model",
        )
    bias = logit(mx.zeros_like(residual)) + (normalized - scaled(residual)) @ row
    return lambda terms: scaled(terms) @ row, _number(bias)


def _heads(found: HookPoints, at: int, values: Mapping[str, Array], direction: Direction) -> list[float]:
    """Return the contributions of the heads of a block; empty if the output of attention is not their sum."""
    block, pattern = found.parts.blocks[at], found.sizes.get(f"blocks.{at}.attn.hook_pattern")
    joined = values.get(f"heads.{at}")
    if joined is None or pattern is None or block.attention_output is None or joined.size % pattern[0]:
        return []
    count = pattern[0]
    single = (np.eye(count, dtype=np.float32)[:, :, None] * joined.reshape(1, count, -1)).reshape(count, -1)
    # With an input of zeros, a projection returns its bias.
    projected = _float32(block.attention_output(mx.array(np.concatenate([single, np.zeros_like(single[:1])]))))
    heads, bias = projected[:count] - projected[count], projected[count]
    if not _is_close(heads.sum(axis=0) + bias, mx.array(values[f"blocks.{at}.{ATTN_OUT}"])):
        return []
    return [float(value) for value in np.array(direction(heads))]


def _is_close(one: mx.array, other: mx.array) -> bool:
    return bool(mx.abs(one - other).max() <= TOLERANCE * mx.abs(other).max())


def _float32(value: Any) -> mx.array:
    result: mx.array = value.astype(mx.float32)
    return result


def _number(value: mx.array) -> float:
    return float(np.array(value).item())
