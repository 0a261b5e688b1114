"""Compute tokens per second from the times of pieces of text."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from benchmarks.bench import BenchError
from benchmarks.client import Answer


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Times of the pieces of a stream, and its number of tokens. A piece may contain several tokens or parts of one."""

    times: list[float]
    tokens: int

    def tokens_until(self, at: float) -> float:
        return self.tokens * bisect_right(self.times, at) / len(self.times)


def timeline(answer: Answer) -> Timeline:
    return Timeline(times=answer.times, tokens=answer.tokens)


@dataclass(frozen=True, kw_only=True)
class Window:
    """An interval, and the number of tokens that all streams received in it."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def decode_window(streams: list[Timeline]) -> Window:
    """Return the interval in which all streams decode: from the latest first token to the earliest last token.

    It excludes prefill on every side, independent of the order in which prompts are computed.

    Raises:
        BenchError: The interval contains less than a quarter of the tokens.
    """
    start, stop = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    tokens = sum(s.tokens_until(stop) - s.tokens_until(start) for s in streams)
    if stop <= start or tokens < sum(s.tokens for s in streams) / 4:
        raise BenchError("the streams decoded at different times; make the answers longer")
    return Window(tokens=tokens, seconds=stop - start)


def overall_rate(answers: list[Answer]) -> float:
    """Return the tokens per second from the first request to the end of the last answer, which includes prefill."""
    started, ended = min(a.sent_at for a in answers), max(a.ended_at for a in answers)
    return sum(a.tokens for a in answers) / (ended - started)


def quantile(values: list[float], q: float) -> float:
    """Return the smallest value such that at least the share ``q`` of all values is at or below it."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
