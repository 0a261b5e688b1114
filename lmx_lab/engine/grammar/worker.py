"""Compile grammars with llguidance; as a sandbox worker (see ``sandbox_worker``), check that they can be used.

As a worker, the first request is a ``TokenTable`` as a pickled tuple. Each later one is a pickled list of grammars,
which is answered with JSON: ``reason``, empty if the first grammar can be enforced; ``part``, the index of the other
grammar that causes the problem; ``can_force``, whether its tokens may be forced; ``compile_s``, the CPU time that
compiling the first grammar took; and ``used_s``, the CPU time of the whole request.
"""

from __future__ import annotations

import functools
import json
import pickle
import random
import re
import string
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# Twenty times the default: an object with 1,000 optional properties has 4,000 items in a row. The limit of a step is
# below the default, because steps are computed between the tokens of other answers: 20,000 items take about 40 ms.
LIMITS = LLParserLimits(max_items_in_row=40_000, step_max_items=20_000)
STACK_BYTES = 512 * 2**20
"""Chains of rules and references recurse: 3,000 overflow the usual 8 MB. Only the used part takes memory."""
MEMORY_BYTES = 4 * 2**30
CPU_S = 30
MAX_FORCED_BYTES = 2000
"""Limit of the text that is tokenized at each step. llama.cpp takes 1 ms for it, and computes no tokens meanwhile."""
MAX_REPEATED = 500
"""Limit of the least number of repetitions in a rule."""
FORCING_S = 0.25
"""CPU time to find out whether tokens may be forced."""
_stack_size_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class TokenTable:
    """A model's vocabulary in the form that llguidance expects."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_tokens: list[int]
    bos_token_id: None = None
    can_force: bool = False
    """Whether the engine knows the tokens of any text, for ``FORCING`` in ``grammar.build``."""
    hides_spaces: bool = False
    """Whether the engine's grammars ignore the space at the beginning of a token."""
    encode: Callable[[str], list[int]] | None = None
    """Returns the tokens of a text; None if only another process can do this."""

    @property
    def eos_token_id(self) -> int:
        return self.eos_tokens[0]

    def show(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special ones. Incomplete characters become U+FFFD."""
        return b"".join([self.tokens[token] for token in tokens]).decode(errors="replace")

    def __call__(self, text: str) -> list[int]:
        # Called for forced text. A tokenizer may normalize it, which would not match the grammar.
        tokens = self.encode(text) if self.encode is not None else []
        if self.is_spelled(text, tokens):
            return tokens
        return [self.byte_tokens[data] for byte in text.encode() if (data := bytes([byte])) in self.byte_tokens]

    @functools.cached_property
    def byte_tokens(self) -> dict[bytes, int]:
        """The tokens of one byte each."""
        return {token: at for at, token in enumerate(self.tokens) if len(token) == 1}

    def is_spelled(self, text: str, tokens: Sequence[int]) -> bool:
        """Return whether these ordinary tokens have exactly this text."""
        is_ordinary = set(tokens).isdisjoint(self.special_token_ids)
        return is_ordinary and b"".join([self.tokens[token] for token in tokens]) == text.encode()


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

_vocabulary: list[tuple[TokenTable, LLTokenizer]] = []
"""The current vocabulary and its tokenizer."""


def handle(request: bytes) -> bytes:
    """Answer one request; see the module's docstring."""
    message = pickle.loads(request)
    if isinstance(message, tuple):
        table = TokenTable(*message)
        _vocabulary[:] = [(table, build_tokenizer(table))]
        return b""
    table, tokenizer = _vocabulary[0]
    started = time.process_time()
    matcher = compile_grammar(tokenizer, message[0])
    compile_s = time.process_time() - started
    reason, part = _walk_all(matcher), None
    forced = False
    if reason:
        reasons = (_walk_all(compile_grammar(tokenizer, grammar)) for grammar in message[1:])
        part, reason = next(((at, own) for at, own in enumerate(reasons) if own), (None, reason))
    elif compile_s < FORCING_S:
        forced = can_force(table, tokenizer, message)
    used_s = time.process_time() - started
    reply = {"reason": reason, "part": part, "can_force": forced, "compile_s": compile_s, "used_s": used_s}
    return json.dumps(reply).encode()


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
            matcher.consume_token(_draw(mask, rng))
        step_s = time.thread_time() - started
        spent_s += step_s
        if matcher.is_error():
            return matcher.get_error()
        if not mask or matcher.is_stopped():
            return "" if mask or step else "no text can follow it"
        if step_s > slowest_s or spent_s > all_s:
            return f"a token of such an answer takes {1e3 * spent_s / (step + 1):.0f} ms to check; simplify it"
    return ""


def can_force(table: TokenTable, tokenizer: LLTokenizer, grammars: Sequence[str]) -> bool:
    """Return whether the engine may force tokens: nowhere is more than ``MAX_FORCED_BYTES`` of the text determined, and
    no special token is written in it, because the tokenizer of llama.cpp returns the token instead of its text.

    Args:
        grammars: The grammar, followed by each of its parts as a separate grammar.
    """
    started = time.process_time()
    special = [name for token in table.special_token_ids if (name := table.tokens[token])]
    # Names are compared without the characters with which a regular expression quotes others.
    unquoted = str.maketrans("", "", "\\[]()")
    whole = grammars[0].translate(unquoted)
    if any(name.decode(errors="replace").translate(unquoted) in whole for name in special):
        return False
    rules = "\n".join(str(part.get("lark_grammar", part)) for part in json.loads(grammars[0])["grammars"])
    literals, repeats = re.findall(r'(?:[^"\n\\]|\\.)+', rules), re.findall(r"\{(\d{1,9})(?:,\d*)?\}", rules)
    if any(len(text.encode()) > MAX_FORCED_BYTES for text in literals) or any(int(n) > MAX_REPEATED for n in repeats):
        return False
    # Constants in a row, and what is repeated, are only found by an answer.
    ends = [end for mark in '",' + string.punctuation if (end := table.byte_tokens.get(mark.encode())) is not None]
    for grammar in map(_on_one_line, grammars[1:]):
        matcher = compile_grammar(tokenizer, grammar)
        rng = random.Random(0)
        for _ in range(64):
            measured = matcher.deep_copy()
            forced = measured.compute_ff_bytes()
            is_short = len(forced) <= MAX_FORCED_BYTES and not any(name in forced for name in special)
            if not is_short or measured.is_error() or time.process_time() - started > FORCING_S:
                return False
            if not (tokens := tokenizer.greedy_tokenize(forced.decode(errors="ignore"))):
                mask = int.from_bytes(matcher.compute_bitmask(), "little")
                if not mask or matcher.is_stopped():
                    break
                # End each value as soon as possible, so that the answer contains many of them.
                tokens = [next((end for end in ends if mask >> end & 1), None) or _draw(mask, rng)]
            matcher.consume_tokens(tokens)
    return True


def _on_one_line(grammar: str) -> str:
    """Remove whitespace between tokens, as llama.cpp enforces JSON. More of the text is then determined."""
    whole = json.loads(grammar)
    for part in whole["grammars"]:
        if "lark_grammar" in part:
            part["lark_grammar"] = re.sub(r"^%ignore .*$", "", part["lark_grammar"], flags=re.MULTILINE)
    return json.dumps(whole, ensure_ascii=False)


def _draw(mask: int, rng: random.Random) -> int:
    """Return the first allowed token at or after a random position."""
    position = rng.randrange(mask.bit_length())
    rest = mask >> position
    return position + (rest & -rest).bit_length() - 1
