"""OpenBLAS from the package ``scipy-openblas32``, loaded so that it shares a process with others."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from lmx_lab.engine import container_limits
from lmx_lab.engine.cpu_blas import elf

PACKAGE = "scipy_openblas32"
PREFIX = "scipy_"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
DESTROY_CONDITION = "pthread_cond_destroy"
IDLE_TIMEOUT = "26"
"""OPENBLAS_THREAD_TIMEOUT: idle threads spin for 2**n cycles before they sleep; 26 are 25 ms.

Longer than what lies between two products of a forward pass, and between two passes: with 4, each product wakes them
(0.34 against 0.24 ms, two cores, 64 rows). Shorter than by default, so that a server that rests does so soon.
"""


class OpenBlas:
    """The loaded library. Loading it twice gives the same one."""

    def __init__(self, threads: int, machine: str) -> None:
        """
        Raises:
            ImportError: the package is not installed, or has no library.
            OSError: the library cannot be loaded.
        """
        path = _library()
        values = {"OPENBLAS_NUM_THREADS": str(threads), "OPENBLAS_THREAD_TIMEOUT": IDLE_TIMEOUT}
        if is_narrow_avx512():
            values["OPENBLAS_CORETYPE"] = "Zen"
        values |= {
            name: os.environ[name] for name in (*values,) if name not in THREAD_VARIABLES and os.environ.get(name)
        }
        with _environment(values):
            # Local (the default), so that a SciPy loaded later does not find these symbols before its own.
            self._library = ctypes.CDLL(str(path))
        self._library.scipy_openblas_get_config.restype = ctypes.c_char_p
        self._library.scipy_openblas_get_corename.restype = ctypes.c_char_p
        self.forks = _allow_forks(path, machine)
        """Whether a fork is harmless with more than one thread."""
        os.register_at_fork(after_in_child=self._after_fork)

    @property
    def title(self) -> str:
        """Name, version, and the processor whose kernels it chose."""
        name, version = self._library.scipy_openblas_get_config().decode().split()[:2]
        return f"{name} {version} ({self._library.scipy_openblas_get_corename().decode()})"

    @property
    def threads(self) -> int:
        return int(self._library.scipy_openblas_get_num_threads())

    @threads.setter
    def threads(self, count: int) -> None:
        self._library.scipy_openblas_set_num_threads(count)

    def address(self, name: str) -> int:
        """Of a function.

        Raises:
            AttributeError: there is none of this name.
        """
        address = ctypes.cast(getattr(self._library, PREFIX + name), ctypes.c_void_p).value
        assert address is not None
        return address

    def _after_fork(self) -> None:
        # A forked child has no threads but its own; OpenBLAS would wait for them.
        self.threads = 1


def is_narrow_avx512(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this is a processor that computes 512 bits in two halves: AMD's Zen 4, of family 25.

    OpenBLAS takes it for a SkylakeX. Its kernels of 256 bits are quicker there: rows times (384, 1,536), GFLOP/s on
    one core, SkylakeX against Zen: 8 rows 45 and 62, 64 rows 88 and 97, 240 rows 101 and 107.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return False
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return facts.get("vendor_id") == "AuthenticAMD" and facts.get("cpu family") == "25"


def _library() -> Path:
    # Found, not imported: importing it would load it for every library in the process.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError("the package scipy-openblas32 is not installed")
    files = sorted((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so*"))
    if not files:
        raise ImportError(f"there is no library in {Path(spec.origin).parent / 'lib'}")
    return files[0]


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _allow_forks(path: Path, machine: str) -> bool:
    """Take out what hangs when a process with OpenBLAS forks (seen with 0.3.34); whether that could be done.

    The handler by which it ends its threads before every fork waits for ever when a product is under way: a thread at
    work overwrites its order to end. IPython forks for every ``!command``. The C library drops a library's fork
    handlers with its exit handlers, of which OpenBLAS has none.

    The child then ends with conditions for which threads wait that it does not have; destroying one waits for them.
    So that call goes to a function that does nothing.
    """
    library = next((one for one in elf.libraries() if os.path.realpath(one.path) == os.path.realpath(path)), None)
    if library is None:
        return False
    handle = elf.handle(library, machine)
    slots = elf.slots(library, [DESTROY_CONDITION], machine).get(DESTROY_CONDITION)
    if handle is None or slots is None:
        return False
    c_library = ctypes.CDLL(None)
    nothing = ctypes.cast(c_library.getpid, ctypes.c_void_p).value or 0
    elf.write(dict.fromkeys(slots, nothing))
    c_library.__cxa_finalize(ctypes.c_void_p(handle))
    return True


def default_threads(
    environ: Mapping[str, str], cgroups: Path = container_limits.CGROUPS, membership: Path = container_limits.MEMBERSHIP
) -> int:
    """What the environment says, else the physical cores that this process may use."""
    if (chosen := chosen_threads(environ)) is not None:
        return chosen
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    # macOS has no such call, and lets a process use all.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(cores, usable, container_limits.cpu_limit(environ, cgroups, membership) or cores))


def chosen_threads(environ: Mapping[str, str]) -> int | None:
    """What the environment says, if it says something."""
    for name in THREAD_VARIABLES:
        # OMP_NUM_THREADS may be a list, one number a level.
        first = environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return None
