"""Delays between attempts: exponential with jitter, and none after the machine has slept."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

FIRST_S, MOST_S = 0.25, 10.0
ADVISED_S = 60.0
"""Maximum delay that a server can request."""
LOOK_S = 1.0
SLEPT_S = 5.0
"""Difference of the two clocks between two checks that counts as sleep."""


class Backoff:
    """Random delays between attempts, up to 0.25 s, 0.5 s … 10 s, so that many clients do not reconnect together."""

    def __init__(self, chance: Callable[[float, float], float] = random.uniform) -> None:
        self._chance = chance
        self.attempts = 0
        """Failed attempts since the last ``reset``."""

    def failed(self, advised_s: float | None = None) -> float:
        """Seconds until the next attempt.

        Args:
            advised_s: The minimum delay that the server requested, if any; at most ``ADVISED_S`` counts.
        """
        # 2**6 exceeds the maximum; a larger power could overflow.
        longest_s = min(MOST_S, FIRST_S * 2 ** min(self.attempts, 6))
        self.attempts += 1
        return max(self._chance(0.0, longest_s), min(advised_s or 0.0, ADVISED_S))

    def reset(self) -> None:
        """Called after a successful attempt."""
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
        self._seen = self._apart()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Idempotent."""
        self._timer.cancel()

    def _apart(self) -> float:
        return self._wall() - self._loop.time()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        before, self._seen = self._seen, self._apart()
        if self._seen - before > SLEPT_S:
            self._on_wake()
