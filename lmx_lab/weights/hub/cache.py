"""Read the layout of the hub cache without huggingface_hub.

``models--org--name/refs/main`` names a commit, and ``models--org--name/snapshots/<commit>/`` contains its files:
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.files import open_regular

PREFIX = "models--"
COMMIT = re.compile(r"[0-9a-f]{7,64}")
COMMIT_BYTES = 1024


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder in which hub models are cached, according to the hub's environment variables."""
    environ = os.environ if environ is None else environ
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := environ.get(name):
            return Path(os.path.expandvars(folder)).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
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
        current = _current(folder, snapshots)
        yield CachedRepo(
            id=repo_id(folder),
            current=current,
            older=tuple(path for path in snapshots if path != current),
        )


def _current(folder: Path, snapshots: list[Path]) -> Path | None:
    try:
        with open_regular(folder / "refs" / "main") as file:
            commit = file.read(COMMIT_BYTES).decode("ascii", errors="replace").strip()
    except (OSError, UnusableModelError):
        return snapshots[0] if len(snapshots) == 1 else None
    snapshot = folder / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and snapshot.is_dir() else None
