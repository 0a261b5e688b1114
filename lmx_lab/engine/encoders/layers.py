"""Building blocks of encoders: linear layers, norms, activations and attention. Engine thread only."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx

from lmx_lab.errors import UnusableModelError

SCORES_BYTES = 32 * 2**20
"""Size of the attention scores that a CPU computes at a time, which takes about 0.1 s. A GPU does not store scores."""
GELU_TAIL = (2.0214851e-05, -8.1131221e-05, 1.4191719e-03, 1.0485195e-02, 2.5478277e-02, 1.0218973)
"""The coefficients of a polynomial p, highest power first. For x >= 0, 1 - 1 / p(x) ** 32 approximates the cumulative
normal distribution, and gelu has an error below 1e-6. The form is that of formula 7.1.28 of Abramowitz and Stegun. The
coefficients were fitted to math.erfc by least squares, and reweighted until the errors of gelu were even."""


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer."""

    weight: mx.array
    """(inputs, outputs), contiguous. MLX's BLAS takes twice as long with the transposed form, which files contain."""
    bias: mx.array | None

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight if self.bias is None else mx.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, eq=False)
class Norm:
    """A layer norm."""

    weight: mx.array
    bias: mx.array | None
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)


def gelu(x: mx.array) -> mx.array:
    """Return x Phi(x), without the tanh approximation."""
    if x.dtype != mx.float32 or not on_cpu():
        return x * (mx.erf(x * math.sqrt(0.5)) + 1) * 0.5
    # On a CPU, MLX computes erf element by element, which takes longer than the products.
    size = mx.abs(x)
    power = mx.array(GELU_TAIL[0])
    for factor in GELU_TAIL[1:]:
        power = power * size + factor
    for _ in range(5):
        power = mx.square(power)
    return mx.maximum(x, 0) - size / power


def gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_sigmoid(x: mx.array) -> mx.array:
    return x * mx.sigmoid(1.702 * x)


def silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": gelu_sigmoid,
    "relu": relu,
    "silu": silu,
    "swish": silu,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
    "linear": lambda x: x,
}
"""Activations by their names in transformers' configurations."""
TORCH_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "Sigmoid": mx.sigmoid,
    "ReLU": relu,
    "GELU": gelu,
    "SiLU": silu,
}
"""Activations by the names of PyTorch's classes, which sentence-transformers' files contain."""


def find_activation(name: object, table: dict[str, Callable[[mx.array], mx.array]]) -> Callable[[mx.array], mx.array]:
    """Look up an activation.

    Raises:
        UnusableModelError: the table does not contain the name.
    """
    found = table.get(str(name))
    if found is None:
        raise UnusableModelError(f"the activation {name!r} is not supported; supported are {', '.join(table)}")
    return found


Steps = Generator[mx.array, None, mx.array]
"""A computation in steps. Each step is yielded before it is evaluated; the result is returned."""


def run_to_end(steps: Steps) -> mx.array:
    """Run all steps and return the result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: mx.array = end.value
        return result


def split_heads(qkv: mx.array, heads: int) -> tuple[mx.array, mx.array, mx.array]:
    """Split a product (rows, length, 3 * size) into queries, keys and values (rows, heads, length, head size)."""
    rows, length, width = qkv.shape
    shape = (rows, length, heads, width // 3 // heads)
    queries, keys, values = (part.reshape(shape).transpose(0, 2, 1, 3) for part in mx.split(qkv, 3, axis=-1))
    return queries, keys, values


def join_heads(x: mx.array) -> mx.array:
    """Convert (rows, heads, length, head size) to (rows, length, size)."""
    rows, heads, length, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows, length, heads * size)


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, window: int | None = None
) -> Steps:
    """Compute attention of all tokens to all, or to tokens that are at most ``window`` away, in blocks of bounded size.

    Args:
        queries: (rows, heads, length, head size), like keys and values.
        mask: (rows, length), False for padding; None if there is no padding.
    """
    rows, heads, length, size = queries.shape
    block = block_length(rows, heads, length, window)
    blocks = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        low, high = (0, length) if window is None else (max(0, start - window), min(length, stop + window))
        part = mx.fast.scaled_dot_product_attention(
            queries[:, :, start:stop],
            keys[:, :, low:high],
            values[:, :, low:high],
            scale=size**-0.5,
            mask=_mask(mask, window, (start, stop), (low, high)),
        )
        blocks.append(part)
        if block < length:
            yield part
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def block_length(rows: int, heads: int, length: int, window: int | None) -> int:
    """Return the number of queries per block: few enough for ``SCORES_BYTES``, and for a window to save work."""
    if window is not None and length > 4 * window:
        length = 2 * window
    if not on_cpu():
        return length
    seen = length if window is None else 2 * window + length
    return max(1, min(length, SCORES_BYTES // (4 * rows * heads * seen)))


def _mask(
    padding: mx.array | None, window: int | None, queries: tuple[int, int], keys: tuple[int, int]
) -> mx.array | None:
    """Return which keys each query attends to, broadcastable to (rows, heads, queries, keys); None for all keys."""
    mask = None if padding is None else padding[:, None, None, keys[0] : keys[1]]
    if window is None or (queries[1] - keys[0] - 1 <= window and keys[1] - queries[0] - 1 <= window):
        return mask
    distance = mx.abs(mx.arange(*queries)[:, None] - mx.arange(*keys)[None])
    near = distance <= window
    # Padding far from any text attends to itself: a softmax over nothing is NaN, which no later mask can remove.
    return near if mask is None else (mask & near) | (distance == 0)
