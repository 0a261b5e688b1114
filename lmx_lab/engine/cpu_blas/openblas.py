"""Replaces the BLAS functions that MLX calls by those of OpenBLAS, and restores them; chooses the number of threads.

OpenBLAS is loaded from the package ``scipy-openblas32`` without affecting other libraries of the process. MLX's wheel
for Linux contains the reference BLAS and calls three of its functions through import slots of ``libmlx.so``. The
addresses of the OpenBLAS functions are written to these slots in memory. The products are then compared with numpy's;
if they differ, the slots are restored. No file is changed. Speed of a float32 product of size 512³ on two cores: 6
GFLOP/s with the reference BLAS, 200 GFLOP/s with OpenBLAS.

The number of threads depends on the load of the machine. OpenBLAS' threads wait for each other by spinning, several
times within a product. If one of them has no core, all of them wait until the system schedules it, which takes
milliseconds each time. Prefill of SmolLM2-135M on two cores: next to two other busy programs 8 tokens/s with two
threads and 100 with one; on an idle machine 260 and 205.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from lmx_lab.engine.cpu_blas import elf, machine_code
from lmx_lab.engine.memory import default_threads, threads_from_environment
from lmx_lab.values.engine import BlasName, BlasReport

log = logging.getLogger(__name__)

PACKAGE = "scipy_openblas32"
PREFIX = "scipy_"
DESTROY_CONDITION = "pthread_cond_destroy"
IDLE_TIMEOUT = "26"
"""OPENBLAS_THREAD_TIMEOUT: idle threads spin for 2**n cycles before they sleep; 26 is about 25 ms.

This is longer than the pause between two products of a forward pass, and between two passes: with 4, each product has
to wake the threads (0.34 against 0.24 ms, two cores, 64 rows). It is shorter than the default, so that the threads of
an idle server sleep soon.
"""

FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
MLX_LIBRARY = "libmlx.so"
# (rows, inner, columns) of the products that are compared: a single row, few rows, odd sizes, enough for threads.
CHECKED_SIZES = ((1, 7, 1), (1, 300, 517), (5, 13, 7), (67, 129, 131))
MEASUREMENT_LIMIT_S = 0.05
REPEATS = 3
PRELOAD = "preload the system's OpenBLAS with LD_PRELOAD"
FEW_ROWS = 4
"""Products with fewer rows are limited by memory bandwidth: more threads gain nothing (1 to 3 streams)."""
SHORT_ROWS = 64
"""Products with fewer rows than this, after a pause, are finished before sleeping threads wake up (up to 30 ms)."""
PAUSE_S = 0.5
INTERVAL_S = 1.0
"""Time between two measurements."""
BUSY_INTERVAL_S = 3.0
"""The same while fewer threads than the maximum are in use: a measurement is most expensive then."""
SHAPE = (64, 512, 512)
"""Rows, inner size, columns of the measured product."""
MUCH_SLOWER = 4
"""A number of threads that takes this many times as long as one thread is measured only once."""


class OpenBlas:
    """The loaded OpenBLAS library. A second instance refers to the same library."""

    def __init__(self, threads: int, machine: str) -> None:
        """Load the library.

        Raises:
            ImportError: the package is not installed, or contains no library.
            OSError: the library cannot be loaded.
        """
        # The package is not imported: that would load the library for the whole process.
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ImportError("the package scipy-openblas32 is not installed")
        folder = Path(spec.origin).parent / "lib"
        path = next(iter(sorted(folder.glob("libscipy_openblas*.so*"))), None)
        if path is None:
            raise ImportError(f"there is no library in {folder}")
        values = {"OPENBLAS_THREAD_TIMEOUT": IDLE_TIMEOUT}
        if is_narrow_avx512(machine_code.processor_facts()):
            values["OPENBLAS_CORETYPE"] = "Zen"
        # Values that the user has set take precedence.
        values |= {name: os.environ[name] for name in values if os.environ.get(name)}
        values["OPENBLAS_NUM_THREADS"] = str(threads)
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            # RTLD_LOCAL (the default): a SciPy that is loaded later must find its own symbols first.
            self._library = ctypes.CDLL(str(path))
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._library.scipy_openblas_get_config.restype = ctypes.c_char_p
        self._library.scipy_openblas_get_corename.restype = ctypes.c_char_p
        self.is_fork_safe = _disable_fork_handlers(path, machine)
        """Whether the process can fork while OpenBLAS has more than one thread."""
        # A forked child has a single thread; OpenBLAS would wait for the others.
        os.register_at_fork(after_in_child=lambda: self._library.scipy_openblas_set_num_threads(1))

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


def is_narrow_avx512(facts: Mapping[str, str]) -> bool:
    """Whether the processor computes 512 bits in two halves: AMD's Zen 4, family 25.

    OpenBLAS treats it as SkylakeX, but its 256-bit kernels are faster there. GFLOP/s of a product with a (384, 1,536)
    matrix on one core, SkylakeX against Zen kernels: 45 and 62 with 8 rows, 88 and 97 with 64, 101 and 107 with 240.

    Args:
        facts: See ``processor_facts``.
    """
    return facts.get("vendor_id") == "AuthenticAMD" and facts.get("cpu family") == "25"


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


class _NotBoundError(Exception):
    """OpenBLAS cannot be used; MLX keeps the BLAS it has."""

    def __init__(self, text: str, *, name: BlasName = "reference", level: int = logging.WARNING) -> None:
        super().__init__(text)
        self.name = name
        self.level = level


def configure_blas(choice: str = "auto", threads: int | None = None) -> BlasReport:
    """Make MLX use OpenBLAS (``auto``) or the BLAS of its wheel (``off``), and report the result.

    It applies to the whole process and can be called again from any thread, but not while MLX computes. It computes
    products on the calling thread's CPU stream. If OpenBLAS cannot be used, MLX is left unchanged; the report and one
    log message contain the reason, and no exception is raised.

    Args:
        threads: By default ``OPENBLAS_NUM_THREADS``, ``OMP_NUM_THREADS`` or the number of usable cores.
    """
    if mx.default_device() != mx.cpu:
        return BlasReport(name="unused", detail="MLX uses the GPU")
    with _lock:
        return _binding.configure(choice, threads)


def use_threads(count: int) -> None:
    """Set the number of threads of the next products, limited to the configured number.

    It has no effect without OpenBLAS. It can be called from any thread, but not while MLX computes.
    """
    with _lock:
        _binding.use_threads(count)


class _Binding:
    """The import slots of the loaded MLX library, and their original contents."""

    def __init__(self) -> None:
        self._originals: dict[int, int] = {}
        """Slot address to function address; empty while MLX uses the BLAS of its wheel."""
        self._openblas: OpenBlas | None = None
        self._functions: dict[str, int] = {}
        self._gemv = False
        self._exponential: machine_code.Exponential | None = None
        """Set while MLX uses it."""
        self._configured: tuple[str, int | None] | None = None
        self._report = BlasReport(name="reference", detail="")
        self._measured: dict[tuple[BlasName, int | None], float] = {}

    def configure(self, choice: str, threads: int | None) -> BlasReport:
        if self._configured != (choice, threads):
            report = self._apply(choice, threads)
            key = (report.name, report.threads)
            if key not in self._measured:
                self._measured[key] = self._measure(report)
            self._report = replace(report, gflops=self._measured[key])
            self._configured = (choice, threads)
        elif self._report.threads is not None:
            self.use_threads(self._report.threads)
        return self._report

    def _measure(self, report: BlasReport) -> float:
        if report.name != "openblas" or report.threads == 1 or self._openblas is None:
            return measure_gflops()
        # On a busy machine several threads are slower than one, because they wait for each other.
        with_all = measure_gflops()
        self._openblas.threads = 1
        with_one = measure_gflops()
        self._openblas.threads = report.threads or 1
        return max(with_all, with_one)

    def use_threads(self, count: int) -> None:
        if self._openblas is not None and self._originals:
            self._openblas.threads = min(count, self._report.threads or 1)

    def _apply(self, choice: str, threads: int | None) -> BlasReport:
        try:
            if sys.platform != "linux":
                raise _NotBoundError("Accelerate, part of the system", name="system", level=logging.DEBUG)
            if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
                raise _NotBoundError("the C library of this system is not glibc")
            library = _mlx_library()
            # The addresses of the slots of each function.
            slots = elf.slots(library, FUNCTIONS, platform.machine())
            if missing := set(FUNCTIONS) - set(slots):
                raise _NotBoundError(f"this build of MLX does not call {', '.join(sorted(missing))}", name="system")
            for function in FUNCTIONS if not self._originals else ():
                _check_is_from_wheel(library, function, slots[function][0])
            if choice == "off":
                self._restore()
                return BlasReport(name="reference", detail="turned off; LMX_LAB_BLAS=auto turns it on", threads=1)
            return self._bind(slots, threads)
        except _NotBoundError as exc:
            name, level, detail = exc.name, exc.level, str(exc)
        except ImportError as exc:
            name, level, detail = "reference", logging.WARNING, f"{exc}; pip install scipy-openblas32, or {PRELOAD}"
        except Exception as exc:
            # An unknown system can fail in any way; the slow BLAS still works there.
            name, level, detail = "reference", logging.WARNING, f"{type(exc).__name__}: {exc}; {PRELOAD}"
        self._restore()
        log.log(level, "OpenBLAS is not used for MLX: %s", detail)
        return BlasReport(name=name, detail=detail, threads=1 if name == "reference" else None)

    def _bind(self, slots: Mapping[str, list[int]], threads: int | None) -> BlasReport:
        count = threads or default_threads(os.environ)
        openblas = self._openblas = self._openblas or OpenBlas(count, platform.machine())
        # With its fork handler in place, a fork would hang if there is more than one thread.
        openblas.threads = count if openblas.is_fork_safe else 1
        if not self._originals:
            if not self._functions:
                self._functions = {name: openblas.address(name) for name in FUNCTIONS}
                # On arm64, OpenBLAS itself calls gemv where possible.
                self._gemv = platform.machine() == "aarch64"
                if platform.machine() == machine_code.MACHINE:
                    try:
                        self._functions["cblas_sgemm"] = machine_code.build_sgemm(
                            self._functions["cblas_sgemm"], openblas.address("cblas_sgemv")
                        )
                        self._gemv = True
                    except OSError as exc:
                        log.info("Products with a single row are computed by sgemm: %s", exc)
            before = {slot: elf.read(slot) for name in FUNCTIONS for slot in slots[name]}
            elf.write({slot: self._functions[name] for name in FUNCTIONS for slot in slots[name]})
            self._originals = before
            if difference := find_difference():
                raise _NotBoundError(f"its products differ from numpy's ({difference}); {PRELOAD}")
            try:
                exponential = machine_code.Exponential(_mlx_library())
                exponential.replace()
                self._exponential = exponential
            except OSError as exc:
                log.info("MLX keeps its own exp function: %s", exc)
        return BlasReport(
            name="openblas",
            detail=openblas.title,
            threads=openblas.threads,
            gemv=self._gemv,
            fma_exp=self._exponential is not None,
            threads_fixed=threads is not None or threads_from_environment(os.environ) is not None,
        )

    def _restore(self) -> None:
        if self._originals:
            elf.write(self._originals)
            self._originals = {}
        if self._exponential is not None:
            self._exponential.restore()
            self._exponential = None


_lock = threading.Lock()
_binding = _Binding()


def _mlx_library() -> elf.Library:
    """Return the library of MLX in this process.

    Raises:
        _NotBoundError: it is not loaded under its usual name.
    """
    library = next((found for found in elf.libraries() if Path(found.path).name == MLX_LIBRARY), None)
    if library is None:
        raise _NotBoundError(f"{MLX_LIBRARY} is not loaded", name="system")
    return library


def _check_is_from_wheel(library: elf.Library, name: str, slot: int) -> None:
    """Check that a slot leads to the BLAS in MLX's wheel.

    Raises:
        _NotBoundError: the user chose another BLAS (LD_PRELOAD, another build of MLX).
    """
    file = elf.owner(elf.read(slot))
    if file == library.path:
        # Not called yet: the slot leads to the dynamic linker, which searches the whole process first.
        function = getattr(ctypes.CDLL(None), name, None) or getattr(ctypes.CDLL(library.path), name)
        file = elf.owner(ctypes.cast(function, ctypes.c_void_p).value or 0)
    if file is None:
        raise _NotBoundError(f"{name} is in no known library", name="system")
    # auditwheel puts the libraries that a wheel contains into NAME.libs.
    if not Path(file).resolve().parent.name.endswith(".libs") or hasattr(ctypes.CDLL(file), "openblas_get_config"):
        raise _NotBoundError(f"{Path(file).name}, already used by MLX", name="system", level=logging.INFO)


def find_difference() -> str | None:
    """Compare products of MLX with numpy's on the calling thread; describe the first one that differs."""
    random = np.random.default_rng(0)
    types = ((mx.float32, 1e-3), (mx.complex64, 1e-3), (mx.float64, 1e-9))
    with mx.stream(mx.cpu):
        for (dtype, tolerance), (rows, inner, columns) in itertools.product(types, CHECKED_SIZES):
            left = random.standard_normal((2, rows, inner)) * (1 + 2j if dtype == mx.complex64 else 1)
            right = random.standard_normal((2, inner, columns))
            # Without numpy's BLAS, whose threads would compete with those of OpenBLAS: on two cores, this took 3 s.
            expected = np.einsum("bij,bjk->bik", left, right)
            for transposed in itertools.product((False, True), repeat=2):
                a, b = _to_mlx(left, dtype, transposed[0]), _to_mlx(right, dtype, transposed[1])
                product = a @ b
                added = mx.addmm(product, a, b, 2.0, 0.5)
                results = ((product, expected), (added, 2.5 * expected))
                if not all(np.allclose(np.array(result), wanted, atol=tolerance) for result, wanted in results):
                    return f"{dtype}, {(rows, inner)} by {(inner, columns)}, transposed: {transposed}"
    return None


def _to_mlx(matrices: np.ndarray[Any, Any], dtype: mx.Dtype, transposed: bool) -> mx.array:
    """The same matrices, stored by rows, or by columns if ``transposed``."""
    if transposed:
        return mx.array(matrices.swapaxes(-1, -2).copy(), dtype=dtype).swapaxes(-1, -2)
    return mx.array(matrices, dtype=dtype)


def measure_gflops() -> float:
    """Speed of a float32 product on the calling thread in GFLOP/s; takes about 0.05 s.

    It is the best of several runs, so that other programs on the machine affect it less.
    """
    with mx.stream(mx.cpu):
        small_s = _product_s(256)
        size = 512 if small_s * 8 * REPEATS < MEASUREMENT_LIMIT_S else 256
        end = time.perf_counter() + MEASUREMENT_LIMIT_S / 2
        best_s = min(_product_s(size) for _ in range(REPEATS))
        while time.perf_counter() < end:
            best_s = min(best_s, _product_s(size))
        return 2 * size**3 / 1e9 / best_s


def _product_s(size: int) -> float:
    a, b = (mx.full((size, size), value) for value in (0.5, 0.25))
    mx.eval(a, b)
    start = time.perf_counter()
    mx.eval(a @ b)
    return time.perf_counter() - start


class ThreadChoice:
    """Sets the number of threads before each step of the engine. Use it on the engine thread only.

    While there is work, it measures about once a second which number of threads is fastest.

    Args:
        report: Its ``threads`` are the maximum. If ``threads_fixed``, this number is always used.
    """

    def __init__(self, report: BlasReport) -> None:
        self.max_threads = report.threads or 1
        self.current = self.max_threads
        self._fixed = report.threads_fixed
        self._fastest = self.max_threads
        candidates = {(self.max_threads + 1) // 2, max(1, self.max_threads - 1), self.max_threads} - {1}
        self._candidates = sorted(candidates, reverse=True)
        self._measured_at = self._used_at = -BUSY_INTERVAL_S
        self.stream: mx.Stream | mx.ThreadLocalStream | None = None
        """A stream that may still be computing when a step begins. Its end is awaited before the number of threads
        changes, and before a measurement, in which products of two streams would wait for each other."""

    def prepare(self, rows: int, *, lanes: int = 1) -> None:
        """Set the number of threads before computing.

        Args:
            rows: Number of tokens to compute: of prompts, of texts, and one for each running answer.
            lanes: Number of parts that are computed at the same time; each of several has one thread.
        """
        if lanes > 1 or not self._candidates:
            self._use(1)
        elif self._fixed:
            self._use(self.max_threads)
        else:
            now, was_idle = time.perf_counter(), time.perf_counter() - self._used_at > PAUSE_S
            self._used_at = now
            is_short = rows < FEW_ROWS or (was_idle and rows < SHORT_ROWS)
            interval_s = INTERVAL_S if self._fastest == self.max_threads else BUSY_INTERVAL_S
            if not is_short and now - self._measured_at > interval_s:
                self._measure()
            self._use(1 if is_short else self._fastest)

    def _measure(self) -> None:
        self.wait()
        self._use(1)
        best_s, self._fastest = _median_product_s(float("inf")), 1
        for count in self._candidates:
            self._use(count)
            if (seconds := _median_product_s(MUCH_SLOWER * best_s)) < best_s:
                best_s, self._fastest = seconds, count
        self._measured_at = time.perf_counter()

    def _use(self, count: int) -> None:
        if count != self.current:
            self.wait()
            use_threads(count)
            self.current = count

    def wait(self) -> None:
        """Wait for the end of what ``stream`` computes."""
        if self.stream is not None:
            mx.synchronize(self.stream)


def _median_product_s(limit_s: float) -> float:
    """Median time of some products; no further one is measured after ``limit_s``. The first product is not counted,
    because it wakes the threads.
    """
    rows, inner, columns = SHAPE
    left, right = mx.full((rows, inner), 0.5), mx.full((inner, columns), 0.25)
    mx.eval(left, right)
    mx.eval(left @ right)
    times_s: list[float] = []
    while not times_s or (len(times_s) < REPEATS and sum(times_s) < limit_s):
        start = time.perf_counter()
        mx.eval(left @ right)
        times_s.append(time.perf_counter() - start)
    return median(times_s)
