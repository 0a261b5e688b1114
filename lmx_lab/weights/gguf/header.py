"""Read the header of a GGUF file (versions 2 and 3): metadata and the table of tensors, using only ``struct``.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file may be malicious: every length is
limited, among other things by the size of the file, so that reading takes bounded time and memory.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.files import open_regular

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | list[Scalar]

MAX_ENTRIES = 65_536
MAX_TEXT_BYTES = 2**20
MAX_NAME_BYTES = 65_535
MAX_ITEMS = 2**22
"""Number of items in all arrays together. Vocabularies have up to 300,000 tokens and as many merges."""
MAX_LAYERS = 1024
"""Arrays of numbers with at most this many items are kept: they have a number for each layer."""

TEXT, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

FILE_TYPES = {
    2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S",
    22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0",
}  # fmt: skip
"""llama.cpp's numbers in ``general.file_type``. A quantization such as ``Q4_K_M`` mixes types of tensors. F32 and
F16 are left out, because programs that do not know the type of a file also write their numbers."""

# Type number of a tensor: name, weights per block, bytes per block.
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """An entry in the table of tensors."""

    name: str
    shape: tuple[int, ...]
    """Shape in the order of the file: the contiguous dimension is the first."""
    type: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """The header of a GGUF file. The methods return a metadata value of the given type, or None."""

    path: Path
    size_bytes: int
    metadata: Mapping[str, Value]
    """Metadata of the file; arrays of texts, and longer ones than ``MAX_LAYERS``, are left out unless requested."""
    tensors: tuple[GgufTensor, ...]
    table_offset: int = 0
    """Offset of the table of tensors in the file, which ends the metadata."""
    data_offset: int = 0
    """Offset in the file from which the offsets of tensors count."""

    @property
    def architecture(self) -> str:
        return self.text("general.architecture") or "unknown"

    @property
    def context_length(self) -> int | None:
        return self.integer(f"{self.architecture}.context_length")

    @property
    def quantization(self) -> str | None:
        """The quantization that the file states, such as ``Q4_K_M``; otherwise ``main_type``."""
        return FILE_TYPES.get(self.integer("general.file_type") or 0, self.main_type)

    @property
    def main_type(self) -> str | None:
        """The type of most bytes of the tensors, such as ``Q4_1``."""
        bytes_of: Counter[str] = Counter()
        for tensor in self.tensors:
            bytes_of[tensor.type] += tensor.size_bytes
        return bytes_of.most_common(1)[0][0] if bytes_of else None

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> float | None:
        value = self.metadata.get(key)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key)
        return value if isinstance(value, bool) else default

    def items(self, key: str) -> list[Scalar]:
        value = self.metadata.get(key)
        return value if isinstance(value, list) else []


def read_header(path: Path, *, arrays: bool = False) -> GgufHeader:
    """Read metadata and tensor table, and check that the file is large enough for every tensor in it.

    Args:
        path: The file.
        arrays: Whether to keep all arrays in the metadata, such as the vocabulary; otherwise they are skipped, except
            those with a number for each layer.

    Raises:
        UnusableModelError: it is not a GGUF file, has an unknown version or type, is truncated, or exceeds a limit.
    """
    try:
        stat = path.stat()
        return _read(path, arrays) if arrays else _read_cached(path, stat.st_size, stat.st_mtime_ns)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and path.is_symlink():
            problem = f"is a link to {path.readlink()}, which does not exist: fetch the file again, or repair the link"
        else:
            problem = f"cannot be read: {exc.strerror or exc}; check its owner and permissions, or fetch it again"
        raise UnusableModelError(f"{path} {problem}") from exc


# The size and the time are part of the cache key, so that a listing does not read unchanged headers again.
@lru_cache(maxsize=128)
def _read_cached(path: Path, size: int, mtime_ns: int) -> GgufHeader:
    return _read(path, arrays=False)


def _read(path: Path, arrays: bool) -> GgufHeader:
    with open_regular(path, buffer_bytes=2**20) as file:
        return _Reader(file, path, arrays).header()


class _Reader:
    """Reads values from the file, never beyond its end."""

    def __init__(self, file: BufferedReader, path: Path, arrays: bool) -> None:
        self._file = file
        self._path = path
        self._arrays = arrays
        self._left = self._size = path.stat().st_size
        self._items = 0

    def header(self) -> GgufHeader:
        if self._left == 0:
            raise self._error("is empty; fetch it again")
        if self._left < 8 or self._take(4) != b"GGUF":
            raise self._error("is not a GGUF file: it does not begin with GGUF. Fetch it again, or use another file")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._error(f"has GGUF version {version}; supported are versions 2 and 3; use another file")
        tensor_count, entry_count = self._count(MAX_ENTRIES), self._count(MAX_ENTRIES)
        metadata = {}
        for _ in range(entry_count):
            key = self._text(MAX_NAME_BYTES)
            metadata[key] = self._value(int(self._scalar("<I")))
        kept = {key: value for key, value in metadata.items() if value is not None}
        table_offset = self._size - self._left
        tensors = tuple(self._tensor() for _ in range(tensor_count))
        alignment = kept.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**16:
            raise self._error(f"is damaged: alignment {alignment!r:.40}; fetch it again")
        data_offset = math.ceil((self._size - self._left) / alignment) * alignment
        end = max((data_offset + tensor.offset + tensor.size_bytes for tensor in tensors), default=0)
        if end > self._size:
            raise self._error(f"is truncated: it has {self._size} bytes, and {end} by its header; fetch it again")
        return GgufHeader(
            path=self._path,
            size_bytes=self._size,
            metadata=kept,
            tensors=tensors,
            table_offset=table_offset,
            data_offset=data_offset,
        )

    def _value(self, kind: int) -> Value | None:
        if kind == TEXT:
            return self._text(MAX_TEXT_BYTES)
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self._error(f"is damaged: unknown metadata type {kind}; fetch it again")
        kind, count = int(self._scalar("<I")), self._count(MAX_ITEMS)
        self._items += count
        if self._items > MAX_ITEMS or (kind not in SCALARS and kind != TEXT):
            raise self._error(
                f"is damaged, or exceeds a limit: an array of {count} items of type {kind}; fetch it again"
            )
        if kind == TEXT:
            if self._arrays:
                return [self._text(MAX_TEXT_BYTES) for _ in range(count)]
            self._skip_texts(count)
            return None
        layout = struct.Struct(f"<{count}{SCALARS[kind][1]}")
        if self._arrays or count <= MAX_LAYERS:
            return list(layout.unpack(self._take(layout.size)))
        self._skip(layout.size)
        return None

    def _skip_texts(self, count: int) -> None:
        """Skip texts. Their lengths are read in the file's buffer, because a vocabulary has 100,000 texts or more."""
        while count > 0:
            buffered, position = self._file.peek(1), 0
            size = len(buffered)
            while count > 0 and position + 8 <= size:
                # A text that exceeds MAX_TEXT_BYTES does not fit in the buffer.
                end = position + 8 + LENGTH.unpack_from(buffered, position)[0]
                if end > size:
                    break
                position, count = end, count - 1
            self._skip(position)
            if count > 0:
                self._skip(self._count(MAX_TEXT_BYTES))
                count -= 1

    def _tensor(self) -> GgufTensor:
        name, dimensions = self._text(MAX_NAME_BYTES), int(self._scalar("<I"))
        if not 0 < dimensions <= 4:
            raise self._error(f"is damaged: {name!r:.80} has {dimensions} dimensions; fetch it again")
        shape = tuple(int(self._scalar("<Q")) for _ in range(dimensions))
        kind, offset = int(self._scalar("<I")), int(self._scalar("<Q"))
        if kind not in TENSOR_TYPES:
            raise self._error(f"has a tensor of type {kind}, which is not supported; use another quantization")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if 0 in shape or shape[0] % block:
            raise self._error(
                f"is damaged: {name!r:.80} has the shape {shape}, not possible in {type_name}; fetch it again"
            )
        size = math.prod(shape) // block * block_bytes
        return GgufTensor(name=name, shape=shape, type=type_name, offset=offset, size_bytes=size)

    def _text(self, limit: int) -> str:
        return self._take(self._count(limit)).decode("utf-8", errors="replace")

    def _count(self, limit: int) -> int:
        count = int(self._scalar("<Q"))
        if count > min(limit, self._left):
            where = self._size - self._left
            raise self._error(f"is truncated or damaged: {count} bytes or items at {where}; fetch it again")
        return count

    def _scalar(self, layout: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _take(self, count: int) -> bytes:
        self._spend(count)
        data = self._file.read(count)
        if len(data) != count:
            raise self._error("changed while it was read; try again when it is complete")
        return data

    def _skip(self, count: int) -> None:
        self._spend(count)
        self._file.seek(count, 1)

    def _spend(self, count: int) -> None:
        if count > self._left:
            raise self._error(f"is truncated: it has {self._size} bytes, less than its header; fetch it again")
        self._left -= count

    def _error(self, what: str) -> UnusableModelError:
        return UnusableModelError(f"{self._path} {what}")
