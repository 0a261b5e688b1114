"""Interpret the names of GGUF files: parts of a split model, quantization, and the default choice. Pure code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

# The names that llama.cpp writes and expects.
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_PARTS = 1000
BLOB = re.compile(r"sha256-[0-9a-f]{64}")
QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+(?:_(?:\d|K|NL|XXS|XS|S|M|L|XL|XXL))*|TQ\d_\d|B?F16|FP?32|FP16|MXFP4(?:_MOE)?|NVFP4))"
    r"(?=$|[-./])",
    re.IGNORECASE,
)
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "UD-Q4_K_XL", "MXFP4", "MXFP4_MOE", "IQ4_XS", "Q5_K_M", "Q8_0")
"""Quantizations in order of preference, for repositories that are requested without one. Without any of them, the
smallest model is chosen."""


@dataclass(frozen=True, kw_only=True)
class GgufFiles:
    """The files of one model."""

    names: tuple[str, ...]
    """Paths relative to the listed folder, with ``/``; of a split model all parts in order, even missing ones."""

    @property
    def stem(self) -> str:
        """The first path without ``.gguf``."""
        return self.names[0][: -len(".gguf")]

    @property
    def quantization(self) -> str | None:
        """The quantization in the file's name, such as ``Q4_K_M``."""
        return quantization_of(self.names[0])


def is_gguf(name: str) -> bool:
    """Whether the name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


def is_blob(name: str) -> bool:
    """Whether the name is that of a file of Ollama, which is named by its hash. Such a file of a model is in GGUF."""
    return BLOB.fullmatch(name) is not None


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of all parts of the split model that a file belongs to, or just the name of another file."""
    match = SPLIT.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_PARTS:
        return (name,)
    return tuple(f"{match[1]}-{n:05}-of-{match[3]}.gguf" for n in range(1, int(match[3]) + 1))


def is_companion(name: str) -> bool:
    """Whether a file is by its name not a model but belongs to one: a projector, or an importance matrix."""
    stem = PurePosixPath(name).name.lower().removesuffix(".gguf")
    return "mmproj" in stem or stem.startswith("imatrix") or stem.endswith("imatrix")


def stem_of(name: str) -> str:
    """Return the name of a GGUF file without its ending, and without the number of a part; any other name unchanged."""
    match = SPLIT.fullmatch(name)
    return match[1] if match else name[: -len(".gguf")] if is_gguf(name) else name


def quantization_of(name: str) -> str | None:
    """Return the quantization in a name such as ``model-q4_k_m-00001-of-00003.gguf`` or ``Q4_K_M/model.gguf``.

    Returns:
        The quantization in capitals, as in ``Q4_K_M``; None if the name contains none.
    """
    found = QUANTIZATION.findall(stem_of(name))
    return str(found[-1]).upper().replace("FP16", "F16").replace("FP32", "F32") if found else None


def group_files(names: Iterable[str]) -> list[GgufFiles]:
    """Group file names by model, sorted by the first file. Companions and other files are left out."""
    found = {parts_of(name) for name in names if is_gguf(name) and not is_companion(name)}
    return [GgufFiles(names=parts) for parts in sorted(found)]


def label_models(models: Iterable[GgufFiles]) -> dict[str, GgufFiles]:
    """Return the models by the label after ``org/name:``: the quantization if it is unique, otherwise the stem."""
    models = list(models)
    counts = Counter(model.quantization for model in models)
    return {
        quantization if (quantization := model.quantization) and counts[quantization] == 1 else model.stem: model
        for model in models
    }


def choices_for(label: str, model: GgufFiles) -> tuple[str, ...]:
    """Return everything that may follow ``org/name:`` for a model: its label, or name or path of its first file."""
    return (label, *(name for path in (model.stem, model.names[0]) for name in (path, PurePosixPath(path).name)))


def find_label(models: Mapping[str, GgufFiles], choice: str) -> str | None:
    """Return the label of the model that has this choice, ignoring case; None if there is none."""
    wanted = choice.casefold()
    for label, model in models.items():
        if wanted in (name.casefold() for name in choices_for(label, model)):
            return label
    return None


def default_label(models: Mapping[str, GgufFiles], sizes: Mapping[str, int]) -> str:
    """Return the label of the model to use if none is named; see ``PREFERRED``.

    Args:
        models: Models by label, at least one.
        sizes: Size of each file in bytes.
    """

    def rank(label: str) -> tuple[int, int, str]:
        quantization = models[label].quantization or ""
        preference = PREFERRED.index(quantization) if quantization in PREFERRED else len(PREFERRED)
        return preference, sum(sizes.get(name, 0) for name in models[label].names), label

    return min(models, key=rank)
