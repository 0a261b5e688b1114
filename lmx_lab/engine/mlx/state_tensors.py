"""Convert key-value caches to the tensors of a file, and back. Runs on the engine thread.

Caches of keys and values are cut into blocks of tokens, so that a file may continue another one and no tensor is large.
Other caches, such as recurrent states and sliding windows, are stored whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import KVCache

from lmx_lab.engine.mlx.kv_cache import KvState
from lmx_lab.engine.prefix_files import DamagedFileError, StoredPrefix, TensorSpec, Tokens

BLOCK_BYTES = 2**21
"""Maximum size of a tensor of a cache of keys and values, unless a single token is larger."""
DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "I8": mx.int8, "I16": mx.int16, "I32": mx.int32,
    "I64": mx.int64, "U8": mx.uint8, "U16": mx.uint16, "U32": mx.uint32, "U64": mx.uint64, "BOOL": mx.bool_,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Arrays = list[tuple[str, mx.array]]


class UnsupportedStateError(Exception):
    """The model has a kind of cache that cannot be stored in a file."""


def is_plain(state: KvState) -> bool:
    """Whether the state is keys and values of all tokens in every layer, so that it can be cut at any token."""
    return all(type(layer) is KVCache for layer in state.layers)


def describe(
    tokens: Tokens, state: KvState, *, start: int = 0, parent: str | None = None
) -> tuple[StoredPrefix, Arrays]:
    """Return the header of a file with this state, and its arrays, which are not evaluated.

    Args:
        start: Number of tokens that are in the files of ``parent``; 0 unless the state is plain.

    Raises:
        UnsupportedStateError: the state cannot be stored.
    """
    arrays: Arrays = []
    if is_plain(state):
        layout: Any = "plain"
        for at, layer in enumerate(state.layers):
            arrays += [(f"{at}.{kind}.{first}", array) for kind, first, array in _blocks(layer, start)]
    else:
        layout = [[_class_name(layer), _flatten(layer.state, arrays)] for layer in state.layers]
    stored = StoredPrefix(
        tokens=tokens,
        start=start,
        parent=parent,
        can_be_trimmed=state.can_be_trimmed,
        layout=json.dumps(layout),
        tensors=tuple(TensorSpec(name, _dtype_name(array), tuple(array.shape)) for name, array in arrays),
    )
    return stored, arrays


def _blocks(layer: Any, start: int) -> Iterator[tuple[str, int, mx.array]]:
    for kind, array in (("keys", layer.keys), ("values", layer.values)):
        block = max(1, BLOCK_BYTES * array.shape[2] // max(1, array.nbytes))
        for first in range(start, layer.offset, block):
            yield kind, first, array[:, :, first : min(first + block, layer.offset)]


def _class_name(layer: Any) -> str:
    name = type(layer).__name__
    if getattr(caches, name, None) is not type(layer) or not hasattr(layer, "from_state"):
        raise UnsupportedStateError(f"a cache of the class {name}")
    return name


def _flatten(value: Any, arrays: Arrays) -> Any:
    """Return a state as JSON, in which arrays are replaced by their index, and append the arrays."""
    if isinstance(value, mx.array):
        arrays.append((str(len(arrays)), value))
        return {"array": len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [_flatten(each, arrays) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedStateError(f"a value of the type {type(value).__name__}")


def _dtype_name(array: mx.array) -> str:
    if array.dtype not in NAMES:
        raise UnsupportedStateError(f"an array of the type {array.dtype}")
    return NAMES[array.dtype]


def to_bytes(array: mx.array) -> bytes:
    """Evaluate an array, and return a copy of its bytes."""
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat.view(mx.uint8), copy=False).tobytes() if flat.size else b""


class StateReader:
    """Builds a state of the tensors of its files, in pieces.

    Args:
        files: The headers and tensors of the files, the one of the first tokens first.
    """

    def __init__(self, files: Sequence[tuple[StoredPrefix, Mapping[str, memoryview]]]) -> None:
        self._files = files
        self._tokens = len(files[-1][0].tokens)
        self._layers: list[Any] = []
        self._layout = json.loads(files[-1][0].layout)
        self._pieces = self._plain() if self._layout == "plain" else self._whole(*files[-1])

    def advance(self, nbytes: int) -> KvState | None:
        """Convert about this many bytes; return the state when it is complete.

        Raises:
            DamagedFileError: the tensors do not form a state of this model.
        """
        try:
            for converted in self._pieces:
                if (nbytes := nbytes - converted) <= 0:
                    return None
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as exc:
            raise DamagedFileError(f"its tensors form no state ({type(exc).__name__}: {exc})") from exc
        return KvState(self._layers)

    def _plain(self) -> Iterator[int]:
        parts: dict[tuple[int, str], list[tuple[int, TensorSpec, memoryview]]] = {}
        for at, (stored, tensors) in enumerate(self._files):
            # A later file may continue an earlier one before its end.
            end = self._files[at + 1][0].start if at + 1 < len(self._files) else len(stored.tokens)
            for spec in stored.tensors:
                layer, kind, first = spec.name.split(".")
                if int(first) < end:
                    width = min(spec.shape[2], end - int(first))
                    parts.setdefault((int(layer), kind), []).append((width, spec, tensors[spec.name]))
        for at in range(len(parts) // 2):
            cache, converted = KVCache(), 0
            for kind in ("keys", "values"):
                blocks = [_array(spec, data)[:, :, :width] for width, spec, data in parts[at, kind]]
                array = mx.concatenate(blocks, axis=2) if len(blocks) > 1 else mx.contiguous(blocks[0])
                mx.eval(array)
                setattr(cache, kind, array)
                converted += array.nbytes
                if array.shape[2] != self._tokens:
                    raise DamagedFileError(f"it has {array.shape[2]} of {self._tokens} tokens")
            cache.offset = self._tokens
            self._layers.append(cache)
            yield converted

    def _whole(self, stored: StoredPrefix, tensors: Mapping[str, memoryview]) -> Iterator[int]:
        arrays = []
        for spec in stored.tensors:
            arrays.append(_array(spec, tensors[spec.name]))
            mx.eval(arrays[-1])
            yield spec.nbytes
        for name, value in self._layout:
            self._layers.append(getattr(caches, name).from_state(_unflatten(value, arrays)))


def _array(spec: TensorSpec, data: memoryview) -> mx.array:
    flat = mx.array(np.frombuffer(data, dtype=np.uint8))
    return flat.view(DTYPES[spec.dtype]).reshape(spec.shape)


def _unflatten(value: Any, arrays: Sequence[mx.array]) -> Any:
    if isinstance(value, dict):
        return arrays[value["array"]]
    if isinstance(value, list):
        return [_unflatten(each, arrays) for each in value]
    return value
