"""What the panels of one lab share: the loop on which they think, the clock, and the lab they show."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from lmx_lab.backend import Source
from lmx_lab.panels.event_source import EventSource
from lmx_lab.panels.history import History
from lmx_lab.portal import LoopThread
from lmx_lab.wire.admin import ModelEvent, RequestEvent, Sample

log = logging.getLogger(__name__)
T = TypeVar("T")
OWN_TASKS = 4
"""The loop's main one, the workbench's own, its clock and its news."""
LAST_LOOK_S = 1.0
TICKS_LEFT = 4
"""So many ticks after its lab has stopped, and nothing is left to do, the loop ends."""
TICK_S = 0.5
"""Twice a second: state and figures go to the panels."""


class Watcher(Protocol):
    """A panel as the workbench knows it; called on the workbench's loop."""

    def tick(self, source: Source, sample: Sample | None) -> None:
        """Half a second has passed."""

    def model_event(self, event: ModelEvent) -> None:
        """Something happened to a model, whoever asked."""

    def changed_source(self) -> None:
        """Another lab is shown from now on."""

    def flush(self) -> None:
        """Show at once what waits to be shown; when the workbench rests, and then on any thread."""


class Workbench:
    """Runs the panels' work on a thread of its own, which a busy cell does not delay.

    Panels outlive the lab they show: when another is launched, ``follow`` makes them show that one.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.events: EventSource | None = None
        """The daemon of which the events panel tells; None while there is none."""
        self.job = ""
        """What somebody does with the lab who shows how far it is, such as a measurement; set on any thread."""
        self.history = History()
        self.panels: dict[str, Any] = {}
        """The one instance of each panel, by name."""
        self.boxes: dict[tuple[str, ...], Any] = {}
        """Those that show several of them, by their names."""
        self._thread: LoopThread | None = None
        self._lock = threading.Lock()
        self._watchers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def source(self) -> Source:
        """The lab that is shown now."""
        return self._source

    def follow(self, source: Source) -> None:
        """Show another lab from now on, and remember what it does."""
        self._source = source
        self.submit(self._tell_changed())

    def follow_events(self, source: EventSource | None) -> None:
        """Show the events of another daemon from now on, or of none."""
        self.events = source
        # The clock tells them; without panels there is no reason for a thread.
        if self._watchers:
            self.submit(asyncio.sleep(0))

    def watch(self, watcher: Watcher) -> None:
        """Tell a panel of time and models, as long as somebody holds it."""
        self.submit(self._add(watcher))

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the panels' loop, without waiting; from any thread."""
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("lmx-lab-panels")
                self._thread.start()
                self._thread.submit(self._live())
            return self._thread.submit(work)

    def rest(self) -> None:
        """Show the lab once more, which has stopped, and end the loop with whatever runs on it. Idempotent.

        The next ``follow`` or request of a panel begins anew.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                last = thread.submit(self._tell_changed())
        if thread is not None:
            with contextlib.suppress(Exception):
                last.result(LAST_LOOK_S)
            thread.stop()
            # Nobody comes round any more for what waits for its frame.
            for watcher in list(self._watchers):
                self._guarded(watcher.flush)

    async def _add(self, watcher: Watcher) -> None:
        self._watchers.add(watcher)
        # The figures belong to the clock: a sample is about the time since the last one.
        self._guarded(lambda: watcher.tick(self._source, None))

    async def _tell_changed(self) -> None:
        for watcher in list(self._watchers):
            self._guarded(watcher.changed_source)
        self._tick()

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._clock())
            tasks.create_task(self._news())

    async def _clock(self) -> None:
        idle = 0
        while idle < TICKS_LEFT:
            self._guarded(self._tick)
            await asyncio.sleep(TICK_S)
            # A click on a panel whose lab has stopped begins all this again; it does not go on for that.
            busy = self._source.state().state != "stopped" or len(asyncio.all_tasks()) > OWN_TASKS
            idle = 0 if busy else idle + 1
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def _tick(self) -> None:
        source = self._source
        sample = source.sample()
        if sample is not None:
            self.history.add_sample(sample)
        for watcher in list(self._watchers):
            self._guarded(lambda watcher=watcher: watcher.tick(source, sample))

    async def _news(self) -> None:
        """What whichever lab is shown has to tell, for ever."""
        while True:
            try:
                async for event in self._source.progress():
                    self._note(event)
            except Exception as exc:
                log.debug("no model events: %r", exc)
            await asyncio.sleep(TICK_S)

    def _note(self, event: ModelEvent | RequestEvent) -> None:
        if isinstance(event, RequestEvent):
            self.history.add_request(event)
            return
        for watcher in list(self._watchers):
            self._guarded(lambda watcher=watcher: watcher.model_event(event))

    def _guarded(self, call: Any) -> None:
        # One panel's bug must not stop the clock of the others.
        try:
            call()
        except Exception:
            log.exception("a panel could not be updated")
