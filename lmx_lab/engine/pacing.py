"""How many prompt tokens one engine step may compute. Pure: it is told what the steps took.

Prompts are computed in chunks between the decode steps of running streams. A chunk as long as a decode step costs the
streams half of their speed at most, and never makes them stall; with nobody decoding, a step is only as long as a
cancel may have to wait.
"""

from __future__ import annotations

ALONE_S = 0.4
"""Length of a step while nobody decodes: every cancel, deadline and arrival waits for its end."""
SHARE = 1.0
"""Time for prompts in a step, as a multiple of the decoding in it."""
FIRST_CHUNK = 8
GROWTH = 2
"""A chunk is at most so many times the one before: speed is only known where it was measured."""
WEIGHT = 0.3
"""Of the newest measurement in the running mean."""


class PrefillPace:
    """Learns what a decode step and a prompt token cost on this machine with this model, and sizes chunks by it.

    ``minimum`` is the chunk that costs no more than a smaller one would (a GPU reads all weights for any number of
    tokens), ``maximum`` bounds the memory that a chunk takes.
    """

    def __init__(self, *, minimum: int, maximum: int) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._largest = max(FIRST_CHUNK, minimum)
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def chunk(self, *, prompts: int, decoding: bool) -> int:
        """Tokens of each of ``prompts`` prompts for the next step, at least 1."""
        share = self._largest // max(1, prompts)
        if self._token_s:
            allowed_s = SHARE * self._decode_s if decoding and self._decode_s else ALONE_S
            share = min(share, int(min(allowed_s, ALONE_S) / self._token_s / max(1, prompts)))
        return max(self._minimum, 1, min(share, self._maximum))

    def takes(self, *, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds that so much work takes, as far as is known."""
        return prompt_tokens * (self._token_s or 0.0) + output_tokens * (self._decode_s or 0.0)

    def took(self, seconds: float, *, prompt_tokens: int, decoding: bool) -> None:
        """Learn from a step that computed ``prompt_tokens`` tokens of prompts, all together."""
        if not prompt_tokens:
            self._decode_s = _mean(self._decode_s, seconds)
            return
        if decoding and self._decode_s is None:
            # No step has only decoded yet: what the prompt tokens do not explain, or half.
            explained_s = prompt_tokens * self._token_s if self._token_s else seconds / 2
            self._decode_s = max(seconds - explained_s, seconds / 4)
        prefill_s = seconds - (self._decode_s or 0.0) if decoding else seconds
        self._token_s = _mean(self._token_s, max(prefill_s, seconds / 10) / prompt_tokens)
        self._largest = min(self._maximum, max(self._largest, prompt_tokens * GROWTH))


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - WEIGHT) * before + WEIGHT * now
