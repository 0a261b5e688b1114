"""What comes of one request, piece by piece: figures and no text. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmx_lab.client.errors import CHAT_SERVER, CHECK, error_in_chat_event
from lmx_lab.errors import WrongServerError

SPOKEN = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "function_call")
"""A delta with one of these has something of the answer in it."""
MOST = 2**53


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens, by the server's count."""

    prompt: int | None
    cached: int | None
    output: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFigures:
    """What the server says about the request's times; None where it says nothing."""

    queue_ms: float | None = None
    ttft_ms: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    peak_memory_gb: float | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What came at one moment; a sign of life where it has nothing else."""

    at_s: float
    """By ``time.perf_counter``."""
    tokens: int = 0
    """The bare engine's count; of a server 1 for a piece of the answer, which may hold several tokens."""
    finish_reason: str | None = None
    usage: Usage | None = None
    server: ServerFigures | None = None


class ChunkReader:
    """Chunks out of the events of one answer.

    Args:
        url: The server's, for the words of errors.
    """

    def __init__(self, url: str) -> None:
        self.finished = False
        self._url = url

    def read(self, data: bytes, at_s: float) -> Chunk:
        """
        Raises:
            LabError: the error that the event tells of, or that it is no chunk.
        """
        # Of dict and not of Mapping: this runs at every token.
        chunk = _document(data)
        if not isinstance(chunk, dict):
            raise WrongServerError(f"{self._url} sent {data[:80]!r} in a stream, unlike {CHAT_SERVER.kind}; {CHECK}")
        choices = chunk.get("choices")
        # Some servers have "error": null in every chunk.
        if chunk.get("error") or not choices:
            error = error_in_chat_event(data.decode(errors="replace"), self._url)
            if error is not None:
                raise error
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        whole = choice.get("message")
        said = whole if isinstance(whole, dict) else choice.get("delta")
        reason = choice.get("finish_reason")
        self.finished = self.finished or bool(reason) or isinstance(whole, dict)
        timings = chunk.get("timings")
        return Chunk(
            at_s=at_s,
            tokens=1 if isinstance(said, dict) and any(said.get(name) for name in SPOKEN) else 0,
            finish_reason=str(reason)[:40] if reason else None,
            usage=_usage(chunk.get("usage")),
            server=_figures(timings) if isinstance(timings, dict) else None,
        )


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    return Usage(
        prompt=_count(value.get("prompt_tokens")),
        cached=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        output=_count(value.get("completion_tokens")),
    )


def _figures(timings: Mapping[str, Any]) -> ServerFigures:
    """Of ``timings`` as llama.cpp and the lab send them; the lab's has more."""
    return ServerFigures(
        queue_ms=_number(timings.get("queue_ms")),
        ttft_ms=_number(timings.get("ttft_ms")),
        prefill_tok_s=_number(timings.get("prompt_per_second")) or None,
        decode_tok_s=_number(timings.get("predicted_per_second")) or None,
        peak_memory_gb=_number(timings.get("peak_memory_gb")),
        cached_tokens=_count(timings.get("cache_n")),
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and 0 <= value <= MOST else None


def _count(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
