"""Admit requests to a loaded model, and decide which of them runs next, by order of arrival and slots.

Each request holds a permit. The engine checks the permit when it queues the request, and releases it when the request
has ended. All engines therefore count queued and running requests in the same way, and an unload can wait for the end
of the requests without asking the engine.

A request is *queued*, then *running* (first its prompt is computed, then it decodes), then removed. The engine carries
out the decisions of ``Scheduler``, which is pure: the caller passes the time.

If a client that has no slot waits while another client has several, a running request of the latter can be *paused*:
it waits in the queue again, and the first request of the waiting client gets its slot. Without this, a few long answers
for a client that does not read would keep all slots until they end. Requests of one client never pause each other,
because that would only cost time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from lmx_lab.errors import GenerationTimeoutError, LabError, NotLoadedError, QueueFullError, counted

LOAD_FIRST = "load one first: lab.load(...), lmx-lab load or POST /admin/models/load"
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
    short: bool
    queued_at: float
    """When it was added, or paused."""
    admitted_at: float | None = None
    """When the request last got a slot; None if it has not started."""
    is_next: bool = False
    """Whether another request was paused for it."""


class Scheduler(Generic[Key]):
    """Orders requests. It stores the key and the client of each request, and whether its prompt is short.

    Times are seconds of the clock that the engine uses.
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
        # New lists replace these after each change, so that any thread may iterate over them.
        self.queued: list[Key] = []
        """The requests that wait for a slot, including paused ones."""
        self.running: list[Key] = []
        """The requests that have a slot."""

    def _update_lists(self) -> None:
        self.queued, self.running = list(self._queued), list(self._running)

    @property
    def not_started(self) -> list[Key]:
        """The requests that have never had a slot."""
        return [key for key, entry in self._queued.items() if entry.admitted_at is None]

    @property
    def idle(self) -> bool:
        return not self._queued and not self._running

    def __contains__(self, key: Key) -> bool:
        return key in self._running or key in self._queued

    def add(self, keys: Sequence[Key], *, tokens: int, now: float, client: str | None = None) -> None:
        """Queue requests with the same prompt behind those that are already queued.

        Args:
            tokens: Number of tokens of the prompt that must be computed.
            client: The client that sent the requests.
        """
        for key in keys:
            self._added += 1
            short = tokens <= SHORT_PROMPT_TOKENS
            self._queued[key] = _Entry(number=self._added, client=client, short=short, queued_at=now)
        self._update_lists()

    def admit(self, judge: Callable[[Key], Verdict] | None, now: float) -> Key | None:
        """Give a slot to the next request, whose prefill starts, and return its key; None if no request can start.

        The caller repeats the call until it returns None. A request that was paused is returned again, and continues.

        Args:
            judge: Decides whether a request may start; None allows it.
        """
        if len(self._running) >= self.slots:
            return None
        for key, entry in self._queued.items():
            if not self._has_lane(entry):
                continue
            verdict = Verdict.TAKE if judge is None else judge(key)
            if verdict is Verdict.TAKE:
                self._running[key] = self._queued.pop(key)
                self._prefilling.add(key)
                entry.admitted_at, entry.is_next = now, False
                self._update_lists()
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
        if not self._queued or len(self._running) < self.slots:
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
        self._update_lists()
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
        if len(self._prefilling) >= self.lanes:
            return False
        return entry.short or sum(not self._running[key].short for key in self._prefilling) < self.prefills

    def prefilled(self, key: Key) -> None:
        """Record that the prompt of this request has been computed, so that the next prefill may start."""
        self._prefilling.discard(key)

    def remove(self, key: Key) -> bool:
        """Remove a request that has ended, and return whether it was queued or running: an end can be reported
        twice.
        """
        self._prefilling.discard(key)
        removed = self._queued.pop(key, None) or self._running.pop(key, None)
        self._update_lists()
        return removed is not None


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


# Admission


@dataclass(eq=False)
class Permit:
    """Permission for one request to be queued and computed."""

    admission: AdmissionControl
    released: bool = False
    """Whether the request has ended."""

    def check(self) -> None:
        """Check that the model still accepts this request. Called when the request is queued.

        Raises:
            NotLoadedError: the model is being unloaded, and requests that wait are not served first.
        """
        if (error := self.admission.queueing_error) is not None:
            raise error

    def release(self) -> None:
        """Record that the request has ended. Idempotent; may be called from any thread."""
        if self.released:
            return
        self.released = True
        admission = self.admission
        with admission._lock:
            admission.active -= 1
            admission.used_at = time.perf_counter()
            idle = admission.active == 0
            watchers, admission._watchers = admission._watchers, []
        for watcher in watchers:
            if watcher.set_running_or_notify_cancel():
                watcher.set_result(None)
        if idle:
            admission._on_idle()


class AdmissionControl:
    """Counts the requests of one model in memory, and refuses those beyond the limit. Thread-safe.

    Args:
        model: Id of the model, for messages.
        limit: Number of requests that may wait or run at the same time.
        on_idle: Called after the last request has ended, on the thread that releases its permit.
    """

    def __init__(self, model: str, *, limit: int, on_idle: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.limit = limit
        self.active = 0
        """Number of requests that were accepted and have not ended."""
        self.used_at = time.perf_counter()
        """Time at which a request was last accepted or ended (``time.perf_counter``)."""
        self.queueing_error: LabError | None = None
        """Error for requests that were accepted but not queued yet; None while they may be queued."""
        self._on_idle = on_idle
        # Reentrant: a request that is garbage-collected while this thread holds the lock releases its permit.
        self._lock = threading.RLock()
        self.closed = False
        """Whether new requests are refused. Set by ``close`` and ``reopen``."""
        self._watchers: list[Future[None]] = []

    def admit(self, count: int, *, slot_free_s: Callable[[], float] = lambda: 1.0) -> list[Permit]:
        """Accept a request for ``count`` answers, all or none; return one permit for each answer.

        Args:
            slot_free_s: Returns the estimated time until the queue has room, for the error.

        Raises:
            NotLoadedError: the model is being unloaded.
            QueueFullError: the limit would be exceeded.
        """
        with self._lock:
            if self.closed:
                raise NotLoadedError(f"{self.model} is being unloaded; {LOAD_FIRST}")
            if self.active + count > self.limit:
                retry_after_s = slot_free_s()
                raise QueueFullError(
                    f"{self.model} has {counted(self.active, 'request')} running or queued, and the limit is "
                    f"{self.limit} (slots and queue_limit); try again in {retry_after_s:.0f} s",
                    retry_after_s=retry_after_s,
                )
            self.active += count
            self.used_at = time.perf_counter()
        return [Permit(self) for _ in range(count)]

    def touch(self) -> None:
        """Count this moment as the last use of the model."""
        self.used_at = time.perf_counter()

    def close(self, error: LabError | None) -> None:
        """Refuse new requests until ``reopen`` is called.

        Args:
            error: Error for requests that were accepted but not queued yet; None lets them be queued.
        """
        self.queueing_error = error
        self.closed = True

    def reopen(self) -> None:
        """Accept requests again."""
        self.closed = False
        self.queueing_error = None

    async def until_at_most(self, count: int) -> None:
        """Wait until at most ``count`` requests are left."""
        while True:
            with self._lock:
                if self.active <= max(0, count):
                    return
                change: Future[None] = Future()
                self._watchers.append(change)
            await asyncio.wrap_future(change)

    async def until_room(self, count: int) -> None:
        """Wait until ``count`` more requests would not exceed the limit."""
        await self.until_at_most(self.limit - count)


@asynccontextmanager
async def deadline(arrived_at: float, timeout_s: float, remedy: str = "send a shorter request") -> AsyncIterator[None]:
    """Cancel the block ``timeout_s`` after ``arrived_at`` (``time.perf_counter``).

    Args:
        remedy: What the caller can do, for the error.

    Raises:
        GenerationTimeoutError: the block did not end in time.
    """
    until = asyncio.get_running_loop().time() + arrived_at + timeout_s - time.perf_counter()
    try:
        async with asyncio.timeout_at(until):
            yield
    except TimeoutError:
        raise GenerationTimeoutError.after(timeout_s, remedy) from None
