"""Compute the metrics of one request from the chunks of its answer. Does no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmx_lab.client.chat_chunks import Piece, TokenUsage, count, number

MAX_TOKENS_PER_PIECE = 2
"""Mean number of tokens in a piece up to which the times of pieces count as times of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMetrics:
    """Measurements that the server reports for the request; None for those that it does not report."""

    queue_ms: float | None = None
    ttft_ms: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    peak_memory_gb: float | None = None
    cached_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The measurements in one chunk of an answer. A chunk without any only shows that the request is still running."""

    at_s: float
    """Time of arrival, from ``time.perf_counter``."""
    tokens: int = 0
    """Number of tokens. For a server this is 1 for each chunk with output, which may contain several tokens."""
    finish_reason: str | None = None
    usage: TokenUsage | None = None
    server: ServerMetrics | None = None


def measure_chunk(piece: Piece | None, at_s: float) -> Chunk:
    """Return the measurements in a piece of a server's answer that arrived at ``at_s``."""
    if piece is None:
        return Chunk(at_s=at_s)
    return Chunk(
        at_s=at_s,
        tokens=1 if piece.has_output else 0,
        finish_reason=piece.finish_reason[:40] if piece.finish_reason else None,
        usage=piece.usage,
        server=None if piece.timings is None else _server_metrics(piece.timings),
    )


def _server_metrics(timings: Mapping[str, Any]) -> ServerMetrics:
    """Convert the ``timings`` of llama.cpp or of LMX Lab, which has more fields."""
    return ServerMetrics(
        queue_ms=number(timings.get("queue_ms")),
        ttft_ms=number(timings.get("ttft_ms")),
        prefill_tok_s=number(timings.get("prompt_per_second")) or None,
        decode_tok_s=number(timings.get("predicted_per_second")) or None,
        peak_memory_gb=number(timings.get("peak_memory_gb")),
        cached_tokens=count(timings.get("cache_n")),
        drafted_tokens=count(timings.get("draft_n")),
        accepted_tokens=count(timings.get("draft_n_accepted")),
    )


@dataclass(kw_only=True)
class Trace:
    """Times and token counts of one request, without its text. All times are from ``time.perf_counter``."""

    sent_at_s: float
    due_at_s: float | None = None
    """Time at which the request was due, if arrivals are scheduled."""
    ended_at_s: float
    """Time of the last chunk, or of the failure."""
    finished_at_s: float | None = None
    """Time of the finish reason, which is sent with or right after the last token."""
    finish_reason: str | None = None
    usage: TokenUsage | None = None
    server: ServerMetrics = field(default_factory=ServerMetrics)
    times_s: list[float] = field(default_factory=list)
    """Times of the chunks with tokens."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens at each of these times."""

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk of the answer."""
        self.ended_at_s = chunk.at_s
        if chunk.tokens:
            self.times_s.append(chunk.at_s)
            self.counts.append(chunk.tokens)
        if chunk.finish_reason is not None:
            self.finish_reason, self.finished_at_s = chunk.finish_reason, chunk.at_s
        self.usage = chunk.usage or self.usage
        self.server = chunk.server or self.server

    def metrics(self) -> dict[str, Any]:
        """Return the fields of a ``RequestSample`` that are computed here."""
        tokens, cached = self._output_tokens, self._cached
        prompt = self.usage.prompt if self.usage else None
        began_s = self.sent_at_s if self.due_at_s is None else self.due_at_s
        first_s = self.times_s[0] if self.times_s else None
        prefill_s = None if first_s is None else first_s - self.sent_at_s
        computed = None if prompt is None else max(0, prompt - (cached or 0))
        server = self.server
        return {
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "output_tokens": tokens,
            "counted_by": "usage" if self._reported_tokens is not None else "chunks",
            "pieces": len(self.counts),
            "ttft_ms": None if first_s is None else (first_s - began_s) * 1e3,
            **(self._gaps_ms() if self._has_token_times(tokens) else {}),
            "prefill_tok_s": computed / prefill_s if computed and prefill_s else None,
            "decode_tok_s": self._decode_rate(tokens) if self._has_token_times(tokens) else None,
            "e2e_ms": (self.ended_at_s - began_s) * 1e3,
            "queue_ms": server.queue_ms,
            "server_ttft_ms": server.ttft_ms,
            "server_prefill_tok_s": server.prefill_tok_s,
            "server_decode_tok_s": server.decode_tok_s,
            "peak_memory_gb": server.peak_memory_gb,
            "drafted_tokens": server.drafted_tokens,
            "accepted_tokens": server.accepted_tokens,
            "finish_reason": self.finish_reason,
        }

    @property
    def _reported_tokens(self) -> int | None:
        """The number of tokens reported by the server. 0 for an answer with output is ignored."""
        reported = self.usage.completion if self.usage else None
        return reported if reported or not self.counts else None

    @property
    def _output_tokens(self) -> int:
        return sum(self.counts) if self._reported_tokens is None else self._reported_tokens

    @property
    def _cached(self) -> int | None:
        reported = self.usage.cached if self.usage else None
        return self.server.cached_tokens if reported is None else reported

    def _has_token_times(self, tokens: int) -> bool:
        """Whether the pieces are so small that the time of each token is known."""
        return tokens <= MAX_TOKENS_PER_PIECE * sum(self.counts)

    def _decode_rate(self, tokens: int) -> float | None:
        """Divide the number of tokens after the first chunk by the time from that chunk to the last token."""
        if not self.times_s or tokens <= self.counts[0]:
            return None
        # The last tokens may have no text, such as the end-of-text token.
        elapsed_s = max(self.times_s[-1], self.finished_at_s or 0.0) - self.times_s[0]
        return (tokens - self.counts[0]) / elapsed_s if elapsed_s > 0 else None

    def _gaps_ms(self) -> dict[str, float]:
        """Return percentiles of the time between two tokens. The tokens of a piece share the time before it."""
        if len(self.times_s) < 2:
            return {}
        counts = np.asarray(self.counts[1:])
        gaps_ms = np.repeat(np.diff(self.times_s) / counts, counts) * 1e3
        percentiles = np.percentile(gaps_ms, (50, 95, 99))
        return {f"itl_ms_p{level}": float(value) for level, value in zip((50, 95, 99), percentiles, strict=True)}
