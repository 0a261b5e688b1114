"""Find model files on this disk and fetch others. No module of this package loads a model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmx_lab.weights.catalog import Catalog
    from lmx_lab.weights.scanner import Listing
    from lmx_lab.weights.store import Progress, ProgressCallback, Stage

_MODULES = {
    "Catalog": "catalog",
    "Listing": "scanner",
    "Progress": "store",
    "ProgressCallback": "store",
    "Stage": "store",
}
__all__ = ["Catalog", "Listing", "Progress", "ProgressCallback", "Stage"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the catalog takes 0.2 s to import, and the completion of model names does not need it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
