"""What a container leaves this process of the machine: by its control groups, and by what JupyterHub tells.

psutil and MLX see the whole machine. Who computes with that in a container of 2 GB is ended by the kernel, without a
word. Groups lie in each other and each may limit, so all are read up to the outermost that shows here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
HUB = "JUPYTERHUB_SERVICE_PREFIX"
HUB_MEMORY, HUB_CPUS = "MEM_LIMIT", "CPU_LIMIT"
"""Set by JupyterHub and Binder, in bytes and in CPUs; anywhere else these names may mean anything."""


@dataclass(frozen=True, kw_only=True)
class MemoryFiles:
    """The names of one version of control groups."""

    limit: str
    used: str
    reclaimable: str
    """In ``memory.stat``: file pages that nobody has touched for long, which go before anybody is ended."""


MEMORY_FILES = (
    MemoryFiles(limit="memory.max", used="memory.current", reclaimable="inactive_file"),
    MemoryFiles(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", reclaimable="total_inactive_file"),
)


def memory_limit_bytes(
    environ: Mapping[str, str], cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> int | None:
    """What all processes of the container may use together; ``None`` if nothing says so."""
    limits = [limit for _, _, limit in _memory_limits(cgroups, membership)]
    if (told := _told(environ, HUB_MEMORY)) is not None:
        limits.append(int(told))
    return min(limits, default=None)


def free_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """What the control groups would still give; ``None`` where none limits."""
    rooms = []
    for folder, files, limit in _memory_limits(cgroups, membership):
        used, stat = _integers(folder / files.used), _text(folder / "memory.stat").split()
        if not used:
            continue
        facts = dict(zip(stat[::2], stat[1::2], strict=False))
        rooms.append(max(0, limit - used[0] + int(facts.get(files.reclaimable, 0))))
    return min(rooms, default=None)


def cpu_limit(environ: Mapping[str, str], cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """The CPUs that the container may use, rounded up; ``None`` for any number."""
    shares = []
    for folder in _groups("cpu", cgroups, membership):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            numbers = [number for name in files for number in _integers(folder / name)]
            if len(numbers) == 2 and min(numbers) > 0:
                shares.append(numbers[0] / numbers[1])
    if (told := _told(environ, HUB_CPUS)) is not None:
        shares.append(told)
    return math.ceil(min(shares)) if shares else None


def _memory_limits(cgroups: Path, membership: Path) -> Iterator[tuple[Path, MemoryFiles, int]]:
    # Version 1 writes "none" as a number beyond any machine, which is as good as one.
    for folder in _groups("memory", cgroups, membership):
        for files in MEMORY_FILES:
            if limit := _integers(folder / files.limit):
                yield folder, files, limit[0]


def _groups(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """The folders that may hold this process's groups, in either version of control groups.

    A container often sees its own group as the root and reads a path of the machine: what is not there is left out.
    """
    own = dict(_own(membership))
    # Version 2 alone, beside version 1, and version 1.
    for mount, path in (
        (cgroups, own.get("", "")),
        (cgroups / "unified", own.get("", "")),
        (cgroups / controller, own.get(controller, "")),
    ):
        parts = Path(path.lstrip("/")).parts
        inner = mount if ".." in parts else mount.joinpath(*parts)
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount))


def _own(membership: Path) -> Iterator[tuple[str, str]]:
    """Of each controller of version 1, and of version 2 under no name, the path of this process's group."""
    for line in _text(membership).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _integers(file: Path) -> list[int]:
    try:
        return [int(word) for word in _text(file).split()]
    except ValueError:
        # "max", alone or before a period.
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _told(environ: Mapping[str, str], name: str) -> float | None:
    try:
        number = float(environ[name]) if environ.get(HUB) else 0.0
    except (KeyError, ValueError):
        return None
    return number if 0 < number < math.inf else None
