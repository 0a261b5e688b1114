"""Decide which request runs next: arrival order, a number of slots, a deadline each. Pure: the caller passes the time.

A request is *queued*, then *running* (first its prompt is computed, then it decodes), then removed. The engine performs
these decisions. How many requests may be queued is decided before, in ``engine.admission``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
SHORT_PROMPT_TOKENS = 256
NEWEST_WEIGHT = 0.2
"""Weight of the newest request in the mean time that a slot is held."""


class Verdict(Enum):
    """The engine's answer whether the next request may start."""

    TAKE = auto()
    LATER = auto()
    """Not yet, for a reason of its own: later requests may start before it."""
    BLOCKED = auto()
    """Not yet, because memory is short: no later request may start before it, or it might wait for ever."""


@dataclass(frozen=True)
class _Entry:
    deadline: float
    short: bool


class Scheduler(Generic[Key]):
    """Orders requests. It knows each by a key, the length of its prompt and its deadline (engine's clock, seconds)."""

    def __init__(self, *, slots: int, prefills: int, lanes: int) -> None:
        self.slots = slots
        self.prefills = prefills
        """Long prompts computed at the same time. More would delay the first token of each without making the last one
        earlier."""
        self.lanes = lanes
        """Prompts computed at the same time. The lanes beside those of long prompts are for short ones, which would
        otherwise wait minutes behind them."""
        self._queued: dict[Key, _Entry] = {}
        self._running: dict[Key, _Entry] = {}
        self._prefilling: set[Key] = set()

    @property
    def queued(self) -> list[Key]:
        return list(self._queued)

    @property
    def running(self) -> list[Key]:
        return list(self._running)

    @property
    def prefilling(self) -> list[Key]:
        return [key for key in self._running if key in self._prefilling]

    @property
    def idle(self) -> bool:
        return not self._queued and not self._running

    def add(self, keys: Sequence[Key], *, tokens: int, deadline: float) -> None:
        """Queue requests of one prompt behind those already queued.

        Args:
            tokens: Length of the prompt.
        """
        for key in keys:
            self._queued[key] = _Entry(deadline, short=tokens <= SHORT_PROMPT_TOKENS)

    def admit(self, judge: Callable[[Key], Verdict]) -> Key | None:
        """Give a slot to the next request, which starts its prefill; None if none starts. Call it until it returns
        None.
        """
        if len(self._running) >= self.slots:
            return None
        for key, entry in self._queued.items():
            if not self._has_lane(entry):
                continue
            verdict = judge(key)
            if verdict is Verdict.TAKE:
                self._running[key] = self._queued.pop(key)
                self._prefilling.add(key)
                return key
            if verdict is Verdict.BLOCKED:
                return None
        return None

    def _has_lane(self, entry: _Entry) -> bool:
        long = sum(not self._running[key].short for key in self._prefilling)
        return len(self._prefilling) < self.lanes and (entry.short or long < self.prefills)

    def prefilled(self, key: Key) -> None:
        """The prompt of this request has been computed; the next prefill may start."""
        self._prefilling.discard(key)

    def expired(self, now: float) -> list[Key]:
        """Return the requests past their deadline, queued or running; they stay until ``remove``."""
        return [key for group in (self._queued, self._running) for key, it in group.items() if now > it.deadline]

    def remove(self, key: Key) -> None:
        """Remove a request that has ended. Unknown keys are ignored, since an end can be reported twice."""
        self._queued.pop(key, None)
        self._running.pop(key, None)
        self._prefilling.discard(key)


class SlotTimes:
    """Estimates when a slot becomes free, from how long ended requests held theirs. Times are seconds."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def add(self, held_s: float) -> None:
        """A request has ended normally, after holding its slot for this time."""
        mean_s = self._mean_s
        self._mean_s = held_s if mean_s is None else (1 - NEWEST_WEIGHT) * mean_s + NEWEST_WEIGHT * held_s

    def free_in_s(self, *, running: int, oldest_s: float, at_most_s: float = float("inf")) -> float:
        """Return the estimated time until one of the running requests ends, at least 1.

        Args:
            oldest_s: How long the oldest of them has been running.
            at_most_s: When one of them ends at the latest.
        """
        if self._mean_s is None:
            return max(1.0, at_most_s) if at_most_s < float("inf") else 1.0
        return max(1.0, min(at_most_s, max(self._mean_s, oldest_s) / running))
