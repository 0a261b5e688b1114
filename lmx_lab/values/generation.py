"""Pieces of an answer, their log-probabilities, and the report on what the answer cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token and how likely the model held it, after penalties and bias, before temperature and cuts."""

    token: int
    text: str
    """What the token is; ``bytes:\\xe2\\x82`` where it is only a part of a character."""
    bytes: bytes
    """What it adds to the text: nothing, if it is a special token in an answer."""
    logprob: float | None
    """Natural logarithm; None for the first token of a prompt, which nothing precedes."""
    ends: bool = False
    """The model ended its text with this token."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in this place, likeliest first; their own ``top`` is empty."""


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """A piece of a tool call. The first piece of each has its id and its name."""

    index: int
    """Which call of the answer."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """All pieces joined are a JSON object, unless the answer was cut off."""


def merged_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One piece for each call: its arguments joined, in the order in which the calls began."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return tuple(
        ToolCallDelta(
            index=index,
            id=next((part.id for part in parts if part.id is not None), None),
            name=next((part.name for part in parts if part.name is not None), None),
            arguments="".join([part.arguments for part in parts]),
        )
        for index, parts in calls.items()
    )


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A piece of an answer and the number of tokens that made it. It may show nothing: text can be held back."""

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens whose text has gone out with this piece, and at the end of the token that ended the text."""
    reasoning: str = ""
    """Of the model's thoughts, which come before the text."""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @property
    def shows(self) -> bool:
        """Whether there is anything in it but a number of tokens."""
        return bool(self.text or self.reasoning or self.tool_calls or self.logprobs)


def joined(deltas: Sequence[Delta]) -> Delta:
    """All of them as one."""
    return Delta(
        text="".join([delta.text for delta in deltas]),
        tokens=sum([delta.tokens for delta in deltas]),
        logprobs=tuple([logprob for delta in deltas for logprob in delta.logprobs]),
        reasoning="".join([delta.reasoning for delta in deltas]),
        tool_calls=merged_calls([call for delta in deltas for call in delta.tool_calls]),
    )


@dataclass(frozen=True, kw_only=True)
class PromptProgress:
    """How far the prompt of a request that has a slot is computed, in tokens; cached ones count as done."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """The prompt's tokens, each with the log-probability that the model gave it."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """What one request cost. Feeds usage, timings, metrics and benchmarks.

    Decode is one forward pass per output token (the first one reads the last prompt token), so ``tokens_per_second``
    is ``output_tokens / decode_s``, also for a single token; prefill is every prompt token before that.
    """

    model: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    """Of the output, those of the thoughts, with the marker that ends them."""
    queue_s: float
    prefill_s: float
    ttft_s: float
    """Time to first token, from arrival."""
    decode_s: float
    peak_memory_bytes: int
    """The highest memory of the engine while the request ran, everything counted."""

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prefill_s if self.prefill_s > 0 else 0.0
