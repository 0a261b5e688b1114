"""Read the memory of this machine, or of the container in which this process runs, without MLX."""

from __future__ import annotations

import os
import sys

import psutil

from lmx_lab.engine import container_limits


def total_bytes() -> int:
    """Return the memory of the machine, or the limit of the container."""
    return min(psutil.virtual_memory().total, container_limits.memory_limit_bytes(os.environ) or sys.maxsize)


def free_bytes() -> int:
    """Return the memory that the machine or the container can still provide without ending a process."""
    free, inside = psutil.virtual_memory().available, container_limits.free_bytes()
    return free if inside is None else min(free, inside)


def limit_bytes(chosen: int | None) -> int:
    """Return how many bytes models and caches may use together: the setting, or 80 % of the machine's memory."""
    return chosen if chosen is not None else total_bytes() * 8 // 10
