"""Find the models of Ollama, LM Studio and llama.cpp on this disk. Their files are only read, and never moved.

Ollama keeps a manifest for each model, ``manifests/HOST/NAMESPACE/MODEL/TAG``, whose layers name files in ``blobs`` by
their hashes (https://pkg.go.dev/github.com/ollama/ollama/server/internal/manifest). LM Studio has a folder
``PUBLISHER/REPOSITORY`` for each model (https://lmstudio.ai/docs/app/advanced/import-model). llama.cpp keeps what its
option ``-hf`` downloaded as files in one folder (``LLAMA_CACHE`` in its documentation of ``llama-server``).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ModelLocation, Source
from lmx_lab.weights.files import MIB, open_regular

LAYER = "application/vnd.ollama.image."
DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


def program_folders() -> list[tuple[Source, Path]]:
    """Return the folders in which the programs keep models, as their own settings say. They need not exist."""
    home = Path.home()
    ollama = os.environ.get("OLLAMA_MODELS")
    # The second folder is that of the service that Ollama's installer sets up on Linux.
    ollama_folders = [Path(ollama)] if ollama else [home / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]
    cache = home / "Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return [
        *(("ollama", folder) for folder in ollama_folders),
        ("lm-studio", _lm_studio_folder(home)),
        ("llama.cpp", Path(os.environ.get("LLAMA_CACHE") or Path(cache, "llama.cpp"))),
    ]


def ollama_locations(folder: Path) -> Iterator[ModelLocation]:
    """Find the models of Ollama: ``llama3.2:1b``, ``user/model:tag`` or ``hf.co/org/name:Q4_K_M``.

    A name without ``:latest`` is an alias, as in Ollama. So are the other names of a file that has several, as after
    ``ollama cp``. Models with an adapter and models of Ollama's cloud are left out: their file alone would be a
    different model, or does not exist.
    """
    names: dict[Path, list[str]] = {}
    for path in sorted((folder / "manifests").glob("*/*/*/*")):
        host, namespace, model, tag = path.parts[-4:]
        content = _read_json(path)
        listed = content.get("layers") if isinstance(content, dict) else None
        # A file that is not a manifest has none.
        found = [layer for layer in listed if isinstance(layer, dict)] if isinstance(listed, list) else []
        layers = {str(layer.get("mediaType")): layer.get("digest") for layer in found}
        digest = DIGEST.fullmatch(str(layers.get(f"{LAYER}model")))
        if digest is None or f"{LAYER}adapter" in layers:
            continue
        parts = [model] if namespace == "library" else [namespace, model]
        name = "/".join(parts if host == "registry.ollama.ai" else [host, *parts])
        if name.isprintable() and tag.isprintable():
            of_file = names.setdefault(folder / "blobs" / f"sha256-{digest[1]}", [])
            of_file += [f"{name}:{tag}", *([name] if tag == "latest" else [])]
    for blob, (first, *others) in names.items():
        yield ModelLocation(id=first, path=blob, source="ollama", aliases=tuple(others))


def _lm_studio_folder(home: Path) -> Path:
    """Return the folder that LM Studio's settings name, or its default."""
    pointer = home / ".lmstudio-home-pointer"
    try:
        with open_regular(pointer) as file:
            studio = Path(file.read(MIB).decode().strip())
    except (OSError, UnicodeDecodeError, UnusableModelError):
        studio = home / ".lmstudio"
    settings = _read_json(studio / "settings.json")
    chosen = settings.get("downloadsFolder") if isinstance(settings, dict) else None
    return Path(chosen) if isinstance(chosen, str) and os.path.isabs(chosen) else studio / "models"


def _read_json(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            return json.loads(file.read(MIB))
    except (OSError, ValueError, RecursionError, UnusableModelError):
        return None
