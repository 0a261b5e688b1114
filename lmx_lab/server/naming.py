"""What a request may call the model it means."""

from __future__ import annotations

from pathlib import Path

from lmx_lab.engine import EngineSnapshot
from lmx_lab.errors import ModelNotFoundError


def loaded_id(name: str | None, now: EngineSnapshot, *, local: bool) -> str | None:
    """The id of what is loaded, if the name is its path and the caller a program on this machine; else the name."""
    if local and name is not None and now.entry is not None and Path(name) == now.entry.path:
        return now.entry.id
    return name


def unknown_model(name: str, now: EngineSnapshot) -> ModelNotFoundError:
    """True of paths too, whatever lies there."""
    loaded = f"{now.model} is loaded" if now.model is not None else "none is loaded"
    return ModelNotFoundError(
        f"no model here has the id {name[:200]!r}; requests name models by id, not by path: {loaded}, "
        "GET /v1/models lists all",
        param="model",
    )
