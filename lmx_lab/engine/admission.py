"""Count the requests of one loaded model from acceptance to their end, and refuse those beyond its limit.

Each request holds a permit. The engine checks the permit when it queues the request, and releases it when the request
has ended. All engines therefore count queued and running requests in the same way, and an unload can wait for the end
of the requests without asking the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from lmx_lab.errors import LabError, NotLoadedError, QueueFullError

LOAD_FIRST = "load one first: lab.load(...), lmx-lab load or POST /admin/models/load"


class Permit:
    """Permission for one request to be queued and computed."""

    def __init__(self, admission: AdmissionControl) -> None:
        self.admission = admission
        self._released = False

    def check(self) -> None:
        """Check that the model still accepts this request. Called when the request is queued.

        Raises:
            NotLoadedError: the model is being unloaded, and requests that wait are not served first.
        """
        if (error := self.admission.queueing_error) is not None:
            raise error

    def release(self) -> None:
        """Record that the request has ended. Idempotent; may be called from any thread."""
        if not self._released:
            self._released = True
            self.admission.release_one()


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
                    f"{self.active} requests for {self.model} are running or queued, and the limit is {self.limit} "
                    f"(slots and queue_limit); try again in {retry_after_s:.0f} s",
                    retry_after_s=retry_after_s,
                )
            self.active += count
            self.used_at = time.perf_counter()
        return [Permit(self) for _ in range(count)]

    @contextmanager
    def admitting(self, count: int, *, slot_free_s: Callable[[], float]) -> Iterator[list[Permit]]:
        """Accept a request as ``admit`` does, and pass it to a model within the block. If that fails, its permits are
        released.
        """
        permits = self.admit(count, slot_free_s=slot_free_s)
        try:
            yield permits
        except BaseException:
            for permit in permits:
                permit.release()
            raise

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

    def release_one(self) -> None:
        """Record that one request has ended. Called once by its permit."""
        with self._lock:
            self.active -= 1
            self.used_at = time.perf_counter()
            idle = self.active == 0
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if watcher.set_running_or_notify_cancel():
                watcher.set_result(None)
        if idle:
            self._on_idle()
