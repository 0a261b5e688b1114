"""Read and write GGUF files: with changed metadata, in several parts, and damaged.

Uses only ``struct``, because the reader of the package ``gguf`` takes three seconds for a vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

Value: TypeAlias = str | bool | int | float | Sequence[int] | Sequence[str]
ALIGNMENT = 32
UINT16, UINT32, INT32, FLOAT32, BOOL, TEXT, ARRAY = 2, 4, 5, 6, 7, 8, 9
WIDTHS = {0: 1, 1: 1, UINT16: 2, 3: 2, UINT32: 4, INT32: 4, FLOAT32: 4, BOOL: 1, 10: 8, 11: 8, 12: 8}
TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a file, as bytes."""

    info: bytes
    """Entry of the tensor table without the offset: name, shape and type."""
    data: bytes
    """Data, including the padding after it."""


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    values: Mapping[str, bytes]
    """Type and value of each key, encoded as in the file."""
    tensors: Mapping[str, Tensor]

    def written(self, target: Path) -> Path:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.values))
        head += b"".join(_text(key) + value for key, value in self.values.items())
        at = 0
        for tensor in self.tensors.values():
            head += tensor.info + struct.pack("<Q", at)
            at += len(tensor.data)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.write(head + bytes(-len(head) % ALIGNMENT))
            file.writelines(tensor.data for tensor in self.tensors.values())
        return target

    def changed(self, values: Mapping[str, Value | None]) -> GgufFile:
        """Return the file with these metadata values; ``None`` removes a key."""
        new = {key: packed(value) for key, value in values.items() if value is not None}
        left = {key: value for key, value in self.values.items() if key not in values or key in new}
        return replace(self, values=left | new)


def read_gguf(path: Path) -> GgufFile:
    """Read a valid file into memory."""
    data = path.read_bytes()
    tensor_count, value_count = struct.unpack_from("<QQ", data, 8)
    at, values = 24, {}
    for _ in range(value_count):
        key, start = _read_text(data, at)
        at = _after(data, start + 4, *struct.unpack_from("<I", data, start))
        values[key] = data[start:at]
    infos: dict[str, tuple[bytes, int]] = {}
    for _ in range(tensor_count):
        name, start = _read_text(data, at)
        end = start + 8 + 8 * struct.unpack_from("<I", data, start)[0]
        infos[name] = data[at:end], struct.unpack_from("<Q", data, end)[0]
        at = end + 8
    body = data[at + -at % ALIGNMENT :]
    ends = dict(pairwise([*sorted(offset for _, offset in infos.values()), len(body)]))
    tensors = {name: Tensor(info=info, data=_padded(body[at : ends[at]])) for name, (info, at) in infos.items()}
    return GgufFile(values=values, tensors=tensors)


def renamed(info: bytes, name: str) -> bytes:
    """Return the entry of a tensor under another name."""
    return _text(name) + info[_read_text(info, 0)[1] :]


def packed(value: Value) -> bytes:
    """Encode type and value. Integers are ``uint32``, in arrays ``int32``; other numbers are ``float32``."""
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT32, value)
        case str():
            return struct.pack("<I", TEXT) + _text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, TEXT, len(value)) + b"".join(_text(str(item)) for item in value)
    return struct.pack(f"<IIQ{len(value)}i", ARRAY, INT32, len(value), *value)


def with_values(source: Path, target: Path, values: Mapping[str, Value | None]) -> Path:
    """Write a copy with these metadata values; ``None`` removes a key."""
    return read_gguf(source).changed(values).written(target)


def with_template(source: Path, template: str | None, folder: Path) -> Path:
    """Write a copy of the same name with another chat template, or without one if it is None."""
    return with_values(source, folder / source.name, {TEMPLATE_KEY: template})


def with_context(source: Path, context: int, folder: Path) -> Path:
    """Write a copy of the same name with another context length."""
    return with_values(source, folder / source.name, {"llama.context_length": context})


def with_tokens(source: Path, renamed: Mapping[str, str], target: Path, template: str) -> Path:
    """Write a copy with a chat template, and with some tokens renamed and changed to ordinary added tokens."""
    file = read_gguf(source)
    tokens, kinds = _texts(file.values["tokenizer.ggml.tokens"]), _numbers(file.values["tokenizer.ggml.token_type"])
    for old, new in renamed.items():
        at = tokens.index(old)
        tokens[at], kinds[at] = new, USER_DEFINED
    return file.changed(
        {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            TEMPLATE_KEY: template,
        }
    ).written(target)


USER_DEFINED = 4
"""Type of an added token that is ordinary text, such as ``<think>``."""


def split_gguf(source: Path, parts: int, folder: Path, *, empty_first: bool = False) -> list[Path]:
    """Write a file in parts, as llama.cpp's ``gguf-split`` does: all metadata in the first part, counts in each.

    Args:
        source: A file with at least as many tensors as parts.
        parts: Number of parts.
        folder: Target folder; the names are ``<source's stem>-00001-of-0000N.gguf``.
        empty_first: Whether the first part has only metadata, as with ``--no-tensor-first-split``.
    """
    file = read_gguf(source)
    names, full = list(file.tensors), parts - empty_first
    shares = [names[len(names) * i // full : len(names) * (i + 1) // full] for i in range(full)]
    if empty_first:
        shares.insert(0, [])
    paths = []
    for at, share in enumerate(shares):
        own = {
            "split.no": struct.pack("<IH", UINT16, at),
            "split.count": struct.pack("<IH", UINT16, parts),
            "split.tensors.count": struct.pack("<Ii", INT32, len(names)),
        }
        part = GgufFile(
            values=({} if at else dict(file.values)) | own, tensors={name: file.tensors[name] for name in share}
        )
        paths.append(part.written(folder / f"{source.stem}-{at + 1:05d}-of-{parts:05d}.gguf"))
    return paths


def unknown_architecture(source: Path, folder: Path) -> Path:
    """Write a valid file with an unknown architecture."""
    return with_values(source, folder / "unknown-architecture.gguf", {"general.architecture": "zzzzz"})


def truncated(source: Path, folder: Path, *, keep: float = 0.5) -> Path:
    """Write the first part of a file, like an interrupted download; ``keep=0.001`` cuts the header."""
    target = folder / "truncated.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    data = source.read_bytes()
    target.write_bytes(data[: int(len(data) * keep)])
    return target


def foreign(folder: Path) -> Path:
    """Write a Git LFS pointer under the name of a model, as git does without its extension for large files."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "foreign.gguf"
    target.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 98362432\n")
    return target


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    """Return the text at a position, and the position after it."""
    end = at + 8 + struct.unpack_from("<Q", data, at)[0]
    return data[at + 8 : end].decode(), end


def _after(data: bytes, at: int, kind: int) -> int:
    """Return the position after a value of this type."""
    if kind == TEXT:
        return int(at + 8 + struct.unpack_from("<Q", data, at)[0])
    if kind != ARRAY:
        return at + WIDTHS[kind]
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind != TEXT:
        return int(at + WIDTHS[kind] * count)
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
    return at


def _texts(value: bytes) -> list[str]:
    at, items = 16, []
    while at < len(value):
        item, at = _read_text(value, at)
        items.append(item)
    return items


def _numbers(value: bytes) -> list[int]:
    return list(struct.unpack_from(f"<{(len(value) - 16) // 4}i", value, 16))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
