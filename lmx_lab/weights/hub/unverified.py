"""Files of the hub cache that were not compared yet with what the hub announced.

For each an empty note lies beside ``snapshots``, from before its download until it was compared. A process that is
killed in between leaves it: then the file is not used before the next fetch has compared it. A note says something of
its file alone, so that it matters to nobody which process wrote it, and files without one are as they always were.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.gguf.names import is_gguf, parts_of
from lmx_lab.weights.hub.cache import PREFIX, repo_id

NOTE = ".unverified-"
FOR_PEOPLE = ("LICENSE*", "README.md")
"""A model is whole without them."""


def note(files: Iterable[Path]) -> None:
    """Say of files in a snapshot, there or not, that what will be found there was not compared.

    Raises:
        OSError: the cache cannot be written to.
    """
    for file in files:
        place = _note(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def forget(file: Path) -> None:
    """The file is what the hub announced."""
    _note(file).unlink(missing_ok=True)


def is_unverified(file: Path) -> bool:
    """Whether a fetch has still to compare this file of a snapshot."""
    return os.path.lexists(_note(file))


def is_for_people(name: str) -> bool:
    """Whether no model needs the file of this name."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in FOR_PEOPLE)


def refuse_unverified(path: Path) -> None:
    """
    Raises:
        UnusableModelError: the model there is of the hub cache, and a file of it is there but was not compared.
    """
    # By whatever links it is reached; the file itself is a link out of the snapshot.
    path = path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    snapshot = _snapshot(path)
    if snapshot is None:
        return
    if path.is_dir():
        files = [file for file in path.rglob("*") if not is_gguf(file.name) and not is_for_people(file.name)]
    else:
        files = [path.with_name(part) for part in parts_of(path.name)]
    if any(file.exists() and is_unverified(file) for file in files):
        choice = "" if path.is_dir() else f":{path.relative_to(snapshot).as_posix()}"
        raise UnusableModelError(
            f"{path} has come from the hub, but was not compared with what the hub announced: its fetch was broken "
            f"off, or is not at its end. Fetch it again with `lmx-lab pull {repo_id(snapshot.parents[1])}{choice}`"
        )


def _note(file: Path) -> Path:
    """By a hash of commit and name: a name of the hub may be a path, or as long as a name can be."""
    snapshot = _snapshot(file.absolute())
    if snapshot is None:
        raise ValueError(f"{file} is in no snapshot of the hub cache")
    named = file.absolute().relative_to(snapshot.parent).as_posix()
    return snapshot.parents[1] / f"{NOTE}{hashlib.sha256(os.fsencode(named)).hexdigest()[:32]}"


def _snapshot(path: Path) -> Path | None:
    """The snapshot that the path leads to or into; ``None`` outside the hub cache."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith(PREFIX):
            return folder
    return None
