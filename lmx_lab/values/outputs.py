"""Define what requests produce: deltas, log-probabilities, tool calls, progress, vectors, and the final reports."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BYTE_CODES = re.compile(r"(?:\\x[0-9a-f]{2})+")
"""Bytes in the text of a token that is only a part of a character."""
FinishReason = Literal["stop", "length", "tool_calls"]
Vectors: TypeAlias = "NDArray[np.float32]"
"""Embeddings, of shape (texts, dimensions), or scores, of shape (texts,)."""

InputType = Literal["query", "document"]

RerankMethod = Literal["cross-encoder", "decoder", "cosine"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token and its log-probability: after penalties and logit bias, before temperature, top-p, top-k and min-p."""

    token: int | None
    """Id of the token; None if the engine runs in another process, because the chat format has no ids."""
    text: str
    """Text of the token; ``bytes:\\xe2\\x82`` if it is only a part of a character."""
    bytes: bytes
    """Bytes that the token adds to the text; empty for a special token in an answer."""
    logprob: float | None
    """Natural logarithm of the probability; None for the first token of a prompt, which has no context."""
    ends: bool = False
    """Whether the model ended its text with this token."""
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this position, most likely first; their own ``top`` is empty."""
    named: tuple[TokenLogprob, ...] = ()
    """The tokens that the request names, in its order and regardless of their rank; their own ``top`` is empty."""
    rank: int | None = None
    """1 if the token is the most likely one at its position; None if the engine does not report it."""
    entropy: float | None = None
    """Entropy of the distribution at this position, in nats; None if the engine does not report it."""


def token_text(data: bytes) -> str:
    """Return the bytes of a token as text, or as ``bytes:\\xe2\\x82`` if they are not whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(text: str) -> bytes:
    """Return the bytes of a token from its text; the inverse of ``token_text``."""
    prefix, _, codes = text.partition("bytes:")
    if prefix or not BYTE_CODES.fullmatch(codes):
        return text.encode()
    return bytes.fromhex(codes.replace("\\x", ""))


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """A part of a tool call. The first delta of each call contains its id and its name."""

    index: int
    """Index of the call in the answer, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """Part of the arguments. All parts of a call together are a JSON object, unless the answer was cut off."""


def merge_tool_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Return one delta per call with all of its arguments, in the order in which the calls began."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        calls.setdefault(delta.index, []).append(delta)
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
    """A part of an answer, with the number of its tokens.

    Its text can be empty although it has tokens, for example while a possible stop string is held back.
    """

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the tokens whose text is in this delta; in the last delta also of the end token."""
    reasoning: str = ""
    """Part of the reasoning that the model writes before its answer."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    ids: tuple[int, ...] = ()
    """Ids of the tokens. There are fewer than ``tokens`` if the engine does not report all of them."""

    @property
    def has_content(self) -> bool:
        """Whether the delta contains anything except a number of tokens."""
        return bool(self.text or self.reasoning or self.tool_calls or self.logprobs)


def merge_deltas(deltas: Iterable[Delta]) -> Delta:
    """Return one delta with the contents of all deltas, in order."""
    texts: list[str] = []
    reasoning: list[str] = []
    logprobs: list[TokenLogprob] = []
    calls: list[ToolCallDelta] = []
    ids: list[int] = []
    tokens = 0
    for delta in deltas:
        texts.append(delta.text)
        reasoning.append(delta.reasoning)
        logprobs += delta.logprobs
        calls += delta.tool_calls
        ids += delta.ids
        tokens += delta.tokens
    return Delta(
        text="".join(texts),
        tokens=tokens,
        logprobs=tuple(logprobs),
        reasoning="".join(reasoning),
        tool_calls=merge_tool_calls(calls) if calls else (),
        ids=tuple(ids),
    )


def whole_characters(text: str) -> str:
    """Return a text that was cut between two tokens without the incomplete character at its end, for display."""
    # A zero-width joiner is followed by another part of the same emoji.
    return text.rstrip("\ufffd\u200d")


@dataclass(frozen=True, kw_only=True)
class PromptProgress:
    """Progress of computing the prompt of a running request, in tokens; cached tokens count as done."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """The tokens of a prompt with their log-probabilities."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """Token counts, timings and memory of one request, for usage, timings, metrics and benchmarks.

    Decoding is one forward pass per output token. The first pass reads the last prompt token, so ``tokens_per_second``
    is ``output_tokens / decode_s`` even for a single token. Prefill computes all prompt tokens before the last.
    """

    model: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    disk_cached_tokens: int = 0
    """Cached tokens whose state was read from disk."""
    output_tokens: int
    reasoning_tokens: int = 0
    """Output tokens of the reasoning, including the marker that ends it."""
    queue_s: float
    prefill_s: float
    ttft_s: float
    """Time to first token, from the arrival of the request."""
    decode_s: float
    peak_memory_bytes: int
    """Peak memory of the whole engine while the request ran."""
    stop_sequence: str | None = None
    """The stop string that ended the answer; None if it ended otherwise."""
    drafted_tokens: int = 0
    """Tokens that were drafted from earlier text and verified."""
    accepted_tokens: int = 0
    """Drafted tokens that became part of the answer."""

    @property
    def total_s(self) -> float:
        """Time from the arrival of the request to its end."""
        return self.queue_s + self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed; 0 if nothing was decoded."""
        return self.output_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prefill speed, without cached tokens; 0 if nothing was computed."""
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prefill_s if self.prefill_s > 0 else 0.0


# Embedding and reranking


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

    @property
    def tokens_per_second(self) -> float:
        """Speed of the computation; 0 if it took no time."""
        return self.tokens / self.compute_s if self.compute_s > 0 else 0.0
