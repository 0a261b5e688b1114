"""OpenBLAS is loaded with the right kernels, and the process can fork and start programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmx_lab.engine.cpu_blas import openblas
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
