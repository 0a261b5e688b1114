"""Read which model a GGUF file or a set of split files contains, from the headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import Facts, Kind
from lmx_lab.weights.config_check import check_positive
from lmx_lab.weights.gguf.header import GgufHeader, read_header
from lmx_lab.weights.gguf.names import parts_of

POOLING_LAST, POOLING_RANK = 3, 4
"""llama.cpp's numbers of two pooling types: the last token's vector, and a score. 1 to 3 result in a vector; 0 is
none."""
ENCODERS = frozenset({
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "t5encoder", "gemma-embedding", "gemma-embedding2", "llama-embed",
})  # fmt: skip
"""llama.cpp's architectures that read text and do not generate any."""
CLASSIFIER = frozenset({"cls.weight", "cls.output.weight"})
NOT_A_MODEL: Mapping[str, str] = {
    "adapter": "an adapter, which modifies another model: load that model instead",
    "controlvector": "a control vector, which modifies another model: load that model instead",
    "imatrix": "an importance matrix (imatrix), which contains no weights: use the file of the model",
    "mmproj": "the projector of a multimodal model (mmproj), not a model: load the model that it belongs to",
    "clip": "the projector of a multimodal model (clip), not a model: load the model that it belongs to",
    "wavtokenizer-dec": "an audio decoder, which does not process text: use another model",
}
"""Descriptions by ``general.type`` or ``general.architecture``."""


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of a whole model: metadata of the first part; size and tensors of all parts.

    The offsets of tensors are relative to their part.

    Args:
        path: The file, or the first part of a split model.

    Raises:
        UnusableModelError: it is not a GGUF file, is damaged, or is split and parts are missing or do not belong to it.
    """
    names = parts_of(path.name)
    if len(names) == 1:
        return _require_single(read_header(path))
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
    return _join(parts)


POSITIVE: Mapping[str, float] = {
    "embedding_length": 2**22,
    "block_count": 10_000,
    "context_length": 2**40,
    "rope.freq_base": 10**15,
    "attention.layer_norm_rms_epsilon": 1,
    "attention.layer_norm_epsilon": 1,
}
"""Values of a model that must be above zero, with their largest possible values. Missing values have defaults."""


def read_gguf_facts(path: Path) -> Facts:
    """Read the properties of a model from its GGUF file.

    Raises:
        UnusableModelError: see ``read_gguf``; or the file is not a language model, or has impossible values.
    """
    header = read_gguf(path)
    _require_language_model(header)
    for key, limit in POSITIVE.items():
        name = f"{header.architecture}.{key}"
        check_positive(path, name, header.metadata.get(name), limit)
    return Facts(
        kind=kind_of(header),
        format="gguf",
        architecture=header.architecture,
        size_bytes=header.size_bytes,
        quantization=header.quantization,
        context_length=header.context_length,
    )


def kind_of(header: GgufHeader) -> Kind:
    """Return the kind of a model: by its pooling type, or by its architecture and its last layer if it has none."""
    pooling = header.integer(f"{header.architecture}.pooling_type") or 0
    if pooling == POOLING_RANK:
        return "rerank"
    if pooling > 0:
        return "embedding"
    if header.architecture not in ENCODERS:
        return "chat"
    return "rerank" if any(tensor.name in CLASSIFIER for tensor in header.tensors) else "embedding"


def _require_single(header: GgufHeader) -> GgufHeader:
    count = header.integer("split.count") or 0
    if count > 1:
        raise UnusableModelError(
            f"{header.path} is one of {count} parts, and its name does not say which. "
            f"Restore the names of all parts: NAME-00001-of-{count:05}.gguf and so on"
        )
    return header


def _check_part(part: GgufHeader, number: int, count: int) -> None:
    index, total = part.integer("split.no"), part.integer("split.count")
    if (index, total) != (number, count):
        is_part = index is not None and total is not None
        actual = f"part {(index or 0) + 1} of {total}" if is_part else "not a part of a split model"
        raise UnusableModelError(
            f"{part.path} is part {number + 1} of {count} by its name, and {actual} by its header. "
            "Fetch all parts again"
        )


def _join(parts: list[GgufHeader]) -> GgufHeader:
    first = parts[0]
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    expected = first.integer("split.tensors.count")
    if len({tensor.name for tensor in tensors}) != len(tensors) or expected not in (None, len(tensors)):
        raise UnusableModelError(
            f"{first.path} and the other parts do not belong to one model: {len(parts)} parts contain {len(tensors)} "
            f"tensors, {expected} different ones were expected. Fetch all parts again"
        )
    return replace(first, size_bytes=sum(part.size_bytes for part in parts), tensors=tensors)


def _require_language_model(header: GgufHeader) -> None:
    architecture = header.text("general.architecture")
    for name in filter(None, (header.text("general.type"), architecture)):
        if name in NOT_A_MODEL:
            raise UnusableModelError(f"{header.path} is {NOT_A_MODEL[name]}")
    if not header.tensors:
        raise UnusableModelError(f"{header.path} contains no weights, at most a vocabulary: fetch the model itself")
    if architecture is None:
        raise UnusableModelError(f"{header.path} does not name its architecture: fetch it again, or use another model")
    if header.text("tokenizer.ggml.model") in (None, "no_vocab", "none"):
        raise UnusableModelError(f"{header.path} contains no vocabulary, so it cannot read text: use another model")
