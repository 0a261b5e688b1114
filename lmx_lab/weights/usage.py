"""List the disk space that models and results use, and delete them. Files of other programs are only listed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

from lmx_lab.errors import (
    InvalidRequestError,
    ModelBusyError,
    ModelNotFoundError,
    StorageFullError,
    UnusableModelError,
    did_you_mean,
)
from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO, HUB_MODEL, DiskUse, ModelEntry, ModelFiles, Stored
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.gguf.names import parts_of
from lmx_lab.weights.hub import cache_folder, repo_folder, repositories
from lmx_lab.weights.locations import copy_locations, folder_locations, hub_locations, program_folders
from lmx_lab.weights.store import TEMP_NAME, existing_parent, lock_model

PROGRAMS = {
    "ollama": "remove a model with `ollama rm NAME`",
    "lm-studio": "remove models in LM Studio, under My Models",
    "llama.cpp": "delete its files in this folder",
}
ADDITIONAL = "its files are your own; delete them in the folder"
DAEMON = "delete a session with its method delete(); old events expire"
MODELS = ("model", "link to a model", "quantized copy", HUB_MODEL)
"""Kinds of items that are models, which are deleted with the lock of the model."""


def disk_use(settings: Settings) -> DiskUse:
    """Return what takes space on the disk. It reads the sizes of all files, which takes seconds on a slow disk."""
    models, quantized, cache, home = settings.models_folder, settings.quantized_folder, cache_folder(), settings.home
    programs = program_folders() if settings.other_programs else []
    items: list[Stored] = []
    for location in folder_locations(models, "store"):
        path = models / location.id
        parts = tuple(path.with_name(name) for name in parts_of(path.name))
        files = tuple(file for part in parts for file in _files(part))
        what = "link to a model" if path.is_symlink() else "model"
        parts = parts if len(parts) > 1 else ()
        items.append(Stored(name=location.id, what=what, path=path, files=files, parts=parts))
    others: list[tuple[str, str, Path | None, str]] = [
        *((it.id, "quantized copy", quantized / it.id, "") for it in copy_locations(quantized)),
        *((repo.id, HUB_MODEL, repo_folder(cache, repo.id), "") for repo in repositories(cache)),
        ("unfinished", "unfinished downloads", models / TEMP_NAME, ""),
        ("bench", "benchmark runs", home / "bench", ""),
        ("experiments", "stored evaluations", home / "experiments.db", "delete some with lab.experiments().delete(ID)"),
        ("daemon", "sessions and events", settings.daemon_folder, DAEMON),
        ("records", "recorded requests", settings.record_to, "delete its records with lab.requests.clear()"),
        ("prefixes", "prefix cache", settings.prefix_cache_dir, ""),
        *((source, f"models of {source}", folder, PROGRAMS[source]) for source, folder in programs),
        *((str(folder), "additional folder", folder, ADDITIONAL) for folder in settings.model_folders),
    ]
    for name, what, place, remedy in others:
        if place is not None:
            items.append(Stored(name=name, what=what, path=place, files=_files(place), remedy=remedy))
    used = (item for item in items if item.size_bytes)
    return DiskUse(
        items=tuple(sorted(used, key=lambda item: (-item.size_bytes, item.name))),
        free_bytes=shutil.disk_usage(existing_parent(settings.home)).free,
    )


def find_stored(settings: Settings, name: str) -> Stored:
    """Return the item of that name.

    Raises:
        InvalidRequestError: there is none, or this package does not delete it; the message says how to delete it.
    """
    items = {item.name: item for item in disk_use(settings).items}
    item = items.get(name)
    if item is None:
        raise InvalidRequestError(
            f"nothing named {name[:200]!r} takes space on this disk{did_you_mean(name, items) or ';'} "
            "`lmx-lab storage` lists what does",
            param="remove",
        )
    if item.remedy:
        raise InvalidRequestError(f"{name} is not removed here ({item.path}): {item.remedy}", param="remove")
    return item


def find_model(settings: Settings, name: str, *, in_use: Mapping[Path, str]) -> ModelFiles:
    """Return what is deleted with a model: an id means all its formats on this disk, an alias or a path means one.

    Args:
        in_use: The models in memory or being loaded by their paths, each with the command or call that unloads it.

    Raises:
        ModelNotFoundError: there is no such model.
        ModelBusyError: it is in use.
        InvalidRequestError: all its files are those of other programs, or the user's own; the message says how to
            delete them.
    """
    items = disk_use(settings).items
    found = {item.path: item for item in items if item.name == name and item.what in MODELS}
    kept: list[str] = []
    entries: list[ModelEntry] = []
    try:
        entries = [entry for entry in Catalog(settings).find_formats(name) if entry.format != ECHO.format]
    except (ModelNotFoundError, UnusableModelError):
        # A damaged model, or a repository with several models, is deleted by the name that ``disk_use`` shows.
        if not found:
            raise
    for entry in entries:
        places = [item for item in items if _contains(item, entry.path)]
        # Folders of other programs come first, because their files are never deleted.
        item = next((it for it in places if it.remedy), places[0] if places else None)
        if item is None or item.remedy:
            kept.append(f"{entry.path}: {ADDITIONAL if item is None else item.remedy}")
        elif item.path not in found:
            item = _part_of_repository(item, entry) if item.what == HUB_MODEL else item
            found[item.path] = item
    if not found:
        remedies = "; ".join(kept) or f"{name} has no files"
        raise InvalidRequestError(f"{name[:200]} is not deleted here: {remedies}", param="model")
    for path, remedy in in_use.items():
        # A model may be loaded by a link to these files.
        if any(_contains(item, each) for item in found.values() for each in (path, path.resolve())):
            raise ModelBusyError(f"{name[:200]} is in use and was not deleted; unload it first: {remedy}")
    links = []
    for other in Catalog(settings).scan():
        files = [other.path, *(other.path.iterdir() if other.path.is_dir() else ())]
        is_own = any(_contains(item, other.path) for item in found.values())
        if not is_own and any(_contains(item, file.resolve()) for item in found.values() for file in files):
            links.append(other.path)
    return ModelFiles(model=name, items=tuple(found.values()), links=tuple(links), kept=tuple(kept))


def _contains(item: Stored, path: Path) -> bool:
    return any(path == part or part in path.parents for part in item.parts or (item.path,))


def _part_of_repository(repo: Stored, entry: ModelEntry) -> Stored:
    """Return the files of a model in the hub cache: the whole repository, unless it has other models, too."""
    if all(it.path == entry.path or repo.path not in it.path.parents for it in hub_locations(repo.path.parent)):
        return repo
    inside = entry.path.relative_to(repo.path / "snapshots")
    names = [Path(*inside.parts[1:]).with_name(part) for part in parts_of(entry.path.name)]
    snapshots = list((repo.path / "snapshots").iterdir())
    files = [file for snapshot in snapshots for name in names if os.path.lexists(file := snapshot / name)]
    others = {file.resolve() for snapshot in snapshots for file in snapshot.rglob("*") if file not in files}
    # The content of a file is a blob, to which files of several snapshots may link.
    blobs = {file.resolve() for file in files if file.is_symlink()} - others
    sizes = {file.name: file.stat().st_size for file in files if file.exists()}
    return Stored(
        name=entry.id,
        what=HUB_MODEL,
        path=entry.path,
        files=tuple(sorted(sizes.items(), key=lambda file: (-file[1], file[0]))),
        parts=(*files, *(blob for blob in blobs if repo.path in blob.parents)),
    )


def remove_stored(settings: Settings, item: Stored) -> None:
    """Delete an item of ``disk_use``. A model that a server has in memory stays usable until it is unloaded.

    Raises:
        StorageFullError: a file cannot be deleted; the message names it.
    """
    # Downloads of a repository of the hub have one lock for all its models.
    name = item.name.partition(":")[0]
    lock = lock_model(settings.models_folder, name) if item.what in MODELS else nullcontext()
    with lock:
        try:
            for path in item.parts or (item.path,):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as exc:
            raise StorageFullError(
                f"{exc.filename or item.path} cannot be deleted: {exc.strerror}; check its permissions"
            ) from exc
    # The folder of an organization, if this was its last model.
    if item.path.parent != settings.models_folder and item.path.is_relative_to(settings.models_folder):
        try:
            item.path.parent.rmdir()
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise


def _files(path: Path) -> tuple[tuple[str, int], ...]:
    """Return ``Stored.files`` of a file, of a folder, or of a link itself; files may appear and disappear meanwhile."""
    found = {}
    if os.path.isdir(path) and not os.path.islink(path):
        for root, _, names in os.walk(path):
            below = os.path.relpath(root, path)
            for name in names:
                with suppress(OSError):
                    found[name if below == "." else os.path.join(below, name)] = os.lstat(
                        os.path.join(root, name)
                    ).st_size
    else:
        with suppress(OSError):
            found[path.name] = os.lstat(path).st_size
    return tuple(sorted(found.items(), key=lambda file: (-file[1], file[0])))
