"""Chooses the number of threads for matrix products, depending on the load of the machine.

OpenBLAS' threads wait for each other by spinning, several times within a product. If one of them has no core, all of
them wait until the system schedules it, which takes milliseconds each time. Prefill of SmolLM2-135M on two cores: next
to two other busy programs 8 tokens/s with two threads and 100 with one; on an idle machine 260 and 205.
"""

from __future__ import annotations

import time
from statistics import median

import mlx.core as mx

from lmx_lab.engine.cpu_blas import openblas
from lmx_lab.values.engine import BlasReport

FEW_ROWS = 4
"""Products with fewer rows are limited by memory bandwidth: more threads gain nothing (1 to 3 streams)."""
SHORT_ROWS = 64
"""Products with fewer rows than this, after a pause, are finished before sleeping threads wake up (up to 30 ms)."""
PAUSE_S = 0.5
INTERVAL_S = 1.0
"""Time between two measurements."""
BUSY_INTERVAL_S = 3.0
"""The same while fewer threads than the maximum are in use: a measurement is most expensive then."""
SHAPE = (64, 512, 512)
"""Rows, inner size, columns of the measured product."""
REPEATS = 3
MUCH_SLOWER = 4
"""A number of threads that takes this many times as long as one thread is measured only once."""


class ThreadChoice:
    """Sets the number of threads before each step of the engine. Use it on the engine thread only.

    While there is work, it measures about once a second which number of threads is fastest.

    Args:
        report: Its ``threads`` are the maximum. If ``threads_fixed``, this number is always used.
    """

    def __init__(self, report: BlasReport) -> None:
        self.max_threads = report.threads or 1
        self.current = self.max_threads
        self._fixed = report.threads_fixed
        self._fastest = self.max_threads
        candidates = {(self.max_threads + 1) // 2, max(1, self.max_threads - 1), self.max_threads} - {1}
        self._candidates = sorted(candidates, reverse=True)
        self._measured_at = self._used_at = -BUSY_INTERVAL_S
        self.stream: mx.Stream | mx.ThreadLocalStream | None = None
        """A stream that may still be computing when a step begins. Its end is awaited before the number of threads
        changes, and before a measurement, in which products of two streams would wait for each other."""

    def prepare(self, rows: int, *, lanes: int = 1) -> None:
        """Set the number of threads before computing.

        Args:
            rows: Number of tokens to compute: of prompts, of texts, and one for each running answer.
            lanes: Number of parts that are computed at the same time; each of several has one thread.
        """
        if lanes > 1 or not self._candidates:
            self._use(1)
        elif self._fixed:
            self._use(self.max_threads)
        else:
            self._use(self._choose(rows))

    def _choose(self, rows: int) -> int:
        now, was_idle = time.perf_counter(), time.perf_counter() - self._used_at > PAUSE_S
        self._used_at = now
        if rows < FEW_ROWS or (was_idle and rows < SHORT_ROWS):
            return 1
        interval_s = INTERVAL_S if self._fastest == self.max_threads else BUSY_INTERVAL_S
        if now - self._measured_at > interval_s:
            self._measure()
        return self._fastest

    def _measure(self) -> None:
        self.wait()
        self._use(1)
        best_s, self._fastest = _product_s(float("inf")), 1
        for count in self._candidates:
            self._use(count)
            if (seconds := _product_s(MUCH_SLOWER * best_s)) < best_s:
                best_s, self._fastest = seconds, count
        self._measured_at = time.perf_counter()

    def _use(self, count: int) -> None:
        if count != self.current:
            self.wait()
            openblas.use_threads(count)
            self.current = count

    def wait(self) -> None:
        """Wait for the end of what ``stream`` computes."""
        if self.stream is not None:
            mx.synchronize(self.stream)


def _product_s(limit_s: float) -> float:
    """Median time of some products; no further one is measured after ``limit_s``. The first product is not counted,
    because it wakes the threads.
    """
    rows, inner, columns = SHAPE
    left, right = mx.full((rows, inner), 0.5), mx.full((inner, columns), 0.25)
    mx.eval(left, right)
    mx.eval(left @ right)
    times_s: list[float] = []
    while not times_s or (len(times_s) < REPEATS and sum(times_s) < limit_s):
        start = time.perf_counter()
        mx.eval(left @ right)
        times_s.append(time.perf_counter() - start)
    return median(times_s)
