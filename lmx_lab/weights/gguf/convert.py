"""Convert a GGUF file to MLX's format in a separate process (``convert_worker``)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmx_lab.errors import UnusableModelError
from lmx_lab.settings import without_secrets
from lmx_lab.weights.files import open_regular
from lmx_lab.weights.store import full_disk_error

PACKAGE_PARENT = Path(__file__).resolve().parents[3]


def convert_gguf(source: Path, folder: Path) -> None:
    """Convert ``source`` into an existing, empty folder that MLX can load.

    Raises:
        UnusableModelError: the file cannot be converted; the message contains the reason.
        StorageFullError: the disk became full.
    """
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
        env=worker_environ(),
    )
    answer = _last_line(process.stdout)
    if process.returncode == 0 and answer.get("ok") is True:
        return
    if answer.get("full") is True:
        raise full_disk_error(f"{source.name} was converted", folder)
    raise UnusableModelError(str(answer.get("error") or _crash_message(source, process)))


def worker_environ() -> dict[str, str]:
    """Return the environment of a process that runs a module of this package."""
    # The package may be importable only because of the caller's current folder.
    search = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH"))))
    return without_secrets(os.environ) | {"PYTHONPATH": search}


def converted_id(path: Path) -> str:
    """Return the id of the converted model: the file's name and a part of its hash, so it is converted only once."""
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


def _crash_message(source: Path, process: subprocess.CompletedProcess[bytes]) -> str:
    last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
    cause = "probably because memory ran out" if process.returncode == -9 else " ".join(last)[:300]
    cause = cause or "without a message"
    return f"{source} cannot be converted: the converter ended with exit code {process.returncode}, {cause}"
