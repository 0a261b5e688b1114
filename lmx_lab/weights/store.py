"""The lab's own model folder: one writer per model at a time, and models appear completely or not at all."""

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

from lmx_lab.errors import StorageFullError

TEMP_NAME, LOCKS_NAME = ".tmp", ".locks"
FULL = (errno.ENOSPC, errno.EDQUOT)
Stage = Literal["download", "verify", "convert", "store"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of fetching a model. ``done_bytes`` starts at 0 in each stage."""

    stage: Stage
    done_bytes: int
    total_bytes: int | None
    """None if the total is not known in advance."""


ProgressCallback = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """A ``ProgressCallback`` that does nothing."""


def file_name(model_id: str) -> str:
    """Convert an id to the name of a file or folder: ``org/name`` becomes ``org--name``."""
    return re.sub(r"[^\w.-]", "-", model_id.replace("/", "--"))


@contextmanager
def lock_model(models: Path, model_id: str) -> Iterator[None]:
    """Hold the lock of a model. Other threads and processes that want it wait, without a limit.

    The operating system releases the lock of a process that was killed.

    Raises:
        StorageFullError: the folder cannot be written to.
    """
    folder = models / LOCKS_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StorageFullError(
            f"cannot write to {models}: {exc.strerror}; set LMX_LAB_HOME to a folder that you can write to"
        ) from exc
    # This import takes 30 ms, and the completion of model names, for example, does not need it.
    from filelock import FileLock

    with FileLock(folder / f"{file_name(model_id)}.lock"):
        yield


@contextmanager
def workspace(models: Path, model_id: str) -> Iterator[Path]:
    """Create a temporary folder in the store's file system, and remove it at the end. Hold the model's lock meanwhile.

    Files that a killed fetch of the same model has left are removed first.

    Raises:
        StorageFullError: the disk became full within the block.
    """
    temp = models / TEMP_NAME
    temp.mkdir(parents=True, exist_ok=True)
    # file_name() never contains "@", so the pattern cannot match files of another model.
    for leftover in temp.glob(f"{file_name(model_id)}@*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f"{file_name(model_id)}@", dir=temp) as name:
            yield Path(name)
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        raise full_disk_error(f"{model_id} was downloaded", temp) from exc


def full_disk_error(action: str, folder: Path, *, needed_bytes: int | None = None) -> StorageFullError:
    """Build the error for a disk that became full.

    Args:
        action: The interrupted operation, as in "NAME was downloaded".
    """
    try:
        free = f"{shutil.disk_usage(existing_parent(folder)).free} bytes are free at {folder}"
    except OSError:
        free = f"{folder} cannot be read"
    needed = "" if needed_bytes is None else f"{needed_bytes} bytes are needed, "
    return StorageFullError(
        f"the disk became full while {action}: {needed}{free}; nothing was kept. Free some space, then try again"
    )


def publish(folder: Path, target: Path, workspace_folder: Path) -> None:
    """Move a finished folder to ``target``. A damaged model that is already there is moved to the workspace."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rename(workspace_folder / "replaced")
    folder.rename(target)
    _sync_folder(target.parent)


def require_disk(folder: Path, needed_bytes: int, reserve_bytes: int, what: str) -> None:
    """Check that the disk under ``folder`` has room for a download.

    Raises:
        StorageFullError: it has not; the message names the needed, the reserved and the free bytes.
    """
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed_bytes + reserve_bytes:
        raise StorageFullError(
            f"{what} needs {needed_bytes} bytes on disk, in addition to a reserve of {reserve_bytes}, and {free} are "
            f"free at {folder}. Free {needed_bytes + reserve_bytes - free} bytes, or choose another folder"
        )


def existing_parent(folder: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    return next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, which may appear and disappear meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
