"""Vectors and scores of texts, and the report on what computing them cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Vectors: TypeAlias = "NDArray[np.float32]"

InputType = Literal["query", "document"]

RerankMethod = Literal["cross-encoder", "decoder", "cosine"]


@dataclass(frozen=True, kw_only=True)
class EncodeReport:
    """What embedding or reranking one request's texts cost."""

    model: str
    texts: int
    """Texts computed; of a rerank by an embedding model the query is one of them."""
    tokens: int
    """Special tokens and prompts included, padding not."""
    queue_s: float
    """From arrival to the first computation, turning texts into tokens included."""
    compute_s: float
    """From there to the end; other requests may have been computed in between."""
    peak_memory_bytes: int

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s
