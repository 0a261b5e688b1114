"""Read and check the header of a safetensors file: an 8-byte little-endian length, that much JSON, the tensors."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lmx_lab.errors import UnusableModelError

# The format's own limit; a larger length means the file is something else.
MAX_HEADER_BYTES = 100_000_000

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8"}


@dataclass(frozen=True, kw_only=True)
class SafetensorsSummary:
    size_bytes: int
    dtype: str | None
    """The type that most bytes have, as in ``float16``."""


def read_summary(path: Path) -> SafetensorsSummary:
    """Check that the file is whole and sum it up, from its header and its length alone.

    Raises:
        UnusableModelError: it is cut short, longer than its header says, or no safetensors file.
    """
    try:
        stat = path.stat()
        return _read_summary(path, stat.st_size, stat.st_mtime_ns)
    except OSError as exc:
        raise UnusableModelError(f"{path} cannot be read: {exc.strerror or exc}") from exc


# Keyed by size and time as well, so that a listing does not parse every header again.
@lru_cache(maxsize=1024)
def _read_summary(path: Path, size: int, mtime_ns: int) -> SafetensorsSummary:
    header, data_start = _read_header(path, size)
    try:
        spans = [(t["dtype"], *t["data_offsets"]) for name, t in header.items() if name != "__metadata__"]
        end = max((int(end) for _, _, end in spans), default=0)
        bytes_of: Counter[str] = Counter()
        for dtype, start, stop in spans:
            bytes_of[str(dtype)] += int(stop) - int(start)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as exc:
        raise UnusableModelError(f"{path} is no safetensors file: its header is malformed ({exc!r})") from exc
    if size != data_start + end:
        state = "cut short" if size < data_start + end else "longer than it should be"
        raise UnusableModelError(f"{path} is {state}: {size} bytes, its header says {data_start + end}; fetch it again")
    dtype = bytes_of.most_common(1)[0][0] if bytes_of else None
    return SafetensorsSummary(size_bytes=size, dtype=DTYPE_NAMES.get(dtype) if dtype else None)


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise UnusableModelError(f"{path} is cut short or no safetensors file: {size} bytes, header of {length}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as exc:
            raise UnusableModelError(f"{path} is no safetensors file: its header is not JSON") from exc
    if not isinstance(header, dict):
        raise UnusableModelError(f"{path} is no safetensors file: its header is no JSON object")
    return header, 8 + length
