"""Prompts made from seeds: the same on both sides of a comparison but for their first words, which no two share that
one cache could serve.
"""

from __future__ import annotations

import hashlib
import random

from lmx_lab.bench.case import Case

# Each is one token of most vocabularies when a space precedes it.
_LINE = (
    "apple river stone cloud garden winter letter market bridge forest silver window morning shadow summer kitchen "
    "music ocean paper mountain bread circle island horse travel doctor picture engine school valley yellow camera "
    "castle dinner farmer glass hammer jungle ladder mirror needle orange pencil rabbit saddle table uncle village"
)
WORDS = tuple(_LINE.split())
OWN_WORDS = 8
"""So many random words make a prompt unlike any other: 48⁸."""
FEWEST_WORDS = 4
"""Of a prompt, however short it is to be: still 48⁴, five million."""
TASK = "Write a very long story, in many chapters, about all of these words."
"""So that models of servers without ``ignore_eos`` have much to say."""
_TASK_WORDS = len(TASK.split())
SHORTEST_WITH_TASK = 2 * _TASK_WORDS


def words(seed: int, request: int, tokens: int, tokens_per_word: float = 1.0) -> str:
    """Words of nothing in particular that are about ``tokens`` tokens, at least one; the same for the same numbers."""
    count = max(1, round(tokens / tokens_per_word))
    return " ".join(_drawn(f"body {seed} {request}", count))


def prompt(
    case: Case,
    *,
    repeat: int,
    request: int,
    warm_up: bool = False,
    run: str = "",
    tokens: int | None = None,
    tokens_per_word: float = 1.0,
) -> str:
    """What one request of a case asks.

    Cold, its first words are of this request alone: of this ``run``, case, repeat and number, so that no earlier
    request has left anything of it in a cache but the chat template's own beginning. Warm, all prompts of a run and
    case are alike, but for their last words. What is behind the first eight words is the same in all runs.

    Args:
        run: Any text that no other run has, nor another target of this one.
        tokens: To be made, where the chat template adds some of its own; by default ``case.prompt_tokens``.
    """
    count = max(FEWEST_WORDS, round((case.prompt_tokens if tokens is None else tokens) / tokens_per_word))
    task = TASK.split() if count >= SHORTEST_WITH_TASK else []
    count -= len(task)
    if case.cache == "cold":
        own = min(OWN_WORDS, count)
        first = _drawn(f"first {run} {case.name} {case.seed} {repeat} {request} {warm_up}", own)
        return " ".join([*first, *_drawn(f"body {case.seed} {request}", count - own), *task])
    last = _drawn(f"last {case.seed} {repeat} {request} {warm_up}", min(OWN_WORDS, count // 4))
    own = min(OWN_WORDS, count - len(last))
    first = _drawn(f"first {run} {case.name} {case.seed}", own)
    return " ".join([*first, *_drawn(f"body {case.seed}", count - own - len(last)), *last, *task])


def prompt_hash(text: str) -> str:
    """Tells whether two targets were asked the same: the first 16 hexadecimal digits of SHA-256 of what is behind the
    first eight words.
    """
    common = " ".join(text.split(" ")[OWN_WORDS:])
    return hashlib.sha256(common.encode()).hexdigest()[:16]


def _drawn(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)
