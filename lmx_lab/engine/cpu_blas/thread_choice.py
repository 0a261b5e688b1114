"""How many threads matrix products are computed with: as many as repay, while other programs use the cores too.

OpenBLAS' threads wait for each other by spinning, several times in a product. If one of them has no core, all wait for
the system to give it one, which takes milliseconds each time. Measured on two cores, SmolLM2-135M: with two other busy
programs, prefill at 8 tokens/s with two threads and at 100 with one; alone on the machine, at 260 and 205.
"""

from __future__ import annotations

import time
from statistics import median

import mlx.core as mx

from lmx_lab.engine.cpu_blas import binding

FEW_ROWS = 4
"""Products of fewer rows wait for memory rather than for a core: more threads gain nothing (1 to 3 streams)."""
SHORT_ROWS = 64
"""Work that begins after a rest, and is smaller than this, is done sooner than the threads are awake (up to 30 ms)."""
REST_S = 0.5
LOOK_AGAIN_S = 1.0
LOOK_LATER_S = 3.0
"""While fewer threads are better than all: looking costs most then."""
SHAPE = (64, 512, 512)
"""Rows, inner, columns of the product that is tried."""
TRIES = 3
HOPELESS = 4
"""So many times slower than one thread: not tried again."""


class ThreadChoice:
    """Tries, about once a second while there is work, which number of threads is quickest now. Engine thread only.

    Args:
        most: The threads to use on a quiet machine.
        fixed: Somebody chose that number: nothing is tried.
    """

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        self.most = most
        self.now = most
        """In use."""
        self._fixed = fixed
        self._best = most
        self._choices = sorted({(most + 1) // 2, max(1, most - 1), most} - {1}, reverse=True)
        self._looked_at = self._asked_at = -LOOK_LATER_S

    def prepare(self, rows: int, *, lanes: int = 1) -> None:
        """Before computing with so many rows: tokens of prompts and texts, and one for each answer that goes on.

        Args:
            lanes: In so many parts at the same time; if there are several, each has one thread.
        """
        if lanes > 1 or not self._choices:
            self._use(1)
        elif self._fixed:
            self._use(self.most)
        else:
            self._use(self._chosen(rows))

    def _chosen(self, rows: int) -> int:
        now, rested = time.perf_counter(), time.perf_counter() - self._asked_at > REST_S
        self._asked_at = now
        if rows < FEW_ROWS or (rested and rows < SHORT_ROWS):
            return 1
        again = LOOK_AGAIN_S if self._best == self.most else LOOK_LATER_S
        if now - self._looked_at > again:
            self._look()
        return self._best

    def _look(self) -> None:
        self._use(1)
        fastest, self._best = _seconds(float("inf")), 1
        for count in self._choices:
            self._use(count)
            if (seconds := _seconds(HOPELESS * fastest)) < fastest:
                fastest, self._best = seconds, count
        self._looked_at = time.perf_counter()

    def _use(self, count: int) -> None:
        if count != self.now:
            binding.use_threads(count)
            self.now = count


def _seconds(hopeless_s: float) -> float:
    """Of a product, the middle one of some; after one that only wakes the threads."""
    rows, inner, columns = SHAPE
    left, right = mx.full((rows, inner), 0.5), mx.full((inner, columns), 0.25)
    mx.eval(left, right)
    mx.eval(left @ right)
    taken: list[float] = []
    while not taken or (len(taken) < TRIES and sum(taken) < hopeless_s):
        started = time.perf_counter()
        mx.eval(left @ right)
        taken.append(time.perf_counter() - started)
    return median(taken)
