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
ADDITIONAL = "its files are your own; delete them in the folder"
DAEMON = "delete a session with its method delete(); old events expire"
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
    models, quantized, cache, home = settings.models_folder, settings.quantized_folder, cache_folder(), settings.home
    programs = program_folders() if settings.other_programs else []
    for location in folder_locations(models, "store"):
        path = models / location.id
        parts = tuple(path.with_name(name) for name in parts_of(path.name))
        files = tuple(file for part in parts for file in _files(part))
        what = "link to a model" if path.is_symlink() else "model"
        yield Stored(name=location.id, what=what, path=path, files=files, parts=parts if len(parts) > 1 else ())
    others: list[tuple[str, str, Path | None, str]] = [
        *((it.id, "quantized copy", quantized / it.id, "") for it in copy_locations(quantized)),
        *((repo.id, "model in the hub cache", repo_folder(cache, repo.id), "") for repo in repositories(cache)),
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
            yield Stored(name=name, what=what, path=place, files=_files(place), remedy=remedy)


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
