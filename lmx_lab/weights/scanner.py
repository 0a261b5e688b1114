"""Scan the disk for models: one scan at a time, on its own thread, shared by all callers and with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ModelEntry, ModelLocation
from lmx_lab.weights.facts import read_entry
from lmx_lab.weights.locations import join_formats

Root = tuple[Path, Iterable[ModelLocation]]
"""A folder to scan, and the locations in it, which are searched during the iteration."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The usable models on the disk."""

    entries: tuple[ModelEntry, ...]
    """Sorted by id. A model in several formats has an entry for each; see ``values.models.by_model``."""
    problem: str | None = None
    """Why ``entries`` may be out of date or incomplete."""


@dataclass(kw_only=True, eq=False)
class _Scan:
    """One pass over all roots."""

    found: list[ModelEntry] = field(default_factory=list)
    root: Path | None = None
    """The folder that is being read."""
    done: Future[Listing] = field(default_factory=Future)

    def run(self, roots: Iterable[Root]) -> Listing:
        first: dict[str, ModelLocation] = {}
        for self.root, locations in roots:
            for location in locations:
                if location.is_format_of(first.get(location.id, location)):
                    with suppress(UnusableModelError):  # The model is not listed.
                        self.found.append(read_entry(location))
                        first.setdefault(location.id, location)
        return self.listing()

    def listing(self, problem: str | None = None) -> Listing:
        """Return the models that were found so far. Thread-safe."""
        entries = sorted(join_formats(list(self.found)), key=lambda entry: (entry.id, entry.format))
        return Listing(entries=tuple(entries), problem=problem)


class Scanner:
    """Scans on demand. A caller gets the result of a scan that began after its call, so it misses no older change.

    While a scan runs, later callers share the next one. The thread ends with the last scan.
    """

    def __init__(self, roots: Callable[[], Iterable[Root]], *, limit_s: float = 4.0) -> None:
        """
        Args:
            roots: Called on the scanning thread at each scan. Of two locations with the same id, the first is used.
            limit_s: How long a caller waits. After that, it gets the last list together with the problem. The first
                scan reads the headers of all GGUF files, 0.2 s each (measured).
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
        """Return the models on the disk; blocks for at most ``limit_s``."""
        scan = self._request_scan()
        wait([scan.done], self._wait_s)
        return self._result(scan)

    async def alisting(self) -> Listing:
        """Return the same as ``listing``, for use in a coroutine."""
        scan = self._request_scan()
        waiting = asyncio.wrap_future(scan.done)
        # A failure is raised below; without this, asyncio would also log it.
        waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.wait([waiting], timeout=self._wait_s)
        return self._result(scan)

    @property
    def _wait_s(self) -> float:
        # After the wait of one caller has timed out, the others are answered immediately.
        return 0.0 if self._overdue else self._limit_s

    def _request_scan(self) -> _Scan:
        with self._lock:
            if self._running is not None:
                self._next = self._next or _Scan()
                return self._next
            self._running = scan = _Scan()
        threading.Thread(target=self._run, args=(scan,), name="lmx-lab-scan", daemon=True).start()
        return scan

    def _result(self, scan: _Scan) -> Listing:
        if scan.done.done():
            return scan.done.result()
        with self._lock:
            running = self._running
            if running is None or scan.done.done():  # it has just ended
                return scan.done.result()
            self._overdue = True
        problem = (
            f"{running.root} has not been read within {self._limit_s:g} s, so this list may be incomplete or out of "
            "date: check its disk"
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
