"""Read how much memory and how many CPUs this process may use: those of the machine, or less if control groups,
JupyterHub or the environment set a limit.

psutil and MLX report the whole machine. In a container of 2 GB, a process that relies on that is killed by the kernel
without a message. Control groups are nested and each of them may set a limit, so all visible ones are read.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
HUB = "JUPYTERHUB_SERVICE_PREFIX"
HUB_MEMORY, HUB_CPUS = "MEM_LIMIT", "CPU_LIMIT"
"""Set by JupyterHub and Binder, in bytes and CPUs. Without ``HUB``, these names may have any other meaning."""
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class MemoryFiles:
    """File names of one version of control groups."""

    limit: str
    used: str
    reclaimable: str
    """Key in ``memory.stat``: size of cached file pages, which the kernel frees before it kills a process."""


MEMORY_FILES = (
    MemoryFiles(limit="memory.max", used="memory.current", reclaimable="inactive_file"),
    MemoryFiles(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", reclaimable="total_inactive_file"),
)


def memory_limit_bytes(
    environ: Mapping[str, str], cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> int | None:
    """Return the memory limit for all processes of the container together; ``None`` if there is no limit."""
    limits = [limit for _, _, limit in _memory_limits(cgroups, membership)]
    if (hub_limit := _hub_limit(environ, HUB_MEMORY)) is not None:
        limits.append(int(hub_limit))
    return min(limits, default=None)


def container_free_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return the memory that is available within the control groups; ``None`` if none of them has a limit."""
    free = []
    for folder, files, limit in _memory_limits(cgroups, membership):
        used, stat = _integers(folder / files.used), _text(folder / "memory.stat").split()
        if not used:
            continue
        facts = dict(zip(stat[::2], stat[1::2], strict=False))
        free.append(max(0, limit - used[0] + int(facts.get(files.reclaimable, 0))))
    return min(free, default=None)


def cpu_limit(environ: Mapping[str, str], cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return the number of CPUs that the container may use, rounded up; ``None`` if there is no limit."""
    limits = []
    for folder in _groups("cpu", cgroups, membership):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            numbers = [number for name in files for number in _integers(folder / name)]
            if len(numbers) == 2 and min(numbers) > 0:
                limits.append(numbers[0] / numbers[1])
    if (hub_limit := _hub_limit(environ, HUB_CPUS)) is not None:
        limits.append(hub_limit)
    return math.ceil(min(limits)) if limits else None


def default_threads(environ: Mapping[str, str], cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the number of threads to compute with: from the environment, or the physical cores that this process may
    use.
    """
    if (chosen := threads_from_environment(environ)) is not None:
        return chosen
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    # macOS has no such call: a process may use all cores.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(cores, usable, cpu_limit(environ, cgroups, membership) or cores))


def threads_from_environment(environ: Mapping[str, str]) -> int | None:
    """Return the number of threads in ``OPENBLAS_NUM_THREADS`` or ``OMP_NUM_THREADS``; ``None`` if neither is set."""
    for name in THREAD_VARIABLES:
        # OMP_NUM_THREADS may be a list with a number for each nesting level.
        first = environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return None


def _memory_limits(cgroups: Path, membership: Path) -> Iterator[tuple[Path, MemoryFiles, int]]:
    # Version 1 writes "no limit" as a number larger than any machine's memory, which needs no special case.
    for folder in _groups("memory", cgroups, membership):
        for files in MEMORY_FILES:
            if limit := _integers(folder / files.limit):
                yield folder, files, limit[0]


def _groups(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders that may describe the control groups of this process, in either version.

    A container often sees its own group as the root, but reads a path that only exists on the host. Folders that do not
    exist are therefore no error.
    """
    # Path of the group by the name of its controller, which is empty for version 2.
    own: dict[str, str] = {}
    for line in _text(membership).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        own |= dict.fromkeys(controllers.split(","), path)
    # Version 2 alone, version 2 next to version 1, and version 1.
    for mount, path in (
        (cgroups, own.get("", "")),
        (cgroups / "unified", own.get("", "")),
        (cgroups / controller, own.get(controller, "")),
    ):
        parts = Path(path.lstrip("/")).parts
        inner = mount if ".." in parts else mount.joinpath(*parts)
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount))


def _integers(file: Path) -> list[int]:
    try:
        return [int(word) for word in _text(file).split()]
    except ValueError:
        # "max" means no limit; it may be followed by a period.
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _hub_limit(environ: Mapping[str, str], name: str) -> float | None:
    try:
        number = float(environ[name]) if environ.get(HUB) else 0.0
    except (KeyError, ValueError):
        return None
    return number if 0 < number < math.inf else None


def total_bytes() -> int:
    """Return the memory of the machine, or the limit of the container."""
    return min(psutil.virtual_memory().total, memory_limit_bytes(os.environ) or sys.maxsize)


def free_bytes() -> int:
    """Return the memory that the machine or the container can still provide without ending a process."""
    free, inside = psutil.virtual_memory().available, container_free_bytes()
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
