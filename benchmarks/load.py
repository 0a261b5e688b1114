"""What else the machine did meanwhile: a figure taken beside somebody's test suite is worth little."""

from __future__ import annotations

import os
import time

import psutil


class Load:
    """Begins now. Child processes count as our own once they have ended."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._all, self._own = _all_busy_s(), _own_busy_s()

    def others_cores(self) -> float:
        """Cores that programs other than the benchmark kept busy, on average."""
        others_s = (_all_busy_s() - self._all) - (_own_busy_s() - self._own)
        return max(0.0, others_s / (time.perf_counter() - self._started))


def _all_busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def _own_busy_s() -> float:
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system
