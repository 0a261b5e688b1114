"""Shorten and compare vectors, which are the rows of numpy arrays. Pure."""

from __future__ import annotations

import numpy as np

from lmx_lab.values.outputs import Vectors


def shorten(vectors: Vectors, dimensions: int | None) -> Vectors:
    """Return the first components of each vector, normalized to length 1 (arXiv 2205.13147)."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    return _normalized(vectors[:, :dimensions])


def cosines(rows: Vectors) -> Vectors:
    """Return the cosine similarity of the first row and each of the other rows."""
    rows = _normalized(rows)
    # Computed row by row, because the rounding of a BLAS depends on the position of a row, and equal documents must
    # get equal scores.
    scores: Vectors = (rows[1:] * rows[0]).sum(axis=1)
    return scores


def _normalized(rows: Vectors) -> Vectors:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    normalized: Vectors = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    return normalized
