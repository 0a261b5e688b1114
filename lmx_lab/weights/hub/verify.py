"""What the hub says that a file holds, and whether that is what came."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmx_lab.errors import DownloadError
from lmx_lab.weights.files import open_regular
from lmx_lab.weights.hub.unverified import forget

PIECE_BYTES = 2**20
PER_REPORT = 64


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
