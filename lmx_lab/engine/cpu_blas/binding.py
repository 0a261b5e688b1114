"""The matrix products of MLX on a Linux CPU, by OpenBLAS.

MLX's wheel brings the reference BLAS and calls three functions of it. Their addresses stand in three slots of the
loaded ``libmlx.so``; OpenBLAS' are put there instead, tried against numpy, and taken out again if anything is amiss. No
file is changed. 512³ in float32 on two cores: 6 GFLOP/s before, 200 after.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from lmx_lab.engine.cpu_blas import elf, gemv
from lmx_lab.engine.cpu_blas.openblas import OpenBlas, chosen_threads, default_threads

log = logging.getLogger(__name__)

FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
MLX_LIBRARY = "libmlx.so"
# Rows, inner, columns: one row and few; odd; enough for several threads.
SIZES = ((1, 7, 1), (1, 300, 517), (5, 13, 7), (67, 129, 131))
LONGEST_MEASUREMENT_S = 0.2
REPEATS = 3
PRELOAD = "or preload an OpenBLAS of the system (LD_PRELOAD)"

Name = Literal["openblas", "reference", "system", "unused"]


@dataclass(frozen=True, kw_only=True)
class BlasReport:
    """Who computes MLX's matrix products."""

    name: Name
    """``reference``: the wheel's. ``system``: another one that was there before. ``unused``: a GPU computes."""
    detail: str
    """For people: version and processor, or why it is not OpenBLAS."""
    threads: int | None = None
    gflops: float | None = None
    """Measured with a float32 product of MLX."""
    gemv: bool = False
    """Whether products of one row go to ``sgemv``."""
    threads_chosen: bool = True
    """Whether somebody chose the number of threads; if not, it may follow what other programs leave."""


class _LeftAloneError(Exception):
    """MLX stays as it was."""

    def __init__(self, text: str, *, name: Name = "reference", level: int = logging.WARNING) -> None:
        super().__init__(text)
        self.name = name
        self.level = level


def bind(choice: str = "auto", threads: int | None = None) -> BlasReport:
    """Put OpenBLAS behind MLX (``auto``) or the BLAS it came with (``off``); see what there is then.

    Computes on the calling thread, by its CPU stream. May be called again, from any thread, but not while MLX computes.
    Never raises for what it finds: MLX is then as it was, and the report and one line in the log say why.
    """
    if mx.default_device() != mx.cpu:
        return BlasReport(name="unused", detail="the GPU computes")
    with _lock:
        return _mlx.bind(choice, threads)


def use_threads(count: int) -> None:
    """Compute with so many threads from now on, at most those that were bound; nothing without OpenBLAS.

    From any thread, but not while MLX computes.
    """
    with _lock:
        _mlx.use_threads(count)


class _Mlx:
    """The slots of the loaded MLX, and what was in them."""

    def __init__(self) -> None:
        self._originals: dict[int, int] = {}
        self._openblas: OpenBlas | None = None
        self._functions: dict[str, int] = {}
        self._gemv = False
        self._wanted: tuple[str, int | None] | None = None
        self._report = BlasReport(name="reference", detail="")
        self._measured: dict[tuple[Name, int | None], float] = {}

    def bind(self, choice: str, threads: int | None) -> BlasReport:
        if self._wanted != (choice, threads):
            report = self._change(choice, threads)
            who = (report.name, report.threads)
            if who not in self._measured:
                self._measured[who] = self._measure(report)
            self._report = replace(report, gflops=self._measured[who])
            self._wanted = (choice, threads)
        elif self._report.threads is not None:
            self.use_threads(self._report.threads)
        return self._report

    def _measure(self, report: BlasReport) -> float:
        if report.name != "openblas" or report.threads == 1 or self._openblas is None:
            return measure()
        # Threads that wait for each other are slow while others use the cores: what one does is the least there is.
        everyone = measure()
        self._openblas.threads = 1
        alone = measure()
        self._openblas.threads = report.threads or 1
        return max(everyone, alone)

    def use_threads(self, count: int) -> None:
        if self._openblas is not None and self._originals:
            self._openblas.threads = min(count, self._report.threads or 1)

    def _change(self, choice: str, threads: int | None) -> BlasReport:
        try:
            slots = self._find_slots()
            if choice == "off":
                self._restore()
                return BlasReport(name="reference", detail="turned off; LMX_LAB_BLAS=auto turns it on", threads=1)
            return self._put_openblas(slots, threads)
        except _LeftAloneError as exc:
            name, level, detail = exc.name, exc.level, str(exc)
        except ImportError as exc:
            name, level, detail = "reference", logging.WARNING, f"{exc}; pip install scipy-openblas32, {PRELOAD}"
        except Exception as exc:
            # Whatever else a strange system comes up with: slow is better than not at all.
            name, level, detail = "reference", logging.WARNING, f"{type(exc).__name__}: {exc}; to do without, {PRELOAD}"
        self._restore()
        log.log(level, "OpenBLAS is not put behind MLX: %s", detail)
        return BlasReport(name=name, detail=detail, threads=1 if name == "reference" else None)

    def _find_slots(self) -> dict[str, list[int]]:
        if sys.platform != "linux":
            raise _LeftAloneError("Accelerate, part of the system", name="system", level=logging.DEBUG)
        if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
            raise _LeftAloneError("the C library of this system is not glibc")
        library = next((found for found in elf.libraries() if Path(found.path).name == MLX_LIBRARY), None)
        if library is None:
            raise _LeftAloneError(f"no {MLX_LIBRARY} is loaded", name="system")
        slots = elf.slots(library, FUNCTIONS, platform.machine())
        if missing := set(FUNCTIONS) - set(slots):
            text = f"this MLX calls no {', '.join(sorted(missing))}; another build than the one known"
            raise _LeftAloneError(text, name="system")
        if not self._originals:
            for name in FUNCTIONS:
                _check_is_wheels_own(library, name, slots[name][0])
        return slots

    def _put_openblas(self, slots: Mapping[str, list[int]], threads: int | None) -> BlasReport:
        count = threads or default_threads(os.environ)
        openblas = self._openblas = self._openblas or OpenBlas(count, platform.machine())
        # Without its fork handler taken out, more than one thread would hang in a fork.
        openblas.threads = count if openblas.forks else 1
        if not self._originals:
            self._functions = self._functions or self._choose_functions(openblas)
            before = {slot: elf.read(slot) for name in FUNCTIONS for slot in slots[name]}
            elf.write({slot: self._functions[name] for name in FUNCTIONS for slot in slots[name]})
            self._originals = before
            if wrong := differences():
                raise _LeftAloneError(f"its products differ from numpy's ({wrong}); {PRELOAD}")
        return BlasReport(
            name="openblas",
            detail=openblas.title,
            threads=openblas.threads,
            gemv=self._gemv,
            threads_chosen=threads is not None or chosen_threads(os.environ) is not None,
        )

    def _choose_functions(self, openblas: OpenBlas) -> dict[str, int]:
        functions = {name: openblas.address(name) for name in FUNCTIONS}
        # There OpenBLAS looks for itself whether gemv will do.
        self._gemv = platform.machine() == "aarch64"
        if platform.machine() == gemv.MACHINE:
            try:
                functions["cblas_sgemm"] = gemv.build(functions["cblas_sgemm"], openblas.address("cblas_sgemv"))
                self._gemv = True
            except OSError as exc:
                log.info("products of one row go to sgemm: %s", exc)
        return functions

    def _restore(self) -> None:
        if self._originals:
            elf.write(self._originals)
            self._originals = {}


_lock = threading.Lock()
_mlx = _Mlx()


def _check_is_wheels_own(library: elf.Library, name: str, slot: int) -> None:
    """
    Raises:
        _LeftAloneError: somebody chose another BLAS (LD_PRELOAD, another build of MLX).
    """
    file = elf.owner(elf.read(slot))
    if file == library.path:
        # Not called yet: the slot leads to the linker, which would look in the whole process first.
        function = getattr(ctypes.CDLL(None), name, None) or getattr(ctypes.CDLL(library.path), name)
        file = elf.owner(ctypes.cast(function, ctypes.c_void_p).value or 0)
    if file is None:
        raise _LeftAloneError(f"{name} leads to no library", name="system")
    # auditwheel puts what a wheel brings into NAME.libs.
    if not Path(file).resolve().parent.name.endswith(".libs") or hasattr(ctypes.CDLL(file), "openblas_get_config"):
        raise _LeftAloneError(f"{Path(file).name}, chosen before", name="system", level=logging.INFO)


def differences() -> str | None:
    """Products of MLX against numpy's, on the calling thread: the first that differs, in words."""
    random = np.random.default_rng(0)
    with mx.stream(mx.cpu):
        for dtype, tolerance in ((mx.float32, 1e-3), (mx.complex64, 1e-3), (mx.float64, 1e-9)):
            for rows, inner, columns in SIZES:
                left = random.standard_normal((2, rows, inner)) * (1 + 2j if dtype == mx.complex64 else 1)
                right = random.standard_normal((2, inner, columns))
                for flips in itertools.product((False, True), repeat=2):
                    made = _laid(left, dtype, flips[0]) @ _laid(right, dtype, flips[1])
                    added = mx.addmm(made, _laid(left, dtype, flips[0]), _laid(right, dtype, flips[1]), 2.0, 0.5)
                    for got, factor in ((made, 1), (added, 2.5)):
                        if not np.allclose(np.array(got), factor * (left @ right), atol=tolerance):
                            return f"{dtype}, {(rows, inner)} by {(inner, columns)}, transposed: {flips}"
    return None


def _laid(matrices: np.ndarray[Any, Any], dtype: mx.Dtype, transposed: bool) -> mx.array:
    """The same matrices, in memory by rows or by columns."""
    if transposed:
        return mx.array(matrices.swapaxes(-1, -2).copy(), dtype=dtype).swapaxes(-1, -2)
    return mx.array(matrices, dtype=dtype)


def measure() -> float:
    """GFLOP/s of a float32 product, on the calling thread; within about 0.2 s.

    The best of many: it says what the machine can do, not what other programs leave of it just now.
    """
    with mx.stream(mx.cpu):
        small = _seconds(256)
        size = 512 if small * 8 * REPEATS < LONGEST_MEASUREMENT_S else 256
        # Threads that wait for each other lose much when others use the CPUs: the best of many tells what is there.
        end = time.perf_counter() + LONGEST_MEASUREMENT_S / 2
        best = min(_seconds(size) for _ in range(REPEATS))
        while time.perf_counter() < end:
            best = min(best, _seconds(size))
        return 2 * size**3 / 1e9 / best


def _seconds(size: int) -> float:
    a, b = (mx.full((size, size), value) for value in (0.5, 0.25))
    mx.eval(a, b)
    start = time.perf_counter()
    mx.eval(a @ b)
    return time.perf_counter() - start
