"""Read how much memory and how many CPUs this process may use: those of the machine, or less if control groups,
resource limits, JupyterHub or the environment set a limit. ``Budget`` divides the memory between models and caches.

psutil and MLX report the whole machine. In a container of 2 GB, a process that relies on that is killed by the kernel
without a message. Control groups are nested and each of them may set a limit, so all visible ones are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from lmx_lab.errors import OutOfMemoryError
from lmx_lab.values.engine import PressureEvent

log = logging.getLogger(__name__)

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
HUB = "JUPYTERHUB_SERVICE_PREFIX"
HUB_MEMORY, HUB_CPUS = "MEM_LIMIT", "CPU_LIMIT"
"""Set by JupyterHub and Binder, in bytes and CPUs. Without ``HUB``, these names may have any other meaning."""
PHYS_FOOTPRINT = 9
"""Index of ``ri_phys_footprint`` in macOS's ``rusage_info_v0``, in words of 8 bytes: a UUID and seven numbers come
before it."""
PRESSURE = Path("/proc/pressure/memory")
STALL_PERCENT, END_STALL_PERCENT = 10.0, 2.0
"""Share of the last 10 s in which a program waited for memory, at which pressure begins and ends."""
FREE_SHARE, END_FREE_SHARE = 0.04, 0.08
"""Share of a container's memory that is free, at which pressure begins and ends."""
RESERVED_BYTES = 256 * 2**20
"""Part of a process's limit for its data that is left for memory that is reserved and not used: the stacks of threads,
and heaps. With 22 threads, a server has reserved up to 0.5 GB (measured)."""
LEAST_BYTES = 256 * 2**20
"""What models may use besides their weights in any case, unless the limit is less."""
LEAST_WORK_BYTES = 64 * 2**20
"""What requests and caches may use under pressure in any case. A batch of short texts needs less."""
HEADROOM_BYTES = 64 * 2**20
"""Memory that a load leaves to the machine: for buffers of a load, and programs that grow meanwhile."""
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
    limits = [limit for _, _, limit in _memory_limits(_groups("memory", cgroups, membership))]
    if (own_limit := _data_limit()) is not None:
        limits.append(max(0, own_limit - RESERVED_BYTES))
    if (hub_limit := _hub_limit(environ, HUB_MEMORY)) is not None:
        limits.append(int(hub_limit))
    return min(limits, default=None)


def container_free_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return the memory that is available within the control groups; ``None`` if none of them has a limit."""
    return _least_free(_memory_limits(_groups("memory", cgroups, membership)))


def _least_free(limits: Iterable[tuple[Path, MemoryFiles, int]]) -> int | None:
    free = []
    for folder, files, limit in limits:
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
    cores = usable_cores()
    return max(1, min(cores, cpu_limit(environ, cgroups, membership) or cores))


def usable_cores() -> int:
    """Return the number of physical cores that this process may use, regardless of limits on its CPU time."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    # macOS has no such call: a process may use all cores.
    return min(cores, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else cores


def threads_from_environment(environ: Mapping[str, str]) -> int | None:
    """Return the number of threads in ``OPENBLAS_NUM_THREADS`` or ``OMP_NUM_THREADS``; ``None`` if neither is set."""
    for name in THREAD_VARIABLES:
        # OMP_NUM_THREADS may be a list with a number for each nesting level.
        first = environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return None


def _memory_limits(groups: Iterable[Path]) -> Iterator[tuple[Path, MemoryFiles, int]]:
    # Version 1 writes "no limit" as a number larger than any machine's memory, which needs no special case.
    for folder in groups:
        for files in MEMORY_FILES:
            if limit := _integers(folder / files.limit):
                yield folder, files, limit[0]


def _data_limit() -> int | None:
    """Return the limit of this process for memory that is not mapped from files (``ulimit -d``); None without one."""
    if sys.platform != "linux":
        return None
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else limit


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
        parts = [part for part in path.split("/") if part]
        for depth in range(0 if ".." in parts else len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _integers(file: Path) -> list[int]:
    try:
        return [int(word) for word in _text(file).split()]
    except ValueError:
        # "max" means no limit; it may be followed by a period.
        return []


def _text(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            return opened.read().decode(errors="replace")
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


def free_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the memory that the machine, the container and the limits of this process still provide without ending a
    process. Takes about 0.5 ms.
    """
    free, inside = psutil.virtual_memory().available, container_free_bytes(cgroups, membership)
    free = free if inside is None else min(free, inside)
    if (limit := _data_limit()) is not None:
        # What counts is reserved memory, that of stacks and heaps included.
        free = min(free, max(0, limit - psutil.Process().memory_info().data))
    return free


def footprint_bytes() -> int:
    """Return the memory of this process that the system cannot take back: on Linux what is not mapped from files, on
    macOS what Activity Monitor shows. Takes about 10 µs on Linux.
    """
    if sys.platform == "linux":
        # ``smaps_rollup`` takes 170 µs, psutil 9 µs for the same numbers of this file.
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * resource.getpagesize()
    if sys.platform == "darwin":
        usage = (ctypes.c_uint64 * 16)()
        if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, ctypes.byref(usage)) == 0:
            return usage[PHYS_FOOTPRINT]
    return int(psutil.Process().memory_info().rss)


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


def pressure_reason(
    *, was: bool, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP, machine: Path = PRESSURE
) -> str | None:
    """Return why the machine or the container is short of memory; None if it is not.

    Args:
        was: Whether it was short of memory before. The end of a shortage then needs a distance from its limits.
        machine: The pressure of the whole machine, as Linux reports it.
    """
    stall_percent, free_share = (END_STALL_PERCENT, END_FREE_SHARE) if was else (STALL_PERCENT, FREE_SHARE)
    groups = list(_groups("memory", cgroups, membership))
    for file in (machine, *(folder / "memory.pressure" for folder in groups)):
        # The first line is "some avg10=0.00 avg60=0.00 avg300=0.00 total=0".
        for word in _text(file).split("\n", 1)[0].split():
            name, _, number = word.partition("=")
            with contextlib.suppress(ValueError):
                if name == "avg10" and float(number) >= stall_percent:
                    where = "on this machine" if file == machine else "in this container"
                    return f"programs {where} waited for memory during {float(number):.0f} % of the last 10 s"
    for folder in groups:
        high, used = _integers(folder / "memory.high"), _integers(folder / "memory.current")
        if high and used and used[0] > high[0] * (1 - free_share):
            return f"the container uses {used[0] / 1e9:.2f} GB, and is slowed down above {high[0] / 1e9:.2f} GB"
    limits = list(_memory_limits(groups))
    free, limit = _least_free(limits), min((limit for *_, limit in limits), default=0)
    if free is not None and free < limit * free_share:
        return f"{free / 1e9:.2f} GB of the container's {limit / 1e9:.2f} GB are free"
    if sys.platform == "darwin":
        level, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        name = b"kern.memorystatus_vm_pressure_level"
        if not ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0):
            return "macOS reports memory pressure" if level.value > 1 else None
    return None


class Budget:
    """One limit for the memory of all models and caches on the CPU, compared with the footprint of the process.

    Engines report what their models and requests use. All other growth of the footprint since the start also counts:
    tokenizers, libraries, and memory that MLX and the C library keep for reuse. With SmolLM2 on MLX these are
    130 MB after the load, and up to 270 MB after long prompts, of which ``return_freed_memory`` returns 115 MB
    (measured). What the process used before, such as the data of a notebook, counts against the default limit, which is
    a share of the machine, and not against one that the user has set.

    Everything may be used on any thread, except ``watch``.

    Args:
        chosen: See ``Settings.memory_limit_bytes``.
        weights: Returns the memory of the models that are loaded. The limit is never lowered below it.
        evict: Called with a number of bytes that are still missing after all caches were dropped, repeatedly while they
            are. Unloads idle models.
        footprint: Returns the footprint of this process.
        cgroups, membership, machine: See ``pressure_reason``.
    """

    watch_s = 1.0
    """Time between two measurements by ``watch``."""

    def __init__(
        self,
        chosen: int | None,
        *,
        weights: Callable[[], int] = lambda: 0,
        evict: Callable[[int], object] = lambda _: None,
        footprint: Callable[[], int] = footprint_bytes,
        cgroups: Path = CGROUPS,
        membership: Path = MEMBERSHIP,
        machine: Path = PRESSURE,
    ) -> None:
        self._chosen = chosen
        self._share_bytes = limit_bytes(None)
        self._weights = weights
        self._evict = evict
        self._footprint = footprint
        self._cgroups, self._membership, self._machine = cgroups, membership, machine
        self._base_bytes = footprint()
        self._inside: list[Callable[[], int]] = []
        self._outside: list[Callable[[], int]] = []
        self._releases: list[Callable[[int], object]] = []
        self._observers: list[Callable[[PressureEvent], None]] = []
        self.pressure: str | None = None
        """Why the machine or the container is short of memory; None if it is not."""
        self._lowered_bytes = 0
        """The limit under pressure."""
        self._pressed_bytes = 0
        """``used_bytes`` at the beginning of the pressure."""
        self._is_short = False
        """Whether caches were dropped at the last measurement because the limit was exceeded."""

    # Users of memory

    def add(self, used: Callable[[], int], *, release: Callable[[int], object] | None = None) -> None:
        """Count memory that a function returns and that is part of the footprint of this process.

        Args:
            release: Called with a number of bytes when memory is short: drops caches of about this size.
        """
        # The models of a lab that is replaced may have been in memory at the start.
        self._base_bytes = min(self._base_bytes, max(0, self._footprint() - used()))
        self._inside.append(used)
        if release is not None:
            self._releases.append(release)

    def add_process(self, used: Callable[[], int]) -> None:
        """Count memory of another process, which a function returns, until ``remove_process``."""
        self._outside.append(used)

    def remove_process(self, used: Callable[[], int]) -> None:
        """Undo ``add_process``. Idempotent."""
        if used in self._outside:
            self._outside.remove(used)

    # Numbers of bytes

    @property
    def used_bytes(self) -> int:
        """What models and requests use, on all engines."""
        return self._sum(self._inside) + self._sum(self._outside)

    @property
    def footprint_bytes(self) -> int:
        """The footprint of this process, and the memory of those of llama.cpp."""
        return self._footprint() + self._sum(self._outside)

    @property
    def allowed_bytes(self) -> int:
        """How much memory the process may allocate after its start, for models, requests and everything else."""
        return self._chosen if self._chosen is not None else max(0, self._share_bytes - self._base_bytes)

    @property
    def limit_bytes(self) -> int:
        """How much models and requests may use now, on all engines."""
        return self._limit(self._footprint())

    def _limit(self, footprint: int) -> int:
        limit = self._unlowered(footprint)
        if self.pressure is not None:
            limit = min(limit, max(self._lowered_bytes, self._weights_bytes))
        return limit

    @property
    def unlowered_bytes(self) -> int:
        """``limit_bytes`` without the pressure of other programs."""
        return self._unlowered(self._footprint())

    def _unlowered(self, footprint: int) -> int:
        growth = max(0, footprint - self._base_bytes - self._sum(self._inside))
        # Data of a notebook, which may grow to any size, cannot take this part of the limit away from loaded models.
        least = min(self.allowed_bytes, self._weights_bytes + LEAST_BYTES)
        return max(self.allowed_bytes - growth, least)

    @property
    def free_bytes(self) -> int:
        """How much more models and requests may use; negative if the limit is exceeded."""
        return self.limit_bytes - self.used_bytes

    @property
    def total_bytes(self) -> int:
        """The value that ``footprint_bytes`` should not exceed."""
        footprint = self._footprint()
        # Memory of other processes is used and counted.
        return footprint + self._limit(footprint) - self._sum(self._inside)

    @property
    def freed_bytes(self) -> int:
        """How much less memory models and requests use than at the beginning of the pressure; 0 without pressure."""
        return max(0, self._pressed_bytes - self.used_bytes) if self.pressure is not None else 0

    @property
    def machine_free_bytes(self) -> int:
        """See ``free_bytes`` of this module."""
        return free_bytes(self._cgroups, self._membership)

    def require_free(self, needed_bytes: int, name: str) -> None:
        """Check that the machine has memory for a model, which other programs may have taken.

        Raises:
            OutOfMemoryError: it has not.
        """
        free = self.machine_free_bytes
        if needed_bytes + HEADROOM_BYTES > free:
            raise OutOfMemoryError(
                f"{name} needs {needed_bytes / 1e9:.2f} GB more, and of the {free / 1e9:.2f} GB that are free on this "
                f"machine or in this container, {HEADROOM_BYTES / 1e9:.2f} GB must stay free; this process uses "
                f"{self.footprint_bytes / 1e9:.2f} GB of the {self.total_bytes / 1e9:.2f} GB that it may use; end "
                "other programs, or choose a smaller or more quantized model"
            )

    # Shortage

    async def watch(self) -> None:
        """Call ``update`` at intervals, without an end."""
        while True:
            try:
                self.update()
            except Exception:
                log.exception("memory could not be measured")
            await asyncio.sleep(self.watch_s)

    def update(self) -> None:
        """Lower the limit if pressure has begun, raise it if it has ended, and drop caches while the limit is exceeded.
        Reads about ten small files.
        """
        pressure = pressure_reason(
            was=self.pressure is not None, cgroups=self._cgroups, membership=self._membership, machine=self._machine
        )
        if (pressure is None) != (self.pressure is None):
            weights, used = self._weights_bytes, self.used_bytes
            self._pressed_bytes = used
            # Half of what caches and requests use now.
            self._lowered_bytes = weights + max((used - weights) // 2, LEAST_WORK_BYTES)
            self.pressure = pressure
            event = PressureEvent(
                active=pressure is not None,
                reason=pressure,
                limit_bytes=self.total_bytes,
                footprint_bytes=self.footprint_bytes,
            )
            log.warning("%s", event)
            for observer in list(self._observers):
                observer(event)
        if (excess := -self.free_bytes) <= 0:
            self._is_short = False
        elif self._is_short:
            self._evict(excess)
        else:
            self._is_short = True
            for release in self._releases:
                release(excess)

    def add_observer(self, observer: Callable[[PressureEvent], None]) -> None:
        """Register a function that is called when pressure begins or ends, on the thread of ``update``."""
        self._observers.append(observer)

    def evict(self, missing_bytes: int) -> None:
        """Request that idle models are unloaded. Their memory is free some time later."""
        self._evict(missing_bytes)

    @property
    def _weights_bytes(self) -> int:
        # Models on a GPU are not counted as used.
        return min(self._weights(), self.used_bytes)

    @staticmethod
    def _sum(users: list[Callable[[], int]]) -> int:
        return sum(used() for used in list(users))
