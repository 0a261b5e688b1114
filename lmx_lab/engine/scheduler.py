"""Decide which request runs next, by order of arrival, slots and deadlines. Pure: the caller passes the time.

A request is *queued*, then *running* (first its prompt is computed, then it decodes), then removed. The engine carries
out these decisions. The number of queued requests is limited earlier, in ``engine.admission``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
SHORT_PROMPT_TOKENS = 256
NEWEST_WEIGHT = 0.2
"""Weight of the newest request in the mean time for which a slot is occupied."""


class Verdict(Enum):
    """The engine's decision whether the next request may start."""

    TAKE = auto()
    """The request starts now."""
    LATER = auto()
    """The request cannot start yet, for a reason that concerns only this request. Later requests may pass it."""
    BLOCKED = auto()
    """The request cannot start yet because memory is short. No later request may pass it, or it might wait forever."""


@dataclass(frozen=True)
class _Entry:
    deadline: float
    short: bool


class Scheduler(Generic[Key]):
    """Orders requests, of which it stores a key, the length of the prompt and the deadline.

    Deadlines are seconds of the clock that the engine uses.
    """

    def __init__(self, *, slots: int, prefills: int, lanes: int) -> None:
        self.slots = slots
        self.prefills = prefills
        """Number of long prompts that are computed at the same time. More would delay the first token of each prompt
        without finishing the last one earlier."""
        self.lanes = lanes
        """Number of prompts that are computed at the same time. The lanes beyond ``prefills`` are for short prompts,
        which would otherwise wait minutes behind long ones."""
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
        """Queue requests with the same prompt behind those that are already queued.

        Args:
            tokens: Length of the prompt.
        """
        for key in keys:
            self._queued[key] = _Entry(deadline, short=tokens <= SHORT_PROMPT_TOKENS)

    def admit(self, judge: Callable[[Key], Verdict]) -> Key | None:
        """Give a slot to the next request, whose prefill starts, and return its key; None if no request can start.

        The caller repeats the call until it returns None.

        Args:
            judge: Decides whether a request may start.
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
        """Record that the prompt of this request has been computed, so that the next prefill may start."""
        self._prefilling.discard(key)

    def expired(self, now: float) -> list[Key]:
        """Return the queued and running requests that are past their deadline. They stay until ``remove`` is called."""
        return [key for group in (self._queued, self._running) for key, entry in group.items() if now > entry.deadline]

    def remove(self, key: Key) -> None:
        """Remove a request that has ended. Unknown keys are ignored, since an end can be reported twice."""
        self._queued.pop(key, None)
        self._running.pop(key, None)
        self._prefilling.discard(key)


class SlotTimes:
    """Estimates when a slot becomes free, from how long earlier requests occupied one. Times are seconds."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def add(self, held_s: float) -> None:
        """Record that a request has ended normally, after occupying its slot for this time."""
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
