"""Define the values of embedding and reranking: vectors, input types, rerank methods and the final report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Vectors: TypeAlias = "NDArray[np.float32]"
"""Embeddings, of shape (texts, dimensions), or scores, of shape (texts,)."""

InputType = Literal["query", "document"]

RerankMethod = Literal["cross-encoder", "decoder", "cosine"]


@dataclass(frozen=True, kw_only=True)
class EncodeReport:
    """Token counts, timings and memory of embedding or reranking the texts of one request."""

    model: str
    texts: int
    """Number of texts computed. When an embedding model reranks, this includes the query."""
    tokens: int
    """Number of tokens, with special tokens and prompts, without padding."""
    queue_s: float
    """Time from the arrival of the request to the first computation; includes tokenization."""
    compute_s: float
    """Time from the first computation to the last; other requests may be computed in between."""
    peak_memory_bytes: int
    """Peak memory of the whole engine while the request ran."""

    @property
    def total_s(self) -> float:
        """Time from the arrival of the request to its end."""
        return self.queue_s + self.compute_s
