"""Write requests for the route ``/completion`` of llama.cpp's server, convert the events that it streams to the deltas
of an answer, and find the ids of tokens that it did not report. Pure: the caller passes the time.

That route generates tokens after those of a prompt. Reasoning, tool calls and stop strings are found here, as on MLX.
The route for chats is not used: it would enforce nothing (measured: it ignores a ``tool_choice`` and refuses a grammar
together with tools), and would hide the tokens of calls.

While its text ends within a character, llama.cpp's server sends nothing, and later only the last token of the
character. The tokens before that one are those whose bytes are the rest of the text that was sent.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from lmx_lab.engine.answers import Generation
from lmx_lab.engine.requests import GenerationRequest
from lmx_lab.values.outputs import (
    Delta,
    PromptProgress,
    TokenLogprob,
    token_text,
)

SAMPLERS = ("penalties", "dry", "top_p", "min_p", "top_k", "xtc", "temperature")
"""The samplers in the order of ``Sampling``; DRY and XTC are off by default. llama.cpp's default list has more
samplers, and begins with top_k."""
TRIAL_SLOT = 0
"""The slot for trials of grammars. The slots of requests follow it."""
SEEDS = 2**32 - 1
"""Number of seeds; the largest 32-bit number stands for a random seed."""
MAX_TOKEN_BYTES = 16
"""Longer tokens do not end within a character."""
MAX_SEQUENCES = 16


def sampling(request: GenerationRequest, *, choice: int, context_length: int) -> dict[str, Any]:
    """Return all sampling parameters, because llama.cpp's defaults differ from those of ``Sampling``."""
    chosen = request.sampling
    seed = -1 if chosen.seed is None else chosen.seed
    if chosen.seed is not None and (choice or not 0 <= seed < SEEDS):
        digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "big") % SEEDS
    return {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k,
        "min_p": chosen.min_p,
        "repeat_penalty": chosen.repetition_penalty,
        "presence_penalty": chosen.presence_penalty,
        "frequency_penalty": chosen.frequency_penalty,
        "repeat_last_n": context_length,
        "dry_multiplier": chosen.dry_multiplier,
        "dry_base": chosen.dry_base,
        "dry_allowed_length": chosen.dry_allowed_length,
        "dry_penalty_last_n": context_length if chosen.dry_penalty_last_n < 0 else chosen.dry_penalty_last_n,
        "xtc_probability": chosen.xtc_probability,
        "xtc_threshold": chosen.xtc_threshold,
        "samplers": list(SAMPLERS),
        "seed": seed,
        "logit_bias": [[token, bias] for token, bias in chosen.logit_bias],
        "ignore_eos": request.ignore_eos,
        # llama.cpp refuses an empty list.
        **({"dry_sequence_breakers": list(chosen.dry_sequence_breakers)} if chosen.dry_sequence_breakers else {}),
    }


def completion_body(
    request: GenerationRequest,
    prompt: Sequence[int | str],
    *,
    slot: int,
    choice: int,
    max_tokens: int,
    may_end: bool,
    context_length: int,
    grammar: str | None,
    markers: Sequence[str],
    vocabulary_size: int,
    timings: bool = False,
) -> dict[str, Any]:
    """Return the body for ``/completion``.

    Args:
        prompt: Ids of tokens, and texts.
        slot: Id of the slot.
        may_end: Whether the model may end its text.
        markers: Special tokens that the text of the answer must contain, as text.
        timings: Whether each event counts the drafted tokens, and not only the last one.
    """
    body = {
        **sampling(request, choice=choice, context_length=context_length),
        "prompt": list(prompt),
        "id_slot": slot,
        "ignore_eos": request.ignore_eos or not may_end,
        "n_predict": max_tokens,
        "stream": True,
        # Without it, a cancelled request continues until the end of its prompt (measured).
        "return_progress": True,
        "preserved_tokens": list(markers),
        "timings_per_token": timings,
    }
    if request.top_logprobs is not None:
        # A named token may have any rank.
        body["n_probs"] = vocabulary_size if request.logprob_tokens else max(1, request.top_logprobs)
    if grammar is not None:
        body["grammar"] = grammar
    return body


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
    """

    def __init__(self) -> None:
        self._hidden: TokenLogprob | None = None
        """Log-probability of the last token if the token has no text: it may be the token that ends the answer."""
        self.restored_tokens = 0
        """Number of prompt tokens in the slot that was restored from disk for this request."""
        self.slot = -1
        """Id of the slot that it last had; -1 before the first one."""
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

        A grammar and the random numbers of a seed would start from the beginning.
        """
        sampling, output_tokens = generation.request.sampling, generation.output_tokens
        has_seed = sampling.seed is not None and sampling.temperature > 0
        if generation.grammar is not None or has_seed:
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
        tokens = max(0, self._tokens_before + int(chunk["tokens_predicted"]) - generation.output_tokens)
        ids = tuple(chunk.get("tokens") or ())
        if tokens > len(ids):
            self.gaps.append(Gap(at=len(self.tokens), count=tokens - len(ids), text=chunk["content"], last=ids))
        self.tokens += ids
        self.pieces += ids if len(ids) == tokens else [chunk["content"]]
        sent = () if self.gaps else ids
        self.sent_ids += len(sent)
        entries = _entries(generation, chunk.get("completion_probabilities", ()))
        # A special token has no text.
        special = ids[0] if len(ids) == tokens == 1 and not chunk["content"] else None
        yield from self._text(
            generation, chunk["content"], now, tokens=tokens, entries=entries, ids=sent, special=special
        )
        if chunk["stop"] and generation.finish is None:
            yield from self._end(generation, "length" if chunk["stop_type"] == "limit" else "stop")

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

    def _text(
        self,
        generation: LlamaGeneration,
        text: str,
        now: float,
        *,
        tokens: int,
        entries: Sequence[TokenLogprob],
        ids: tuple[int, ...],
        special: int | None,
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
        token = text if special is None else special
        yield generation.add(token, now, entry=known[-1] if known else None, count=tokens, ids=ids)

    def _end(self, generation: LlamaGeneration, reason: Literal["stop", "length"]) -> Iterator[Delta]:
        if self._hidden is not None:
            # No stop strings are sent to llama.cpp, so the reason "stop" means that the model ended its text.
            ending = replace(self._hidden, ends=reason != "length")
            yield generation.add("", 0.0, entry=ending, count=0)
        yield generation.complete(reason)


LlamaGeneration = Generation[AnswerReader]


@dataclass(kw_only=True, eq=False)
class Slot:
    """A slot of llama.cpp. What is in it may be less than what is known here, because llama.cpp may clear it."""

    id: int
    scope: str | None = ""
    """The scope of the requests that have filled it (``GenerationRequest.scope``); None while it is not known."""
    tokens: list[int] = field(default_factory=list)
    used_at: float = 0.0
    """When it was last taken (``time.perf_counter``)."""
    user: LlamaGeneration | None = None
    """The last generation in it."""
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked while ``SlotFiles`` saves it."""


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
