"""Vectors as they are sent, as numbers to compute with."""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt

from lmx_lab.errors import UnreachableError
from lmx_lab.wire.embeddings import EmbeddingList


def as_array(answer: EmbeddingList) -> npt.NDArray[np.float32]:
    """One row for each input, float32; of numbers as well as of base64.

    Raises:
        UnreachableError: the rows are no vectors of one length, which the lab's server never answers.
    """
    rows = [_row(item.embedding) for item in sorted(answer.data, key=lambda item: item.index)]
    try:
        return np.stack(rows)
    except ValueError as exc:
        raise UnreachableError(f"the server answered with {len(rows)} vectors that make no table: {exc}") from exc


def _row(value: list[float] | str) -> npt.NDArray[np.float32]:
    if not isinstance(value, str):
        return np.asarray(value, dtype=np.float32)
    try:
        return np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4").astype(np.float32)
    except ValueError as exc:
        raise UnreachableError(f"the server answered with a vector that is no base64 of float32: {exc}") from exc
