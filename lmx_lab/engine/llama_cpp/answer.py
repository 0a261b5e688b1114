"""Convert the events that llama.cpp streams to the deltas of an answer, and find the ids of tokens that it did not
report. Pure: the caller passes the time.

While its text ends within a character, llama.cpp's server sends nothing, and later only the last token of the
character. The tokens before that one are those whose bytes are the rest of the text that was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from lmx_lab.engine.llama_cpp.request import Route
from lmx_lab.engine.requests import GenerationRequest
from lmx_lab.engine.text.channels import ChannelFormat
from lmx_lab.engine.text.splitter import SplitText, TextSplitter, read_start
from lmx_lab.values.outputs import (
    Delta,
    FinishReason,
    GenerationReport,
    PromptProgress,
    TokenLogprob,
    ToolCallDelta,
    token_text,
)

FINISHES: Mapping[str, FinishReason] = {
    "eos": "stop", "word": "stop", "stop": "stop", "tool_calls": "tool_calls", "limit": "length", "length": "length",
}  # fmt: skip
MAX_TOKEN_BYTES = 16
"""Longer tokens do not end within a character."""
MAX_SEQUENCES = 16


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Missing tokens of an answer."""

    at: int
    """Number of known tokens before them."""
    count: int
    text: str
    """The text that they form with ``last``; empty if the answer ended within a character."""
    last: tuple[int, ...]
    """Ids of the tokens that were sent with the text."""


class TokenIndex:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._ids: dict[bytes, list[int]] = defaultdict(list)
        for token, data in enumerate(tokens):
            self._ids[data].append(token)

    def candidates(self, gap: Gap) -> list[tuple[int, ...]]:
        """Return the sequences of tokens that may fill a gap, at most ``MAX_SEQUENCES``."""
        known = b"".join(self._tokens[token] for token in gap.last)
        data = gap.text.encode()
        if not data or not data.endswith(known):
            return []
        return list(islice(self._sequences(data[: len(data) - len(known)], gap.count), MAX_SEQUENCES))

    def _sequences(self, data: bytes, count: int) -> Iterator[tuple[int, ...]]:
        if not count:
            if not data:
                yield ()
            return
        for end in range(1, min(len(data) - count + 1, MAX_TOKEN_BYTES) + 1):
            for token in self._ids.get(data[:end], ()):
                for rest in self._sequences(data[end:], count - 1):
                    yield (token, *rest)


def choose(candidates: Sequence[tuple[int, ...]], gap: Gap, usual: Sequence[int]) -> tuple[int, ...] | None:
    """Return the only candidate, or the one that the tokenizer would use; None if there is none.

    Args:
        usual: The tokens of the gap's text, as the tokenizer returns them.
    """
    if len(candidates) == 1:
        return candidates[0]
    length = gap.count + len(gap.last)
    return next((each for each in candidates if (*each, *gap.last) == tuple(usual[-length:])), None)


@dataclass(frozen=True, kw_only=True)
class AnswerBeginning:
    """The first tokens of an answer, which are not generated."""

    tokens: list[int]
    texts: list[str]
    """The text of each token as llama.cpp would stream it: a special token has none, unless it is a marker."""
    ends: bool
    """Whether the last of them ends the answer."""


class AnswerReader:
    """Reads the events of one answer; ``report`` returns its tokens and times.

    llama.cpp holds back incomplete characters, and sends their text with the log-probability of their last token only.
    """

    def __init__(
        self,
        request: GenerationRequest,
        route: Route,
        channel_format: ChannelFormat | None,
        *,
        model: str,
        named_tokens: Sequence[int] = (),
        prompt_tokens: int,
        arrived_at: float,
    ) -> None:
        self._request = request
        self._read = self._read_completion if route == "/completion" else self._read_chat
        self._splitter: TextSplitter[TokenLogprob] = TextSplitter(
            "".join, request.stop, channel_format, min_tokens=request.min_tokens
        )
        self._plain = channel_format is None and not request.stop and request.top_logprobs is None
        """Whether the text needs no processing, and is passed on unchanged."""
        self._model = model
        self._named_tokens = named_tokens
        self._prompt_tokens = prompt_tokens
        self._arrived_at = arrived_at
        self._admitted_at: float | None = None
        self._first_token_at: float | None = None
        self._has_called = False
        self._hidden: TokenLogprob | None = None
        """Log-probability of the last token if the token has no text: it may be the token that ends the answer."""
        self._reasoning_tokens = 0
        self.computed_tokens = 0
        """Number of prompt tokens that have been computed, without cached ones."""
        self.cached_tokens = 0
        self.restored_tokens = 0
        """Number of prompt tokens in the slot that was restored from disk for this request."""
        self.slot: int | None = None
        """Id of the slot; None on the chat route, which does not report it."""
        self.output_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self.tokens: list[int] = []
        """Ids of the output tokens, without those in ``gaps``."""
        self.gaps: list[Gap] = []
        """The tokens whose ids llama.cpp did not send, because it had held back incomplete characters."""
        self.sent_ids = 0
        """Number of ids that are in deltas. From the first gap on, ids are sent at the end."""
        self.pieces: list[int | str] = []
        """The output as ids of tokens, or as text where ids are missing."""
        self._tokens_before = self._drafted_before = self._accepted_before = 0
        """Numbers of output tokens, drafted and accepted tokens before the last pause."""
        self.finish: FinishReason | None = None
        """Set at the end of the answer. Events after that are ignored."""

    @property
    def disk_cached_tokens(self) -> int:
        """Number of cached tokens that were read from disk."""
        return min(self.restored_tokens, self.cached_tokens)

    @property
    def slot_tokens(self) -> int:
        """Number of tokens in the KV cache of the slot."""
        return self.cached_tokens + self.computed_tokens + self.output_tokens

    def begin(self, now: float) -> PromptProgress:
        """Record that the request has a slot, and return the first progress."""
        self._admitted_at = now
        return PromptProgress(done=0, total=self._prompt_tokens)

    def read_start(self, start: AnswerBeginning, *, is_full: bool) -> Delta:
        """Return the beginning of an answer that is continued. Sets ``finish`` if the answer ends there.

        Args:
            is_full: Whether no more tokens may follow.
        """
        finish: FinishReason | None = "stop" if start.ends else "length" if is_full else None
        if self._plain:
            self.finish = finish
            return Delta(text="".join(start.texts), tokens=len(start.tokens), ids=tuple(start.tokens))
        delta, self.finish = read_start(self._splitter, start.texts, ids=start.tokens, finish=finish)
        return delta

    @property
    def can_continue(self) -> bool:
        """Whether another request with the tokens so far would continue the answer."""
        return self.finish is None and 0 < self.output_tokens == len(self.tokens) and self._hidden is None

    def reaches(self, tokens: int) -> bool:
        """Return whether the current request has generated this number of tokens, and the answer continues."""
        return self.finish is None and self._tokens_before < tokens <= self.output_tokens

    def pause(self) -> None:
        """Record that the next events are those of another request, whose prompt includes the output so far."""
        self._tokens_before = self.output_tokens
        self._drafted_before, self._accepted_before = self.drafted_tokens, self.accepted_tokens

    def read(self, chunk: Mapping[str, Any], now: float) -> Iterator[Delta | PromptProgress]:
        """Yield the items for the reader that one event contains."""
        if self.finish is not None:
            return
        if (progress := chunk.get("prompt_progress")) is not None:
            if self._tokens_before:
                return
            self.cached_tokens = min(int(progress["cache"]), self._prompt_tokens - 1)
            done = int(progress["processed"])
            self.computed_tokens = max(0, done - self.cached_tokens)
            yield PromptProgress(done=done, total=self._prompt_tokens)
            return
        if (timings := chunk.get("timings")) is not None:
            self.drafted_tokens = self._drafted_before + int(timings.get("draft_n", 0))
            self.accepted_tokens = self._accepted_before + int(timings.get("draft_n_accepted", 0))
        yield from self._read(chunk, now)

    def last_ids(self, found: Sequence[Sequence[int]]) -> Delta:
        """Return the ids that were not sent yet.

        Args:
            found: The tokens of the gaps; those of the last one may be missing.
        """
        tokens, at = [], self.sent_ids
        for gap, missing in zip(self.gaps, found, strict=False):
            tokens += [*self.tokens[at : gap.at], *missing]
            at = gap.at
        return Delta(text="", tokens=0, ids=(*tokens, *self.tokens[at:]))

    def report(self, now: float, *, peak_memory_bytes: int = 0) -> GenerationReport:
        """Return the report of the answer, which has ended."""
        assert self.finish is not None
        admitted_at = self._admitted_at if self._admitted_at is not None else now
        first_at = self._first_token_at if self._first_token_at is not None else now
        # llama.cpp counts the forward pass that computed the first token as prompt time, which would make the speed of
        # short answers too high.
        if self.output_tokens > 1:
            forward_pass_s = (now - first_at) / (self.output_tokens - 1)
        else:
            forward_pass_s = (first_at - admitted_at) / (self.computed_tokens + 1)
        decoding_at = max(admitted_at, first_at - forward_pass_s)
        return GenerationReport(
            model=self._model,
            finish_reason=self.finish,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached_tokens,
            disk_cached_tokens=self.disk_cached_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self._reasoning_tokens + self._splitter.reasoning_tokens,
            queue_s=admitted_at - self._arrived_at,
            prefill_s=decoding_at - admitted_at,
            ttft_s=first_at - self._arrived_at,
            decode_s=now - decoding_at,
            peak_memory_bytes=peak_memory_bytes,
            stop_sequence=self._splitter.stop_string,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )

    def _read_completion(self, chunk: Mapping[str, Any], now: float) -> Iterator[Delta]:
        tokens = self._count(self._tokens_before + int(chunk["tokens_predicted"]), now)
        ids = tuple(chunk.get("tokens") or ())
        if tokens > len(ids):
            self.gaps.append(Gap(at=len(self.tokens), count=tokens - len(ids), text=chunk["content"], last=ids))
        self.tokens += ids
        self.pieces += ids if len(ids) == tokens else [chunk["content"]]
        if self.gaps:
            ids = ()
        self.sent_ids += len(ids)
        entries = self._entries(chunk.get("completion_probabilities", ()))
        yield from self._text(chunk["content"], tokens, entries, ids)
        self.slot = chunk.get("id_slot", self.slot)
        if chunk["stop"] and self.finish is None:
            yield from self._end(FINISHES.get(chunk["stop_type"], "stop"))

    def _read_chat(self, chunk: Mapping[str, Any], now: float) -> Iterator[Delta]:
        tokens = self._count(int(chunk.get("timings", {}).get("predicted_n", 0)), now)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if reasoning := delta.get("reasoning_content") or "":
                self._reasoning_tokens += tokens
            calls = []
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                name, arguments = function.get("name") or None, function.get("arguments") or ""
                index, id_ = int(call.get("index", 0)), call.get("id") or None
                calls.append(ToolCallDelta(index=index, id=id_, name=name, arguments=arguments))
            self._has_called = self._has_called or bool(calls)
            if reasoning or calls:
                yield Delta(text="", tokens=tokens, reasoning=reasoning, tool_calls=tuple(calls))
                tokens = 0
            entries = self._entries((choice.get("logprobs") or {}).get("content") or ())
            yield from self._text(delta.get("content") or "", tokens, entries)
            if choice["finish_reason"] is not None and self.finish is None:
                yield from self._end(FINISHES.get(choice["finish_reason"], "stop"))

    def _count(self, predicted: int, now: float) -> int:
        """Return the number of new tokens, and record when the first one arrived."""
        new = max(0, predicted - self.output_tokens)
        self.output_tokens += new
        if new and self._first_token_at is None:
            self._first_token_at = now
        return new

    def _text(
        self, text: str, tokens: int, entries: Sequence[TokenLogprob], ids: tuple[int, ...] = ()
    ) -> Iterator[Delta]:
        if not (text or tokens):
            return
        if self._plain:
            yield Delta(text=text, tokens=tokens, ids=ids)
            return
        known = [*filter(None, [self._hidden]), *entries]
        self._hidden = known.pop() if entries and not text and not entries[-1].bytes else None
        for entry in known[:-1]:
            # The text of tokens that form one character comes with the last of them.
            yield _delta(self._splitter.add("", entry, count=0), 0)
        piece = self._splitter.add(text, known[-1] if known else None, count=tokens)
        yield _delta(piece, tokens, ids)
        if piece.stopped:
            self.finish = "tool_calls" if self._splitter.has_called else "stop"

    def _end(self, reason: FinishReason) -> Iterator[Delta]:
        if self._hidden is not None:
            # No stop strings are sent to llama.cpp, so the reason "stop" means that the model ended its text.
            ending = replace(self._hidden, ends=reason != "length")
            yield _delta(self._splitter.add("", ending, count=0), 0)
        piece = self._splitter.finish()
        yield _delta(piece, 0)
        if piece.stopped:
            reason = "stop"
        called = self._has_called or self._splitter.has_called
        self.finish = "tool_calls" if called and reason == "stop" else reason

    def _entries(self, entries: Sequence[Mapping[str, Any]]) -> list[TokenLogprob]:
        if self._request.top_logprobs is None:
            return []
        return [_logprob(entry, self._request.top_logprobs, self._named_tokens) for entry in entries]


def _logprob(entry: Mapping[str, Any], top: int = 0, named: Sequence[int] = ()) -> TokenLogprob:
    data = bytes(entry["bytes"])
    # All tokens, if some are named.
    others = list(entry.get("top_logprobs") or ())
    found = {other["id"]: other for other in others if other["id"] in named} if named else {}
    return TokenLogprob(
        token=int(entry["id"]),
        text=token_text(data),
        bytes=data,
        logprob=float(entry["logprob"]),
        top=tuple(_logprob(other) for other in others[:top]),
        named=tuple(_logprob(found[token]) for token in named if token in found),
    )


def _delta(piece: SplitText[TokenLogprob], tokens: int, ids: tuple[int, ...] = ()) -> Delta:
    return Delta(
        text=piece.text,
        tokens=tokens,
        logprobs=piece.entries,
        reasoning=piece.reasoning,
        tool_calls=piece.calls,
        ids=ids,
    )
