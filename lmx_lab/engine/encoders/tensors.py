"""Read the tensors of a checkpoint one by one, and check each. Engine thread only."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from lmx_lab.engine.cancellation import check_cancelled
from lmx_lab.engine.encoders.layers import Linear, Norm
from lmx_lab.errors import OutOfMemoryError, UnusableModelError


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
