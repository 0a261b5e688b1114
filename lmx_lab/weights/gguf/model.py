"""Say what model a GGUF file, or a set of split ones, holds, or why it is none, from the headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import Facts, Kind
from lmx_lab.weights.gguf.header import GgufHeader, read_header
from lmx_lab.weights.gguf.names import parts_of

POOLING_LAST, POOLING_RANK = 3, 4
"""llama.cpp's numbers of the poolings that take the last token's vector, and end in a score; 1 to 3 end in a vector, 0
is none."""
ENCODERS = frozenset({
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "t5encoder", "gemma-embedding", "gemma-embedding2", "llama-embed",
})  # fmt: skip
"""Architectures of llama.cpp that read a text and do not write one."""
CLASSIFIER = frozenset({"cls.weight", "cls.output.weight"})
NO_MODELS: Mapping[str, str] = {
    "adapter": "an adapter, which changes another model: load that model instead",
    "controlvector": "a control vector, which changes another model: load that model instead",
    "imatrix": "the measurements for a quantization (imatrix), without weights: take the model's own file",
    "mmproj": "the projector of a model that sees or hears (mmproj), no model itself: load the model that it is for",
    "clip": "the projector of a model that sees or hears (clip), no model itself: load the model that it is for",
    "wavtokenizer-dec": "a decoder of sound, which neither reads nor writes text: take another model",
}
"""By ``general.type`` or ``general.architecture``."""


def read_gguf(path: Path) -> GgufHeader:
    """The header of the whole model: metadata of the first part, size and tensors of all; offsets are within each part.

    Args:
        path: The file, or the first part of a split model.

    Raises:
        UnusableModelError: no GGUF file, damaged, or a split model with parts that are missing or not its own.
    """
    names = parts_of(path.name)
    if len(names) == 1:
        return _whole(read_header(path))
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        more = ", …" if len(missing) > 3 else ""
        raise UnusableModelError(
            f"{path} lacks {len(missing)} of its {len(names)} parts: {', '.join(missing[:3])}{more}. "
            "Put them beside it, or fetch the model again"
        )
    parts = [read_header(path.parent / name) for name in names]
    for number, part in enumerate(parts):
        _check_part(part, number, len(parts))
    return _joined(parts)


def read_gguf_facts(path: Path) -> Facts:
    """What the model says about itself.

    Raises:
        UnusableModelError: as ``read_gguf``; or it is whole, and no language model.
    """
    header = read_gguf(path)
    _refuse_no_model(header)
    return Facts(
        kind=kind_of(header),
        format="gguf",
        architecture=header.architecture,
        size_bytes=header.size_bytes,
        quantization=header.quantization,
        context_length=header.context_length,
    )


def kind_of(header: GgufHeader) -> Kind:
    """What the model is for: by its pooling, and where the file names none by its architecture and its last layer."""
    pooling = header.integer(f"{header.architecture}.pooling_type") or 0
    if pooling == POOLING_RANK:
        return "rerank"
    if pooling > 0:
        return "embedding"
    if header.architecture not in ENCODERS:
        return "chat"
    return "rerank" if any(tensor.name in CLASSIFIER for tensor in header.tensors) else "embedding"


def _whole(header: GgufHeader) -> GgufHeader:
    count = header.integer("split.count") or 0
    if count > 1:
        raise UnusableModelError(
            f"{header.path} is one of {count} parts, and its name does not say which. "
            f"Give all parts their names back: NAME-00001-of-{count:05}.gguf and so on"
        )
    return header


def _check_part(part: GgufHeader, number: int, count: int) -> None:
    said, of = part.integer("split.no"), part.integer("split.count")
    if (said, of) != (number, count):
        inside = f"part {said + 1} of {of}" if said is not None and of is not None else "no part of a split model"
        raise UnusableModelError(
            f"{part.path} is named as part {number + 1} of {count}, and is {inside} by its header. "
            "Fetch all parts again"
        )


def _joined(parts: list[GgufHeader]) -> GgufHeader:
    first = parts[0]
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    expected = first.integer("split.tensors.count")
    if len({tensor.name for tensor in tensors}) != len(tensors) or expected not in (None, len(tensors)):
        raise UnusableModelError(
            f"{first.path} and the other parts are not of one model: {len(tensors)} tensors in all {len(parts)}, "
            f"{expected} expected, each once. Fetch all parts again"
        )
    return replace(first, size_bytes=sum(part.size_bytes for part in parts), tensors=tensors)


def _refuse_no_model(header: GgufHeader) -> None:
    said = (header.text("general.type"), header.text("general.architecture"))
    for name in filter(None, said):
        if name in NO_MODELS:
            raise UnusableModelError(f"{header.path} is {NO_MODELS[name]}")
    if not header.tensors:
        raise UnusableModelError(f"{header.path} holds no weights, a vocabulary at most: fetch the model itself")
    if said[1] is None:
        raise UnusableModelError(f"{header.path} does not name its architecture: fetch it again, or another model")
    if header.text("tokenizer.ggml.model") in (None, "no_vocab", "none"):
        raise UnusableModelError(f"{header.path} holds no vocabulary, so it reads no text: take another model")
