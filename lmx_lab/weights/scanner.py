"""The scan of the disk for models: one at a time, on its own thread, shared by all callers, with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.scan import ModelLocation, read_entry

SCAN_S = 4.0
"""How long a caller waits for a scan. A first one reads the headers of all GGUF files, 0.2 s each (measured)."""
Root = tuple[Path, Iterable[ModelLocation]]
"""A folder that is scanned, and the places in it; they are found while they are iterated."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The usable models on the disk."""

    entries: tuple[ModelEntry, ...]
    """By id."""
    problem: str | None = None
    """Why ``entries`` may be out of date or incomplete."""


@dataclass(kw_only=True, eq=False)
class _Scan:
    """One pass over all roots."""

    found: dict[str, ModelEntry] = field(default_factory=dict)
    root: Path | None = None
    """The one that is being read."""
    done: Future[Listing] = field(default_factory=Future)

    def run(self, roots: Iterable[Root]) -> Listing:
        for self.root, places in roots:
            for place in places:
                if place.id not in self.found:
                    try:
                        self.found[place.id] = read_entry(place)
                    except UnusableModelError:
                        continue
        return self.listing()

    def listing(self, problem: str | None = None) -> Listing:
        """What was found so far; from any thread."""
        return Listing(entries=tuple(sorted(self.found.values(), key=lambda entry: entry.id)), problem=problem)


class Scanner:
    """Scans when asked. A caller gets a scan that began after its call, so that it sees all that was there before.

    While a scan runs, later callers share the next one. The thread ends with the last scan.
    """

    def __init__(self, roots: Callable[[], Iterable[Root]], *, limit_s: float = SCAN_S) -> None:
        """
        Args:
            roots: Called on the scanning thread at each scan; of two places with one id the first counts.
            limit_s: How long a caller waits. After that, it gets the last list, with the problem named.
        """
        self._roots = roots
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._running: _Scan | None = None
        self._next: _Scan | None = None
        self._overdue = False
        """Whether a caller's wait for the running scan has timed out."""
        self._last: Listing | None = None
        """The result of the last complete scan."""

    def listing(self) -> Listing:
        """The models on the disk; blocks for ``limit_s`` at most."""
        asked = self._ask()
        wait([asked.done], self._wait_s)
        return self._outcome(asked)

    async def alisting(self) -> Listing:
        """As ``listing``, on an event loop."""
        asked = self._ask()
        waiting = asyncio.wrap_future(asked.done)
        # The failure is raised below. Without this, asyncio would also log it.
        waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.wait([waiting], timeout=self._wait_s)
        return self._outcome(asked)

    @property
    def _wait_s(self) -> float:
        # Once one caller's wait has timed out, others are answered at once.
        return 0.0 if self._overdue else self._limit_s

    def _ask(self) -> _Scan:
        with self._lock:
            if self._running is not None:
                self._next = self._next or _Scan()
                return self._next
            self._running = scan = _Scan()
        threading.Thread(target=self._run, args=(scan,), name="lmx-lab-scan", daemon=True).start()
        return scan

    def _outcome(self, asked: _Scan) -> Listing:
        if asked.done.done():
            return asked.done.result()
        with self._lock:
            running = self._running
            if running is None or asked.done.done():  # it has just ended
                return asked.done.result()
            self._overdue = True
        problem = (
            f"{running.root} has not been read within {self._limit_s:g} s, so this list may be incomplete or out of "
            "date: check the disk that it lies on"
        )
        if self._last is None:
            return running.listing(problem)
        return Listing(entries=self._last.entries, problem=problem)

    def _run(self, scan: _Scan | None) -> None:
        while scan is not None:
            scan.done.set_running_or_notify_cancel()
            try:
                self._last = result = scan.run(self._roots())
            except BaseException as exc:
                scan.done.set_exception(exc)
            else:
                scan.done.set_result(result)
            with self._lock:
                self._running, self._next, self._overdue = self._next, None, False
                scan = self._running
