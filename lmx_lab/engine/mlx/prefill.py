"""How many prompt tokens one engine step may compute. Pure: it is told what the steps took.

Prompts are computed in chunks between the decode steps of running streams. A chunk half as long again as a decode step
keeps the gaps between tokens below three times what they are alone, and lets those who wait begin soon; with nobody
decoding, a step is only as long as a cancel may have to wait.
"""

from __future__ import annotations

ALONE_S = 0.4
"""Length of a step while nobody decodes: every cancel, deadline and arrival waits for its end."""
SHARE = 1.5
"""Time for prompts in a step, as a multiple of the decoding in it."""
MOST_SHARE = 1.7
"""The same where less would be spent mostly on what a chunk costs for itself."""
FIRST_CHUNK = 8
GROWTH = 2
"""A chunk is at most so many times the one before: speed is only known where it was measured."""
WEIGHT = 0.3
"""Of the newest measurement in the running means."""
OUTLIER = 4
"""A measurement counts as so many times what was expected at most."""


class PrefillPace:
    """Learns what decoding and prompts cost on this machine with this model, and sizes chunks by it.

    Either costs something for itself (the weights are read) and something for each request or token. While others
    decode a chunk is at least so long that its tokens cost as much as it does itself, if there is time for that:
    shorter ones would waste time.
    """

    def __init__(self, *, minimum: int, maximum: int) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._largest = max(FIRST_CHUNK, minimum)
        self._decode = Line()
        self._most_decoding = 0
        """In one step that did nothing else."""
        self._prompt = Line()

    def chunk(self, *, prompts: int, decoding: int) -> int:
        """Tokens of each of ``prompts`` prompts for the next step, at least 1, beside ``decoding`` requests."""
        tokens = float(self._largest)
        if self._prompt.known:
            fitting = self._prompt.within(ALONE_S)
            if decoding and self._decode.known:
                # Where more wait for their first token than read on, waiting weighs more than a gap.
                decode_s = self._decode.at(decoding) * max(1.0, prompts / decoding)
                worth = min(self._prompt.fixed / self._prompt.slope, self._prompt.within(MOST_SHARE * decode_s))
                fitting = min(fitting, max(worth, self._prompt.within(SHARE * decode_s)))
            tokens = min(tokens, fitting)
        return max(self._minimum, 1, min(int(tokens) // max(1, prompts), self._maximum))

    def takes(self, *, prompt_tokens: int, output_tokens: int, decoding: int) -> float:
        """Seconds that so much work of one request takes, as far as is known."""
        return prompt_tokens * self._prompt.slope + output_tokens * self._decode.at(decoding)

    def took(self, seconds: float, *, prompt_tokens: int, decoding: int) -> None:
        """Learn from a step in which ``decoding`` requests decoded, and so many prompt tokens were computed in all."""
        if not prompt_tokens:
            self._most_decoding = max(self._most_decoding, decoding)
            self._decode.add(decoding, seconds)
            return
        if not decoding:
            self._prompt.add(prompt_tokens, seconds)
        elif decoding <= self._most_decoding or not self._prompt.known:
            # What of the step went into decoding is known from steps that did nothing else.
            decode_s = self._decode.at(decoding) if self._decode.known else seconds / 2
            self._prompt.add(prompt_tokens, max(seconds - decode_s, seconds / 10))
        else:
            self._decode.add(decoding, max(seconds - self._prompt.at(prompt_tokens), seconds / 10))
        self._largest = min(self._maximum, max(self._largest, prompt_tokens * GROWTH))


class Line:
    """Cost as ``fixed + slope * amount``, fitted to what was measured, the newest counting most."""

    def __init__(self) -> None:
        self._amount = self._seconds = self._squares = self._products = 0.0
        self.known = False
        self.fixed = 0.0
        self.slope = 0.0

    def add(self, amount: int, seconds: float) -> None:
        if self.known:
            # Another program's moment on the machine shall not count as this one's pace.
            seconds = min(seconds, OUTLIER * self.at(amount))
        weight = WEIGHT if self.known else 1.0
        self._amount += weight * (amount - self._amount)
        self._seconds += weight * (seconds - self._seconds)
        self._squares += weight * (amount * amount - self._squares)
        self._products += weight * (amount * seconds - self._products)
        self._fit()

    def at(self, amount: int) -> float:
        return self.fixed + self.slope * amount

    def within(self, seconds: float) -> float:
        """How much can be had for so many seconds."""
        return max(0.0, (seconds - self.fixed) / self.slope)

    def _fit(self) -> None:
        mean = self._seconds / self._amount
        variance = self._squares - self._amount**2
        if variance > (0.2 * self._amount) ** 2:
            slope = (self._products - self._amount * self._seconds) / variance
            self.slope = min(mean, max(mean / 20, slope))
        elif self.known:
            # The same amount again tells only what both cost together: the share of each stays.
            self.slope *= mean / (self.slope + self.fixed / self._amount)
        else:
            self.slope = mean
        self.fixed = max(0.0, self._seconds - self.slope * self._amount)
        self.known = True
