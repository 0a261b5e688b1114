"""What all encoders consist of. Engine thread only.

Activations and attention; the interface of networks, padded batches of texts, and ``config.json``; pooling, which
converts hidden states to vectors, and the modules after it. Networks and their parts are modules of ``mlx.nn``, with
the names that checkpoints have.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from lmx_lab.engine.mlx.weights import DTYPES, fit_weights, read_weights
from lmx_lab.engine.texts import TextTokens
from lmx_lab.errors import OutOfMemoryError, UnusableModelError
from lmx_lab.weights.files import read_json

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
SCORES_BYTES = 32 * 2**20
"""Size of the attention scores that a CPU computes at a time, which takes about 0.1 s. A GPU does not store scores."""
GELU_TAIL = (2.0214851e-05, -8.1131221e-05, 1.4191719e-03, 1.0485195e-02, 2.5478277e-02, 1.0218973)
"""The coefficients of a polynomial p, highest power first. For x >= 0, 1 - 1 / p(x) ** 32 approximates the cumulative
normal distribution, and gelu has an error below 1e-6. The form is that of formula 7.1.28 of Abramowitz and Stegun. The
coefficients were fitted to math.erfc by least squares, and reweighted until the errors of gelu were even."""


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)


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


def split_heads(x: mx.array, heads: int) -> mx.array:
    """Convert (rows, length, size) to (rows, heads, length, head size)."""
    return mx.unflatten(x, -1, (heads, -1)).transpose(0, 2, 1, 3)


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, window: int | None = None
) -> Steps:
    """Compute attention of all tokens to all, or to tokens that are at most ``window`` away, in blocks of bounded size.

    Args:
        queries: (rows, heads, length, head size), like keys and values.
        mask: (rows, length), False for padding; None if there is no padding.

    Returns:
        The result, with the shape (rows, length, size).
    """
    rows, heads, length, size = queries.shape
    block = block_length(rows, heads, length, window)
    blocks = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        low, high = (0, length) if window is None else (max(0, start - window), min(length, stop + window))
        # Which keys each query attends to, broadcastable to (rows, heads, queries, keys); None for all keys.
        seen = None if mask is None else mask[:, None, None, low:high]
        if window is not None and max(stop - low, high - start) - 1 > window:
            distance = mx.abs(mx.arange(start, stop)[:, None] - mx.arange(low, high)[None])
            near = distance <= window
            # Padding far from any text attends to itself, because a softmax over nothing is NaN, and no later mask
            # removes it.
            seen = near if seen is None else (seen & near) | (distance == 0)
        part = mx.fast.scaled_dot_product_attention(
            queries[:, :, start:stop],
            keys[:, :, low:high],
            values[:, :, low:high],
            scale=size**-0.5,
            mask=seen,
        )
        blocks.append(part)
        if block < length:
            yield part
    return mx.concatenate(blocks, axis=2).transpose(0, 2, 1, 3).flatten(-2)


def block_length(rows: int, heads: int, length: int, window: int | None) -> int:
    """Return the number of queries per block: few enough for ``SCORES_BYTES``, and for a window to save work."""
    if window is not None and length > 4 * window:
        length = 2 * window
    if not on_cpu():
        return length
    seen = length if window is None else 2 * window + length
    return max(1, min(length, SCORES_BYTES // (4 * rows * heads * seen)))


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


class ModelConfig:
    """A model's ``config.json``; values are checked when they are read.

    Every method raises ``UnusableModelError`` if a value is invalid.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the values of a file; mlx-lm calls this for the arguments of a model."""
        return cls(values)

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


class TypedModule(Module):
    """A module of ``mlx.nn``, which has no types."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class Network(TypedModule):
    """A model without its head: token ids to hidden states.

    A classifier has its head as well, and ``classify`` computes a score for each text.
    """

    hidden_size: int
    inner_size: int
    heads: int
    vocabulary_size: int
    positions: int | None
    """The largest number of tokens of one text; None if it is not limited."""
    segments: int
    """Number of segments that its texts may have: 2 if a pair has two, 1 if the model has no segments."""
    vectors: ClassVar[tuple[int, int]]
    """Number of vectors of both sizes that a token needs in a layer."""

    @property
    @abstractmethod
    def itemsize(self) -> int:
        """Bytes of a number of a hidden state."""

    @abstractmethod
    def forward(self, batch: PaddedBatch) -> Steps:
        """Yield the hidden state (rows, length, size) after each layer, not evaluated; return the last one."""

    def block_length(self, rows: int, length: int) -> int:
        """Return the number of tokens of each text whose attention is computed at a time."""
        return block_length(rows, self.heads, length, None)

    def batch_bytes(self, rows: int, length: int) -> int:
        """Estimate the memory that a batch takes in addition to the weights: scores and their softmax, and vectors."""
        scores = rows * self.heads * length * self.block_length(rows, length)
        outer, inner = self.vectors
        return self.itemsize * (2 * scores + rows * length * (outer * self.hidden_size + inner * self.inner_size))


class Encoder(Network):
    """A network that is implemented here. It is loaded by mlx-lm."""

    prefix: ClassVar[str]
    """Pattern of the prefix of names in checkpoints."""
    ignored: ClassVar[str]
    """Pattern of the names of tensors that may remain unused."""
    labels: str | None = None
    """Name of the last tensor of a classifier, which has one row for each label; None without a classifier."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the model without its weights.

        Raises:
            UnusableModelError: the configuration is not supported.
        """
        super().__init__()
        self.hidden_size, self.inner_size = config.size("hidden_size"), config.size("intermediate_size")
        self.heads, self.vocabulary_size = config.size("num_attention_heads"), config.size("vocab_size")
        if self.hidden_size % self.heads:
            raise UnusableModelError(
                f"config.json: hidden_size {self.hidden_size} is not a multiple of its {self.heads} heads"
            )

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights with the names of this module; mlx-lm calls this before it sets them."""
        found = {re.sub(f"^({self.prefix})", "", name): weight for name, weight in weights.items()}
        if self.labels is not None and self.labels in found:
            require_one_label(int(found[self.labels].shape[0]))
        own = parameters(self)
        return {name: weight for name, weight in found.items() if name in own or not re.match(self.ignored, name)}

    @abstractmethod
    def classify(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        """Return scores (rows,) from hidden states (rows, length, size)."""


def join_modules(**modules: Any) -> Any:
    """Return a module that contains these, for the names of their weights."""
    joined = TypedModule()
    for name, module in modules.items():
        setattr(joined, name, module)
    return joined


def parameters(module: Module) -> dict[str, mx.array]:
    """Return the weights of a module by name."""
    flat: Any = tree_flatten(module.parameters())  # type: ignore[no-untyped-call]
    return dict(flat)


def read_model(model: Module, *, limit_bytes: int, dtype: str) -> None:
    """Read the weights of a model in the requested type, and check that they are finite.

    Raises:
        UnusableModelError: a tensor is not finite, or has another kind of numbers.
        OutOfMemoryError: the weights exceed the limit.
        NotLoadedError: the load was cancelled.
    """
    wanted, needed_bytes = DTYPES.get(dtype, mx.float32 if on_cpu() else None), 0
    for value in parameters(model).values():
        converts = wanted is not None and mx.issubdtype(value.dtype, mx.floating)
        needed_bytes += value.size * wanted.size if wanted is not None and converts else value.nbytes
    require_memory(needed_bytes, limit_bytes)
    fit_weights(model, dtype, limit_bytes=limit_bytes)
    read_weights(model)
    for name, value in parameters(model).items():
        if mx.issubdtype(value.dtype, mx.floating):
            require_finite(name, value)
        elif value.dtype != mx.uint32:  # the type of quantized weights
            raise UnusableModelError(f"the tensor {name} contains {value.dtype}; floating-point numbers are required")


def require_one_label(labels: int) -> None:
    """Check that a classifier has one label.

    Raises:
        UnusableModelError: it has several.
    """
    if labels != 1:
        raise UnusableModelError(f"its classifier has {labels} labels; a reranker has one")


Head = Callable[[mx.array, PaddedBatch], mx.array]
"""Computes vectors (rows, dimensions) or, for a reranker, scores (rows,) from hidden states (rows, length, size)."""


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """Pools the hidden states of a text's tokens to one vector; the vectors of several modes are concatenated."""

    modes: tuple[PoolingMode, ...]
    include_prompt: bool = True
    """Whether tokens of the prompt are also pooled."""


class PooledHead(TypedModule):
    """Computes a vector for each text, or a score if the last operation returns a single number."""

    def __init__(self, pooling: Pooling, operations: list[Module], *, score: bool = False) -> None:
        super().__init__()
        self.pooling, self.operations, self.score = pooling, operations, score

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


class Normalize(TypedModule):
    """Scales vectors to length 1."""

    def __call__(self, x: mx.array) -> mx.array:
        # Shorter vectors are not scaled to length 1.
        return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


class VectorNorm(TypedModule):
    """Normalizes vectors by a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width)

    def __call__(self, x: mx.array) -> mx.array:
        return self.norm(x)  # type: ignore[no-any-return]


class Dense(TypedModule):
    """Applies a linear layer and an activation to vectors."""

    def __init__(self, width: int, outputs: int, *, bias: bool, activation: str) -> None:
        super().__init__()
        self.linear = Linear(width, outputs, bias=bias)
        self.act = find_activation(activation, TORCH_ACTIVATIONS)

    def __call__(self, x: mx.array) -> mx.array:
        return self.act(self.linear(x))


def read_operation(name: str, folder: Path, width: int) -> tuple[Module, int]:
    """Read a module after the pooling.

    Args:
        name: Name of its class in sentence-transformers.
        folder: Folder of its files.
        width: Size of the vectors that it receives.

    Returns:
        The module, and the size of the vectors that it returns, in float32.

    Raises:
        UnusableModelError: the module is not supported, or its files are missing or damaged.
    """
    match name:
        case "Normalize":
            return Normalize(), width
        case "LayerNorm":
            module: Module = VectorNorm(width)
        case "Dense":
            config = ModelConfig(read_json(folder / "config.json"))
            values = config.values
            if values.get("use_residual") or values.get("module_input_name", "sentence_embedding") != (
                "sentence_embedding"
            ):
                raise UnusableModelError(f"{folder} is a dense module with options that are not supported")
            # Last part of PyTorch's class name, such as ``Tanh``.
            activation = str(values.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
            bias, outputs = values.get("bias") is not False, config.size("out_features")
            module, width = Dense(width, outputs, bias=bias, activation=activation), outputs
        case _:
            raise UnusableModelError(f"modules.json contains the module {name}, which is not supported")
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UnusableModelError(f"{folder} contains no model*.safetensors; PyTorch's own format is not supported")
    tensors: list[Any] = [mx.load(str(file)) for file in files]
    module.load_weights([item for arrays in tensors for item in arrays.items()])
    module.set_dtype(mx.float32)
    for key, value in parameters(module).items():
        require_finite(key, value)
    return module, width
