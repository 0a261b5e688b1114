"""Embeddings by feature hashing: texts with the same words, or parts of words, are similar. Pure numpy.

Each word and each three letters of a word add to one component, found by a hash (Weinberger et al., arXiv 0902.2206).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

import numpy as np

from lmx_lab.engine.requests import Vectors

DIMENSIONS = 384
WORD = re.compile(r"\w+")
PART_WEIGHT = 0.5
"""Of three letters, where a whole word weighs 1."""


def vector(text: str) -> Vectors:
    """The text as a vector of length 1."""
    row = np.zeros(DIMENSIONS, dtype=np.float32)
    for feature, weight in _features(text):
        code = zlib.crc32(feature.encode(errors="replace"))
        row[code % DIMENSIONS] += weight if code & 0x8000_0000 else -weight
    length = float(np.linalg.norm(row))
    if length == 0:
        row[0], length = 1.0, 1.0
    unit: Vectors = row / np.float32(length)
    return unit


def _features(text: str) -> Iterator[tuple[str, float]]:
    for word in WORD.findall(text.casefold()) or [text]:
        yield word, 1.0
        padded = f"<{word}>"
        for at in range(len(padded) - 2):
            yield padded[at : at + 3], PART_WEIGHT
