"""The memory of this machine, or of the container around this process, without MLX."""

from __future__ import annotations

import os
import sys

import psutil

from lmx_lab.engine import container_limits


def total_bytes() -> int:
    """Memory of the machine, or what a container leaves of it."""
    return min(psutil.virtual_memory().total, container_limits.memory_limit_bytes(os.environ) or sys.maxsize)


def free_bytes() -> int:
    """Memory that this machine, or the container, can still provide without ending a process."""
    free, inside = psutil.virtual_memory().available, container_limits.free_bytes()
    return free if inside is None else min(free, inside)


def limit_bytes(chosen: int | None) -> int:
    """What models and caches may take together: the setting, else 80 % of the machine."""
    return chosen if chosen is not None else total_bytes() * 8 // 10
