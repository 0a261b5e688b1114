"""Read the layout of the hub cache, and verify its files, without huggingface_hub.

``models--org--name/refs/main`` names a commit, and ``models--org--name/snapshots/<commit>/`` contains its files:
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.

Downloaded files are verified against the sizes and hashes that the hub announced. Files that are not verified yet are
marked: for each of them, an empty marker file is created beside ``snapshots`` before its download, and removed after it
was verified. If a process is killed in between, the marker remains, and the file is not used before the next fetch has
verified it. A marker concerns only its own file, so it does not matter which process created it, and files without one
are used as always.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmx_lab.errors import DownloadError, UnusableModelError
from lmx_lab.weights.files import open_regular
from lmx_lab.weights.gguf.names import is_gguf, parts_of

PREFIX = "models--"
COMMIT = re.compile(r"[0-9a-f]{7,64}")
MARKER = ".unverified-"
DOCUMENTATION = ("LICENSE*", "README.md")
"""Files that no model needs."""


def cache_folder() -> Path:
    """Return the folder in which hub models are cached, according to the hub's environment variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(name):
            return Path(os.path.expandvars(folder)).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def repo_folder(cache: Path, repo_id: str) -> Path:
    """Return the folder of a repository in the cache, which need not exist."""
    return cache / (PREFIX + repo_id.replace("/", "--"))


def repo_id(folder: Path) -> str:
    """Return ``org/name`` of a repository's folder in the cache."""
    return folder.name.removeprefix(PREFIX).replace("--", "/", 1)


@dataclass(frozen=True, kw_only=True)
class CachedRepo:
    """A repository in the cache, complete or not."""

    id: str
    current: Path | None
    """The snapshot that ``refs/main`` names, or the only one of a model that was fetched by its commit."""
    older: tuple[Path, ...]
    """The other snapshots. A file that was not fetched again with a newer commit is still in one of them."""


def repositories(cache: Path) -> Iterator[CachedRepo]:
    """Iterate over the models in the cache."""
    for folder in sorted(cache.glob(f"{PREFIX}*")):
        snapshots = sorted(path for path in (folder / "snapshots").glob("*") if path.is_dir())
        current = None
        try:
            with open_regular(folder / "refs" / "main") as file:
                commit = file.read(1024).decode("ascii", errors="replace").strip()
        except (OSError, UnusableModelError):
            if len(snapshots) == 1:
                current = snapshots[0]
        else:
            if COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir():
                current = folder / "snapshots" / commit
        yield CachedRepo(
            id=repo_id(folder),
            current=current,
            older=tuple(path for path in snapshots if path != current),
        )


@dataclass(frozen=True, kw_only=True)
class ExpectedFile:
    """A file of a repository as the hub describes it."""

    size_bytes: int
    """0 if unknown."""
    algorithm: str | None = None
    """``sha256``, or ``git`` for small files: SHA-1 of a header and the content."""
    digest: str | None = None


def verify_files(files: Mapping[Path, ExpectedFile], report: Callable[[int], None]) -> None:
    """Read downloaded files and compare them with what the hub announced. Correct files are no longer unverified.

    Args:
        report: Called with the number of bytes read so far.

    Raises:
        DownloadError: a file has another size or content. Such files were removed, including the targets of links. The
            message names the first of them.
    """
    done, problems = 0, []
    for path, expected in files.items():
        announced = _describe(expected)
        try:
            actual, done = _describe_file(path, expected, done, report)
        except FileNotFoundError:
            problem = f"{path.name} is missing: another process removed it, perhaps because it was incorrect"
        else:
            if actual == announced:
                mark_verified(path)
                continue
            problem = (
                f"{path.name} is not the file that the hub announced: it has {actual}, expected {announced}. It was "
                "not kept; something between this machine and the hub may be modifying it"
            )
        problems.append(problem)
        for file in (path.resolve(), path):
            file.unlink(missing_ok=True)
    if problems:
        raise DownloadError(f"{problems[0]}. Try again")


def _describe(expected: ExpectedFile) -> str:
    digest = f", {expected.algorithm} {expected.digest}" if expected.digest else ""
    return f"{expected.size_bytes} bytes{digest}"


def _describe_file(path: Path, expected: ExpectedFile, done: int, report: Callable[[int], None]) -> tuple[str, int]:
    """Describe a file as ``_describe`` does; return the description and the number of bytes read so far."""
    size = path.stat().st_size
    if size != expected.size_bytes and expected.size_bytes:
        return f"{size} bytes", done
    if expected.digest is None:
        return _describe(expected), done + size
    if expected.algorithm == "git":
        # git's id of a content, not a security feature.
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    else:
        digest = hashlib.sha256()
    with open_regular(path) as file:
        for at, piece in enumerate(iter(lambda: file.read(2**20), b"")):
            digest.update(piece)
            done += len(piece)
            if at % 64 == 0:
                report(done)
    return f"{expected.size_bytes} bytes, {expected.algorithm} {digest.hexdigest()}", done


# Markers


def mark_unverified(files: Iterable[Path]) -> None:
    """Mark files of a snapshot as unverified, before they are downloaded.

    Raises:
        OSError: the cache cannot be written to.
    """
    for file in files:
        marker = _marker(file)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def mark_verified(file: Path) -> None:
    """Remove the marker of a file."""
    _marker(file).unlink(missing_ok=True)


def is_unverified(file: Path) -> bool:
    """Whether this file of a snapshot still has to be verified."""
    return os.path.lexists(_marker(file))


def require_verified(path: Path) -> None:
    """Check that no file of a model in the hub cache is unverified. Models in other places always pass.

    Raises:
        UnusableModelError: a file is.
    """
    # Links to the snapshot are resolved, but not the file itself: it is a link out of the snapshot.
    path = path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    snapshot = _snapshot(path)
    if snapshot is None:
        return
    if path.is_dir():
        files = [
            file
            for file in path.rglob("*")
            if not is_gguf(file.name) and not any(fnmatch.fnmatch(file.name, pattern) for pattern in DOCUMENTATION)
        ]
    else:
        files = [path.with_name(part) for part in parts_of(path.name)]
    if any(file.exists() and is_unverified(file) for file in files):
        choice = "" if path.is_dir() else f":{path.relative_to(snapshot).as_posix()}"
        raise UnusableModelError(
            f"{path} was downloaded from the hub but not verified: its download was interrupted or is still running. "
            f"Fetch it again with `lmx-lab pull {repo_id(snapshot.parents[1])}{choice}`"
        )


def _marker(file: Path) -> Path:
    """Return the path of a file's marker.

    Its name is a hash of commit and path, because a file in a repository may be in a subfolder, or have a name of
    maximal length.
    """
    snapshot = _snapshot(file.absolute())
    if snapshot is None:
        raise ValueError(f"{file} is not in a snapshot of the hub cache")
    named = file.absolute().relative_to(snapshot.parent).as_posix()
    return snapshot.parents[1] / f"{MARKER}{hashlib.sha256(os.fsencode(named)).hexdigest()[:32]}"


def _snapshot(path: Path) -> Path | None:
    """Return the snapshot that is or contains the path; None outside the hub cache."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith(PREFIX):
            return folder
    return None
