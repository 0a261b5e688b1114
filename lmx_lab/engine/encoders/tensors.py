"""The tensors of a checkpoint, taken out one by one and checked on the way. Engine thread only."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from lmx_lab.engine.encoders.layers import Linear, Norm
from lmx_lab.errors import UnusableModelError


class Tensors:
    """Whatever is missing, left over, of another shape or not finite is refused by name."""

    def __init__(self, found: dict[str, mx.array], dtype: mx.Dtype | None, ignored: str = "") -> None:
        """
        Args:
            found: By name, not yet read from disk.
            dtype: Of what is taken; None leaves it as it is.
            ignored: A pattern of the names that may be left over.
        """
        self._found = found
        self._dtype = dtype
        self._ignored = re.compile(ignored)

    @classmethod
    def read(
        cls, folder: Path, dtype: mx.Dtype | None, rename: Callable[[str], str] = str, ignored: str = "(?!)"
    ) -> Self:
        """All ``model*.safetensors`` of a folder, their names mended by ``rename``."""
        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise UnusableModelError(f"{folder} holds no model*.safetensors (PyTorch's own files are not loaded)")
        found: dict[str, mx.array] = {}
        for file in files:
            arrays: Any = mx.load(str(file))
            found |= {rename(name): array for name, array in arrays.items()}
        return cls(found, dtype, ignored)

    @property
    def nbytes(self) -> int:
        """What they take when all of them are taken."""
        return sum(array.size * (self._dtype or array.dtype).size for array in self._found.values())

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def expand(self, bits: int, group_size: int) -> None:
        """Make plain tensors of MLX's quantized ones; encoders are small enough."""
        for name in [name.removesuffix(".scales") for name in self._found if name.endswith(".scales")]:
            weight, scales = self._found[f"{name}.weight"], self._found.pop(f"{name}.scales")
            biases = self._found.pop(f"{name}.biases", None)
            self._found[f"{name}.weight"] = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)

    def rows(self, name: str) -> int:
        """The first dimension of a tensor."""
        return int(self._get(name).shape[0])

    def take(self, name: str, *shape: int) -> mx.array:
        """A tensor of this shape, read from disk.

        Raises:
            UnusableModelError: it is not there, has another shape or type, or holds NaN or infinite numbers.
        """
        tensor = self._get(name)
        if tuple(tensor.shape) != shape:
            raise UnusableModelError(
                f"the tensor {name} has the shape {tuple(tensor.shape)}; config.json wants {shape}"
            )
        if not mx.issubdtype(tensor.dtype, mx.floating):
            raise UnusableModelError(f"the tensor {name} holds {tensor.dtype}; floating-point numbers are needed")
        del self._found[name]
        tensor = tensor if self._dtype is None else tensor.astype(self._dtype)
        require_finite(name, tensor)
        return tensor

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = True) -> Linear:
        return joined([self.pair(name, inputs, outputs, bias=bias)])

    def pair(self, name: str, inputs: int, outputs: int, *, bias: bool = True) -> tuple[mx.array, mx.array | None]:
        """Weight (outputs, inputs) and bias."""
        return self.take(f"{name}.weight", outputs, inputs), self.take(f"{name}.bias", outputs) if bias else None

    def norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> Norm:
        return Norm(self.take(f"{name}.weight", size), self.take(f"{name}.bias", size) if bias else None, eps)

    def finish(self) -> None:
        """
        Raises:
            UnusableModelError: a tensor is left that this model has no use for.
        """
        left = sorted(name for name in self._found if not self._ignored.match(name))
        if left:
            raise UnusableModelError(f"{len(left)} tensors belong to no part of this model, first {left[0]}")

    def _get(self, name: str) -> mx.array:
        if name not in self._found:
            raise UnusableModelError(f"the tensor {name} is missing")
        return self._found[name]


def require_finite(name: str, tensor: mx.array) -> None:
    """
    Raises:
        UnusableModelError: there is a number in it that is none.
    """
    if not mx.isfinite(tensor).all().item():
        raise UnusableModelError(f"the tensor {name} holds NaN or infinite numbers in {tensor.dtype}: a damaged file")


def joined(parts: list[tuple[mx.array, mx.array | None]]) -> Linear:
    """Linear layers of the same input as one, in memory as the BLAS likes it."""
    weight = mx.contiguous(mx.concatenate([weight for weight, _ in parts]).T)
    biases = [bias for _, bias in parts if bias is not None]
    bias = mx.concatenate(biases) if biases else None
    mx.eval(weight, *([] if bias is None else [bias]))
    return Linear(weight, bias)
