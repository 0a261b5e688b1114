"""Where models may lie, and what is read of each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.entry import Facts, ModelEntry, Source
from lmx_lab.weights.folder import read_folder
from lmx_lab.weights.gguf_config import refuse_unsupported
from lmx_lab.weights.gguf_header import read_header
from lmx_lab.weights.starters import STARTERS


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model may be; nothing of it was read yet."""

    id: str
    path: Path
    source: Source


def folder_places(folder: Path, source: Source) -> Iterator[Place]:
    """Models and ``.gguf`` files in a folder, one level below it as ``org/name``, or the folder itself."""
    if _is_model_place(folder):
        yield Place(id=folder.name, path=folder, source=source)
        return
    for path in _visible(folder):
        if _is_model_place(path):
            yield Place(id=path.name, path=path, source=source)
        elif path.is_dir():
            for below in _visible(path):
                if _is_model_place(below):
                    yield Place(id=f"{path.name}/{below.name}", path=below, source=source)


def _is_model_place(path: Path) -> bool:
    try:
        return (path / "config.json").exists() or (path.suffix == ".gguf" and path.is_file())
    except OSError:
        # Another user's folder: nothing of ours.
        return False


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if _is_listable(path.name))
    except OSError:
        return []


def _is_listable(name: str) -> bool:
    """Neither hidden nor, as names of other encodings are, impossible to put into JSON."""
    return not name.startswith(".") and name.isprintable()


def path_places(name: str) -> Iterator[Place]:
    """The file or folder of that name; a starter's id never means a folder that happens to be here."""
    path = os.path.expanduser(name)
    if name not in STARTERS and name.strip() and os.path.exists(path):
        # The whole path as its id: the folder's name alone may be that of another model.
        yield Place(id=os.path.abspath(path), path=Path(path).absolute(), source="path")


def read_entry(place: Place) -> ModelEntry:
    """What lies there.

    Raises:
        UnusableModelError: nothing that can be loaded; the message says why.
    """
    try:
        facts = read_facts(place.path)
    except OSError as exc:
        raise UnusableModelError(f"{place.path} cannot be read: {exc.strerror}") from exc
    return ModelEntry(id=place.id, path=place.path, source=place.source, **asdict(facts))


def read_facts(path: Path) -> Facts:
    """What a folder or a ``.gguf`` file says about itself, after every check that needs no loading.

    Raises:
        UnusableModelError: nothing that can be loaded; the message says why.
    """
    if path.is_dir():
        return read_folder(path)
    if path.suffix.lower() != ".gguf":
        raise UnusableModelError(f"{path} is no model: neither a folder with config.json nor a .gguf file")
    header = read_header(path)
    refuse_unsupported(header)
    return Facts(
        kind="chat",
        format="gguf",
        architecture=header.architecture,
        size_bytes=header.size_bytes,
        quantization=header.quantization,
        context_length=header.context_length,
    )
