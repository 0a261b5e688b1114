"""Decide which request runs next, by order of arrival, slots and deadlines. Pure: the caller passes the time.

A request is *queued*, then *running* (first its prompt is computed, then it decodes), then removed. The engine carries
out these decisions. The number of queued requests is limited earlier, in ``engine.admission``.

If a client that has no slot waits while another client has several, a running request of the latter can be *paused*:
it waits in the queue again, and the first request of the waiting client gets its slot. Without this, a few long answers
for a client that does not read would keep all slots until they end. Requests of one client never pause each other,
because that would only cost time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
SHORT_PROMPT_TOKENS = 256
NEWEST_WEIGHT = 0.2
"""Weight of the newest request in the mean time for which a slot is occupied."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """When a client without a slot gets a slot of another client."""

    wait_s: float = 0.1
    """Time for which a client without a slot waits before a request of another client is paused."""
    turn_s: float = 0.5
    """Time for which a request keeps its slot before it can be paused."""
    check_s: float = 0.05
    """Minimum interval between two checks."""


class Verdict(Enum):
    """The engine's decision whether the next request may start."""

    TAKE = auto()
    """The request starts now."""
    LATER = auto()
    """The request cannot start yet, for a reason that concerns only this request. Later requests may pass it."""
    BLOCKED = auto()
    """The request cannot start yet because memory is short. No later request may pass it, or it might wait forever."""


@dataclass(kw_only=True)
class _Entry:
    number: int
    """Position in the order of arrival."""
    client: str | None
    deadline: float
    short: bool
    queued_at: float
    """When it was added, or paused."""
    admitted_at: float | None = None
    """When the request last got a slot; None if it has not started."""
    is_next: bool = False
    """Whether another request was paused for it."""


class Scheduler(Generic[Key]):
    """Orders requests, of which it stores a key, whether the prompt is short, and the deadline.

    Deadlines are seconds of the clock that the engine uses.
    """

    def __init__(self, *, slots: int, prefills: int, lanes: int, turns: Turns | None = None) -> None:
        self.slots = slots
        self._turns = turns or Turns()
        self.prefills = prefills
        """Number of long prompts that are computed at the same time. More would delay the first token of each prompt
        without finishing the last one earlier."""
        self.lanes = lanes
        """Number of prompts that are computed at the same time. The lanes beyond ``prefills`` are for short prompts,
        which would otherwise wait minutes behind long ones."""
        self._queued: dict[Key, _Entry] = {}
        """In the order in which they get slots: first those for which others were paused, then by arrival."""
        self._running: dict[Key, _Entry] = {}
        self._prefilling: set[Key] = set()
        self._added = 0

    @property
    def queued(self) -> list[Key]:
        """The requests that wait for a slot, including paused ones."""
        return list(self._queued)

    @property
    def not_started(self) -> list[Key]:
        """The requests that have never had a slot."""
        return [key for key, entry in self._queued.items() if entry.admitted_at is None]

    @property
    def running(self) -> list[Key]:
        """The requests that have a slot."""
        return list(self._running)

    @property
    def idle(self) -> bool:
        return not self._queued and not self._running

    def __contains__(self, key: Key) -> bool:
        return key in self._running or key in self._queued

    def add(self, keys: Sequence[Key], *, tokens: int, deadline: float, now: float, client: str | None = None) -> None:
        """Queue requests with the same prompt behind those that are already queued.

        Args:
            tokens: Number of tokens of the prompt that must be computed.
            client: The client that sent the requests.
        """
        for key in keys:
            self._added += 1
            short = tokens <= SHORT_PROMPT_TOKENS
            self._queued[key] = _Entry(number=self._added, client=client, deadline=deadline, short=short, queued_at=now)

    def admit(self, judge: Callable[[Key], Verdict], now: float) -> Key | None:
        """Give a slot to the next request, whose prefill starts, and return its key; None if no request can start.

        The caller repeats the call until it returns None. A request that was paused is returned again, and continues.

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
                entry.admitted_at, entry.is_next = now, False
                return key
            if verdict is Verdict.BLOCKED:
                return None
        return None

    def pause(self, can_pause: Callable[[Key], bool], now: float) -> Key | None:
        """Take the slot of a running request for a client without a slot, and return the paused request; None if none
        should be paused. The caller calls ``admit`` afterwards.

        The paused request waits in the queue at the position of its arrival. It is the one that has had its slot for
        longest, of the client with the most slots.

        Args:
            can_pause: Returns whether the engine can pause a request that decodes.
        """
        if not self._queued:
            return None
        if (starting := next((key for key in self._without_slot() if now >= self._pause_at(key)), None)) is None:
            return None
        slots = self._slots_by_client()
        pausable = [
            key
            for key, entry in self._running.items()
            if key not in self._prefilling
            and slots[entry.client] > 1
            and now - (entry.admitted_at or 0.0) >= self._turns.turn_s
            and can_pause(key)
        ]
        if not pausable:
            return None
        running = self._running
        paused = min(pausable, key=lambda key: (-slots[running[key].client], running[key].admitted_at or 0.0))
        self._queued[paused] = self._running.pop(paused)
        self._queued[paused].queued_at = now
        self._queued[starting].is_next = True
        self._queued = dict(sorted(self._queued.items(), key=lambda item: (not item[1].is_next, item[1].number)))
        return paused

    def next_pause_at(self) -> float | None:
        """Return the time after which ``pause`` may return a request; None if it will not."""
        return min(map(self._pause_at, self._without_slot()), default=None)

    def _without_slot(self) -> Iterator[Key]:
        """Yield the requests that could start in a slot of another client, and whose client has none."""
        slots = self._slots_by_client()
        if len(self._running) < self.slots or max(slots.values(), default=0) < 2:
            return
        for key, entry in self._queued.items():
            if entry.client not in slots and self._has_lane(entry):
                yield key

    def _slots_by_client(self) -> Counter[str | None]:
        return Counter(entry.client for entry in self._running.values())

    def _pause_at(self, key: Key) -> float:
        """Return the time after which another request may be paused for a queued one."""
        return self._queued[key].queued_at + self._turns.wait_s

    def _has_lane(self, entry: _Entry) -> bool:
        long = sum(not self._running[key].short for key in self._prefilling)
        return len(self._prefilling) < self.lanes and (entry.short or long < self.prefills)

    def prefilled(self, key: Key) -> None:
        """Record that the prompt of this request has been computed, so that the next prefill may start."""
        self._prefilling.discard(key)

    def expired(self, now: float) -> list[Key]:
        """Return the queued and running requests that are past their deadline. They stay until ``remove`` is called."""
        return [key for group in (self._queued, self._running) for key, entry in group.items() if now > entry.deadline]

    def remove(self, key: Key) -> bool:
        """Remove a request that has ended, and return whether it was queued or running: an end can be reported
        twice.
        """
        self._prefilling.discard(key)
        return (self._queued.pop(key, None) or self._running.pop(key, None)) is not None


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
