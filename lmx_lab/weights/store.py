"""The lab's own model folder: one writer per model at a time, and models that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock

from lmx_lab.errors import StorageFullError

TEMP_NAME, LOCKS_NAME = ".tmp", ".locks"
FULL = (errno.ENOSPC, errno.EDQUOT)
Stage = Literal["download", "verify", "convert", "store"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A fetch has come so far. ``done_bytes`` starts again at 0 with each stage."""

    stage: Stage
    done_bytes: int
    total_bytes: int | None
    """``None`` where the total is not known beforehand."""


ProgressCallback = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """The callback of a caller who does not watch."""


def file_name(model_id: str) -> str:
    """The id as one name of a file or folder: ``org/name`` becomes ``org--name``."""
    return re.sub(r"[^\w.-]", "-", model_id.replace("/", "--"))


@contextmanager
def exclusive(models: Path, model_id: str) -> Iterator[None]:
    """Hold this model's lock: of all threads and processes one goes on, the others wait here without limit.

    The system frees the lock of a process that was killed.
    """
    folder = models / LOCKS_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StorageFullError(
            f"cannot write to {models}: {exc.strerror}; set LMX_LAB_HOME to a folder of yours"
        ) from exc
    with FileLock(folder / f"{file_name(model_id)}.lock"):
        yield


@contextmanager
def workspace(models: Path, model_id: str) -> Iterator[Path]:
    """A temporary folder on the store's file system, removed at the end; call it with the model's lock held.

    What a killed fetch of the same model left behind is removed first. A disk that fills up meanwhile is reported as
    ``StorageFullError``.
    """
    temp = models / TEMP_NAME
    temp.mkdir(parents=True, exist_ok=True)
    # "@" is in no file_name(), so one model's leftovers cannot be another's.
    for leftover in temp.glob(f"{file_name(model_id)}@*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with (
        full_disk_reported(model_id, temp),
        tempfile.TemporaryDirectory(prefix=f"{file_name(model_id)}@", dir=temp) as name,
    ):
        yield Path(name)


@contextmanager
def full_disk_reported(what: str, folder: Path) -> Iterator[None]:
    """Raise ``StorageFullError`` in place of the system's error for a full disk or quota under ``folder``."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        raise StorageFullError(
            f"the disk filled up while {what} was fetched: {free_in_words(folder)}; nothing of it was kept. Free some"
        ) from exc


def free_in_words(folder: Path) -> str:
    """For errors about a full disk."""
    try:
        return f"{shutil.disk_usage(existing_parent(folder)).free} bytes are free at {folder}"
    except OSError:
        return f"{folder} cannot be read"


def publish(folder: Path, target: Path, workspace_folder: Path) -> None:
    """Make a finished folder the model at ``target``, in place of a damaged one if there is one."""
    _sync(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rename(workspace_folder / "replaced")
    folder.rename(target)
    _sync_folder(target.parent)


def require_disk(folder: Path, needed_bytes: int, reserve_bytes: int, what: str) -> None:
    """Refuse a download that the disk under ``folder`` cannot take.

    Raises:
        StorageFullError: with what is needed, what is kept in reserve, and what is free.
    """
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed_bytes + reserve_bytes:
        raise StorageFullError(
            f"{what} needs {needed_bytes} bytes of disk beside a reserve of {reserve_bytes}, and {free} are free at "
            f"{folder}. Free {needed_bytes + reserve_bytes - free} bytes, or choose another folder"
        )


def existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    return next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below, also while they come and go."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    # Windows cannot open a folder; there the rename has to do.
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
