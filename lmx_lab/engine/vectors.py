"""Vectors cut, and compared. Pure: numpy arrays of one row for each text."""

from __future__ import annotations

import numpy as np

from lmx_lab.values.encoding import Vectors


def cut(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first components, of length 1 again, as models are trained to be cut (arXiv 2205.13147)."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    return _normalized(vectors[:, :dimensions])


def cosines(rows: Vectors) -> Vectors:
    """Of the first row with each of the others."""
    rows = _normalized(rows)
    # Row by row: a BLAS rounds by where in the matrix a row stands, and equal documents shall be equal.
    scores: Vectors = (rows[1:] * rows[0]).sum(axis=1)
    return scores


def _normalized(rows: Vectors) -> Vectors:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    normalized: Vectors = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    return normalized
