"""Computes the metrics of one request from its chunks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmx_lab.bench.chunks import Chunk, ServerFigures
from lmx_lab.client.chat_chunks import TokenUsage

COARSE = 2
"""Mean number of tokens in a piece up to which times of pieces count as times of tokens."""


@dataclass(kw_only=True)
class Trace:
    """Times and token counts of one request, without text."""

    sent_at_s: float
    """Like all times here by ``time.perf_counter``."""
    due_at_s: float | None = None
    """When the request was due, if arrivals are scheduled."""
    ended_at_s: float
    """Time of the last chunk or of the failure."""
    finished_at_s: float | None = None
    """Time of the finish reason, which is sent with or right after the last token."""
    finish_reason: str | None = None
    usage: TokenUsage | None = None
    server: ServerFigures = field(default_factory=ServerFigures)
    times_s: list[float] = field(default_factory=list)
    """Times of the chunks with tokens."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens at each of these times."""

    def add(self, chunk: Chunk) -> None:
        self.ended_at_s = chunk.at_s
        if chunk.tokens:
            self.times_s.append(chunk.at_s)
            self.counts.append(chunk.tokens)
        if chunk.finish_reason is not None:
            self.finish_reason, self.finished_at_s = chunk.finish_reason, chunk.at_s
        self.usage = chunk.usage or self.usage
        self.server = chunk.server or self.server

    def figures(self) -> dict[str, Any]:
        """The fields of a ``Sample`` that are computed here."""
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
            "counted_by": "usage" if self._counted is not None else "chunks",
            "pieces": len(self.counts),
            "ttft_ms": None if first_s is None else (first_s - began_s) * 1e3,
            **(self._gaps_ms() if self._is_fine(tokens) else {}),
            "prefill_tok_s": computed / prefill_s if computed and prefill_s else None,
            "decode_tok_s": self._decode_rate(tokens) if self._is_fine(tokens) else None,
            "e2e_ms": (self.ended_at_s - began_s) * 1e3,
            "queue_ms": server.queue_ms,
            "server_ttft_ms": server.ttft_ms,
            "server_prefill_tok_s": server.prefill_tok_s,
            "server_decode_tok_s": server.decode_tok_s,
            "peak_memory_gb": server.peak_memory_gb,
            "finish_reason": self.finish_reason,
        }

    @property
    def _counted(self) -> int | None:
        """The server's token count; a count of 0 for an answer with tokens is ignored."""
        counted = self.usage.completion if self.usage else None
        return counted if counted or not self.counts else None

    @property
    def _output_tokens(self) -> int:
        return sum(self.counts) if self._counted is None else self._counted

    @property
    def _cached(self) -> int | None:
        reported = self.usage.cached if self.usage else None
        return self.server.cached_tokens if reported is None else reported

    def _is_fine(self, tokens: int) -> bool:
        """Whether the pieces are small enough to know the time of each token."""
        return tokens <= COARSE * sum(self.counts)

    def _decode_rate(self, tokens: int) -> float | None:
        """Number of tokens after the first chunk, divided by the time from there to the last token."""
        if not self.times_s or tokens <= self.counts[0]:
            return None
        # The last tokens may have no text, such as the end-of-text token.
        elapsed_s = max(self.times_s[-1], self.finished_at_s or 0.0) - self.times_s[0]
        return (tokens - self.counts[0]) / elapsed_s if elapsed_s > 0 else None

    def _gaps_ms(self) -> dict[str, float]:
        """Percentiles of the time between two pieces. The tokens of a piece share the time before it."""
        if len(self.times_s) < 2:
            return {}
        counts = np.asarray(self.counts[1:])
        gaps_ms = np.repeat(np.diff(self.times_s) / counts, counts) * 1e3
        found = np.percentile(gaps_ms, (50, 95, 99))
        return {f"itl_ms_p{level}": float(value) for level, value in zip((50, 95, 99), found, strict=True)}
