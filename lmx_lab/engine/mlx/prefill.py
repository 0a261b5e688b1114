"""Decide how many prompt tokens one engine step computes. Pure: the caller passes the durations of steps.

Prompts are computed in chunks between the decode steps of running answers. If a chunk takes 1.5 times as long as a
decode step, the time between two tokens is less than three times that without prompts, and queued requests start soon.
While no answer is decoded, the length of a step is limited only by how long a cancellation may wait.
"""

from __future__ import annotations

PREFILL_STEP_S = 0.4
"""Duration of a step while no answer is decoded. Every cancellation, deadline and new request waits for its end."""
PREFILL_SHARE = 1.5
"""Time for prompts in a step, as a multiple of the time for decoding."""
MAX_PREFILL_SHARE = 1.7
"""The same if a shorter chunk would be mostly overhead."""
WORTHWHILE_TOKENS = 16
"""Number of tokens up to which a chunk is made longer than ``PREFILL_STEP_S``, to cost as much as its fixed cost."""
FIRST_CHUNK = 8
FEWEST_TOGETHER = 16
"""Number of tokens of each prompt, up to the minimum of the machine, if the maximum is too small for all prompts."""
GROWTH = 2
"""Maximum size of a chunk as a multiple of the largest chunk so far, since longer ones have not been measured."""
WEIGHT = 0.3
"""Weight of the newest measurement in the running means."""
OUTLIER = 4
"""Maximum of a measurement as a multiple of the expected duration; longer ones are reduced to it."""


class PrefillPace:
    """Measures the cost of decoding and of prompts on this machine with this model, and chooses the size of chunks.

    Both have a fixed cost (the weights are read) and a cost per request or token. While answers are decoded, a chunk is
    long enough for its tokens to cost at least as much as its fixed cost, if there is time for that.
    """

    def __init__(self, *, minimum: int, maximum: int) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._largest = max(FIRST_CHUNK, minimum)
        self._decode = LinearCost()
        self._max_decoding = 0
        """Highest number of answers in a step that computed no prompt."""
        self._prompt = LinearCost()

    def chunk(self, *, prompts: int, decoding: int) -> int:
        """Return how many tokens of each prompt the next step computes: a multiple of the minimum, so that steps of
        different prompts have the same length.

        Args:
            prompts: Number of prompts.
            decoding: Number of answers that are decoded in the same step.
        """
        tokens = float(self._largest)
        if self._prompt.known:
            # While other programs are busy, the fixed cost alone may take this long.
            worthwhile = min(WORTHWHILE_TOKENS, self._prompt.fixed / self._prompt.slope)
            fitting = max(self._prompt.within(PREFILL_STEP_S), worthwhile)
            if decoding and self._decode.known:
                # If more requests wait for their first token than are decoded, chunks may be longer.
                decode_s = self._decode.at(decoding) * max(1.0, prompts / decoding)
                efficient = min(
                    self._prompt.fixed / self._prompt.slope, self._prompt.within(MAX_PREFILL_SHARE * decode_s)
                )
                fitting = min(fitting, max(efficient, self._prompt.within(PREFILL_SHARE * decode_s)))
            tokens = min(tokens, fitting)
        share = self._maximum // max(1, prompts)
        # All prompts together have at most ``maximum`` tokens, unless each would have too few.
        least = max(1, min(self._minimum, max(share, FEWEST_TOGETHER)))
        return max(least, min(int(tokens) // max(1, prompts), share) // least * least)

    def estimate_s(self, *, prompt_tokens: int, output_tokens: int, decoding: int) -> float:
        """Return the estimated time of this work of one request, in seconds."""
        return prompt_tokens * self._prompt.slope + output_tokens * self._decode.at(decoding)

    def record(self, seconds: float, *, prompt_tokens: int, decoding: int) -> None:
        """Record the duration of a step.

        Args:
            prompt_tokens: Number of prompt tokens that it computed in all.
            decoding: Number of answers that it decoded.
        """
        if not prompt_tokens:
            self._max_decoding = max(self._max_decoding, decoding)
            self._decode.add(decoding, seconds)
            return
        if not decoding:
            self._prompt.add(prompt_tokens, seconds)
        elif decoding <= self._max_decoding or not self._prompt.known:
            # The time for decoding is known from steps that computed no prompt.
            decode_s = self._decode.at(decoding) if self._decode.known else seconds / 2
            self._prompt.add(prompt_tokens, max(seconds - decode_s, seconds / 10))
        else:
            self._decode.add(decoding, max(seconds - self._prompt.at(prompt_tokens), seconds / 10))
        self._largest = min(self._maximum, max(self._largest, prompt_tokens * GROWTH))


class LinearCost:
    """Duration as ``fixed + slope * amount``, fitted to measurements, of which newer ones have more weight."""

    def __init__(self) -> None:
        self._amount = self._seconds = self._squares = self._products = 0.0
        self.known = False
        self.fixed = 0.0
        self.slope = 0.0

    def add(self, amount: int, seconds: float) -> None:
        if self.known:
            # Another program may have used the processors for a moment.
            seconds = min(seconds, OUTLIER * self.at(amount))
        weight = WEIGHT if self.known else 1.0
        self._amount += weight * (amount - self._amount)
        self._seconds += weight * (seconds - self._seconds)
        self._squares += weight * (amount * amount - self._squares)
        self._products += weight * (amount * seconds - self._products)
        mean = self._seconds / self._amount
        variance = self._squares - self._amount**2
        if variance > (0.2 * self._amount) ** 2:
            slope = (self._products - self._amount * self._seconds) / variance
            self.slope = min(mean, max(mean / 20, slope))
        elif self.known:
            # Measurements of one amount give only the sum of both costs; their ratio is left unchanged.
            self.slope *= mean / (self.slope + self.fixed / self._amount)
        else:
            self.slope = mean
        self.fixed = max(0.0, self._seconds - self.slope * self._amount)
        self.known = True

    def at(self, amount: int) -> float:
        return self.fixed + self.slope * amount

    def within(self, seconds: float) -> float:
        """Return the amount that takes this long."""
        return max(0.0, (seconds - self.fixed) / self.slope)
