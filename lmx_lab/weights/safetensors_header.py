"""Read and check the header of a safetensors file.

The file consists of an 8-byte little-endian length, a JSON header of that length, and the tensors. It may be malicious,
so the header is compared with the actual size before anything is loaded.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.config_check import check_quantized
from lmx_lab.weights.files import open_regular

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F64": 64, "F32": 32,
    "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64,
}  # fmt: skip
"""Bits per element of the types that MLX reads. The sizes of tensors of other types are not checked."""
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8"}


@dataclass(frozen=True, kw_only=True)
class SafetensorsSummary:
    """The size of a safetensors file and the type of its tensors."""

    size_bytes: int
    dtype: str | None
    """The type of most bytes, such as ``float16``."""


def read_summary(path: Path) -> SafetensorsSummary:
    """Check a file by its header and its size, and summarize it.

    Raises:
        UnusableModelError: the file is truncated, longer than its header states, or not a safetensors file; or tensors
            overlap or have a size that does not match their shape.
    """
    try:
        stat = path.stat()
        return _read_summary(path, stat.st_size, stat.st_mtime_ns)
    except OSError as exc:
        raise UnusableModelError(
            f"{path} cannot be read: {exc.strerror or exc}; check its permissions, or fetch it again"
        ) from exc


# The size and the time are part of the cache key, so that a listing does not parse unchanged headers again.
@lru_cache(maxsize=1024)
def _read_summary(path: Path, size: int, mtime_ns: int) -> SafetensorsSummary:
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        # 100 MB are the limit of the format itself; with a larger length, the file is something else.
        if size < 8 or length > min(size - 8, 100_000_000):
            raise UnusableModelError(
                f"{path} is truncated or not a safetensors file: it has {size} bytes, and a header of {length}; "
                "fetch it again"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as exc:
            raise UnusableModelError(
                f"{path} is not a safetensors file: its header is not JSON; fetch it again"
            ) from exc
    if not isinstance(header, dict):
        raise UnusableModelError(f"{path} is not a safetensors file: its header is not a JSON object; fetch it again")
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    bytes_of: Counter[str] = Counter()
    end = 0
    try:
        # Every tensor has the size of its shape, and tensors do not overlap.
        for name, tensor in sorted(tensors.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            start, stop = tensor["data_offsets"]
            lengths = [int(length) for length in tensor["shape"]]
            bits = DTYPE_BITS.get(tensor["dtype"])
            fits = bits is None or math.prod(lengths) * bits == (stop - start) * 8
            if not (end <= start <= stop and min(lengths, default=0) >= 0 and fits):
                raise UnusableModelError(
                    f"{path} is not a safetensors file: {name!r:.80} has the shape {tensor['shape']!r:.80} of "
                    f"{tensor['dtype']!r:.20} and the bytes {start} to {stop}; fetch it again"
                )
            bytes_of[str(tensor["dtype"])] += int(stop) - int(start)
            end = int(stop)
        check_quantized(path, {name: (str(it["dtype"]), list(it["shape"])) for name, it in tensors.items()})
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as exc:
        raise UnusableModelError(
            f"{path} is not a safetensors file: its header is invalid ({exc!r}); fetch it again"
        ) from exc
    whole = 8 + length + end
    if size != whole:
        state = "truncated" if size < whole else "too long"
        raise UnusableModelError(f"{path} is {state}: it has {size} bytes, and {whole} by its header; fetch it again")
    dtype = bytes_of.most_common(1)[0][0] if bytes_of else None
    return SafetensorsSummary(size_bytes=size, dtype=DTYPE_NAMES.get(dtype) if dtype else None)
