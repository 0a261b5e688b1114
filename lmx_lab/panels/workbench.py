"""Run the panels of one lab: their event loop, their timer, the backend that they show, its recent history, and static
snapshots of their last state, which a notebook without its kernel shows instead of widgets.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from lmx_lab.backend import Backend
from lmx_lab.errors import HostingError
from lmx_lab.portal import BACKGROUND, LoopThread
from lmx_lab.results.figures import format_time
from lmx_lab.urls import is_vscode
from lmx_lab.values.models import ModelEvent
from lmx_lab.wire.admin import RequestEvent, Sample

if TYPE_CHECKING:
    # Imported for types only, because most labs have no daemon, and the client takes time to import.
    from lmx_lab.client.subscription import ConnectionState
    from lmx_lab.wire.events import DaemonEvent

log = logging.getLogger(__name__)
T = TypeVar("T")
KEPT_S = 15 * 60
"""Time for which measurements are kept: two per second."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# If an output contains a widget, JupyterLab ignores the other representations in the output, and displays "Loading
# widget..." or "model not found" if the widget no longer exists. Therefore the snapshot is a separate output. It is
# hidden if the widget before it exists or was closed, and an output of plain text before a snapshot is hidden.
_STYLE = """\
<style>
.jp-OutputArea-child:has(section.lmx) + .jp-OutputArea-child:has(.lmx-snapshot),
.jp-OutputArea-child:has(> .lm-mod-hidden) + .jp-OutputArea-child:has(.lmx-snapshot),
.jp-OutputArea-child:has(+ .jp-OutputArea-child .lmx-snapshot) > .jp-OutputArea-output:not(:has(*)) { display: none; }
</style>
"""


@dataclass(frozen=True, kw_only=True)
class EndedRequest:
    """A request that has ended, and the time of its end."""

    at: float
    """Seconds since 1970."""
    event: RequestEvent


class History:
    """The samples of the last ``KEPT_S`` seconds, and the last 1,000 requests that have ended.

    The workbench adds to it; it can be read from any thread.
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=2 * KEPT_S)
        self._requests: deque[EndedRequest] = deque(maxlen=1000)

    @property
    def samples(self) -> list[Sample]:
        """The samples, oldest first."""
        return list(self._samples)

    @property
    def requests(self) -> list[EndedRequest]:
        """The requests, oldest first."""
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
        """Called every ``tick_s`` seconds."""

    def model_event(self, event: ModelEvent) -> None:
        """Called for each event of a model, whichever client of the server has caused it."""

    def request_ended(self, event: RequestEvent) -> None:
        """Called for each request that has ended, whichever client has sent it."""

    def backend_changed(self) -> None:
        """Called when another lab is shown."""

    def flush(self) -> None:
        """Show pending changes immediately. Called when the workbench is suspended."""


class Workbench:
    """Runs the code of panels on the background loop of the process, which a busy cell does not delay.

    Panels can outlive the lab that they show: ``follow`` makes them show another one.

    Args:
        tick_s: Time between two updates of the panels.
        frame_s: Minimum time between two messages of a panel's state: fewer than four are sent per second, and changes
            appear without delay.
    """

    def __init__(self, backend: Backend, *, tick_s: float = 0.5, frame_s: float = 0.3) -> None:
        self._backend = backend
        self.tick_s = tick_s
        self.frame_s = frame_s
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
        """The thread of the background loop, if it was used since the workbench was suspended."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """The work of the panels, which ends when the workbench is suspended."""
        self._timer: asyncio.Task[None] | None = None
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
        try:
            self._thread = thread = BACKGROUND.thread
            return thread.submit(self._run(work))
        except HostingError:
            work.close()
            raise

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._timer is None or self._timer.done():
            self._timer = self.create_task(self._run_timer(), "update panels")
        self._own(asyncio.current_task())
        return await work

    def create_task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that ends when the workbench is suspended. Call it on the panels' loop."""
        task = asyncio.create_task(work, name=name)
        self._own(task)
        return task

    def _own(self, task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def suspend_if_shown(self, backend: Backend) -> None:
        """Suspend the workbench because this lab has stopped, unless another lab is shown."""
        if self._backend is backend:
            self.suspend()

    def suspend(self) -> None:
        """Update the panels a last time, to show that their lab has stopped, and cancel their work.

        Idempotent. The next ``follow``, or the next request of a panel, starts the updates again.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            # Other code of the process may block the loop.
            with contextlib.suppress(Exception):
                thread.submit(self._end()).result(1.0)

    async def _end(self) -> None:
        await self._notify_changed()
        if tasks := set(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for watcher in list(self._watchers):
            self._guard(watcher.flush)

    async def _notify_changed(self) -> None:
        self.static_views.mark_changed(ended=True)
        for watcher in list(self._watchers):
            self._guard(watcher.backend_changed)
        self._guard(self._tick)

    async def _run_timer(self) -> None:
        """Update the panels and read events, until the lab has stopped."""
        reader = self.create_task(self._read_events(), "read a lab's events")
        try:
            while True:
                self._guard(self._tick)
                if self.static_views.is_due:
                    await asyncio.to_thread(self.static_views.refresh)
                if self._backend.state().state == "stopped":
                    return
                await asyncio.sleep(self.tick_s)
        finally:
            reader.cancel()

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
            await asyncio.sleep(self.tick_s)

    def _guard(self, call: Callable[[], object]) -> None:
        # An error in one panel must not stop the timer of the others.
        try:
            call()
        except Exception:
            log.exception("a panel could not be updated")


class StaticViews:
    """The snapshots of displayed widgets. They are sent again after a change, so that a saved notebook is up to date.

    Snapshots are updated when a cell ends, at the next ``refresh`` after ``mark_changed(ended=True)``, and otherwise
    ten seconds after the last update if ``mark_changed`` was called since. Can be used from any thread.

    Args:
        check: Called when a cell ends; calls ``mark_changed`` for changes that cause no event.
        max_views: Maximum number of displayed widgets whose snapshots are updated; the newest are kept.
    """

    def __init__(self, check: Callable[[], object] = lambda: None, *, max_views: int = 32) -> None:
        self._check = check
        self._max_views = max_views
        self._views: dict[str, tuple[Callable[[], str], str, bool]] = {}
        """For each display id, the function that returns the current HTML, and the HTML that was sent last."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_changed = False
        self._due_at = 0.0
        self._shell: Any = None

    def show(self, bundle: Any, render: Callable[[], str] | None = None) -> None:
        """Display the result of a ``_repr_mimebundle_``.

        Args:
            render: Returns the current HTML of the bundle; None if it does not change.
        """
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        outputs = split_outputs(data, metadata, os.environ)
        name = f"lmx-lab-{os.getpid()}-{next(self._numbers)}" if render and len(outputs) > 1 else None
        # Imported when a widget is displayed, because a lab without a notebook does not need IPython.
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        for output in outputs:
            shown_as = name if output is outputs[-1] else None
            display(output, metadata=metadata, raw=True, display_id=shown_as)  # type: ignore[no-untyped-call]
        if render is not None and name is not None:
            with self._lock:
                self._views[name] = render, data["text/html"], False
                while len(self._views) > self._max_views:
                    del self._views[next(iter(self._views))]
            if (shell := get_ipython()) is not None and shell is not self._shell:
                self._shell = shell
                shell.events.register("post_run_cell", self._after_cell)

    def mark_changed(self, *, ended: bool = False) -> None:
        """Schedule an update of the snapshots.

        Args:
            ended: Whether a turn, a load or a measurement has ended; the update is then due immediately.
        """
        self._is_changed = True
        if ended:
            self._due_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether ``refresh`` should be called."""
        return self._is_changed and bool(self._views) and time.monotonic() >= self._due_at

    def refresh(self, *, after_cell: bool = False) -> None:
        """Send the snapshots that have changed. Must not be called on the panels' loop, which the snapshots may use.

        Args:
            after_cell: Whether a cell has just ended. Snapshots that were sent at another time are then sent again,
                because nbconvert and papermill ignore messages between two cells.
        """
        from IPython.display import display  # As in show.

        with self._lock:
            self._is_changed, self._due_at = False, time.monotonic() + 10
            for name, (render, sent, again) in list(self._views.items()):
                try:
                    content = render()
                    if is_new := content != sent or (again and after_cell):
                        display({"text/html": _wrapped(content)}, raw=True, display_id=name, update=True)  # type: ignore[no-untyped-call]
                except Exception:
                    # An error in one panel must not stop the others, or make the user's cell fail.
                    log.exception("the snapshot of a panel could not be updated")
                else:
                    self._views[name] = render, content, (is_new or again) and not after_cell

    def _after_cell(self, _result: Any) -> None:
        self._check()
        if self._is_changed or any(again for _, _, again in list(self._views.values())):
            self.refresh(after_cell=True)


def split_outputs(
    data: Mapping[str, Any], metadata: Mapping[str, Any], environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Split a bundle into the two outputs that JupyterLab needs: the widget and its snapshot.

    A bundle without a widget, or for another frontend, is returned unchanged as the only output. nbconvert renders the
    empty HTML instead of the widget, and then the snapshot.
    """
    # Only in Colab does a widget's bundle have metadata.
    if WIDGET_VIEW not in data or "text/html" not in data or metadata or is_vscode(environ):
        return [dict(data)]
    return [{**data, "text/html": ""}, {"text/html": _wrapped(data["text/html"])}]


def _wrapped(content: str) -> str:
    return f'{_STYLE}<div class="lmx-snapshot"><div>as of {format_time(time.time())}</div>{content}</div>'
