"""Model files: what is on this disk, and how more of it gets here. Nothing here loads a model."""

from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.entry import (
    ECHO,
    KINDS_IN_WORDS,
    Format,
    Kind,
    ModelEntry,
    Progress,
    ProgressCallback,
    Source,
    Stage,
)
from lmx_lab.weights.scanner import Listing

__all__ = [
    "ECHO",
    "KINDS_IN_WORDS",
    "Catalog",
    "Format",
    "Kind",
    "Listing",
    "ModelEntry",
    "Progress",
    "ProgressCallback",
    "Source",
    "Stage",
]
