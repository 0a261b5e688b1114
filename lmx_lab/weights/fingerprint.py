"""Detect whether the files of a model have changed since the engine read them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import FileMark, ModelEntry
from lmx_lab.weights.files import list_folder, open_regular
from lmx_lab.weights.gguf.names import parts_of

SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Suffixes of the files in a model folder that a load may read."""
_known_digests: dict[str, str] = {}
"""Digests of the content of files, by the digest of their marks."""


def with_marks(entry: ModelEntry) -> ModelEntry:
    """Return the entry with the current marks of its files. Call it before the files are read.

    All functions for loaded models include the draft model.
    """
    draft = with_marks(entry.draft) if entry.draft is not None else None
    return replace(entry, marks=tuple(_marks(entry.path)), draft=draft)


def require_unchanged(entry: ModelEntry) -> None:
    """Check that the files are the same as when the marks were taken.

    Raises:
        UnusableModelError: a file was changed, replaced or removed.
    """
    marks = tuple(_marks(entry.path))
    if missing := sorted({mark.name for mark in entry.marks} - {mark.name for mark in marks}):
        raise UnusableModelError(
            f"{missing[0]} was removed while {entry.id} was loaded; fetch the model again", param="model"
        )
    if entry.marks != marks:
        raise UnusableModelError(f"{entry.path} was changed while it was loaded; load it again", param="model")
    if entry.draft is not None:
        require_unchanged(entry.draft)


def is_loaded(loaded: ModelEntry | None, wanted: ModelEntry | None) -> bool:
    """Whether the loaded model is the wanted one, and its files are unchanged."""
    if loaded is None or wanted is None:
        return loaded is wanted
    is_same = loaded.path == wanted.path and loaded.marks == tuple(_marks(wanted.path))
    return is_same and is_loaded(loaded.draft, wanted.draft)


def is_overwritten(loaded: ModelEntry) -> bool:
    """Whether a file was overwritten or truncated in place, which changes the memory of processes that have it mapped.

    A file that was replaced or removed does not change for these processes.
    """
    before = {(mark.name, mark.inode): mark for mark in loaded.marks}
    if any(before.get((mark.name, mark.inode), mark) != mark for mark in _marks(loaded.path)):
        return True
    return loaded.draft is not None and is_overwritten(loaded.draft)


def marks_digest(entry: ModelEntry) -> str:
    """Return a digest of the marks, which changes when a file is changed, replaced, added or removed."""
    return hashlib.sha256(repr(entry.marks).encode()).hexdigest()


def content_digest(entry: ModelEntry) -> str:
    """Return a digest of the content of all files that a load reads: weights, configuration, tokenizer and template.

    Reads the whole weights, which takes about a second per gigabyte.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for mark in entry.marks:
        with open_regular(Path(mark.name)) as file:
            content = hashlib.file_digest(file, hashlib.sha256).hexdigest()
        digest.update(f"{os.path.relpath(mark.name, entry.path)} {content}\n".encode())
    return digest.hexdigest()


def known_content_digest(entry: ModelEntry) -> str:
    """Return ``content_digest``, which is computed only once for files with the same marks; empty without files.

    Raises:
        OSError: a file cannot be read.
    """
    marks = marks_digest(entry)
    if entry.marks and marks not in _known_digests:
        if len(_known_digests) >= 256:
            _known_digests.clear()
        _known_digests[marks] = content_digest(entry)
    return _known_digests.get(marks, "")


def _marks(path: Path) -> Iterator[FileMark]:
    if os.path.isdir(path):
        # Modules of an encoder have their own folders.
        folders = (path, *(file for file in list_folder(path) if os.path.isdir(file)))
        names = [str(file) for folder in folders for file in list_folder(folder) if file.name.endswith(SUFFIXES)]
    else:
        names = [str(path.with_name(name)) for name in parts_of(path.name)]
    for name in sorted(names):
        try:
            known = os.stat(name)
        except OSError:
            continue
        yield FileMark(
            name=name, inode=(known.st_dev, known.st_ino), size_bytes=known.st_size, changed_ns=known.st_mtime_ns
        )
