"""Run the panels of one lab: their event loop, their timer, the backend that they show, and its recent history."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from lmx_lab.backend import Backend
from lmx_lab.panels.static_views import StaticViews
from lmx_lab.portal import LoopThread
from lmx_lab.wire.admin import ModelEvent, RequestEvent, Sample

if TYPE_CHECKING:
    # Imported for types only, because most labs have no daemon, and the client takes time to import.
    from lmx_lab.client.subscription import ConnectionState
    from lmx_lab.wire.events import DaemonEvent

log = logging.getLogger(__name__)
T = TypeVar("T")
KEPT_S = 15 * 60
"""Time for which measurements are kept: two per second."""
MAX_SAMPLES = 2 * KEPT_S
MAX_REQUESTS = 1000
OWN_TASKS = 3
"""Number of tasks of an idle loop: the loop's main task, the workbench's timer and its event reader."""
LAST_UPDATE_S = 1.0
"""Maximum time for the last update when the workbench is suspended."""
IDLE_TICKS = 4
"""Number of updates after which the loop ends if its lab has stopped and no work is left."""
TICK_S = 0.5
"""Time between two updates of the panels."""


@dataclass(frozen=True, kw_only=True)
class EndedRequest:
    """A request that has ended, and the time of its end."""

    at: float
    """Seconds since 1970."""
    event: RequestEvent


class History:
    """The samples of the last ``KEPT_S`` seconds, and the ended requests.

    The workbench adds to it; it can be read from any thread.
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._requests: deque[EndedRequest] = deque(maxlen=MAX_REQUESTS)

    @property
    def samples(self) -> list[Sample]:
        """The samples, oldest first."""
        return list(self._samples)

    @property
    def requests(self) -> list[EndedRequest]:
        """At most ``MAX_REQUESTS`` requests, oldest first."""
        return list(self._requests)

    def add_sample(self, sample: Sample) -> None:
        if self._samples and self._samples[-1].at == sample.at:
            return  # A server elsewhere sends one sample per second, but samples are read twice per second.
        self._samples.append(sample)
        while self._samples[0].at < sample.at - KEPT_S:
            self._samples.popleft()

    def add_request(self, event: RequestEvent) -> None:
        self._requests.append(EndedRequest(at=time.time(), event=event))


class EventSource(Protocol):
    """The part of a daemon that the events panel uses. All methods run on the panels' loop and raise only
    ``LabError``."""

    @property
    def place(self) -> str:
        """The daemon's address, for display."""

    def events(self) -> AsyncGenerator[DaemonEvent | ConnectionState, None]:
        """Yield events and states of the connection, in order.

        The stream ends or raises when no further attempt to connect can succeed.
        """

    async def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], scope: Literal["once", "session"]
    ) -> None:
        """Allow or deny a call; ``session`` also applies to later calls of the tool."""

    async def cancel(self, session_id: str) -> None:
        """Cancel the session's running turn; does nothing if there is none."""


class Watcher(Protocol):
    """The methods of a panel that the workbench calls, on its own loop."""

    def tick(self, backend: Backend, sample: Sample | None) -> None:
        """Called every ``TICK_S``."""

    def model_event(self, event: ModelEvent) -> None:
        """Called for each event of a model, whichever client of the server has caused it."""

    def request_ended(self, event: RequestEvent) -> None:
        """Called for each request that has ended, whichever client has sent it."""

    def backend_changed(self) -> None:
        """Called when another lab is shown."""

    def flush(self) -> None:
        """Show pending changes immediately. Called on any thread when the workbench is suspended."""


class Workbench:
    """Runs the code of panels in a separate thread, which a busy cell does not delay.

    Panels can outlive the lab that they show: ``follow`` makes them show another one.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.events: EventSource | None = None
        """The daemon whose events are shown; None if there is none."""
        self._job = ""
        """The job of the backend at the last check."""
        self.history = History()
        self.static_views = StaticViews(self._check_job)
        self.panels: dict[str, Any] = {}
        """The one instance of each panel, by name."""
        self.boxes: dict[tuple[str, ...], Any] = {}
        """Widgets that show several panels, by the names of the panels."""
        self._thread: LoopThread | None = None
        self._lock = threading.Lock()
        self._watchers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def backend(self) -> Backend:
        """The lab that is shown."""
        return self._backend

    def follow(self, backend: Backend) -> None:
        """Show another lab from now on, and record its measurements."""
        self._backend = backend
        self.submit(self._notify_changed())

    def follow_events(self, source: EventSource | None) -> None:
        """Show the events of another daemon from now on, or of none."""
        self.events = source
        # The next tick notifies the panels; without panels no thread is needed.
        if self._watchers:
            self.submit(asyncio.sleep(0))

    def watch(self, watcher: Watcher) -> None:
        """Register a panel, which is notified from now on while it exists."""

        async def add() -> None:
            self._watchers.add(watcher)
            # Without a sample, because taking one here would shorten the interval of the next regular sample.
            self._guard(functools.partial(watcher.tick, self._backend, None))

        self.submit(add())

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the panels' loop, without waiting. Can be called from any thread."""
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("lmx-lab-panels")
                self._thread.start()
                self._thread.submit(self._run_timer())
                self._thread.submit(self._read_events())
            return self._thread.submit(work)

    def suspend_if_shown(self, backend: Backend) -> None:
        """Suspend the workbench because this lab has stopped, unless another lab is shown."""
        if self._backend is backend:
            self.suspend()

    def suspend(self) -> None:
        """Update the panels a last time, to show that their lab has stopped, and end the loop with all its tasks.

        Idempotent. The next ``follow``, or the next request of a panel, starts the loop again.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                last = thread.submit(self._notify_changed())
        if thread is not None:
            with contextlib.suppress(Exception):
                last.result(LAST_UPDATE_S)
            thread.stop()
            # The loop has ended, so there is no next frame that would set pending values.
            for watcher in list(self._watchers):
                self._guard(watcher.flush)

    async def _notify_changed(self) -> None:
        self.static_views.mark_changed(ended=True)
        for watcher in list(self._watchers):
            self._guard(watcher.backend_changed)
        self._tick()

    async def _run_timer(self) -> None:
        idle = 0
        while idle < IDLE_TICKS:
            self._guard(self._tick)
            if self.static_views.is_due:
                await asyncio.to_thread(self.static_views.refresh)
            await asyncio.sleep(TICK_S)
            # A click on a panel of a stopped lab has started this loop; only further work keeps it running.
            busy = self._backend.state().state != "stopped" or len(asyncio.all_tasks()) > OWN_TASKS
            idle = 0 if busy else idle + 1
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def _check_job(self) -> None:
        """Update the snapshots if a job has begun, progressed or ended."""
        if (job := self._backend.job) != self._job:
            self._job = job
            self.static_views.mark_changed(ended=not job)

    def _tick(self) -> None:
        backend = self._backend
        self._check_job()
        sample = backend.sample()
        if sample is not None:
            self.history.add_sample(sample)
        for watcher in list(self._watchers):
            self._guard(functools.partial(watcher.tick, backend, sample))

    async def _read_events(self) -> None:
        """Read the events of the lab that is shown, until cancelled."""
        while True:
            try:
                async for event in self._backend.events():
                    ends = isinstance(event, ModelEvent) and event.stage in ("loaded", "unloaded", "failed")
                    self.static_views.mark_changed(ended=ends)
                    if isinstance(event, RequestEvent):
                        self.history.add_request(event)
                    for watcher in list(self._watchers):
                        notify = watcher.request_ended if isinstance(event, RequestEvent) else watcher.model_event
                        self._guard(functools.partial(notify, event))
            except Exception as exc:
                log.debug("the lab's events cannot be read: %r", exc)
            await asyncio.sleep(TICK_S)

    def _guard(self, call: Callable[[], object]) -> None:
        # An error in one panel must not stop the timer of the others.
        try:
            call()
        except Exception:
            log.exception("a panel could not be updated")
