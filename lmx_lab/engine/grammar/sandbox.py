"""Compiling a grammar, and trying it in a process of its own: callers write grammars, and some crash or take for ever.

The process runs this file, so it imports nothing of the package. It gets ``Words`` and lists of grammars, and answers
each list with JSON: ``reason``, empty if the first compiles, and ``part``, which of the others is to blame.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

T = TypeVar("T")
# Twenty times the default: an object with 1,000 optional properties has 4,000 items in a row. A step's are fewer than
# the default: they are computed between the tokens of other answers, 20,000 in about 40 ms.
LIMITS = LLParserLimits(max_items_in_row=40_000, step_max_items=20_000)
STACK_BYTES = 512 * 2**20
"""Chains of rules and references recurse: 3,000 overflow the usual 8 MB. Only what is used takes memory."""
MEMORY_BYTES = 4 * 2**30
CPU_S = 30
STEPS, WALKS = 24, 2
SLOWEST_S = 0.25
SLOW_WALK_S = 0.6
_stacks = threading.Lock()


@dataclass(frozen=True, eq=False)
class Words:
    """A vocabulary as llguidance wants to see it."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_tokens: list[int]
    bos_token_id: None = None

    @property
    def eos_token_id(self) -> int:
        return self.eos_tokens[0]

    def __call__(self, text: str) -> list[int]:
        # For forced text, which our grammars forbid to look for: see ``grammar.NO_FORCING``.
        return []


def tokenizer_of(words: Words) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=words.eos_tokens)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning, its first mask computed; it may be in its error state."""

    def compile_() -> LLMatcher:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    return _on_large_stack(compile_)


def _on_large_stack(work: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="lmx-lab-compile")
    with _stacks:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return results[0]


def _tried(tokenizer: LLTokenizer, grammar: str) -> str:
    matcher = compiled(tokenizer, grammar)
    for seed in range(WALKS):
        if matcher.is_error():
            break
        if reason := _walk(matcher.deep_copy(), random.Random(seed)):
            return reason
    return matcher.get_error()


def _walk(matcher: LLMatcher, draw: random.Random) -> str:
    """Some steps of an answer, as the engine's thread would take them; what is wrong with them, if anything is."""
    spent = 0.0
    for step in range(STEPS):
        started = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask and not matcher.is_error():
            matcher.consume_token(_drawn(mask, draw))
        took = time.thread_time() - started
        spent += took
        if matcher.is_error():
            return matcher.get_error()
        if not mask or matcher.is_stopped():
            return "" if mask or step else "no text can follow it"
        if took > SLOWEST_S or spent > SLOW_WALK_S:
            return f"a token of such an answer takes {1e3 * spent / (step + 1):.0f} ms to check; simplify it"
    return ""


def _drawn(mask: int, draw: random.Random) -> int:
    """One of the allowed tokens, by the first that is allowed after a place drawn at random."""
    behind = mask >> (place := draw.randrange(mask.bit_length()))
    return place + (behind & -behind).bit_length() - 1


def _answer(tokenizer: LLTokenizer, grammars: list[str]) -> str:
    reason, part = _tried(tokenizer, grammars[0]), None
    if reason:
        reasons = (_tried(tokenizer, grammar) for grammar in grammars[1:])
        part, reason = next(((at, own) for at, own in enumerate(reasons) if own), (None, reason))
    return json.dumps({"reason": reason, "part": part})


def _limit(kind: int, soft: int, hard: int) -> None:
    # Not every system has every limit, and a container may have set lower ones.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (soft, hard))


def _watch(parent: int) -> None:
    """End with the parent, even while a grammar is being compiled."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(channel: Connection, parent: int) -> None:
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    _limit(resource.RLIMIT_AS, MEMORY_BYTES, MEMORY_BYTES)
    tokenizer: LLTokenizer | None = None
    while True:
        try:
            asked = channel.recv()
        except (EOFError, OSError):
            return
        # Nobody may be left to end a process that is busy.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + CPU_S, resource.RLIM_INFINITY)
        if isinstance(asked, list):
            assert tokenizer is not None
            channel.send_bytes(_answer(tokenizer, asked).encode())
        else:
            tokenizer = tokenizer_of(Words(*asked))
            channel.send_bytes(b"{}")


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), parent=int(sys.argv[2]))
