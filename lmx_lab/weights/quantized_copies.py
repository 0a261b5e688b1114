"""Store quantized copies of GGUF files, which llama.cpp computes faster than the originals.

Each copy has its own folder, whose name contains a hash of the original's content. A copy counts only as long as
its original exists and is unchanged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import QuantizedCopy, QuantizedType
from lmx_lab.weights.files import read_json
from lmx_lab.weights.gguf.names import is_gguf
from lmx_lab.weights.scan import ModelLocation, read_source, write_source
from lmx_lab.weights.store import lock_model

RECORD_NAME = "quantized_copy.json"


def copy_locations(folder: Path) -> Iterator[ModelLocation]:
    """Find the copies in the folder of all copies. They get the ids of their originals in ``join_formats``."""
    for path in _copies(folder):
        source = read_source(path)
        copy = read_copy(path)
        files = sorted(file for file in path.iterdir() if is_gguf(file.name)) if source is not None else []
        if copy is not None and len(files) == 1:
            yield ModelLocation(id=path.name, path=files[0], source="store", converted_from=source, copy=copy)


def write_copy(folder: Path, name: str, original: Path, copy: QuantizedCopy) -> None:
    """Record in the folder of a copy what it is a copy of, and what was measured.

    Args:
        name: Name that the folder gets in the folder of all copies.
    """
    (folder / RECORD_NAME).write_text(json.dumps(asdict(copy)))
    write_source(folder, name, original)


def read_copy(folder: Path) -> QuantizedCopy | None:
    """Return the measurements of the copy in a folder; None if there is no valid record."""
    try:
        copy = QuantizedCopy(**read_json(folder / RECORD_NAME))
        # Fails if a value of an edited record is not a number.
        return copy if copy.type in get_args(QuantizedType) and str(copy) else None
    except (UnusableModelError, TypeError, ValueError):
        return None


def remove_stale_copies(folder: Path) -> None:
    """Remove the copies whose originals were changed or deleted.

    Raises:
        StorageFullError: the folder cannot be written to.
    """
    for path in _copies(folder):
        if read_source(path) is None:
            with lock_model(folder, path.name):
                shutil.rmtree(path, ignore_errors=True)


def _copies(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []
