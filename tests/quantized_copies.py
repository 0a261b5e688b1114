"""Store quantized copies for tests, without making them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from lmx_lab.values.models import QuantizedCopy
from lmx_lab.weights.gguf.convert import converted_id
from lmx_lab.weights.quantized_copies import write_copy

EXACT = QuantizedCopy(
    type="Q8_0",
    original="Q4_1",
    tokens=440,
    mean_kl=0.005,
    perplexity=17.8,
    original_perplexity=17.7,
    prefill_speed=1.9,
    batch_speed=1.5,
    decode_speed=0.95,
)
"""A copy that is loaded by default."""
LOSSY = replace(EXACT, type="Q4_0", mean_kl=0.27, perplexity=20.5, decode_speed=1.4)


def store_copy(home: Path, original: Path, copy: QuantizedCopy) -> Path:
    """Store a copy of a GGUF file in a home, with the content of the original; return its path."""
    name = f"{converted_id(original)}-{copy.type.lower()}"
    folder = home / "quantized" / name
    folder.mkdir(parents=True)
    shutil.copy(original, folder / "model.gguf")
    write_copy(folder, name, original, copy)
    return folder / "model.gguf"
