"""List the disk space that models and results use, and delete them. Files of other programs are only listed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from lmx_lab.errors import InvalidRequestError, StorageFullError, did_you_mean
from lmx_lab.settings import Settings
from lmx_lab.values.models import DiskUse, Stored
from lmx_lab.weights.gguf.names import parts_of
from lmx_lab.weights.hub import cache_folder, repo_folder, repositories
from lmx_lab.weights.locations import copy_locations, folder_locations
from lmx_lab.weights.programs import program_folders
from lmx_lab.weights.store import TEMP_NAME, existing_parent, lock_model

PROGRAMS = {
    "ollama": "remove a model with `ollama rm NAME`",
    "lm-studio": "remove models in LM Studio, under My Models",
    "llama.cpp": "delete its files in this folder",
}
NO_MODELS = ("benchmark runs", "unfinished downloads", "prefix cache")
"""Kinds of items that are deleted without the lock of a model."""


def disk_use(settings: Settings) -> DiskUse:
    """Return what takes space on the disk. It reads the sizes of all files, which takes seconds on a slow disk."""
    items = (item for item in _find(settings) if item.size_bytes)
    return DiskUse(
        items=tuple(sorted(items, key=lambda item: (-item.size_bytes, item.name))),
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
            f"nothing named {name[:200]!r} takes space on this disk{did_you_mean(name, items)}; "
            "`lmx-lab storage` lists what does",
            param="remove",
        )
    if item.remedy:
        raise InvalidRequestError(f"{name} is not removed here ({item.path}): {item.remedy}", param="remove")
    return item


def remove_stored(settings: Settings, item: Stored) -> None:
    """Delete an item of ``disk_use``. A model that a server has in memory stays usable until it is unloaded.

    Raises:
        StorageFullError: a file cannot be deleted; the message names it.
    """
    lock = nullcontext() if item.what in NO_MODELS else lock_model(settings.models_folder, item.name)
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


def _find(settings: Settings) -> Iterator[Stored]:
    models, cache = settings.models_folder, cache_folder()
    for location in folder_locations(models, "store"):
        path = models / location.id
        parts = tuple(path.with_name(name) for name in parts_of(path.name))
        files = tuple(file for part in parts for file in _files(part))
        what = "link to a model" if path.is_symlink() else "model"
        yield Stored(name=location.id, what=what, path=path, files=files, parts=parts if len(parts) > 1 else ())
    for copy in copy_locations(settings.quantized_folder):
        folder = settings.quantized_folder / copy.id
        yield Stored(name=copy.id, what="quantized copy", path=folder, files=_files(folder))
    for repo in repositories(cache):
        folder = repo_folder(cache, repo.id)
        yield Stored(name=repo.id, what="model in the hub cache", path=folder, files=_files(folder))
    temporary = models / TEMP_NAME
    yield Stored(name="unfinished", what="unfinished downloads", path=temporary, files=_files(temporary))
    runs, experiments, daemon = settings.home / "bench", settings.home / "experiments.db", settings.daemon_folder
    yield Stored(name="bench", what="benchmark runs", path=runs, files=_files(runs))
    for name, what, path, remedy in (
        ("experiments", "stored evaluations", experiments, "delete some with lab.experiments().delete(ID)"),
        ("daemon", "sessions and events", daemon, "delete a session with its method delete(); old events expire"),
    ):
        yield Stored(name=name, what=what, path=path, files=_files(path), remedy=remedy)
    if (records := settings.record_to) is not None:
        remedy = "delete its records with lab.requests.clear()"
        yield Stored(name="records", what="recorded requests", path=records, files=_files(records), remedy=remedy)
    if (prefixes := settings.prefix_cache_dir) is not None:
        yield Stored(name="prefixes", what="prefix cache", path=prefixes, files=_files(prefixes))
    for source, folder in program_folders() if settings.other_programs else ():
        what, remedy = f"models of {source}", PROGRAMS[source]
        yield Stored(name=source, what=what, path=folder, files=_files(folder), remedy=remedy)
    for folder in settings.model_folders:
        remedy = "its files are your own; delete them in the folder"
        yield Stored(name=str(folder), what="additional folder", path=folder, files=_files(folder), remedy=remedy)


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
