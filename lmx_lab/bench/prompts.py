"""Prompts made from seeds: the same on both sides of a comparison, and no accidental gift of a cache."""

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

    Cold, its first words are of this request alone: of this ``run`` (any text that no other run has), case, repeat and
    number, so that no earlier request has left anything of it in a cache but the chat template's own beginning. Warm,
    all prompts of a case are alike, but for their last words.

    Args:
        tokens: To be made, where the chat template adds some of its own; by default ``case.prompt_tokens``.
    """
    count = max(1, round((case.prompt_tokens if tokens is None else tokens) / tokens_per_word))
    task = TASK.split() if count >= SHORTEST_WITH_TASK else []
    count -= len(task)
    own = min(OWN_WORDS, count if case.cache == "cold" else max(1, count // 4))
    alone = _drawn(f"own {run} {case.name} {case.seed} {repeat} {request} {warm_up}", own)
    if case.cache == "cold":
        return " ".join([*alone, *_drawn(f"body {case.seed} {request}", count - own), *task])
    shared = _drawn(f"shared {run} {case.name} {case.seed}", count - own)
    return " ".join([*shared, *alone, *task])


def prompt_hash(text: str) -> str:
    """Tells prompts apart in a table: the first 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _drawn(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)
