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

from lmx_lab.engine.answers import Generation
from lmx_lab.engine.llama_cpp.request import Route
from lmx_lab.values.outputs import (
    Delta,
    FinishReason,
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


class AnswerReader:
    """Reads the events of one answer, and adds them to its generation, whose ``row`` it is.

    llama.cpp holds back incomplete characters, and sends their text with the log-probability of their last token only.

    Args:
        chat: Messages, tools and template variables for the chat route; empty for the other one.
    """

    def __init__(self, route: Route, chat: Mapping[str, Any]) -> None:
        self.route = route
        self.chat = chat
        self._has_called = False
        self._hidden: TokenLogprob | None = None
        """Log-probability of the last token if the token has no text: it may be the token that ends the answer."""
        self.restored_tokens = 0
        """Number of prompt tokens in the slot that was restored from disk for this request."""
        self.slot: int | None = None
        """Id of the slot; None on the chat route, which does not report it."""
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

    def can_continue(self, generation: LlamaGeneration) -> bool:
        """Return whether another request with the tokens so far would continue the answer: llama.cpp keeps no state of
        it except the tokens.

        A grammar, the parser of the chat format and the random numbers of a seed would start from the beginning.
        """
        sampling, output_tokens = generation.request.sampling, generation.output_tokens
        has_seed = sampling.seed is not None and sampling.temperature > 0
        if self.route != "/completion" or generation.grammar is not None or has_seed:
            return False
        return generation.finish is None and 0 < output_tokens == len(self.tokens) and self._hidden is None

    def reaches(self, generation: LlamaGeneration, tokens: int) -> bool:
        """Return whether the current request has generated this number of tokens, and the answer continues."""
        return generation.finish is None and self._tokens_before < tokens <= generation.output_tokens

    def pause(self, generation: LlamaGeneration) -> None:
        """Record that the next events are those of another request, whose prompt includes the output so far."""
        self._tokens_before = generation.output_tokens
        self._drafted_before, self._accepted_before = generation.drafted_tokens, generation.accepted_tokens

    def read(
        self, generation: LlamaGeneration, chunk: Mapping[str, Any], now: float
    ) -> Iterator[Delta | PromptProgress]:
        """Yield the items for the reader that one event contains. Events after the end of the answer are ignored."""
        if generation.finish is not None:
            return
        if (progress := chunk.get("prompt_progress")) is not None:
            if self._tokens_before:
                return
            total = len(generation.prompt)
            generation.cached_tokens = min(int(progress["cache"]), total - 1)
            generation.disk_cached_tokens = min(self.restored_tokens, generation.cached_tokens)
            done = int(progress["processed"])
            generation.computed_tokens = max(0, done - generation.cached_tokens)
            yield PromptProgress(done=done, total=total)
            return
        if (timings := chunk.get("timings")) is not None:
            generation.drafted_tokens = self._drafted_before + int(timings.get("draft_n", 0))
            generation.accepted_tokens = self._accepted_before + int(timings.get("draft_n_accepted", 0))
        read = self._read_completion if self.route == "/completion" else self._read_chat
        yield from read(generation, chunk, now)

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

    def _read_completion(self, generation: LlamaGeneration, chunk: Mapping[str, Any], now: float) -> Iterator[Delta]:
        tokens = max(0, self._tokens_before + int(chunk["tokens_predicted"]) - generation.output_tokens)
        ids = tuple(chunk.get("tokens") or ())
        if tokens > len(ids):
            self.gaps.append(Gap(at=len(self.tokens), count=tokens - len(ids), text=chunk["content"], last=ids))
        self.tokens += ids
        self.pieces += ids if len(ids) == tokens else [chunk["content"]]
        if self.gaps:
            ids = ()
        self.sent_ids += len(ids)
        entries = _entries(generation, chunk.get("completion_probabilities", ()))
        yield from self._text(generation, chunk["content"], now, tokens=tokens, entries=entries, ids=ids)
        self.slot = chunk.get("id_slot", self.slot)
        if chunk["stop"] and generation.finish is None:
            yield from self._end(generation, FINISHES.get(chunk["stop_type"], "stop"))

    def _read_chat(self, generation: LlamaGeneration, chunk: Mapping[str, Any], now: float) -> Iterator[Delta]:
        predicted = int(chunk.get("timings", {}).get("predicted_n", 0))
        tokens = max(0, predicted - generation.output_tokens)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if reasoning := delta.get("reasoning_content") or "":
                generation.splitter.reasoning_tokens += tokens
            calls = []
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                name, arguments = function.get("name") or None, function.get("arguments") or ""
                index, id_ = int(call.get("index", 0)), call.get("id") or None
                calls.append(ToolCallDelta(index=index, id=id_, name=name, arguments=arguments))
            self._has_called = self._has_called or bool(calls)
            if reasoning or calls:
                generation.count_tokens(tokens, now)
                yield Delta(text="", tokens=tokens, reasoning=reasoning, tool_calls=tuple(calls))
                tokens = 0
            entries = _entries(generation, (choice.get("logprobs") or {}).get("content") or ())
            yield from self._text(generation, delta.get("content") or "", now, tokens=tokens, entries=entries)
            if choice["finish_reason"] is not None and generation.finish is None:
                yield from self._end(generation, FINISHES.get(choice["finish_reason"], "stop"))

    def _text(
        self,
        generation: LlamaGeneration,
        text: str,
        now: float,
        *,
        tokens: int,
        entries: Sequence[TokenLogprob],
        ids: tuple[int, ...] = (),
    ) -> Iterator[Delta]:
        if not (text or tokens):
            return
        if generation.splitter.is_plain and not generation.start and generation.request.top_logprobs is None:
            # It needs no processing, and is passed on unchanged.
            generation.count_tokens(tokens, now)
            yield Delta(text=text, tokens=tokens, ids=ids)
            return
        known = [*filter(None, [self._hidden]), *entries]
        self._hidden = known.pop() if entries and not text and not entries[-1].bytes else None
        for entry in known[:-1]:
            # The text of tokens that form one character comes with the last of them.
            yield generation.add("", now, entry=entry, count=0)
        yield generation.add(text, now, entry=known[-1] if known else None, count=tokens, ids=ids)

    def _end(self, generation: LlamaGeneration, reason: FinishReason) -> Iterator[Delta]:
        if self._hidden is not None:
            # No stop strings are sent to llama.cpp, so the reason "stop" means that the model ended its text.
            ending = replace(self._hidden, ends=reason != "length")
            yield generation.add("", 0.0, entry=ending, count=0)
        yield generation.complete("length" if reason == "length" else "stop")
        if self._has_called and generation.finish == "stop":
            generation.finish = "tool_calls"


LlamaGeneration = Generation[AnswerReader]


def set_decoding_at(generation: LlamaGeneration, now: float) -> None:
    """Estimate when the prompt of an answer that ends now was computed.

    llama.cpp counts the forward pass that computed the first token as prompt time, which would make the speed of short
    answers too high.
    """
    first_at, admitted_at = generation.first_token_at or now, generation.admitted_at
    if generation.output_tokens > 1:
        forward_pass_s = (now - first_at) / (generation.output_tokens - 1)
    else:
        forward_pass_s = (first_at - admitted_at) / (generation.computed_tokens + 1)
    generation.decoding_at = max(admitted_at, first_at - forward_pass_s)


def _entries(generation: LlamaGeneration, entries: Sequence[Mapping[str, Any]]) -> list[TokenLogprob]:
    if (top := generation.request.top_logprobs) is None:
        return []
    return [_logprob(entry, top, generation.named_tokens) for entry in entries]


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
