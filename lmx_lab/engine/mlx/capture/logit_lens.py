"""Compute the prediction of a model after each of its blocks (the logit lens of nostalgebraist, 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from lmx_lab.engine.mlx.capture.activations import Array, Steps, TraceContext, read_rows, resolve_positions
from lmx_lab.engine.mlx.capture.points import RESID_POST
from lmx_lab.engine.mlx.capture.tail import VOCABULARY_ROWS, logits_of_residual
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.tracing import LogitLens

MAX_ROWS = 4 * VOCABULARY_ROWS
"""Maximum number of rows of the vocabulary that are computed together."""
MAX_TOP = 100
GROUP_SIZE = 64
"""Number of logits whose maximum is computed together to find the largest logits."""


def compute_logit_lens(context: TraceContext, tokens: Sequence[int], work: LogitLens) -> Steps:
    """Return the arrays ``ids`` and ``logprobs``, of shape (blocks, positions, top), by descending probability."""
    if not 1 <= work.top <= MAX_TOP:
        raise InvalidRequestError(f"top is {work.top}; it must be from 1 to {MAX_TOP}", param="top")
    context.require_tail()
    found = context.found
    positions = resolve_positions(work.positions, len(tokens))
    names = [f"blocks.{at}.{RESID_POST}" for at in range(len(found.parts.blocks))]
    shape = len(names), len(positions), work.top
    width = found.sizes[names[0]][0]
    context.check_bytes(
        4 * len(names) * len(positions) * (2 * work.top + width),
        f"the residual stream and the tokens of {len(names)} blocks at {len(positions)} positions",
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
        logits = logits_of_residual(found.parts.model, found.parts.norm, mx.array(flat[at:end])).astype(mx.float32)
        flat_ids[at:end], flat_logprobs[at:end] = _most_likely(np.array(logits, copy=False), work.top)
        is_known = np.zeros(logits.shape[-1], bool) if is_known is None else is_known
        new = np.unique(flat_ids[at:end][~is_known[flat_ids[at:end]]])
        is_known[new] = True
        texts |= {str(token): context.text_of(token) for token in new.tolist()}
        limit, at = (yield 0), end
    return {"ids": ids, "logprobs": logprobs}, {"positions": positions, "texts": texts}


def _most_likely(logits: Array, top: int) -> tuple[Array, Array]:
    """Return the most likely tokens of each row, and their log-probabilities, in descending order."""
    ids, logprobs = np.empty((len(logits), top), np.int32), np.empty((len(logits), top), np.float32)
    # Row by row, so that the intermediate values of a row stay in the processor's cache.
    for at, row in enumerate(logits):
        found = _candidates(row, top)
        best = row[found]
        order = np.argsort(-best)[:top]
        ids[at] = found[order]
        largest = best[order[0]]
        shifted = row - largest
        logprobs[at] = best[order] - (largest + np.log(np.exp(shifted, out=shifted).sum()))
    return ids, logprobs


def _candidates(row: Array, top: int) -> Array:
    """Return the positions of at least ``top`` values of a row, among them the largest ones.

    They are the values that reach the smallest of the ``top`` largest maxima of groups, which is faster than a
    partition of all values.
    """
    groups = len(row) // GROUP_SIZE
    if groups >= top:
        maxima = row[: groups * GROUP_SIZE].reshape(GROUP_SIZE, groups).max(axis=0)
        found = np.flatnonzero(row >= np.partition(maxima, -top)[-top])
        if len(found) >= top:  # False if a value is NaN.
            return found
    return np.argpartition(row, -top)[-top:]
