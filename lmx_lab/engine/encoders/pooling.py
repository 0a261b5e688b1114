"""From hidden states to vectors: pooling and what comes after it. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from lmx_lab.engine.encoders.layers import TORCH_ACTIVATIONS, Norm, activation
from lmx_lab.engine.encoders.network import PaddedBatch
from lmx_lab.engine.encoders.sentence_transformers import Dense, LayerNorm, Normalize, Pooling, PoolingMode, Step
from lmx_lab.engine.encoders.tensors import Tensors

SMALLEST_LENGTH = 1e-12
"""Shorter vectors are not brought to length 1."""
TORCH_NORM_EPS = 1e-5

Operation = Callable[[mx.array], mx.array]


@dataclass(frozen=True, eq=False)
class PooledHead:
    """One vector for each text, or one score if the last operation leaves one number."""

    pooling: Pooling
    operations: tuple[Operation, ...]
    score: bool = False

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        hidden = hidden.astype(mx.float32)
        vectors = mx.concatenate([pool(hidden, batch, mode) for mode in self.pooling.modes], axis=-1)
        for operation in self.operations:
            vectors = operation(vectors)
        return vectors.squeeze(-1) if self.score else vectors


def pool(hidden: mx.array, batch: PaddedBatch, mode: PoolingMode) -> mx.array:
    """(rows, size) of (rows, length, size); padding and skipped_tokens tokens count for nothing."""
    match mode:
        case "cls":
            return hidden[mx.arange(len(batch.skipped_tokens)), mx.array(batch.skipped_tokens)]
        case "lasttoken":
            return batch.last(hidden)
    place = np.arange(hidden.shape[1])
    counted = (place < batch.lengths[:, None]) & (place >= batch.skipped_tokens[:, None])
    if mode == "max":
        return mx.where(mx.array(counted)[..., None], hidden, -mx.inf).max(axis=1)
    weights = counted * (place + 1) if mode == "weightedmean" else counted
    total = weights.sum(axis=1, keepdims=True)
    shares = weights / (np.sqrt(total) if mode == "mean_sqrt_len_tokens" else total)
    return (mx.array(shares.astype(np.float32))[:, None] @ hidden).squeeze(1)


def operation(step: Step, width: int) -> tuple[Operation, int]:
    """What a module does to vectors of ``width`` numbers, and how many it leaves; its weights are float32.

    Raises:
        UnusableModelError: as of ``Tensors``, or of an activation that is not known.
    """
    match step:
        case Normalize():
            return normalize, width
        case LayerNorm():
            tensors = Tensors.read(step.folder, mx.float32)
            norm = Norm(tensors.take("norm.weight", width), tensors.take("norm.bias", width), TORCH_NORM_EPS)
            tensors.finish()
            return norm, width
        case Dense():
            return _dense(step, width), step.outputs


def _dense(step: Dense, width: int) -> Operation:
    act = activation(step.activation, TORCH_ACTIVATIONS)
    tensors = Tensors.read(step.folder, mx.float32)
    linear = tensors.linear("linear", width, step.outputs, bias=step.bias)
    tensors.finish()
    return lambda x: act(linear(x))


def normalize(x: mx.array) -> mx.array:
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), SMALLEST_LENGTH)
