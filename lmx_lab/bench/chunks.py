"""The measurements in one chunk of an answer: token counts and times, without the text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmx_lab.client.chat_chunks import Piece, TokenUsage, count, number


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFigures:
    """Measurements that the server reports for the request; None where it reports nothing."""

    queue_ms: float | None = None
    ttft_ms: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    peak_memory_gb: float | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What arrived at one moment. Without any content it only shows that the request is alive."""

    at_s: float
    """By ``time.perf_counter``."""
    tokens: int = 0
    """The bare engine's count; for a server 1 per piece of the answer, which may hold several tokens."""
    finish_reason: str | None = None
    usage: TokenUsage | None = None
    server: ServerFigures | None = None


def chunk_of(piece: Piece | None, at_s: float) -> Chunk:
    """The measurements in a piece of a server's answer that arrived at ``at_s``."""
    if piece is None:
        return Chunk(at_s=at_s)
    return Chunk(
        at_s=at_s,
        tokens=1 if piece.has_output else 0,
        finish_reason=piece.finish_reason[:40] if piece.finish_reason else None,
        usage=piece.usage,
        server=None if piece.timings is None else _figures(piece.timings),
    )


def _figures(timings: Mapping[str, Any]) -> ServerFigures:
    """The ``timings`` of llama.cpp and of LMX Lab, which has more fields."""
    return ServerFigures(
        queue_ms=number(timings.get("queue_ms")),
        ttft_ms=number(timings.get("ttft_ms")),
        prefill_tok_s=number(timings.get("prompt_per_second")) or None,
        decode_tok_s=number(timings.get("predicted_per_second")) or None,
        peak_memory_gb=number(timings.get("peak_memory_gb")),
        cached_tokens=count(timings.get("cache_n")),
    )
