"""What a process holds: memory, descriptors, threads, children. And by how much that has grown."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import psutil

from soak.row import Row

POLL_S = 0.1
ASKED_S = 1.0
"""Between two times that the process is asked to give back."""
STEADY_S = 2.0
"""For so long nothing must fall before a reading counts as settled."""
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Reading:
    rss_bytes: int
    """Of the process alone; a child's memory is the child's."""
    descriptors: int
    threads: int
    processes: int
    """Children and theirs, zombies among them."""

    def lower(self, other: Reading) -> Reading:
        """The lower value of each."""
        return Reading(
            rss_bytes=min(self.rss_bytes, other.rss_bytes),
            descriptors=min(self.descriptors, other.descriptors),
            threads=min(self.threads, other.threads),
            processes=min(self.processes, other.processes),
        )


POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads that ``asyncio.to_thread`` makes, one by one as its calls happen to meet: when the last begins is chance."""
GIVES_BACK = """
import ctypes, gc, signal, sys

def give_back(number, frame):
    gc.collect()
    if (mx := sys.modules.get("mlx.core")) is not None:
        mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

signal.signal(signal.SIGUSR1, give_back)
"""
"""Runs in a process before it is watched: asked by a signal, it frees what it only keeps for use again.

MLX keeps 3 to 33 MB of freed buffers, glibc 35 to 80 MB of freed pieces, now more and now less; a leak is what stays.
"""
NOTHING = Reading(rss_bytes=0, descriptors=0, threads=0, processes=0)


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """By how much a process may grow without it being a leak.

    Memory moves by itself: of an allocator's arenas only whole pages are given back. Threads of pools come with the
    first burst.
    """

    rss_share: float = 0.02
    rss_mb: float = 3.0
    descriptors: int = 0
    threads: int = 0
    processes: int = 0

    def excess(self, base: Reading, now: Reading) -> Reading:
        """By how much ``now`` is above what ``base`` allows; zero where it is not."""
        rss = int(base.rss_bytes * (1 + self.rss_share) + self.rss_mb * MB)
        return Reading(
            rss_bytes=max(0, now.rss_bytes - rss),
            descriptors=max(0, now.descriptors - base.descriptors - self.descriptors),
            threads=max(0, now.threads - base.threads - self.threads),
            processes=max(0, now.processes - base.processes - self.processes),
        )

    def __str__(self) -> str:
        more = [f"{count} {name}" for name in ("descriptors", "threads", "processes") if (count := getattr(self, name))]
        return ", ".join([f"RSS {self.rss_share:.0%} + {self.rss_mb:g} MB", *more])


class Watch:
    """A running process under observation: ``begin()`` after its warm-up, ``add_to(row)`` when the work is done.

    The process has run ``GIVES_BACK``: without it the signal would end it.
    """

    def __init__(self, pid: int, *, allowance: Allowance | None = None) -> None:
        self._process = psutil.Process(pid)
        self.allowance = allowance or Allowance()
        self.base: Reading | None = None
        self._asked_at = 0.0

    def read(self) -> Reading:
        """What it holds at this moment.

        Raises:
            psutil.NoSuchProcess: it has ended.
        """
        with self._process.oneshot():
            if self._process.status() == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(self._process.pid)
            return Reading(
                rss_bytes=int(self._process.memory_info().rss),
                descriptors=self._process.num_fds(),
                threads=self._process.num_threads(),
                processes=len(self._process.children(recursive=True)),
            )

    def _read_settled(self) -> Reading:
        if time.monotonic() >= self._asked_at + ASKED_S:
            self._process.send_signal(signal.SIGUSR1)
            self._asked_at = time.monotonic()
            time.sleep(POLL_S)
        return self.read()

    def begin(self, *, limit_s: float = 10.0) -> Reading:
        """The base that later readings are held against: the lowest values, once none falls any more."""
        lowest = self._read_settled()
        ends = steady = time.monotonic()
        ends, steady = ends + limit_s, steady + STEADY_S
        while (now := time.monotonic()) < min(ends, steady):
            time.sleep(POLL_S)
            if (lower := lowest.lower(self._read_settled())) != lowest:
                lowest, steady = lower, now + STEADY_S
        self.base = lowest
        return lowest

    def excess(self, *, limit_s: float = 20.0) -> Reading:
        """By how much it has grown beyond its allowance since ``begin()``.

        Sockets are closed and threads end some time after the last answer, so what is too much is read again until it
        is not, or the limit is reached: then the lowest excess counts.
        """
        if self.base is None:
            raise RuntimeError("begin() comes first")
        ends = time.monotonic() + limit_s
        least = self.allowance.excess(self.base, self._read_settled())
        while least != NOTHING and time.monotonic() < ends:
            time.sleep(POLL_S)
            least = least.lower(self.allowance.excess(self.base, self._read_settled()))
        return least

    def add_to(self, row: Row, *, limit_s: float = 20.0) -> None:
        """Adds the excess to the columns of leaks, and says in the notes from what to what memory has gone."""
        try:
            excess, now = self.excess(limit_s=limit_s), self.read()
        except psutil.NoSuchProcess:
            row.wrong.append(f"process {self._process.pid} has ended")
            return
        assert self.base is not None
        row.leaked_mb += round(excess.rss_bytes / MB, 1)
        row.leaked_descriptors += excess.descriptors
        row.leaked_threads += excess.threads
        row.leaked_processes += excess.processes
        memory = f"RSS {self.base.rss_bytes / MB:.1f} to {now.rss_bytes / MB:.1f} MB (allowed: {self.allowance})"
        row.notes = "; ".join(filter(None, [row.notes, memory]))
