"""MLX uses OpenBLAS or its own BLAS as a whole, and computes the same products with both. OpenBLAS is loaded with the
right kernels, and the process can fork and start programs.
"""

from __future__ import annotations

import itertools
import logging
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine.cpu_blas import configure_blas, elf, openblas
from tests.engine.cpu_blas.helpers import needs_slots, needs_x86, run

WORKING = """
import os, subprocess, sys, threading
import mlx.core as mx
from lmx_lab.engine.cpu_blas import configure_blas
stop, working = threading.Event(), threading.Event()
def work():
    assert configure_blas("auto", 2).name == "openblas"
    a = mx.ones((256, 576)); b = mx.ones((576, 1536))
    with mx.stream(mx.cpu):
        while not stop.is_set():
            mx.eval(a @ b)
            working.set()
    mx.synchronize()
    mx.clear_streams()
thread = threading.Thread(target=work)
thread.start()
working.wait()
"""
FORKS = """
for _ in range(20):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
working.clear()
working.wait()
"""
CHILD_COMPUTES = """
stop.set()
thread.join()
child = os.fork()
if not child:
    a = mx.ones((256, 576))
    mx.eval(a @ a.T)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
child = os.fork()
if not child:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
EXEC = """
names = [name for name in os.environ if name.startswith("OPENBLAS")]
command = "import os; print([name for name in os.environ if name.startswith('OPENBLAS')])"
print(names, subprocess.check_output([sys.executable, "-c", command], text=True).strip())
"""


@needs_slots
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python warns about every fork of a process with threads")
def test_forks_while_mlx_computes_hang_neither_the_parent_nor_the_child() -> None:
    run(WORKING + FORKS + CHILD_COMPUTES)


@needs_slots
def test_programs_started_while_mlx_computes_get_the_original_environment() -> None:
    assert run(WORKING + EXEC + "stop.set(); thread.join()") == "[] []"


@pytest.mark.parametrize(
    ("facts", "narrow"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17", True),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2", False),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143", False),
        ("CPU implementer\t: 0x41\nCPU architecture: 8", False),
        ("", False),
    ],
)
def test_zen_4_is_recognized_by_its_family(tmp_path: Path, facts: str, narrow: bool) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{facts}\n\nprocessor\t: 1\n{facts}\n")
    assert openblas.is_narrow_avx512(file) is narrow


def test_without_cpuinfo_no_special_kernels_are_chosen(tmp_path: Path) -> None:
    assert openblas.is_narrow_avx512(tmp_path / "none") is False


@needs_x86
def test_kernels_chosen_by_the_user_are_used() -> None:
    assert "Nehalem" in run(
        "from lmx_lab.engine.cpu_blas import configure_blas; print(configure_blas().detail)",
        OPENBLAS_CORETYPE="Nehalem",
    )


@pytest.fixture
def mlx_binding() -> Iterator[openblas._Binding]:
    """MLX with the BLAS of its wheel, and a separate binding for the test."""
    before = configure_blas("off")
    assert before.name == "reference"
    separate = openblas._Binding()
    yield separate
    separate.configure("off", None)
    configure_blas("auto")


def slot_contents() -> list[int]:
    library = next(found for found in elf.libraries() if found.path.endswith(openblas.MLX_LIBRARY))
    slots = elf.slots(library, openblas.FUNCTIONS, platform.machine())
    assert set(slots) == set(openblas.FUNCTIONS)
    return [elf.read(slot) for name in openblas.FUNCTIONS for slot in slots[name]]


@needs_slots
def test_openblas_is_bound_and_the_original_is_restored(mlx_binding: openblas._Binding) -> None:
    installed = slot_contents()
    report = mlx_binding.configure("auto", 1)
    assert (report.name, report.threads) == ("openblas", 1)
    assert report.gemv
    assert report.gflops is not None
    assert not set(slot_contents()) & set(installed)
    assert mlx_binding.configure("auto", 1) is report
    assert mlx_binding.configure("auto", 2).threads == 2
    assert mlx_binding.configure("off", None).name == "reference"
    assert slot_contents() == installed


@needs_slots
def test_several_threads_can_configure_at_once() -> None:
    code = """
import threading, mlx.core as mx
from lmx_lab.engine.cpu_blas import configure_blas
names = []
def configure(threads):
    names.append(configure_blas("auto", threads).name)
    mx.synchronize()
    mx.clear_streams()
threads = [threading.Thread(target=configure, args=(count,)) for count in (1, 2, 1, 2, 3, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(names == ["openblas"] * 6)
"""
    assert run(code) == "True"


FAULTS = {
    "package missing": (openblas, "PACKAGE", "no_such_package", "pip install scipy-openblas32"),
    "symbol missing": (openblas, "PREFIX", "other_", "AttributeError"),
    "another MLX": (openblas, "FUNCTIONS", ("cblas_sgemm", "cblas_zgemm"), "does not call cblas_zgemm"),
    "wrong products": (openblas, "find_difference", lambda: "1 by 1", "differ from numpy's"),
}


@needs_slots
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_mlx_unchanged_and_is_logged_once(
    fault: str, mlx_binding: openblas._Binding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, name, value, words = FAULTS[fault]
    installed = slot_contents()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        report = mlx_binding.configure("auto", None)
        assert mlx_binding.configure("auto", None) is report
    assert report.name in {"reference", "system"}
    assert words in report.detail
    assert slot_contents() == installed
    assert [(entry.levelno, report.detail in entry.getMessage()) for entry in caplog.records] == [
        (logging.WARNING, True)
    ]


def _refuse(*_: object) -> None:
    raise PermissionError(13, "mprotect: Permission denied")


@needs_slots
def test_pages_that_stay_read_only_leave_mlx_unchanged(
    mlx_binding: openblas._Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = slot_contents()
    with monkeypatch.context() as patch:
        patch.setattr(elf, "_protection", lambda _page: elf.mmap.PROT_READ)
        patch.setattr(elf, "protect", _refuse)
        assert "Permission denied" in mlx_binding.configure("auto", None).detail
    assert slot_contents() == installed


@needs_x86
def test_without_executable_pages_a_single_row_is_computed_by_sgemm(
    mlx_binding: openblas._Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(elf, "protect", _refuse)
        report = mlx_binding.configure("auto", None)
    assert (report.name, report.gemv) == ("openblas", False)


@needs_slots
def test_another_blas_that_mlx_already_uses_is_kept(
    mlx_binding: openblas._Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = slot_contents()
    with monkeypatch.context() as patch:
        patch.setattr(elf, "owner", lambda _address: "/usr/lib/libopenblas.so.0")
        report = mlx_binding.configure("auto", None)
    assert (report.name, report.detail) == ("system", "libopenblas.so.0, already used by MLX")
    assert slot_contents() == installed


def test_nothing_is_bound_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert configure_blas().name == "unused"


@needs_slots
@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)))
def test_products_of_mlx_equal_those_of_numpy(transposed: tuple[bool, bool]) -> None:
    assert configure_blas("auto").name == "openblas"
    random = np.random.default_rng(1)
    for _ in range(60):
        rows, inner, columns, batch = (int(size) for size in random.integers(1, (4, 90, 90, 4)))
        a, b = random.standard_normal((batch, rows, inner)), random.standard_normal((inner, columns))
        left = mx.array(a.swapaxes(1, 2).copy()).swapaxes(1, 2) if transposed[0] else mx.array(a)
        right = mx.array(b.T.copy()).T if transposed[1] else mx.array(b)
        assert np.allclose(np.array(left @ right), a @ b, atol=1e-3)
        # A part of a matrix, so that rows are not contiguous.
        assert np.allclose(np.array(left[..., :1, ::2] @ right[::2]), a[..., :1, ::2] @ b[::2], atol=1e-3)


@needs_slots
def test_a_process_exits_normally_with_either_blas() -> None:
    for choice in ("auto", "off"):
        run(f"from lmx_lab.engine.cpu_blas import configure_blas; configure_blas({choice!r})")
