"""Delay attempts to connect: exponentially with jitter, and not at all after the machine has slept."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

MIN_DELAY_S, MAX_DELAY_S = 0.25, 10.0
"""Upper limits of the random delay after the first failure, and after many."""
MAX_ADVISED_S = 60.0
"""Maximum delay that a server can request."""
CHECK_INTERVAL_S = 1.0
SLEEP_THRESHOLD_S = 5.0
"""Time by which the wall clock has to be ahead of the loop's clock since the last check to count as sleep."""


class Backoff:
    """Random delays between attempts, up to 0.25 s, 0.5 s … 10 s, so that many clients do not reconnect together."""

    def __init__(self, chance: Callable[[float, float], float] = random.uniform) -> None:
        self._chance = chance
        self.attempts = 0
        """Failed attempts since the last ``reset``."""

    def next_delay_s(self, advised_s: float | None = None) -> float:
        """Count a failed attempt and return the delay before the next one, in seconds.

        Args:
            advised_s: The minimum delay that the server requested, if any; at most ``MAX_ADVISED_S`` is used.
        """
        # 2**6 exceeds the maximum; a larger power could overflow.
        longest_s = min(MAX_DELAY_S, MIN_DELAY_S * 2 ** min(self.attempts, 6))
        self.attempts += 1
        return max(self._chance(0.0, longest_s), min(advised_s or 0.0, MAX_ADVISED_S))

    def reset(self) -> None:
        """Start again with short delays, after a successful attempt."""
        self.attempts = 0


class SleepWatch:
    """Calls ``on_wake`` on the running loop after the machine has slept: the wall clock advanced, the loop's did not.

    Setting the wall clock forward looks the same and costs one reconnect; setting it back has no effect. On systems
    whose monotonic clock includes sleep, sleep is not detected, and dead connections end by their timeout.
    """

    def __init__(self, on_wake: Callable[[], None], *, wall: Callable[[], float] = time.time) -> None:
        self._on_wake = on_wake
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._last_difference_s = self._clock_difference_s()
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()

    def _clock_difference_s(self) -> float:
        return self._wall() - self._loop.time()

    def _check(self) -> None:
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)
        before_s, self._last_difference_s = self._last_difference_s, self._clock_difference_s()
        if self._last_difference_s - before_s > SLEEP_THRESHOLD_S:
            self._on_wake()
