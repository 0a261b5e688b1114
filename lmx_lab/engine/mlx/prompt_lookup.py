"""Prompt lookup: where an answer repeats earlier text, draft the tokens that followed there.

Edited text, code and summaries with quotes repeat parts of their prompt (the idea is from
https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

from lmx_lab.engine.mlx.speculative import Drafter

NGRAM = 3
"""Number of last tokens that must have occurred before in the same order."""


class PromptLookup(Drafter):
    """Drafts the tokens that followed the last tokens of the text where these occurred before."""

    drafts_always = False

    def __init__(self) -> None:
        super().__init__()
        self._indexed = NGRAM
        self._next: dict[tuple[int, ...], int] = {}
        """For each n-gram, the position of the token after its last occurrence."""

    def propose(self, tokens: Sequence[int], sampled: Callable[[], int], *, limit: int) -> list[int]:
        """See ``Drafter``. Returns none if the sampled token is not the expected one."""
        expected = self.expect(tokens, limit=limit + 1)
        # Reading the sampled token waits for its computation, so this is done only if there is a draft.
        if len(expected) < 2 or expected[0] != sampled():
            return []
        return expected[1:]

    def expect(self, tokens: Sequence[int], *, limit: int) -> list[int]:
        """Return tokens that may follow, at most ``limit``; none if there is no earlier occurrence."""
        for at in range(self._indexed, len(tokens)):
            self._next[tuple(tokens[at - NGRAM : at])] = at
        self._indexed = max(self._indexed, len(tokens))
        start = self._next.get(tuple(tokens[-NGRAM:])) if len(tokens) >= self._resume_at else None
        if start is None:
            return []
        # If the repetition reaches the end of the text, it is expected to continue in a cycle.
        return list(islice(cycle(tokens[start:]), min(self._length + 1, max(0, limit))))
