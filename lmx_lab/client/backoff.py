"""When to try again: later and later, at random, but at once after this machine has slept."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

FIRST_S, MOST_S = 0.25, 10.0
ADVISED_S = 60.0
"""No server's advice is followed for longer."""
LOOK_S = 1.0
SLEPT_S = 5.0
"""By so much the two clocks must have parted between two looks."""


class Backoff:
    """Delays between attempts: anything up to 0.25 s, 0.5 s … 10 s, so that many clients do not come back together."""

    def __init__(self, chance: Callable[[float, float], float] = random.uniform) -> None:
        self._chance = chance
        self.attempts = 0
        """That failed since the last ``reset``."""

    def failed(self, advised_s: float | None = None) -> float:
        """Seconds until the next attempt.

        Args:
            advised_s: What the server said, if anything: no less than that, within reason.
        """
        # Beyond 2**6 the most is reached; the power itself must not overflow.
        longest_s = min(MOST_S, FIRST_S * 2 ** min(self.attempts, 6))
        self.attempts += 1
        return max(self._chance(0.0, longest_s), min(advised_s or 0.0, ADVISED_S))

    def reset(self) -> None:
        """After an attempt that did well."""
        self.attempts = 0


class SleepWatch:
    """Calls ``on_wake`` on the running loop after the machine has slept: the wall clock went on, the other one did not.

    A wall clock that was set forward looks the same, and costs one reconnect; one that was set back means nothing.
    Where the steady clock counts sleep, too, no sleep is seen, and a dead connection is found out by its silence.
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
