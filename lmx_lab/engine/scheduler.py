"""Who runs next: arrival order, a number of slots, a bounded queue, a deadline each. Pure: it is told the time.

A request is *queued*, then *running*, then gone. The engine thread performs what is decided here.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from lmx_lab.errors import QueueFullError

Key = TypeVar("Key", bound=Hashable)


class Scheduler(Generic[Key]):
    """Orders requests, known here by a key and their deadline (seconds on the engine's clock)."""

    def __init__(self, *, slots: int, queue_limit: int, prefills: int) -> None:
        self.slots = slots
        self.queue_limit = queue_limit
        self.prefills = prefills
        """Prompts computed at the same time: more make the first token of each later, not the last one earlier."""
        self._queued: dict[Key, float] = {}
        self._running: dict[Key, float] = {}
        self._prefilling: set[Key] = set()

    @property
    def queued(self) -> list[Key]:
        return list(self._queued)

    @property
    def running(self) -> list[Key]:
        return list(self._running)

    @property
    def idle(self) -> bool:
        return not self._queued and not self._running

    def add(self, key: Key, *, deadline: float) -> None:
        """Queue a request behind those already there.

        Raises:
            QueueFullError: all slots are taken and ``queue_limit`` requests wait.
        """
        waiting = len(self._queued) - (self.slots - len(self._running))
        if waiting >= self.queue_limit:
            raise QueueFullError(
                f"{self.queue_limit} requests already wait for {self.slots} slots; try again when some have ended",
                retry_after_s=1.0,
            )
        self._queued[key] = deadline

    def admit(self) -> list[Key]:
        """The requests that take a slot and begin their prefill now, in arrival order."""
        room = min(self.slots - len(self._running), self.prefills - len(self._prefilling))
        admitted = list(self._queued)[: max(0, room)]
        for key in admitted:
            self._running[key] = self._queued.pop(key)
        self._prefilling.update(admitted)
        return admitted

    def prefilled(self, key: Key) -> None:
        """The prompt has been computed; the next one may begin."""
        self._prefilling.discard(key)

    def expired(self, now: float) -> list[Key]:
        """Requests past their deadline, waiting or running; they stay until ``remove``."""
        return [key for group in (self._queued, self._running) for key, deadline in group.items() if now > deadline]

    def remove(self, key: Key) -> None:
        """The request has ended, however; unknown keys are ignored, since an end can be reported twice."""
        self._queued.pop(key, None)
        self._running.pop(key, None)
        self._prefilling.discard(key)
