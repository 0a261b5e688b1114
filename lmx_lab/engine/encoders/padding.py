"""Texts of several lengths as one array. Engine thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.encoders.tokens import TextTokens


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Rows of token ids, padded on the right to the longest."""

    ids: NDArray[np.int32]
    """(rows, length)"""
    lengths: NDArray[np.int32]
    """(rows,), without padding."""
    skipped: NDArray[np.int32]
    """(rows,), leading tokens that are left out of pooling."""
    second_at: NDArray[np.int32]
    """(rows,), where the second segment begins; the row's length where there is none."""
    real: mx.array | None
    """(rows, length), False for padding; None if there is no padding."""

    @classmethod
    def of(cls, texts: Sequence[TextTokens]) -> Self:
        lengths = np.array([len(text.tokens) for text in texts], np.int32)
        ids = np.zeros((len(texts), int(lengths.max())), np.int32)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text.tokens)] = text.tokens
        starts = [len(text.tokens) if text.second_at is None else text.second_at for text in texts]
        padded = bool((lengths < ids.shape[1]).any())
        return cls(
            ids=ids,
            lengths=lengths,
            skipped=np.array([text.skipped for text in texts], np.int32),
            second_at=np.array(starts, np.int32),
            real=mx.array(np.arange(ids.shape[1]) < lengths[:, None]) if padded else None,
        )

    def last(self, hidden: mx.array) -> mx.array:
        """(rows, size): of (rows, length, size) what stands at each row's last token."""
        return hidden[mx.arange(len(self.lengths)), mx.array(self.lengths - 1)]
