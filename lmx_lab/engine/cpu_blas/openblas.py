"""Loads OpenBLAS from the package ``scipy-openblas32`` without affecting other libraries of the process."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lmx_lab.engine.cpu_blas import elf

PACKAGE = "scipy_openblas32"
PREFIX = "scipy_"
THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"
DESTROY_CONDITION = "pthread_cond_destroy"
IDLE_TIMEOUT = "26"
"""OPENBLAS_THREAD_TIMEOUT: idle threads spin for 2**n cycles before they sleep; 26 is about 25 ms.

This is longer than the pause between two products of a forward pass, and between two passes: with 4, each product has
to wake the threads (0.34 against 0.24 ms, two cores, 64 rows). It is shorter than the default, so that the threads of
an idle server sleep soon.
"""


class OpenBlas:
    """The loaded OpenBLAS library. A second instance refers to the same library."""

    def __init__(self, threads: int, machine: str) -> None:
        """Load the library.

        Raises:
            ImportError: the package is not installed, or contains no library.
            OSError: the library cannot be loaded.
        """
        path = _library_path()
        values = {"OPENBLAS_THREAD_TIMEOUT": IDLE_TIMEOUT}
        if is_narrow_avx512():
            values["OPENBLAS_CORETYPE"] = "Zen"
        # Values that the user has set take precedence.
        values |= {name: os.environ[name] for name in values if os.environ.get(name)}
        with _environment({THREADS_VARIABLE: str(threads), **values}):
            # RTLD_LOCAL (the default): a SciPy that is loaded later must find its own symbols first.
            self._library = ctypes.CDLL(str(path))
        self._library.scipy_openblas_get_config.restype = ctypes.c_char_p
        self._library.scipy_openblas_get_corename.restype = ctypes.c_char_p
        self.is_fork_safe = _disable_fork_handlers(path, machine)
        """Whether the process can fork while OpenBLAS has more than one thread."""
        os.register_at_fork(after_in_child=self._after_fork)

    @property
    def title(self) -> str:
        """Name, version, and the processor type that its kernels are for."""
        name, version = self._library.scipy_openblas_get_config().decode().split()[:2]
        return f"{name} {version} ({self._library.scipy_openblas_get_corename().decode()})"

    @property
    def threads(self) -> int:
        """Number of threads of the next product."""
        return int(self._library.scipy_openblas_get_num_threads())

    @threads.setter
    def threads(self, count: int) -> None:
        self._library.scipy_openblas_set_num_threads(count)

    def address(self, name: str) -> int:
        """The address of a function.

        Raises:
            AttributeError: the library has no such function.
        """
        address = ctypes.cast(getattr(self._library, PREFIX + name), ctypes.c_void_p).value
        assert address is not None
        return address

    def _after_fork(self) -> None:
        # A forked child has a single thread; OpenBLAS would wait for the others.
        self.threads = 1


def is_narrow_avx512(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor computes 512 bits in two halves: AMD's Zen 4, family 25.

    OpenBLAS treats it as SkylakeX, but its 256-bit kernels are faster there. GFLOP/s of a product with a (384, 1,536)
    matrix on one core, SkylakeX against Zen kernels: 45 and 62 with 8 rows, 88 and 97 with 64, 101 and 107 with 240.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return False
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return facts.get("vendor_id") == "AuthenticAMD" and facts.get("cpu family") == "25"


def _library_path() -> Path:
    # The package is not imported: that would load the library for the whole process.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError("the package scipy-openblas32 is not installed")
    files = sorted((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so*"))
    if not files:
        raise ImportError(f"there is no library in {Path(spec.origin).parent / 'lib'}")
    return files[0]


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block."""
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


def _disable_fork_handlers(path: Path, machine: str) -> bool:
    """Disable two OpenBLAS functions that hang when the process forks (seen with 0.3.34); return whether it worked.

    The first is its fork handler, which ends its threads before every fork. It waits forever while a product is being
    computed, because a busy thread overwrites the request to end. IPython forks for every ``!command``. The C library
    removes the fork handlers of a library together with its exit handlers; OpenBLAS has none of the latter.

    The second runs when the child process exits: destroying a condition variable waits for threads that the child does
    not have. That call is redirected to a function without effect.
    """
    library = next((one for one in elf.libraries() if os.path.realpath(one.path) == os.path.realpath(path)), None)
    if library is None:
        return False
    handle = elf.handle(library, machine)
    slots = elf.slots(library, [DESTROY_CONDITION], machine).get(DESTROY_CONDITION)
    if handle is None or slots is None:
        return False
    c_library = ctypes.CDLL(None)
    without_effect = ctypes.cast(c_library.getpid, ctypes.c_void_p).value or 0
    elf.write(dict.fromkeys(slots, without_effect))
    c_library.__cxa_finalize(ctypes.c_void_p(handle))
    return True
