"""Compile grammars with llguidance; as a sandbox worker (see ``sandbox_worker``), check that they can be used.

As a worker, the first request is a ``TokenTable`` as a pickled tuple. Each later one is a pickled list of grammars,
which is answered with JSON: ``reason``, empty if the first grammar can be enforced; ``part``, the index of the other
grammar that causes the problem; ``compile_s``, the CPU time that compiling the first grammar took; and ``used_s``, the
CPU time of the whole request.
"""

from __future__ import annotations

import json
import pickle
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# Twenty times the default: an object with 1,000 optional properties has 4,000 items in a row. The limit of a step is
# below the default, because steps are computed between the tokens of other answers: 20,000 items take about 40 ms.
LIMITS = LLParserLimits(max_items_in_row=40_000, step_max_items=20_000)
STACK_BYTES = 512 * 2**20
"""Chains of rules and references recurse: 3,000 overflow the usual 8 MB. Only the used part takes memory."""
MEMORY_BYTES = 4 * 2**30
CPU_S = 30
_stack_size_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class TokenTable:
    """A model's vocabulary in the form that llguidance expects."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_tokens: list[int]
    bos_token_id: None = None

    @property
    def eos_token_id(self) -> int:
        return self.eos_tokens[0]

    def show(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special ones. Incomplete characters become U+FFFD."""
        return b"".join([self.tokens[token] for token in tokens]).decode(errors="replace")

    def __call__(self, text: str) -> list[int]:
        # Called for forced text, which our grammars switch off: see ``NO_FORCING`` in ``grammar.build``.
        return []


def build_tokenizer(table: TokenTable) -> LLTokenizer:
    """Build llguidance's tokenizer for this vocabulary."""
    return LLTokenizer(TokenizerWrapper(table), n_vocab=len(table.tokens), eos_token=table.eos_tokens)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar and compute its first mask. The matcher may be in its error state."""
    compiled: list[LLMatcher] = []

    def work() -> None:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        compiled.append(matcher)

    thread = threading.Thread(target=work, name="lmx-lab-compile")
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return compiled[0]


# In the sandbox

_tokenizers: list[LLTokenizer] = []
"""The tokenizer of the current vocabulary."""


def handle(request: bytes) -> bytes:
    """Answer one request; see the module's docstring."""
    message = pickle.loads(request)
    if isinstance(message, tuple):
        _tokenizers[:] = [build_tokenizer(TokenTable(*message))]
        return b""
    started = time.process_time()
    matcher = compile_grammar(_tokenizers[0], message[0])
    compile_s = time.process_time() - started
    reason, part = _walk_all(matcher), None
    if reason:
        reasons = (_walk_all(compile_grammar(_tokenizers[0], grammar)) for grammar in message[1:])
        part, reason = next(((at, own) for at, own in enumerate(reasons) if own), (None, reason))
    used_s = time.process_time() - started
    return json.dumps({"reason": reason, "part": part, "compile_s": compile_s, "used_s": used_s}).encode()


def _walk_all(matcher: LLMatcher) -> str:
    for seed in range(2):
        if matcher.is_error():
            break
        if reason := walk(matcher.deep_copy(), random.Random(seed)):
            return reason
    return matcher.get_error()


def walk(matcher: LLMatcher, rng: random.Random, *, slowest_s: float = 0.25, all_s: float = 0.6) -> str:
    """Take 24 steps of a random answer as the engine would, and return the problem; empty if there is none.

    Args:
        slowest_s: Limit of the time of one step.
        all_s: Limit of the time of all steps.
    """
    spent_s = 0.0
    for step in range(24):
        started = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask and not matcher.is_error():
            # Choose the first allowed token at or after a random position.
            position = rng.randrange(mask.bit_length())
            rest = mask >> position
            matcher.consume_token(position + (rest & -rest).bit_length() - 1)
        step_s = time.thread_time() - started
        spent_s += step_s
        if matcher.is_error():
            return matcher.get_error()
        if not mask or matcher.is_stopped():
            return "" if mask or step else "no text can follow it"
        if step_s > slowest_s or spent_s > all_s:
            return f"a token of such an answer takes {1e3 * spent_s / (step + 1):.0f} ms to check; simplify it"
    return ""
