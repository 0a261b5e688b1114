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
"""Of the newest measurement in the running means."""
OUTLIER = 4
"""A step counts as so many times as long as expected at most."""


class PrefillPace:
    """Learns what a decode step and a chunk of a prompt cost on this machine with this model, and sizes chunks by it.

    A chunk costs something for itself (the weights are read) and something for each token. While others decode it is at
    least so long that its tokens cost as much as it does itself: shorter ones would only waste time.
    """

    def __init__(self, *, minimum: int, maximum: int) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._largest = max(FIRST_CHUNK, minimum)
        self._decode_s: float | None = None
        self._cost = Line()

    def chunk(self, *, prompts: int, decoding: bool) -> int:
        """Tokens of each of ``prompts`` prompts for the next step, at least 1."""
        tokens = float(self._largest)
        if self._cost.known:
            fitting = self._cost.tokens_within(ALONE_S)
            if decoding and self._decode_s:
                worth = self._cost.fixed / self._cost.slope
                fitting = min(fitting, max(worth, self._cost.tokens_within(SHARE * self._decode_s)))
            tokens = min(tokens, fitting)
        return max(self._minimum, 1, min(int(tokens) // max(1, prompts), self._maximum))

    def takes(self, *, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds that so much work takes, as far as is known."""
        return prompt_tokens * self._cost.slope + output_tokens * (self._decode_s or 0.0)

    def took(self, seconds: float, *, prompt_tokens: int, decoding: bool) -> None:
        """Learn from a step that computed ``prompt_tokens`` tokens of prompts, all together."""
        if not prompt_tokens:
            self._decode_s = _mean(self._decode_s, seconds)
            return
        if decoding and self._decode_s is None:
            # No step has only decoded yet: what the prompt does not explain, or half.
            explained_s = self._cost.at(prompt_tokens) if self._cost.known else seconds / 2
            self._decode_s = max(seconds - explained_s, seconds / 4)
        prefill_s = seconds - (self._decode_s or 0.0) if decoding else seconds
        prefill_s = max(prefill_s, seconds / 10)
        if self._cost.known:
            # Another program's moment on the machine shall not count as this one's pace.
            prefill_s = min(prefill_s, OUTLIER * self._cost.at(prompt_tokens))
        self._cost.add(prompt_tokens, prefill_s)
        self._largest = min(self._maximum, max(self._largest, prompt_tokens * GROWTH))


class Line:
    """Cost as ``fixed + slope * tokens``, fitted to what was measured, the newest counting most."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._squares = self._products = 0.0
        self.known = False
        self.fixed = 0.0
        self.slope = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        weight = WEIGHT if self.known else 1.0
        for name, value in (
            ("_tokens", tokens),
            ("_seconds", seconds),
            ("_squares", tokens * tokens),
            ("_products", tokens * seconds),
        ):
            setattr(self, name, (1 - weight) * getattr(self, name) + weight * value)
        self._fit()

    def at(self, tokens: int) -> float:
        return self.fixed + self.slope * tokens

    def tokens_within(self, seconds: float) -> float:
        return max(0.0, (seconds - self.fixed) / self.slope)

    def _fit(self) -> None:
        mean = self._seconds / self._tokens
        variance = self._squares - self._tokens**2
        if variance > (0.2 * self._tokens) ** 2:
            slope = (self._products - self._tokens * self._seconds) / variance
            self.slope = min(mean, max(mean / 20, slope))
        elif self.known:
            # Chunks of one size tell only what they cost together: the share of each stays.
            self.slope = mean * self.slope / max(self.slope, (self.fixed / self._tokens) + self.slope)
        else:
            self.slope = mean
        self.fixed = max(0.0, self._seconds - self.slope * self._tokens)
        self.known = True


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - WEIGHT) * before + WEIGHT * now
