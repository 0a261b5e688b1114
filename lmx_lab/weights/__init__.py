"""Model files: what is on this disk, and how more of it gets here. Nothing here loads a model."""

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
