"""MLX uses OpenBLAS or its own BLAS as a whole, and computes the same products with both. OpenBLAS is loaded with the
right kernels, the process can fork and start programs, and products have the number of threads that is fastest.
"""

import itertools
import logging
import platform
import sys

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine.cpu_blas import ThreadChoice, configure_blas, elf, machine_code, openblas
from lmx_lab.engine.cpu_blas.openblas import BUSY_INTERVAL_S, INTERVAL_S, PAUSE_S
from lmx_lab.values.engine import BlasReport
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
def test_forks_while_mlx_computes_hang_neither_the_parent_nor_the_child():
    run(WORKING + FORKS + CHILD_COMPUTES)


@needs_slots
def test_programs_started_while_mlx_computes_get_the_original_environment():
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
def test_zen_4_is_recognized_by_its_family(tmp_path, facts, narrow):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{facts}\n\nprocessor\t: 1\n{facts}\n")
    assert openblas.is_narrow_avx512(machine_code.processor_facts(file)) is narrow


def test_without_cpuinfo_nothing_is_known_about_the_processor(tmp_path):
    assert machine_code.processor_facts(tmp_path / "none") == {}


@needs_x86
def test_kernels_chosen_by_the_user_are_used():
    assert "Nehalem" in run(
        "from lmx_lab.engine.cpu_blas import configure_blas; print(configure_blas().detail)",
        OPENBLAS_CORETYPE="Nehalem",
    )


@pytest.fixture
def mlx_binding():
    """MLX with the BLAS of its wheel, and a separate binding for the test."""
    before = configure_blas("off")
    assert before.name == "reference"
    separate = openblas._Binding()
    yield separate
    separate.configure("off", None)
    configure_blas("auto")


def slot_contents():
    library = next(found for found in elf.libraries() if found.path.endswith(openblas.MLX_LIBRARY))
    slots = elf.slots(library, openblas.FUNCTIONS, platform.machine())
    assert set(slots) == set(openblas.FUNCTIONS)
    return [elf.read(slot) for name in openblas.FUNCTIONS for slot in slots[name]]


@needs_slots
def test_openblas_is_bound_and_the_original_is_restored(mlx_binding):
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
def test_several_threads_can_configure_at_once():
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
def test_a_fault_leaves_mlx_unchanged_and_is_logged_once(fault, mlx_binding, monkeypatch, caplog):
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


def _refuse(*_):
    raise PermissionError(13, "mprotect: Permission denied")


@needs_slots
def test_pages_that_stay_read_only_leave_mlx_unchanged(mlx_binding, monkeypatch):
    installed = slot_contents()
    with monkeypatch.context() as patch:
        patch.setattr(elf, "_protection", lambda _page: elf.mmap.PROT_READ)
        patch.setattr(elf, "protect", _refuse)
        assert "Permission denied" in mlx_binding.configure("auto", None).detail
    assert slot_contents() == installed


@needs_x86
def test_without_executable_pages_a_single_row_is_computed_by_sgemm(mlx_binding, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(elf, "protect", _refuse)
        report = mlx_binding.configure("auto", None)
    assert (report.name, report.gemv) == ("openblas", False)


@needs_slots
def test_another_blas_that_mlx_already_uses_is_kept(mlx_binding, monkeypatch):
    installed = slot_contents()
    with monkeypatch.context() as patch:
        patch.setattr(elf, "owner", lambda _address: "/usr/lib/libopenblas.so.0")
        report = mlx_binding.configure("auto", None)
    assert (report.name, report.detail) == ("system", "libopenblas.so.0, already used by MLX")
    assert slot_contents() == installed


def test_nothing_is_bound_on_a_gpu(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert configure_blas().name == "unused"


@needs_slots
@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)))
def test_products_of_mlx_equal_those_of_numpy(transposed):
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
def test_a_process_exits_normally_with_either_blas():
    for choice in ("auto", "off"):
        run(f"from lmx_lab.engine.cpu_blas import configure_blas; configure_blas({choice!r})")


class Machine:
    """Simulates the time of a product for each number of threads, and the clock."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.seconds = {1: 1.0, 2: 0.6, 3: 0.5, 4: 0.4}
        self.measured = []
        self.in_use = 0
        monkeypatch.setattr(openblas, "use_threads", self._use)
        monkeypatch.setattr(openblas, "_median_product_s", self._measure)
        monkeypatch.setattr(openblas.time, "perf_counter", lambda: self.now)

    def _use(self, count):
        self.in_use = count

    def _measure(self, limit_s):
        self.measured.append(self.in_use)
        return self.seconds[self.in_use]


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def choice(machine, threads=2, *, fixed=False):
    made = ThreadChoice(BlasReport(name="openblas", detail="", threads=threads, threads_fixed=fixed))
    machine.in_use = threads
    return made


BUSY = {1: 1.0, 2: 30.0}
"""Times of a product on a machine where a second thread waits for other programs."""


@pytest.mark.parametrize(
    ("threads", "seconds", "in_use", "measured"),
    [
        pytest.param(2, {}, 2, [1, 2], id="an idle machine uses all threads"),
        pytest.param(2, BUSY, 1, [1, 2], id="a busy machine uses the fastest number"),
        pytest.param(4, {1: 4, 2: 2, 3: 1.5, 4: 9}, 3, [1, 4, 3, 2], id="more cores, a number in between"),
        pytest.param(4, {1: 4, 2: 2, 3: 8, 4: 9}, 2, [1, 4, 3, 2], id="more cores, another number"),
        pytest.param(1, {}, 1, [], id="one core"),
    ],
)
def test_the_fastest_number_of_threads_is_measured_and_used(machine, threads, seconds, in_use, measured):
    machine.seconds |= seconds
    made = choice(machine, threads)
    made.prepare(500)
    assert (made.current, machine.in_use, machine.measured) == (in_use, in_use, measured)


@pytest.mark.parametrize(
    ("fixed", "work", "in_use"),
    [
        pytest.param(False, {"rows": 3}, 1, id="few rows"),
        pytest.param(False, {"rows": 63}, 1, id="short work after a pause"),
        pytest.param(False, {"rows": 500, "lanes": 2}, 1, id="lanes have one thread each"),
        pytest.param(True, {"rows": 500, "lanes": 2}, 1, id="lanes with a fixed number"),
        pytest.param(True, {"rows": 1}, 2, id="a fixed number, one row"),
        pytest.param(True, {"rows": 100}, 2, id="a fixed number"),
    ],
)
def test_work_for_which_the_number_of_threads_is_known_measures_nothing(machine, fixed, work, in_use):
    choice(machine, fixed=fixed).prepare(**work)
    assert (machine.in_use, machine.measured) == (in_use, [])


@pytest.mark.parametrize("before", [{"rows": 63}, {"rows": 500, "lanes": 2}])
def test_later_work_has_all_threads(machine, before):
    made = choice(machine)
    made.prepare(**before)
    machine.now += PAUSE_S / 2
    made.prepare(63 if before["rows"] == 63 else 500)
    assert machine.in_use == 2


def test_it_measures_again_only_after_the_interval(machine):
    made = choice(machine)
    made.prepare(100)
    measured = len(machine.measured)
    machine.now += INTERVAL_S - 0.01
    made.prepare(100)
    assert len(machine.measured) == measured
    machine.seconds = BUSY
    machine.now += 0.02
    made.prepare(100)
    assert machine.in_use == 1


def test_on_a_busy_machine_it_measures_less_often_and_uses_all_threads_again(machine):
    made = choice(machine)
    machine.seconds = BUSY
    made.prepare(100)
    measured = len(machine.measured)
    machine.seconds = {1: 1.0, 2: 0.6}
    machine.now += INTERVAL_S + 0.1
    made.prepare(100)
    assert (machine.in_use, len(machine.measured)) == (1, measured)
    machine.now += BUSY_INTERVAL_S
    made.prepare(100)
    assert machine.in_use == 2


def test_a_real_product_is_measured():
    assert 0 < openblas._median_product_s(float("inf")) < 10


def test_a_slow_number_of_threads_is_measured_once():
    assert openblas._median_product_s(0.0) > 0


def test_the_number_changes_and_is_measured_only_when_the_stream_computes_nothing(machine, monkeypatch):
    idle = False

    def wait(stream):
        nonlocal idle
        idle = stream is threads.stream

    def use(count):
        nonlocal idle
        assert idle
        machine.in_use = count

    monkeypatch.setattr(mx, "synchronize", wait)
    monkeypatch.setattr(openblas, "use_threads", use)
    threads = choice(machine)
    threads.stream = mx.default_stream(mx.cpu)
    for rows in (100, 1, 100):
        idle = False
        threads.prepare(rows)
        machine.now += INTERVAL_S / 4
    assert machine.measured == [1, 2]
    assert machine.in_use == 2
