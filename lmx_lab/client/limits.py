"""How long an answer may be: so much is read, decompressed, and no more, whatever the server sends."""

from __future__ import annotations

from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody

SHORT_BYTES = 100_000
"""A refusal, and an answer of a few fields."""
LONG_BYTES = 64_000_000
"""The list of models, and one text: that is ten million tokens, or 600,000 with the probability of each."""
COMPONENTS = 16_384
"""No embedding model known has vectors as long as this."""
COMPONENT_BYTES = {"base64": 6, "float": 26}
"""Four bytes in base64; a float in decimal, with what separates it from the next."""
ITEM_BYTES = 200
"""What is around a vector or a score."""
ESCAPED = 3
"""JSON that escapes all but ASCII is so many times as long as UTF-8."""


def chat_bytes(body: ChatRequest) -> int:
    return SHORT_BYTES + LONG_BYTES * (body.n or 1) * (1 + (body.top_logprobs or 0))


def embeddings_bytes(body: EmbeddingsBody) -> int:
    texts = 1 if body.is_single else len(body.input)
    vector = (body.dimensions or COMPONENTS) * COMPONENT_BYTES[body.encoding_format or "float"]
    return SHORT_BYTES + texts * (ITEM_BYTES + vector)


def rerank_bytes(documents: int, *, sent: int) -> int:
    """
    Args:
        sent: The bytes of the request, whose documents may be in the answer again.
    """
    return SHORT_BYTES + documents * ITEM_BYTES + ESCAPED * sent
