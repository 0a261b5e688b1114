"""Find the places where models may be, on this disk. Nothing in the files of models is read.

Models of other programs are used in place, and never moved. Ollama keeps a manifest for each model,
``manifests/HOST/NAMESPACE/MODEL/TAG``, whose layers name files in ``blobs`` by their hashes
(https://pkg.go.dev/github.com/ollama/ollama/server/internal/manifest). LM Studio has a folder ``PUBLISHER/REPOSITORY``
for each model (https://lmstudio.ai/docs/app/advanced/import-model). llama.cpp keeps what its option ``-hf`` downloaded
as files in one folder (``LLAMA_CACHE`` in its documentation of ``llama-server``).

A quantized copy of a GGUF file, which llama.cpp computes faster than the original, has its own folder, whose name
contains a hash of the original's content. A copy counts only as long as its original exists and is unchanged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ModelLocation, QuantizedCopy, QuantizedType, Source
from lmx_lab.weights.files import MIB, list_folder, open_regular, read_json
from lmx_lab.weights.gguf.names import GgufFiles, choices_for, group_files, is_gguf, label_models, parts_of, stem_of
from lmx_lab.weights.hub import CachedRepo, is_unverified, repositories
from lmx_lab.weights.starters import find_starter
from lmx_lab.weights.store import lock_model

SOURCE_NAME = "converted_from.json"
RECORD_NAME = "quantized_copy.json"
LAYER = "application/vnd.ollama.image."
DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
Location = TypeVar("Location", bound=ModelLocation)


def store_location(path: Path, name: str) -> ModelLocation:
    """Return the location of a model in the lab's own folder, whose folder there has this name.

    The formats of a starter have the starter's id.
    """
    starter = find_starter(name)
    if starter is None:
        aliases = _file_names(name, path)
        return ModelLocation(id=name, path=path, source="store", aliases=aliases, converted_from=read_source(path))
    aliases = () if name == starter.id else (name,)
    return ModelLocation(id=starter.id, path=path, source="store", aliases=aliases, family=f"starter {starter.id}")


def join_formats(locations: Iterable[Location]) -> list[Location]:
    """Return the locations, with the id of the GGUF file for each model that was converted from one of them.

    Of two locations with the same path, the first is used.
    """
    found = list(locations)
    files = {location.path: location for location in reversed(found)}
    sources = {location.converted_from for location in found} & files.keys()
    joined = []
    for location in found:
        file = files.get(location.converted_from) if location.converted_from is not None else None
        if location.path in sources:
            joined.append(replace(location, family=location.family or f"file {location.path}"))
        elif file is None:
            joined.append(location)
        else:
            names: tuple[str, ...] = (location.id, *location.aliases)
            source = location.source
            if (copy := location.copy) is not None:
                # Aliases of a file of the hub are other spellings of its id. Those of other files mean the file itself.
                spellings = file.aliases if copy.automatic and file.source == "hub" else ()
                names, source = (f"{file.id}:{copy.type}", *names, *spellings), file.source
            family = file.family or f"file {file.path}"
            joined.append(replace(location, id=file.id, aliases=names, family=family, source=source))
    return joined


def write_source(folder: Path, name: str, source: Path) -> None:
    """Record in the folder of a converted model from which file it was converted.

    Args:
        name: Name of the folder in the store. Copies of the folder are other models.
    """
    (folder / SOURCE_NAME).write_text(json.dumps(_source_record(name, source)))


def read_source(folder: Path) -> Path | None:
    """Return the file from which a model was converted; None if it was not, or the file has changed."""
    try:
        record = read_json(folder / SOURCE_NAME)
        source = Path(record["path"])
        return source if record == _source_record(folder.name, source) else None
    except (OSError, UnusableModelError, KeyError, TypeError, ValueError):
        return None


def _source_record(name: str, source: Path) -> dict[str, str | int]:
    status = os.stat(source)
    return {
        "name": name,
        "path": str(source.absolute()),
        "size_bytes": status.st_size,
        "changed_ns": status.st_mtime_ns,
    }


def folder_locations(folder: Path, source: Source) -> Iterator[ModelLocation]:
    """Find the models in a folder, or the folder itself as a model.

    Their ids are the names of files and folders; one level below, they are ``org/name``.
    """
    if is_model_folder(folder):
        yield ModelLocation(id=folder.name, path=folder, source=source)
        return
    for path in gguf_models(folder):
        yield ModelLocation(id=path.name, path=path, source=source, aliases=_file_names(path.name, path))
    for path in _folders(folder):
        yield from _subfolder_locations(path, path.name, source)
        if not is_model_folder(path):
            for below in _folders(path):
                yield from _subfolder_locations(below, f"{path.name}/{below.name}", source)


def _subfolder_locations(folder: Path, name: str, source: Source) -> Iterator[ModelLocation]:
    """Return the only model of a folder by the folder's name, or each of several GGUF models by its file's name."""
    if is_model_folder(folder):
        yield ModelLocation(id=name, path=folder, source=source)
        return
    models = gguf_models(folder)
    for path in models:
        id_ = name if len(models) == 1 else f"{name}/{path.name}"
        yield ModelLocation(id=id_, path=path, source=source, aliases=_file_names(id_, path))


def _file_names(id_: str, path: Path) -> tuple[str, ...]:
    """Return the names of a model's GGUF file with and without its ending, which are aliases of the id."""
    if not is_gguf(path.name):
        return ()
    stem = stem_of(path.name)
    folder = id_.removesuffix(path.name) if id_.endswith(path.name) else ""
    return tuple(name for name in dict.fromkeys((f"{folder}{stem}", path.name, stem)) if name != id_)


def hub_locations(cache: Path) -> Iterator[ModelLocation]:
    """Find models in the hub cache: ``org/name``, and ``org/name:Q4_K_M`` for each GGUF model of a repository."""
    for repo in repositories(cache):
        found = _cached_ggufs(repo)
        is_folder = repo.current is not None and (not found or any(repo.current.glob("model*.safetensors")))
        if repo.current is not None and is_folder:
            yield ModelLocation(id=repo.id, path=repo.current, source="hub")
        for label, files in label_models(found).items():
            bare = () if is_folder or len(found) > 1 else (repo.id,)
            aliases = (*(f"{repo.id}:{choice}" for choice in choices_for(label, files)), *bare)
            path = found[files] / files.names[0]
            yield ModelLocation(id=f"{repo.id}:{label}", path=path, source="hub", aliases=aliases)


def _cached_ggufs(repo: CachedRepo) -> dict[GgufFiles, Path]:
    """Return a snapshot for each GGUF model: a complete and verified one if possible, and a newer one first."""
    whole: dict[GgufFiles, Path] = {}
    others: dict[GgufFiles, Path] = {}
    for snapshot in (*([repo.current] if repo.current else []), *repo.older):
        # Repositories may have a folder for each quantization.
        folders = [("", snapshot), *((f"{path.name}/", path) for path in _folders(snapshot))]
        names = {f"{part}{name}" for part, folder in folders for name in _gguf_names(folder)}
        for files in group_files(names):
            is_whole = names.issuperset(files.names) and not any(is_unverified(snapshot / name) for name in files.names)
            (whole if is_whole else others).setdefault(files, snapshot)
    return others | whole


def program_folders() -> list[tuple[Source, Path]]:
    """Return the folders in which the programs keep models, as their own settings say. They need not exist."""
    home = Path.home()
    ollama = os.environ.get("OLLAMA_MODELS")
    # The second folder is that of the service that Ollama's installer sets up on Linux.
    ollama_folders = [Path(ollama)] if ollama else [home / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]
    cache = home / "Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    # The folder that LM Studio's settings name, or its default.
    try:
        with open_regular(home / ".lmstudio-home-pointer") as file:
            studio = Path(file.read(MIB).decode().strip())
    except (OSError, UnicodeDecodeError, UnusableModelError):
        studio = home / ".lmstudio"
    chosen = _read_program_json(studio / "settings.json").get("downloadsFolder")
    is_path = isinstance(chosen, str) and os.path.isabs(chosen)
    return [
        *(("ollama", folder) for folder in ollama_folders),
        ("lm-studio", Path(str(chosen)) if is_path else studio / "models"),
        ("llama.cpp", Path(os.environ.get("LLAMA_CACHE") or Path(cache, "llama.cpp"))),
    ]


def ollama_locations(folder: Path) -> Iterator[ModelLocation]:
    """Find the models of Ollama: ``llama3.2:1b``, ``user/model:tag`` or ``hf.co/org/name:Q4_K_M``.

    A name without ``:latest`` is an alias, as in Ollama. So are the other names of a file that has several, as after
    ``ollama cp``. Models with an adapter and models of Ollama's cloud are left out: their file alone would be a
    different model, or does not exist.
    """
    names: dict[Path, list[str]] = {}
    for path in sorted((folder / "manifests").glob("*/*/*/*")):
        host, namespace, model, tag = path.parts[-4:]
        # A file that is not a manifest has no layers.
        listed = _read_program_json(path).get("layers")
        found = [layer for layer in listed if isinstance(layer, dict)] if isinstance(listed, list) else []
        layers = {str(layer.get("mediaType")): layer.get("digest") for layer in found}
        digest = DIGEST.fullmatch(str(layers.get(f"{LAYER}model")))
        if digest is None or f"{LAYER}adapter" in layers:
            continue
        parts = [model] if namespace == "library" else [namespace, model]
        name = "/".join(parts if host == "registry.ollama.ai" else [host, *parts])
        if name.isprintable() and tag.isprintable():
            of_file = names.setdefault(folder / "blobs" / f"sha256-{digest[1]}", [])
            of_file += [f"{name}:{tag}", *([name] if tag == "latest" else [])]
    for blob, (first, *others) in names.items():
        yield ModelLocation(id=first, path=blob, source="ollama", aliases=tuple(others))


def _read_program_json(path: Path) -> Mapping[str, Any]:
    """Return a JSON object of another program; an empty one if the file is not valid."""
    try:
        with open_regular(path) as file:
            content = json.loads(file.read(MIB))
    except (OSError, ValueError, RecursionError, UnusableModelError):
        return {}
    return content if isinstance(content, dict) else {}


def path_locations(name: str) -> Iterator[ModelLocation]:
    """Return the file or folder of that name, or else the GGUF file with this name and its ending.

    A starter's id never refers to a folder of the same name.
    """
    path = Path(os.path.expanduser(name)).absolute()
    aliases: tuple[str, ...] = ()
    if name.strip() and not os.path.lexists(path) and os.path.lexists(file := path.with_name(f"{path.name}.gguf")):
        path, aliases = file, (name,)
    # Any part of a split model will do. If others are missing, the error is raised when the model is read.
    if (
        find_starter(name) is None
        and name.strip()
        and any(os.path.lexists(path.parent / it) for it in parts_of(path.name))
    ):
        found = model_path(path)
        # The whole path is the id: another model may have the name of the folder.
        aliases += (found.name, stem_of(found.name)) if is_gguf(found.name) else ()
        yield ModelLocation(id=os.path.abspath(found), path=found, source="path", aliases=aliases)


def model_path(path: Path) -> Path:
    """Return the file to read: the first part of a split model, or the only GGUF model of a folder."""
    if not path.is_dir():
        return path.with_name(parts_of(path.name)[0])
    models = [] if is_model_folder(path) else gguf_models(path)
    return models[0] if len(models) == 1 else path


def is_model_folder(path: Path) -> bool:
    """Whether the folder contains ``config.json``, as models in MLX's format do."""
    try:
        return (path / "config.json").exists()
    except OSError:
        # The folder belongs to another user.
        return False


def gguf_models(folder: Path) -> list[Path]:
    """Return the GGUF models directly in the folder. A split one is listed by its first part, which may be missing."""
    return [folder / files.names[0] for files in group_files(_gguf_names(folder))]


def _gguf_names(folder: Path) -> list[str]:
    return [path.name for path in _visible(folder) if is_gguf(path.name) and not os.path.isdir(path)]


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if os.path.isdir(path)]


def _visible(folder: Path) -> list[Path]:
    """Return the entries of a folder whose names are not hidden and can be written as JSON. Names that are not valid
    UTF-8 cannot.
    """
    return [path for path in list_folder(folder) if not path.name.startswith(".") and path.name.isprintable()]


def copy_locations(folder: Path) -> Iterator[ModelLocation]:
    """Find the copies in the folder of all copies. They get the ids of their originals in ``join_formats``."""
    for path in _copies(folder):
        source = read_source(path)
        copy = read_copy(path)
        files = sorted(file for file in path.iterdir() if is_gguf(file.name)) if source is not None else []
        if copy is not None and len(files) == 1:
            yield ModelLocation(id=path.name, path=files[0], source="store", converted_from=source, copy=copy)


def write_copy(folder: Path, name: str, original: Path, copy: QuantizedCopy) -> None:
    """Record in the folder of a copy what it is a copy of, and what was measured.

    Args:
        name: Name that the folder gets in the folder of all copies.
    """
    (folder / RECORD_NAME).write_text(json.dumps(asdict(copy)))
    write_source(folder, name, original)


def read_copy(folder: Path) -> QuantizedCopy | None:
    """Return the measurements of the copy in a folder; None if there is no valid record."""
    try:
        copy = QuantizedCopy(**read_json(folder / RECORD_NAME))
        # Fails if a value of an edited record is not a number.
        return copy if copy.type in get_args(QuantizedType) and str(copy) else None
    except (UnusableModelError, TypeError, ValueError):
        return None


def remove_stale_copies(folder: Path) -> None:
    """Remove the copies whose originals were changed or deleted.

    Raises:
        StorageFullError: the folder cannot be written to.
    """
    for path in _copies(folder):
        if read_source(path) is None:
            with lock_model(folder, path.name):
                shutil.rmtree(path, ignore_errors=True)


def _copies(folder: Path) -> list[Path]:
    return [path for path in list_folder(folder) if path.is_dir() and not path.name.startswith(".")]
