"""Find the ids of tokens that llama.cpp did not report. Pure.

While its text ends within a character, llama.cpp's server sends nothing, and later only the last token of the
character. The tokens before that one are those whose bytes are the rest of the text that was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

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
