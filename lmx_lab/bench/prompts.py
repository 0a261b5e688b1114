"""Generate prompts from seeds.

Both sides of a comparison get the same prompts except for the first words, which differ so that no server can take a
prompt from its cache.
"""

from __future__ import annotations

import hashlib
import random

from lmx_lab.bench.case import Case

# Each word is one token in most vocabularies if a space precedes it.
_LINE = (
    "apple river stone cloud garden winter letter market bridge forest silver window morning shadow summer kitchen "
    "music ocean paper mountain bread circle island horse travel doctor picture engine school valley yellow camera "
    "castle dinner farmer glass hammer jungle ladder mirror needle orange pencil rabbit saddle table uncle village"
)
WORDS = tuple(_LINE.split())
UNIQUE_WORDS = 8
"""Number of random words that make a prompt unique: 48⁸ combinations."""
MIN_WORDS = 4
"""Minimum length of a prompt: 48⁴ combinations, five million."""
TASK = "Write a very long story, in many chapters, about all of these words."
"""A task at the end of the prompt, so that models write long answers on servers without ``ignore_eos``."""
_TASK_WORDS = len(TASK.split())
MIN_WORDS_WITH_TASK = 2 * _TASK_WORDS


def words(seed: int, request: int, tokens: int, tokens_per_word: float = 1.0) -> str:
    """Return random words of about ``tokens`` tokens, at least one word. They depend only on the arguments."""
    count = max(1, round(tokens / tokens_per_word))
    return " ".join(_random_words(f"body {seed} {request}", count))


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
    """Return the prompt of one request.

    If the case's cache is cold, the first words depend on the run, case, repeat and request, so that no cache contains
    more of the prompt than the start of the chat template. If it is warm, all prompts of a run and case are equal
    except for their last words. The words after the first eight are the same in all runs.

    Args:
        run: A text that is unique for the run and the target.
        tokens: Length of the prompt without the chat template; by default ``case.prompt_tokens``.
        tokens_per_word: Mean number of tokens of a word in the vocabulary of the target.
    """
    count = max(MIN_WORDS, round((case.prompt_tokens if tokens is None else tokens) / tokens_per_word))
    task = TASK.split() if count >= MIN_WORDS_WITH_TASK else []
    count -= len(task)
    if case.cache == "cold":
        own = min(UNIQUE_WORDS, count)
        first = _random_words(f"first {run} {case.name} {case.seed} {repeat} {request} {warm_up}", own)
        return " ".join([*first, *_random_words(f"body {case.seed} {request}", count - own), *task])
    last = _random_words(f"last {case.seed} {repeat} {request} {warm_up}", min(UNIQUE_WORDS, count // 4))
    own = min(UNIQUE_WORDS, count - len(last))
    first = _random_words(f"first {run} {case.name} {case.seed}", own)
    return " ".join([*first, *_random_words(f"body {case.seed}", count - own - len(last)), *last, *task])


def prompt_hash(text: str) -> str:
    """Hash the text after the first eight words, to check that two targets got the same prompt.

    Returns:
        The first 16 hexadecimal digits of the SHA-256 hash.
    """
    common = " ".join(text.split(" ")[UNIQUE_WORDS:])
    return hashlib.sha256(common.encode()).hexdigest()[:16]


def _random_words(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)
