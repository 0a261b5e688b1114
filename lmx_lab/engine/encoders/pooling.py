"""Convert hidden states to vectors: pooling and the modules after it. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from lmx_lab.engine.encoders.layers import TORCH_ACTIVATIONS, Norm, find_activation
from lmx_lab.engine.encoders.network import PaddedBatch
from lmx_lab.engine.encoders.sentence_transformers import Dense, LayerNorm, Module, Normalize, Pooling, PoolingMode
from lmx_lab.engine.encoders.tensors import Tensors

SMALLEST_LENGTH = 1e-12
"""Shorter vectors are not scaled to length 1."""
TORCH_NORM_EPS = 1e-5

Operation = Callable[[mx.array], mx.array]
"""Converts vectors (rows, width) to vectors (rows, new width)."""


@dataclass(frozen=True, eq=False)
class PooledHead:
    """Computes a vector for each text, or a score if the last operation returns a single number."""

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
    """Pool hidden states (rows, length, size) to (rows, size), without padding and skipped tokens."""
    match mode:
        case "cls":
            return hidden[mx.arange(len(batch.skipped_tokens)), mx.array(batch.skipped_tokens)]
        case "lasttoken":
            return batch.last_token(hidden)
    position = np.arange(hidden.shape[1])
    counted = (position < batch.lengths[:, None]) & (position >= batch.skipped_tokens[:, None])
    if mode == "max":
        return mx.where(mx.array(counted)[..., None], hidden, -mx.inf).max(axis=1)
    weights = counted * (position + 1) if mode == "weightedmean" else counted
    total = weights.sum(axis=1, keepdims=True)
    shares = weights / (np.sqrt(total) if mode == "mean_sqrt_len_tokens" else total)
    return (mx.array(shares.astype(np.float32))[:, None] @ hidden).squeeze(1)


def build_operation(module: Module, width: int) -> tuple[Operation, int]:
    """Return the operation of a module on vectors of ``width`` numbers, and the width of its result, in float32.

    Raises:
        UnusableModelError: a tensor is missing or invalid, or the activation is not supported.
    """
    match module:
        case Normalize():
            return normalize, width
        case LayerNorm():
            tensors = Tensors.read(module.folder, mx.float32)
            norm = Norm(tensors.take("norm.weight", width), tensors.take("norm.bias", width), TORCH_NORM_EPS)
            tensors.finish()
            return norm, width
        case Dense():
            return _dense(module, width), module.outputs


def _dense(module: Dense, width: int) -> Operation:
    act = find_activation(module.activation, TORCH_ACTIVATIONS)
    tensors = Tensors.read(module.folder, mx.float32)
    linear = tensors.linear("linear", width, module.outputs, bias=module.bias)
    tensors.finish()
    return lambda x: act(linear(x))


def normalize(x: mx.array) -> mx.array:
    """Scale vectors to length 1."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), SMALLEST_LENGTH)
