"""An entry of a model that does not exist, for tests that do not load it."""

from __future__ import annotations

from pathlib import Path

from lmx_lab.values.models import ModelEntry

ENTRY = ModelEntry(
    id="tiny",
    path=Path("/models/tiny"),
    kind="chat",
    architecture="llama",
    format="mlx",
    size_bytes=7,
    quantization=None,
    context_length=512,
    source="store",
)
