"""Where models may lie, and what is read of each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import Facts, ModelEntry, Source
from lmx_lab.weights.folder import read_folder
from lmx_lab.weights.gguf.model import read_gguf_facts
from lmx_lab.weights.gguf.names import GgufFiles, choices, grouped, is_gguf, labelled, parts_of
from lmx_lab.weights.hub.cache import CachedRepo, repositories
from lmx_lab.weights.hub.unverified import is_unverified, refuse_unverified
from lmx_lab.weights.starters import STARTERS

NAMED_IN_ERRORS = 6


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model may be; nothing of it was read yet."""

    id: str
    path: Path
    source: Source
    also: tuple[str, ...] = ()
    """Other names that mean it, where no model has them for an id; upper and lower case are one."""

    def is_called(self, name: str) -> bool:
        """Whether the name is one of the others."""
        return name.casefold() in (other.casefold() for other in self.also)


def folder_places(folder: Path, source: Source) -> Iterator[Place]:
    """Models in a folder by the names of their files or folders, one level below as ``org/name``; or the folder."""
    if _is_model_folder(folder):
        yield Place(id=folder.name, path=folder, source=source)
        return
    for path in _gguf_models(folder):
        yield Place(id=path.name, path=path, source=source)
    for path in _folders(folder):
        yield from _below(path, path.name, source)
        if not _is_model_folder(path):
            for below in _folders(path):
                yield from _below(below, f"{path.name}/{below.name}", source)


def _below(folder: Path, name: str, source: Source) -> Iterator[Place]:
    """The one model of a folder by the folder's name; of several GGUF models each by its file's name below it."""
    if _is_model_folder(folder):
        yield Place(id=name, path=folder, source=source)
        return
    models = _gguf_models(folder)
    for path in models:
        yield Place(id=name if len(models) == 1 else f"{name}/{path.name}", path=path, source=source)


def hub_places(cache: Path) -> Iterator[Place]:
    """Models in the hub cache: ``org/name``, and ``org/name:Q4_K_M`` for each GGUF model of a repository."""
    for repo in repositories(cache):
        yield from _repo_places(repo)


def _repo_places(repo: CachedRepo) -> Iterator[Place]:
    found = _cached_ggufs(repo)
    is_folder = repo.current is not None and (not found or any(repo.current.glob("model*.safetensors")))
    if repo.current is not None and is_folder:
        yield Place(id=repo.id, path=repo.current, source="hub")
    for label, files in labelled(found).items():
        bare = () if is_folder or len(found) > 1 else (repo.id,)
        also = (*(f"{repo.id}:{choice}" for choice in choices(label, files)), *bare)
        yield Place(id=f"{repo.id}:{label}", path=found[files] / files.names[0], source="hub", also=also)


def _cached_ggufs(repo: CachedRepo) -> dict[GgufFiles, Path]:
    """The snapshot of each GGUF model: where it is whole and compared, the current one if it can be, else any."""
    whole: dict[GgufFiles, Path] = {}
    others: dict[GgufFiles, Path] = {}
    for snapshot in (*([repo.current] if repo.current else []), *repo.older):
        names = {f"{part}{name}" for part, folder in _with_subfolders(snapshot) for name in _gguf_names(folder)}
        for files in grouped(names):
            is_whole = names.issuperset(files.names) and not any(is_unverified(snapshot / name) for name in files.names)
            (whole if is_whole else others).setdefault(files, snapshot)
    return others | whole


def _with_subfolders(snapshot: Path) -> list[tuple[str, Path]]:
    """GGUF files of a repository lie in its root, or in a folder for each quantization."""
    return [("", snapshot), *((f"{path.name}/", path) for path in _folders(snapshot))]


def path_places(name: str) -> Iterator[Place]:
    """The file or folder of that name; a starter's id never means a folder that happens to be here."""
    path = Path(os.path.expanduser(name)).absolute()
    # Of a split model any part is enough: what is missing is said when it is read.
    if name not in STARTERS and name.strip() and any(os.path.lexists(path.parent / it) for it in parts_of(path.name)):
        found = model_path(path)
        # The whole path as its id: the folder's name alone may be that of another model.
        yield Place(id=os.path.abspath(found), path=found, source="path")


def model_path(path: Path) -> Path:
    """What to read for a file or folder: of a split model the first part, of a folder with one GGUF model that."""
    if not path.is_dir():
        return path.with_name(parts_of(path.name)[0])
    models = [] if _is_model_folder(path) else _gguf_models(path)
    return models[0] if len(models) == 1 else path


def _is_model_folder(path: Path) -> bool:
    try:
        return (path / "config.json").exists()
    except OSError:
        # Another user's folder: nothing of ours.
        return False


def _gguf_models(folder: Path) -> list[Path]:
    """The GGUF models directly in the folder; of a split one the first part, there or not."""
    return [folder / files.names[0] for files in grouped(_gguf_names(folder))]


def _gguf_names(folder: Path) -> list[str]:
    return [path.name for path in _visible(folder) if is_gguf(path.name) and not os.path.isdir(path)]


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if os.path.isdir(path)]


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if _is_listable(path.name))
    except OSError:
        return []


def _is_listable(name: str) -> bool:
    """Neither hidden nor, as names of other encodings are, impossible to put into JSON."""
    return not name.startswith(".") and name.isprintable()


def read_entry(place: Place) -> ModelEntry:
    """What lies there.

    Raises:
        UnusableModelError: nothing that can be loaded; the message says why.
    """
    try:
        facts = read_facts(place.path)
        modified_at = int(os.stat(place.path).st_mtime)
    except OSError as exc:
        raise UnusableModelError(f"{place.path} cannot be read: {exc.strerror}") from exc
    return ModelEntry(id=place.id, path=place.path, source=place.source, modified_at=modified_at, **asdict(facts))


def read_facts(path: Path) -> Facts:
    """What a folder or a ``.gguf`` file says about itself, after every check that needs no loading.

    Raises:
        UnusableModelError: nothing that can be loaded; the message says why.
    """
    refuse_unverified(path)
    if path.is_dir():
        _refuse_ambiguous(path)
        return read_folder(path)
    if not is_gguf(path.name):
        raise UnusableModelError(f"{path} is no model: neither a folder with config.json nor a .gguf file")
    return read_gguf_facts(path)


def _refuse_ambiguous(folder: Path) -> None:
    models = [] if _is_model_folder(folder) else _gguf_models(folder)
    if models:
        shown = ", ".join(path.name for path in models[:NAMED_IN_ERRORS])
        raise UnusableModelError(
            f"{folder} holds {len(models)} models in GGUF; name one of them: {shown}"
            f"{', …' if len(models) > NAMED_IN_ERRORS else ''}"
        )
