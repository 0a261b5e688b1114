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


def limit_bytes(chosen: int | None, available_bytes: int | None = None) -> int:
    """Return how many bytes models and caches may use together: the setting, or 80 % of the available memory.

    Args:
        available_bytes: The available memory; by default that of the machine or the container.
    """
    if chosen is not None:
        return chosen
    return (total_bytes() if available_bytes is None else available_bytes) * 8 // 10


def prefix_cache_bytes(chosen: int | None, memory_limit_bytes: int) -> int:
    """Return how many bytes the caches of ended requests may use: the setting, or a tenth of the memory limit."""
    return memory_limit_bytes // 10 if chosen is None else chosen
