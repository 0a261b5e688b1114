"""What all encoders consist of. Engine thread only.

Layers, norms, activations and attention; the tensors of a checkpoint, which are read one by one and checked; interfaces
of networks and heads, padded batches of texts, and ``config.json``; pooling, which converts hidden states to vectors,
and the modules after it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.cancellation import check_cancelled
from lmx_lab.engine.encoders.sentence_transformers import Dense, LayerNorm, Module, Normalize, Pooling, PoolingMode
from lmx_lab.engine.texts import TextTokens
from lmx_lab.errors import OutOfMemoryError, UnusableModelError

SCORES_BYTES = 32 * 2**20
"""Size of the attention scores that a CPU computes at a time, which takes about 0.1 s. A GPU does not store scores."""
GELU_TAIL = (2.0214851e-05, -8.1131221e-05, 1.4191719e-03, 1.0485195e-02, 2.5478277e-02, 1.0218973)
"""The coefficients of a polynomial p, highest power first. For x >= 0, 1 - 1 / p(x) ** 32 approximates the cumulative
normal distribution, and gelu has an error below 1e-6. The form is that of formula 7.1.28 of Abramowitz and Stegun. The
coefficients were fitted to math.erfc by least squares, and reweighted until the errors of gelu were even."""

Operation = Callable[[mx.array], mx.array]
"""Converts vectors (rows, width) to vectors (rows, new width)."""


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
    "quick_gelu": lambda x: x * mx.sigmoid(1.702 * x),
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


class Tensors:
    """The tensors of a checkpoint. A tensor that is missing, unused, of another shape or not finite is an error.

    Args:
        found: Tensors by name, not yet read from disk.
        dtype: Type to which tensors are converted; None keeps their own.
        ignored: Pattern of names that may remain unused.
    """

    def __init__(self, found: dict[str, mx.array], dtype: mx.Dtype | None, ignored: str = "") -> None:
        self._found = found
        self._dtype = dtype
        self._ignored = re.compile(ignored)

    @classmethod
    def read(
        cls, folder: Path, dtype: mx.Dtype | None, rename: Callable[[str], str] = str, ignored: str = "(?!)"
    ) -> Self:
        """Open all ``model*.safetensors`` of a folder. ``rename`` maps the names in the files to those used here."""
        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise UnusableModelError(f"{folder} contains no model*.safetensors; PyTorch's own format is not supported")
        found: dict[str, mx.array] = {}
        for file in files:
            arrays: Any = mx.load(str(file))
            found |= {rename(name): array for name, array in arrays.items()}
        return cls(found, dtype, ignored)

    @property
    def nbytes(self) -> int:
        """Total size of all tensors after conversion."""
        return sum(array.size * (self._dtype or array.dtype).size for array in self._found.values())

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def expand(self, bits: int, group_size: int) -> None:
        """Dequantize tensors in MLX's quantized format. Encoders are small enough for that."""
        for name in [name.removesuffix(".scales") for name in self._found if name.endswith(".scales")]:
            weight, scales = self._found[f"{name}.weight"], self._found.pop(f"{name}.scales")
            biases = self._found.pop(f"{name}.biases", None)
            self._found[f"{name}.weight"] = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)

    def rows(self, name: str) -> int:
        """Return the first dimension of a tensor."""
        return int(self._get(name).shape[0])

    def take(self, name: str, *shape: int) -> mx.array:
        """Read a tensor of this shape from disk.

        Raises:
            UnusableModelError: it is missing, has another shape or type, or contains NaN or infinite numbers.
            NotLoadedError: the load was cancelled.
        """
        check_cancelled()
        tensor = self._get(name)
        if tuple(tensor.shape) != shape:
            raise UnusableModelError(
                f"the tensor {name} has the shape {tuple(tensor.shape)}; config.json requires {shape}"
            )
        if not mx.issubdtype(tensor.dtype, mx.floating):
            raise UnusableModelError(f"the tensor {name} contains {tensor.dtype}; floating-point numbers are required")
        del self._found[name]
        tensor = tensor if self._dtype is None else tensor.astype(self._dtype)
        require_finite(name, tensor)
        return tensor

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = True) -> Linear:
        """Read a linear layer."""
        return join_linear([self.pair(name, inputs, outputs, bias=bias)])

    def pair(self, name: str, inputs: int, outputs: int, *, bias: bool = True) -> tuple[mx.array, mx.array | None]:
        """Read the weight (outputs, inputs) and the bias of a linear layer."""
        return self.take(f"{name}.weight", outputs, inputs), self.take(f"{name}.bias", outputs) if bias else None

    def norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> Norm:
        """Read a layer norm."""
        return Norm(self.take(f"{name}.weight", size), self.take(f"{name}.bias", size) if bias else None, eps)

    def finish(self) -> None:
        """Check that all tensors were used.

        Raises:
            UnusableModelError: a tensor remains that is not in the ignored ones.
        """
        left = sorted(name for name in self._found if not self._ignored.match(name))
        if left:
            raise UnusableModelError(f"{len(left)} tensors are not part of this architecture, first {left[0]}")

    def _get(self, name: str) -> mx.array:
        if name not in self._found:
            raise UnusableModelError(f"the tensor {name} is missing")
        return self._found[name]


def require_finite(name: str, tensor: mx.array) -> None:
    """Check that a tensor contains only finite numbers.

    Raises:
        UnusableModelError: it contains NaN or infinite numbers.
    """
    if not mx.isfinite(tensor).all().item():
        raise UnusableModelError(
            f"the tensor {name} contains NaN or infinite numbers in {tensor.dtype}; the file is damaged, or a wider "
            "dtype is needed"
        )


def join_linear(parts: list[tuple[mx.array, mx.array | None]]) -> Linear:
    """Combine linear layers of the same input to one, in the memory layout that is fastest for the BLAS."""
    weight = mx.contiguous(mx.concatenate([weight for weight, _ in parts]).T)
    biases = [bias for _, bias in parts if bias is not None]
    bias = mx.concatenate(biases) if biases else None
    mx.eval(weight, *([] if bias is None else [bias]))
    return Linear(weight, bias)


def require_memory(needed_bytes: int, limit_bytes: int) -> None:
    """Check that weights fit into the memory limit.

    Raises:
        OutOfMemoryError: they do not.
    """
    if needed_bytes > limit_bytes:
        raise OutOfMemoryError(
            f"its weights take {needed_bytes / 1e9:.2f} GB, and the limit is {limit_bytes / 1e9:.2f} GB; choose a "
            "smaller model, or raise memory_limit_bytes"
        )


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Token ids of several texts as one array, padded on the right to the longest."""

    ids: NDArray[np.int32]
    """(rows, length)"""
    lengths: NDArray[np.int32]
    """(rows,), number of tokens without padding."""
    skipped_tokens: NDArray[np.int32]
    """(rows,), number of leading tokens that are left out of pooling."""
    second_start: NDArray[np.int32]
    """(rows,), index where the second segment begins; the length of the row if there is none."""
    mask: mx.array | None
    """(rows, length), False for padding; None if there is no padding."""

    @classmethod
    def from_texts(cls, texts: Sequence[TextTokens]) -> Self:
        lengths = np.array([len(text.tokens) for text in texts], np.int32)
        ids = np.zeros((len(texts), int(lengths.max())), np.int32)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text.tokens)] = text.tokens
        starts = [len(text.tokens) if text.second_start is None else text.second_start for text in texts]
        padded = bool((lengths < ids.shape[1]).any())
        return cls(
            ids=ids,
            lengths=lengths,
            skipped_tokens=np.array([text.skipped_tokens for text in texts], np.int32),
            second_start=np.array(starts, np.int32),
            mask=mx.array(np.arange(ids.shape[1]) < lengths[:, None]) if padded else None,
        )

    def last_token(self, hidden: mx.array) -> mx.array:
        """Return the hidden states (rows, size) of the last tokens, of (rows, length, size)."""
        return hidden[mx.arange(len(self.lengths)), mx.array(self.lengths - 1)]


class Network(Protocol):
    """A model without its head: token ids to hidden states."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def positions(self) -> int | None:
        """The largest number of tokens of one text; None if it is not limited."""
        ...

    @property
    def segments(self) -> int:
        """Number of segments that its texts may have: 2 if a pair has two, 1 if the model has no segments."""
        ...

    def forward(self, batch: PaddedBatch) -> Generator[mx.array, None, mx.array]:
        """Yield the hidden state (rows, length, size) after each layer, not evaluated; return the last one."""
        ...

    def batch_bytes(self, rows: int, length: int) -> int:
        """Estimate the memory that a batch takes in addition to the weights."""
        ...


class Head(Protocol):
    """Computes vectors or scores from hidden states."""

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        """Return vectors (rows, dimensions) or, for a reranker, scores (rows,)."""
        ...


class ModelConfig:
    """A model's ``config.json``; values are checked when they are read.

    Every method raises ``UnusableModelError`` if a value is invalid.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def size(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnusableModelError(f"config.json: {key} is {value!r}; it must be an integer of at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnusableModelError(f"config.json: {key} is {value!r}; it must be a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a value as a boolean."""
        return bool(self.values.get(key, default))

    def head_size(self) -> int:
        """Return the size of one attention head."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            raise UnusableModelError(f"config.json: hidden_size {hidden} is not a multiple of its {heads} heads")
        return hidden // heads


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
            # The epsilon is PyTorch's default.
            norm = Norm(tensors.take("norm.weight", width), tensors.take("norm.bias", width), 1e-5)
            tensors.finish()
            return norm, width
        case Dense():
            act = find_activation(module.activation, TORCH_ACTIVATIONS)
            tensors = Tensors.read(module.folder, mx.float32)
            linear = tensors.linear("linear", width, module.outputs, bias=module.bias)
            tensors.finish()
            return lambda x: act(linear(x)), module.outputs


def normalize(x: mx.array) -> mx.array:
    """Scale vectors to length 1."""
    # Shorter vectors are not scaled to length 1.
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
