"""Write float32 arrays as safetensors files, and read them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmx_lab.errors import InvalidRequestError, UnusableModelError
from lmx_lab.weights.safetensors_header import read_header

Array = NDArray[np.float32]


def header_of(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a safetensors file with float32 tensors of these shapes, which follow it in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> Path:
    """Write a file, and return its path. A ``~`` at its beginning stands for the user's home folder.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    target = Path(path).expanduser()
    try:
        with target.open("wb") as file:
            file.write(header_of({name: array.shape for name, array in tensors.items()}, metadata))
            for array in tensors.values():
                file.write(np.ascontiguousarray(array, dtype="<f4").tobytes())
    except OSError as exc:
        raise InvalidRequestError(
            f"{target} cannot be written: {exc.strerror or exc}; use another path", param="path"
        ) from exc
    return target


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the float32 tensors of a file, and its metadata.

    Raises:
        InvalidRequestError: the file does not exist, or is not a safetensors file.
    """
    source = Path(path).expanduser()
    try:
        header, start = read_header(source)
        data = source.read_bytes()[start:]
    except (UnusableModelError, OSError) as exc:
        raise InvalidRequestError(f"{source} cannot be read: {exc}", param="path") from exc
    tensors = {
        name: np.frombuffer(data[slice(*tensor["data_offsets"])], dtype="<f4").reshape(tensor["shape"])
        for name, tensor in header.items()
        if name != "__metadata__" and tensor["dtype"] == "F32"
    }
    return tensors, header.get("__metadata__", {})
