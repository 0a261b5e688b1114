"""Find model files on this disk and fetch others. No module of this package loads a model."""

from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.scanner import Listing
from lmx_lab.weights.store import Progress, ProgressCallback, Stage

__all__ = [
    "Catalog",
    "Listing",
    "Progress",
    "ProgressCallback",
    "Stage",
]
