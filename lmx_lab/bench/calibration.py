"""How many words make a prompt of so many tokens: by what a target counts of two short requests, and of a warm-up."""

from __future__ import annotations

import secrets
from contextlib import aclosing
from dataclasses import dataclass, replace

from lmx_lab.bench.prompts import words
from lmx_lab.bench.targets import Target

FEW_WORDS = 8
MANY_WORDS = (64, 512)
"""At least, and at most."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    tokens_per_word: float = 1.0
    template_tokens: float = 0.0
    """What the chat template adds to any prompt, and what its words have more than most."""
    proven: bool = False
    """A whole prompt of this length was counted."""

    def left(self, tokens: int) -> int:
        """Of a prompt of so many tokens, those that its words are to be."""
        return max(1, round(tokens - self.template_tokens))

    def corrected(self, wanted_tokens: int, counted_tokens: int) -> Calibration:
        """By a prompt that was made for ``wanted_tokens`` and had ``counted_tokens``."""
        more = counted_tokens - max(wanted_tokens, self.template_tokens + 1)
        return replace(self, template_tokens=self.template_tokens + more, proven=True)


async def calibrated(target: Target, tokens: int) -> Calibration:
    """For prompts of about ``tokens`` tokens; without effect where the target counts nothing.

    Raises:
        LabError: the target's.
    """
    least, most = MANY_WORDS
    many = max(least, min(tokens, most))
    few_tokens, many_tokens = await _counted(target, FEW_WORDS), await _counted(target, many)
    if few_tokens is None or many_tokens is None or many_tokens <= few_tokens:
        return Calibration()
    tokens_per_word = (many_tokens - few_tokens) / (many - FEW_WORDS)
    return Calibration(tokens_per_word=tokens_per_word, template_tokens=few_tokens - FEW_WORDS * tokens_per_word)


async def _counted(target: Target, count: int) -> int | None:
    """The tokens of a prompt of so many words."""
    text = words(secrets.randbits(32), 0, count)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    found = None
    async with aclosing(target.ask(body)) as chunks:
        async for chunk in chunks:
            found = chunk.usage.prompt if chunk.usage else found
    return found
