"""Import a GGUF file into a folder, in a process of its own (see ``gguf_import``)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmx_lab.errors import StorageFullError, UnusableModelError
from lmx_lab.settings import without_secrets
from lmx_lab.weights.files import open_regular
from lmx_lab.weights.store import free_in_words

PACKAGE_PARENT = Path(__file__).resolve().parents[3]


def convert_gguf(source: Path, folder: Path) -> None:
    """Convert ``source`` into an existing, empty folder that MLX can load.

    Raises:
        UnusableModelError: it is nothing that can be imported, with the reason; or the converter died of it.
        StorageFullError: the disk filled up.
    """
    # The package may be on the path only because of the caller's current folder.
    search = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "lmx_lab.weights.gguf.convert_worker",
            str(source.absolute()),
            str(folder.absolute()),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env=without_secrets(os.environ) | {"PYTHONPATH": search},
    )
    answer = _last_line(process.stdout)
    if process.returncode == 0 and answer.get("ok") is True:
        return
    if answer.get("full") is True:
        raise StorageFullError(
            f"the disk filled up while {source.name} was imported: {free_in_words(folder)}; nothing of it was kept. "
            "Free some"
        )
    raise UnusableModelError(str(answer.get("error") or _death(source, process)))


def converted_id(path: Path) -> str:
    """The id under which a GGUF file is stored: its name and a little of its content's hash, so it is imported once."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-")[:80] or "model"
    return f"{stem}-{digest[:8]}".lower()


def _last_line(output: bytes) -> dict[str, Any]:
    try:
        value = json.loads(output.decode(errors="replace").strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _death(source: Path, process: subprocess.CompletedProcess[bytes]) -> str:
    last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
    cause = "probably for lack of memory" if process.returncode == -9 else " ".join(last)[:300]
    return f"{source} cannot be imported: the converter ended with {process.returncode}, {cause or 'silently'}"
