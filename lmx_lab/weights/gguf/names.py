"""What the names of GGUF files say: parts of one model, its quantization, and what to take if nobody says. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

# As llama.cpp writes and looks for them.
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_PARTS = 1000
QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+(?:_(?:\d|K|NL|XXS|XS|S|M|L|XL|XXL))*|TQ\d_\d|B?F16|FP?32|FP16|MXFP4(?:_MOE)?|NVFP4))"
    r"(?=$|[-./])",
    re.IGNORECASE,
)
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "UD-Q4_K_XL", "MXFP4", "MXFP4_MOE", "IQ4_XS", "Q5_K_M", "Q8_0")
"""Of a repository that is asked for without a quantization: the first of these that it has, else its smallest."""


@dataclass(frozen=True, kw_only=True)
class GgufFiles:
    """The files of one model."""

    names: tuple[str, ...]
    """Paths relative to where they were listed, with ``/``; of a split model all parts in order, there or not."""

    @property
    def stem(self) -> str:
        """The first name without ``.gguf``."""
        return self.names[0][: -len(".gguf")]

    @property
    def quantization(self) -> str | None:
        return quantization_of(self.names[0])


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def parts_of(name: str) -> tuple[str, ...]:
    """All parts of the split model that the name belongs to, the first one first; of another file its name alone."""
    match = SPLIT.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_PARTS:
        return (name,)
    return tuple(f"{match[1]}-{n:05}-of-{match[3]}.gguf" for n in range(1, int(match[3]) + 1))


def is_companion(name: str) -> bool:
    """Whether the file is by its name no model but beside one: a projector, or measurements for its quantization."""
    stem = PurePosixPath(name).name.lower().removesuffix(".gguf")
    return "mmproj" in stem or stem.startswith("imatrix") or stem.endswith("imatrix")


def quantization_of(name: str) -> str | None:
    """``Q4_K_M`` of ``model-q4_k_m-00001-of-00003.gguf`` or ``Q4_K_M/model.gguf``; ``None`` if the name says none."""
    match = SPLIT.fullmatch(name)
    stem = match[1] if match else name[: -len(".gguf")] if is_gguf(name) else name
    found = QUANTIZATION.findall(stem)
    return str(found[-1]).upper().replace("FP16", "F16").replace("FP32", "F32") if found else None


def grouped(names: Iterable[str]) -> list[GgufFiles]:
    """The models among the names, by their first file; companions and other files are left out."""
    found = {parts_of(name) for name in names if is_gguf(name) and not is_companion(name)}
    return [GgufFiles(names=parts) for parts in sorted(found)]


def labelled(models: Iterable[GgufFiles]) -> dict[str, GgufFiles]:
    """Each model by what stands behind ``org/name:``: its quantization, or where that is no name of one, its stem."""
    models = list(models)
    times = Counter(model.quantization for model in models)
    return {
        quantization if (quantization := model.quantization) and times[quantization] == 1 else model.stem: model
        for model in models
    }


def choices(label: str, model: GgufFiles) -> tuple[str, ...]:
    """All that may stand behind ``org/name:`` for a model: its label, or its (first) file's name or path."""
    return (label, *(name for path in (model.stem, model.names[0]) for name in (path, PurePosixPath(path).name)))


def chosen(models: Mapping[str, GgufFiles], choice: str) -> str | None:
    """The label that is meant by one of the ``choices``, in upper or lower case; ``None`` if there is none."""
    wanted = choice.casefold()
    for label, model in models.items():
        if wanted in (name.casefold() for name in choices(label, model)):
            return label
    return None


def default(models: Mapping[str, GgufFiles], sizes: Mapping[str, int]) -> str:
    """The label to take if nobody said; see ``PREFERRED``.

    Args:
        models: At least one.
        sizes: Bytes of each file.
    """

    def rank(label: str) -> tuple[int, int, str]:
        quantization = models[label].quantization or ""
        place = PREFERRED.index(quantization) if quantization in PREFERRED else len(PREFERRED)
        return place, sum(sizes.get(name, 0) for name in models[label].names), label

    return min(models, key=rank)
