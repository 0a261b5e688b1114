"""What the hub says that a file holds, and whether that is what came."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmx_lab.errors import DownloadError, UnusableModelError
from lmx_lab.weights.files import open_regular
from lmx_lab.weights.gguf.names import is_gguf, parts_of
from lmx_lab.weights.hub.cache import PREFIX, repo_id

PIECE_BYTES = 2**20
PER_REPORT = 64
NOTE = ".unverified-"
FOR_PEOPLE = ("LICENSE*", "README.md")
"""A model is whole without them."""


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A file of a repository, as the hub describes it."""

    size_bytes: int
    """0 where it does not say."""
    algorithm: str | None = None
    """``sha256``, or for small files git's own: SHA-1 of a header and the content."""
    digest: str | None = None


def require_announced(files: Mapping[Path, Announced], told: Callable[[int], None]) -> None:
    """Read files that have come, and compare them with what the hub said; ``told`` gets the bytes read so far.

    Those that are right are no longer unverified.

    Raises:
        DownloadError: some have another length or another content; they were removed, with the files that links to
            them are. The message names the first.
    """
    done, wrong = 0, []
    for path, expected in files.items():
        try:
            found, done = _described(path, expected, done, told)
        except FileNotFoundError:
            # Another process has found it to be wrong.
            found = ""
        if found == (said := _said(expected)):
            forget(path)
            continue
        for file in (path.resolve(), path):
            file.unlink(missing_ok=True)
        wrong.append(
            f"{path.name} is not the file that the hub announced: {found}, expected {said}. It was not kept; something "
            "between here and the hub may be altering it"
            if found
            else f"{path.name} is gone: another process has found it to be wrong, or removed it"
        )
    if wrong:
        raise DownloadError(f"{wrong[0]}. Try again")


def _said(expected: Announced) -> str:
    return f"{expected.size_bytes} bytes" + (f", {expected.algorithm} {expected.digest}" if expected.digest else "")


def _described(path: Path, expected: Announced, done: int, told: Callable[[int], None]) -> tuple[str, int]:
    """The file in the words of ``_said``, and how many bytes have been read by now."""
    size = path.stat().st_size
    if size != expected.size_bytes and expected.size_bytes:
        return f"{size} bytes", done
    if expected.digest is None:
        return _said(expected), done + size
    if expected.algorithm == "git":
        # Not for security: git's name for a content.
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    else:
        digest = hashlib.sha256()
    with open_regular(path) as file:
        for at, piece in enumerate(iter(lambda: file.read(PIECE_BYTES), b"")):
            digest.update(piece)
            done += len(piece)
            if at % PER_REPORT == 0:
                told(done)
    return f"{expected.size_bytes} bytes, {expected.algorithm} {digest.hexdigest()}", done


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
