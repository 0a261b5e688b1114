"""OpenBLAS behind MLX: the same products, put there and taken out as a whole, and harmless to the process."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine import cpu_blas
from lmx_lab.engine.cpu_blas import binding, elf, gemv, openblas

LINUX_CPU = sys.platform == "linux" and mx.default_device() == mx.cpu
needs_slots = pytest.mark.skipif(not LINUX_CPU, reason="MLX calls a BLAS of its own on Linux CPUs only")
needs_x86 = pytest.mark.skipif(
    not LINUX_CPU or platform.machine() != gemv.MACHINE, reason="the instructions are x86-64's"
)
ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112


@pytest.fixture
def unbound() -> Iterator[binding._Mlx]:
    """The slots as MLX was installed, and a binding of the test's own."""
    before = cpu_blas.bind("off")
    assert before.name == "reference"
    mlx = binding._Mlx()
    yield mlx
    mlx.bind("off", None)
    cpu_blas.bind("auto")


def in_slots() -> list[int]:
    library = next(found for found in elf.libraries() if found.path.endswith(binding.MLX_LIBRARY))
    slots = elf.slots(library, binding.FUNCTIONS, platform.machine())
    assert set(slots) == set(binding.FUNCTIONS)
    return [elf.read(slot) for name in binding.FUNCTIONS for slot in slots[name]]


def run(code: str, **environ: str) -> str:
    # What the threads of tests are bounded by is no choice of the process.
    unset = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=unset | environ, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@needs_slots
def test_openblas_is_put_in_and_taken_out(unbound: binding._Mlx) -> None:
    installed = in_slots()
    report = unbound.bind("auto", 1)
    assert (report.name, report.threads) == ("openblas", 1)
    assert report.gemv
    assert report.gflops is not None
    assert not set(in_slots()) & set(installed)
    assert unbound.bind("auto", 1) is report
    assert unbound.bind("auto", 2).threads == 2
    assert unbound.bind("off", None).name == "reference"
    assert in_slots() == installed


@needs_slots
def test_several_threads_may_bind_at_once() -> None:
    code = """
import threading, mlx.core as mx
from lmx_lab.engine import cpu_blas
names = []
def bind(threads):
    names.append(cpu_blas.bind("auto", threads).name)
    mx.synchronize()
    mx.clear_streams()
threads = [threading.Thread(target=bind, args=(count,)) for count in (1, 2, 1, 2, 3, 1)]
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
    "another MLX": (binding, "FUNCTIONS", ("cblas_sgemm", "cblas_zgemm"), "calls no cblas_zgemm"),
    "wrong products": (binding, "differences", lambda: "1 by 1", "differ from numpy's"),
}


@needs_slots
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_mlx_as_it_was_and_is_logged_once(
    fault: str, unbound: binding._Mlx, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, name, value, words = FAULTS[fault]
    installed = in_slots()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        report = unbound.bind("auto", None)
        assert unbound.bind("auto", None) is report
    assert report.name in {"reference", "system"}
    assert words in report.detail
    assert in_slots() == installed
    assert [(entry.levelno, report.detail in entry.getMessage()) for entry in caplog.records] == [
        (logging.WARNING, True)
    ]


def _refuse(*_: object) -> None:
    raise PermissionError(13, "mprotect: Permission denied")


@needs_slots
def test_pages_that_stay_read_only_leave_mlx_as_it_was(unbound: binding._Mlx, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = in_slots()
    with monkeypatch.context() as patch:
        patch.setattr(elf, "_protection", lambda _page: elf.mmap.PROT_READ)
        patch.setattr(elf, "protect", _refuse)
        assert "Permission denied" in unbound.bind("auto", None).detail
    assert in_slots() == installed


@needs_x86
def test_where_no_page_may_be_executable_one_row_goes_to_sgemm(
    unbound: binding._Mlx, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(elf, "protect", _refuse)
        report = unbound.bind("auto", None)
    assert (report.name, report.gemv) == ("openblas", False)


@needs_slots
def test_another_blas_that_was_chosen_before_is_left_alone(
    unbound: binding._Mlx, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = in_slots()
    with monkeypatch.context() as patch:
        patch.setattr(elf, "owner", lambda _address: "/usr/lib/libopenblas.so.0")
        report = unbound.bind("auto", None)
    assert (report.name, report.detail) == ("system", "libopenblas.so.0, chosen before")
    assert in_slots() == installed


def test_a_gpu_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert cpu_blas.bind().name == "unused"


@needs_slots
def test_read_only_slots_are_written_and_read_only_again() -> None:
    page = elf.mmap.mmap(-1, elf.PAGE_BYTES)
    slot = ctypes.addressof(ctypes.c_char.from_buffer(page))
    elf.protect(slot, elf.PAGE_BYTES, elf.mmap.PROT_READ)
    elf.write({slot: 1, slot + 8: 2**63})
    assert (elf.read(slot), elf.read(slot + 8)) == (1, 2**63)
    assert elf._protection(slot) == elf.mmap.PROT_READ
    elf.protect(slot, elf.PAGE_BYTES, elf.mmap.PROT_READ | elf.mmap.PROT_WRITE)


@pytest.mark.parametrize(("machine", "types"), list(elf.SLOT_TYPES.items()))
@pytest.mark.parametrize("relocated", [True, False], ids=["glibc", "musl"])
def test_slots_are_found_in_the_tables_of_a_library(machine: str, types: tuple[int, int], relocated: bool) -> None:
    names = b"\0puts\0cblas_sgemm\0"
    symbols = b"".join(struct.pack("<I20x", at) for at in (0, 1, 6))
    glob_dat, jump_slot = types
    data = struct.pack("<QQq", 0x100, 2 << 32 | glob_dat, 0) + struct.pack("<QQq", 8, elf.RELATIVE_TYPES[machine], 8)
    calls = b"".join(struct.pack("<QQq", 0x200 + 8 * at, at << 32 | jump_slot, 0) for at in (1, 2))
    parts = {elf.DT_STRTAB: names.ljust(24, b"\0"), elf.DT_SYMTAB: symbols, elf.DT_RELA: data, elf.DT_JMPREL: calls}
    image = b"".join(parts.values())
    memory = ctypes.create_string_buffer(image, 1024)
    base = ctypes.addressof(memory)
    tags = {elf.DT_RELASZ: len(data), elf.DT_PLTRELSZ: len(calls)}
    for tag, part in parts.items():
        tags[tag] = image.index(part) + (base if relocated else 0)
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in [*tags.items(), (0, 0)])
    memory[512 : 512 + len(dynamic)] = dynamic
    library = elf.Library(path="made.so", base=base, dynamic=base + 512)
    assert elf.slots(library, ["cblas_sgemm", "absent"], machine) == {"cblas_sgemm": [base + 0x100, base + 0x210]}
    assert elf.handle(library, machine) == base + 8
    with pytest.raises(ValueError, match="riscv64"):
        elf.slots(library, ["puts"], "riscv64")


@needs_slots
@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)))
def test_products_of_mlx_are_those_of_numpy(transposed: tuple[bool, bool]) -> None:
    assert cpu_blas.bind("auto").name == "openblas"
    random = np.random.default_rng(1)
    for _ in range(60):
        rows, inner, columns, batch = (int(size) for size in random.integers(1, (4, 90, 90, 4)))
        a, b = random.standard_normal((batch, rows, inner)), random.standard_normal((inner, columns))
        left = mx.array(a.swapaxes(1, 2).copy()).swapaxes(1, 2) if transposed[0] else mx.array(a)
        right = mx.array(b.T.copy()).T if transposed[1] else mx.array(b)
        assert np.allclose(np.array(left @ right), a @ b, atol=1e-3)
        # A part of a matrix, so that rows do not lie one after another.
        assert np.allclose(np.array(left[..., :1, ::2] @ right[::2]), a[..., :1, ::2] @ b[::2], atol=1e-3)


@needs_x86
def test_a_row_is_multiplied_by_sgemv_as_by_sgemm() -> None:
    library = openblas.OpenBlas(1, platform.machine())
    number, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(None, *[number] * 6, real, pointer, number, pointer, number, real, pointer, number)
    product = kind(gemv.build(library.address("cblas_sgemm"), library.address("cblas_sgemv")))
    random = np.random.default_rng(2)
    cases = itertools.product((1, 2), (PLAIN, TRANSPOSED), (PLAIN, TRANSPOSED), (0.0, 0.5), range(40))
    for rows, trans_a, trans_b, beta, _ in cases:
        inner, columns = (int(size) for size in random.integers(1, 300, 2))
        more_a, more_b = (int(more) for more in random.integers(0, 5, 2))
        a, b = random.random((rows, inner), np.float32), random.random((inner, columns), np.float32)
        laid_a, laid_b = a.T if trans_a == TRANSPOSED else a, b.T if trans_b == TRANSPOSED else b
        laid_a, laid_b = (
            np.ascontiguousarray(np.pad(m, ((0, 0), (0, more)))) for m, more in ((laid_a, more_a), (laid_b, more_b))
        )
        # beta = 0 overwrites whatever was there: MLX gives memory that was never written.
        c = np.full((rows + 1, columns), np.nan if beta == 0 else 3.0, np.float32)
        c[rows] = 7
        where = [m.ctypes.data for m in (laid_a, laid_b, c)]
        sizes = (rows, columns, inner)
        lengths = laid_a.shape[1], laid_b.shape[1]
        product(
            ROW_MAJOR,
            trans_a,
            trans_b,
            *sizes,
            2.0,
            where[0],
            lengths[0],
            where[1],
            lengths[1],
            beta,
            where[2],
            columns,
        )
        assert np.allclose(c[:rows], 2 * (a @ b) + (3 * beta), rtol=1e-4)
        assert (c[rows] == 7).all()


@needs_x86
def test_what_is_no_product_of_a_row_by_a_matrix_goes_to_sgemm() -> None:
    """Columns first, or nothing to add up: sgemv would answer otherwise, or not at all."""
    library = openblas.OpenBlas(1, platform.machine())
    number, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(None, *[number] * 6, real, pointer, number, pointer, number, real, pointer, number)
    product = kind(gemv.build(library.address("cblas_sgemm"), library.address("cblas_sgemv")))
    a, b, c = np.ones(3, np.float32), np.ones(6, np.float32), np.full(2, 5, np.float32)
    product(102, PLAIN, PLAIN, 1, 2, 3, 1.0, a.ctypes.data, 1, b.ctypes.data, 3, 0.0, c.ctypes.data, 1)
    assert c.tolist() == [3, 3]
    product(101, PLAIN, PLAIN, 1, 2, 0, 1.0, a.ctypes.data, 3, b.ctypes.data, 2, 0.5, c.ctypes.data, 2)
    assert c.tolist() == [1.5, 1.5]


WORKING = """
import os, subprocess, sys, threading
import mlx.core as mx
from lmx_lab.engine import cpu_blas
stop, working = threading.Event(), threading.Event()
def work():
    assert cpu_blas.bind("auto", 2).name == "openblas"
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
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python warns of every fork of a process with threads")
def test_forks_while_mlx_computes_hang_neither_the_parent_nor_the_child() -> None:
    run(WORKING + FORKS + CHILD_COMPUTES)


@needs_slots
def test_programs_started_while_mlx_computes_see_the_environment_as_it_was() -> None:
    assert run(WORKING + EXEC + "stop.set(); thread.join()") == "[] []"


@needs_slots
def test_a_process_that_bound_ends_by_itself() -> None:
    for choice in ("auto", "off"):
        run(f"from lmx_lab.engine import cpu_blas; cpu_blas.bind({choice!r})")


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "nonsense"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_threads_are_the_cores_that_the_process_may_use(
    files: dict[str, str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openblas.psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert openblas.default_threads({}, tmp_path) == threads


def test_the_usual_variables_choose_the_threads() -> None:
    assert openblas.default_threads({"OMP_NUM_THREADS": "3,2", "OPENBLAS_NUM_THREADS": "0"}) == 3
    assert openblas.default_threads({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "5"}) == 5


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
def test_zen_4_is_told_by_its_family(tmp_path: Path, facts: str, narrow: bool) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{facts}\n\nprocessor\t: 1\n{facts}\n")
    assert openblas.is_narrow_avx512(file) is narrow


def test_without_cpuinfo_nothing_is_assumed(tmp_path: Path) -> None:
    assert openblas.is_narrow_avx512(tmp_path / "none") is False


@needs_x86
def test_the_users_choice_of_kernels_stays() -> None:
    assert "Nehalem" in run(
        "from lmx_lab.engine import cpu_blas; print(cpu_blas.bind().detail)", OPENBLAS_CORETYPE="Nehalem"
    )
