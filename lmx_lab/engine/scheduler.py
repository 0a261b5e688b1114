"""Who runs next: arrival order, a number of slots, a bounded queue, a deadline each. Pure: it is told the time.

A request is *queued*, then *running* (first its prompt is computed, then it decodes), then gone. The engine thread
performs what is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from lmx_lab.errors import QueueFullError

Key = TypeVar("Key", bound=Hashable)
SHORT_PROMPT_TOKENS = 256


class Verdict(Enum):
    """What the engine says about a request whose turn it would be."""

    TAKE = auto()
    LATER = auto()
    """Not yet, for a reason of its own: others may pass it."""
    BLOCKED = auto()
    """Not yet, for want of memory: nobody may pass it, or it might wait for ever."""


@dataclass(frozen=True)
class _Entry:
    deadline: float
    short: bool


class Scheduler(Generic[Key]):
    """Orders requests, known here by a key, the length of their prompt and their deadline (engine's clock, seconds)."""

    def __init__(self, *, slots: int, queue_limit: int, prefills: int, lanes: int) -> None:
        self.slots = slots
        self.queue_limit = queue_limit
        self.prefills = prefills
        """Long prompts computed at the same time: more make the first token of each later, not the last one earlier."""
        self.lanes = lanes
        """Prompts computed at the same time. What is left beside the long ones is for short ones, which would wait for
        minutes behind them."""
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

    def add(self, keys: Sequence[Key], *, tokens: int, deadline: float, retry_after_s: float = 1.0) -> None:
        """Queue requests of one prompt behind those already there: all of them or none.

        ``retry_after_s`` is what the refused are told.

        Raises:
            QueueFullError: all slots are taken and more than ``queue_limit`` requests would wait.
        """
        waiting = len(self._queued) + len(keys) - (self.slots - len(self._running))
        if waiting > self.queue_limit:
            raise QueueFullError(
                f"{max(0, waiting - len(keys))} requests already wait for {self.slots} slots, at most "
                f"{self.queue_limit} may (queue_limit); try again in {retry_after_s:.0f} s",
                retry_after_s=retry_after_s,
            )
        for key in keys:
            self._queued[key] = _Entry(deadline, short=tokens <= SHORT_PROMPT_TOKENS)

    def admit(self, judge: Callable[[Key], Verdict]) -> Key | None:
        """The next request that takes a slot and begins its prefill, or None. Call it until it says so."""
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
        """The prompt has been computed; the next one may begin."""
        self._prefilling.discard(key)

    def expired(self, now: float) -> list[Key]:
        """Requests past their deadline, waiting or running; they stay until ``remove``."""
        return [key for group in (self._queued, self._running) for key, it in group.items() if now > it.deadline]

    def remove(self, key: Key) -> None:
        """The request has ended, however; unknown keys are ignored, since an end can be reported twice."""
        self._queued.pop(key, None)
        self._running.pop(key, None)
        self._prefilling.discard(key)
