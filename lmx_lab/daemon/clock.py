"""Times as the API writes them: UTC in ISO 8601 with milliseconds, which sort as text. And a clock to forget by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

STEP_S = 60.0
"""By so much the two clocks must part for a step of the wall clock."""
DOUBT_S = 3600.0


def iso(at_s: float | None = None) -> str:
    """Unix seconds, by default now, as ``2026-11-21T10:00:00.123Z``."""
    at = datetime.fromtimestamp(time.time() if at_s is None else at_s, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"


def unix_s(at: str) -> float:
    """The Unix seconds of such a time."""
    return datetime.fromisoformat(at).timestamp()


class CautiousClock:
    """The wall clock; but a step forward is believed only when it has lasted an hour: what is forgotten for its sake
    never comes back. After a sleep of the machine, which looks the same, things are forgotten an hour later.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        *,
        known_s: float = math.inf,
    ) -> None:
        """
        Args:
            known_s: When something happened last, in Unix seconds: that it is later by more has to last, too.
        """
        self._wall = wall
        self._steady = steady
        self._apart_s = min(wall(), known_s) - steady()
        """Between the two, as believed."""
        self._doubted_at: float | None = None

    def now_s(self) -> float:
        """Unix seconds."""
        steady = self._steady()
        apart_s = self._wall() - steady
        if apart_s - self._apart_s > STEP_S:
            self._doubted_at = steady if self._doubted_at is None else self._doubted_at
            if steady - self._doubted_at < DOUBT_S:
                return steady + self._apart_s
        self._apart_s, self._doubted_at = apart_s, None
        return steady + apart_s
