"""Convert numpy arrays to the safetensors format and back.

The format is an 8-byte little-endian length, a JSON header of that length, and the bytes of the arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES = {"F32": "<f4", "I32": "<i4"}
METADATA = "__metadata__"


def encode_tensors(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors document of arrays in float32 or int32."""
    import numpy as np  # Imported here, because programs that use no arrays also import this package.

    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    head = encode_header({name: (names[array.dtype], array.shape) for name, array in arrays.items()}, metadata)
    return b"".join([head, *(array.tobytes() for array in arrays.values())])


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the part of a safetensors document before the bytes of its tensors, which follow in the same order.

    Args:
        tensors: The type, ``F32`` or ``I32``, and the shape of each tensor.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode_tensors(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the arrays and the metadata of a document of ``encode_tensors``.

    Raises:
        ValueError: the document is damaged, or contains arrays of other types.
    """
    import numpy as np

    start = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or start > len(data):
        raise ValueError("it is truncated, or not a safetensors document")
    header = json.loads(data[8:start])
    metadata = header.pop(METADATA, {})
    arrays = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
        if last - first != math.prod(shape) * dtype.itemsize or not 0 <= first <= last <= len(data) - start:
            raise ValueError(f"the size of {name} does not fit its shape")
        # Copied, because the array must be aligned and writable.
        arrays[name] = np.frombuffer(data[start + first : start + last], dtype=dtype).reshape(shape).copy()
    return arrays, metadata
