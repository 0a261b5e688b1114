"""Measure the memory, descriptors, threads and child processes of a process, and how much they have grown."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import psutil

from soak.report import Row

POLL_S = 0.1
ASKED_S = 1.0
"""Time between two signals that make the process free memory."""
STEADY_S = 2.0
"""Time without a lower value after which a measurement counts as settled."""
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class ResourceUsage:
    """What a process uses at one moment."""

    rss_bytes: int
    """Resident memory of the process, without its children."""
    descriptors: int
    threads: int
    processes: int
    """Number of descendants, including zombies."""

    def lower(self, other: ResourceUsage) -> ResourceUsage:
        """Return the lower of both values for each resource."""
        return ResourceUsage(
            rss_bytes=min(self.rss_bytes, other.rss_bytes),
            descriptors=min(self.descriptors, other.descriptors),
            threads=min(self.threads, other.threads),
            processes=min(self.processes, other.processes),
        )


POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads that ``asyncio.to_thread`` may create, one at a time, whenever its calls happen to overlap."""
FREE_MEMORY_ON_SIGNAL = """
import ctypes, gc, signal, sys

def free_memory(number, frame):
    gc.collect()
    if (mx := sys.modules.get("mlx.core")) is not None:
        mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

signal.signal(signal.SIGUSR1, free_memory)
"""
"""Python that a monitored process runs first: on SIGUSR1, it frees memory that it only keeps for reuse.

MLX keeps a varying 3 to 33 MB of freed buffers, and glibc 35 to 80 MB of freed blocks. What remains is a leak.
"""
NO_EXCESS = ResourceUsage(rss_bytes=0, descriptors=0, threads=0, processes=0)


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """By how much a process may grow without a leak.

    Memory varies, because an allocator can return only whole pages. Thread pools grow with the first burst of requests.
    """

    rss_share: float = 0.02
    rss_mb: float = 3.0
    descriptors: int = 0
    threads: int = 0
    processes: int = 0

    def excess(self, base: ResourceUsage, now: ResourceUsage) -> ResourceUsage:
        """Return by how much ``now`` exceeds what ``base`` allows, at least zero."""
        rss = int(base.rss_bytes * (1 + self.rss_share) + self.rss_mb * MB)
        return ResourceUsage(
            rss_bytes=max(0, now.rss_bytes - rss),
            descriptors=max(0, now.descriptors - base.descriptors - self.descriptors),
            threads=max(0, now.threads - base.threads - self.threads),
            processes=max(0, now.processes - base.processes - self.processes),
        )

    def __str__(self) -> str:
        more = [f"{count} {name}" for name in ("descriptors", "threads", "processes") if (count := getattr(self, name))]
        return ", ".join([f"RSS {self.rss_share:.0%} + {self.rss_mb:g} MB", *more])


SETTLED_SERVER = Allowance(threads=POOL, descriptors=6, processes=1)
"""Allowance for a server of one model. On a busy machine, a chat template that is slow has a process of its own."""


class ResourceMonitor:
    """Monitor a running process: call ``begin()`` after its warm-up, and ``add_to(row)`` when the work is done.

    The process must have run ``FREE_MEMORY_ON_SIGNAL``, because the signal would end it otherwise.
    """

    def __init__(self, pid: int, *, allowance: Allowance | None = None) -> None:
        self._process = psutil.Process(pid)
        self.allowance = allowance or Allowance()
        self.base: ResourceUsage | None = None
        self._asked_at = 0.0

    def read(self) -> ResourceUsage:
        """Return what the process uses now.

        Raises:
            psutil.NoSuchProcess: the process has ended.
        """
        with self._process.oneshot():
            if self._process.status() == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(self._process.pid)
            return ResourceUsage(
                rss_bytes=int(self._process.memory_info().rss),
                descriptors=self._process.num_fds(),
                threads=self._process.num_threads(),
                processes=len(self._process.children(recursive=True)),
            )

    def _read_after_freeing(self) -> ResourceUsage:
        if time.monotonic() >= self._asked_at + ASKED_S:
            self._process.send_signal(signal.SIGUSR1)
            self._asked_at = time.monotonic()
            time.sleep(POLL_S)
        return self.read()

    def begin(self, *, limit_s: float = 10.0) -> ResourceUsage:
        """Measure the lowest values until none falls any more; later measurements are compared with them."""
        lowest = self._read_after_freeing()
        ends = steady = time.monotonic()
        ends, steady = ends + limit_s, steady + STEADY_S
        while (now := time.monotonic()) < min(ends, steady):
            time.sleep(POLL_S)
            if (lower := lowest.lower(self._read_after_freeing())) != lowest:
                lowest, steady = lower, now + STEADY_S
        self.base = lowest
        return lowest

    def excess(self, *, limit_s: float = 20.0) -> ResourceUsage:
        """Return by how much the process has grown beyond its allowance since ``begin()``.

        Sockets are closed and threads end some time after the last answer. Therefore an excess is measured again until
        it is gone, or until the limit; then the lowest excess counts.
        """
        if self.base is None:
            raise RuntimeError("call begin() first")
        ends = time.monotonic() + limit_s
        least = self.allowance.excess(self.base, self._read_after_freeing())
        while least != NO_EXCESS and time.monotonic() < ends:
            time.sleep(POLL_S)
            least = least.lower(self.allowance.excess(self.base, self._read_after_freeing()))
        return least

    def add_to(self, row: Row, *, limit_s: float = 20.0) -> None:
        """Add the excess to the columns of leaks, and the memory before and after to the notes."""
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
