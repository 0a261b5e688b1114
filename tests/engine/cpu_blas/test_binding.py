"""MLX uses OpenBLAS or its own BLAS as a whole, and computes the same products with both."""

from __future__ import annotations

import itertools
import logging
import platform
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine.cpu_blas import binding, configure_blas, elf, openblas
from tests.engine.cpu_blas.helpers import needs_slots, needs_x86, run


@pytest.fixture
def mlx_binding() -> Iterator[binding._Binding]:
    """MLX with the BLAS of its wheel, and a separate binding for the test."""
    before = configure_blas("off")
    assert before.name == "reference"
    separate = binding._Binding()
    yield separate
    separate.configure("off", None)
    configure_blas("auto")


def slot_contents() -> list[int]:
    library = next(found for found in elf.libraries() if found.path.endswith(binding.MLX_LIBRARY))
    slots = elf.slots(library, binding.FUNCTIONS, platform.machine())
    assert set(slots) == set(binding.FUNCTIONS)
    return [elf.read(slot) for name in binding.FUNCTIONS for slot in slots[name]]


@needs_slots
def test_openblas_is_bound_and_the_original_is_restored(mlx_binding: binding._Binding) -> None:
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
    "another MLX": (binding, "FUNCTIONS", ("cblas_sgemm", "cblas_zgemm"), "does not call cblas_zgemm"),
    "wrong products": (binding, "find_difference", lambda: "1 by 1", "differ from numpy's"),
}


@needs_slots
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_mlx_unchanged_and_is_logged_once(
    fault: str, mlx_binding: binding._Binding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    mlx_binding: binding._Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = slot_contents()
    with monkeypatch.context() as patch:
        patch.setattr(elf, "_protection", lambda _page: elf.mmap.PROT_READ)
        patch.setattr(elf, "protect", _refuse)
        assert "Permission denied" in mlx_binding.configure("auto", None).detail
    assert slot_contents() == installed


@needs_x86
def test_without_executable_pages_a_single_row_is_computed_by_sgemm(
    mlx_binding: binding._Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(elf, "protect", _refuse)
        report = mlx_binding.configure("auto", None)
    assert (report.name, report.gemv) == ("openblas", False)


@needs_slots
def test_another_blas_that_mlx_already_uses_is_kept(
    mlx_binding: binding._Binding, monkeypatch: pytest.MonkeyPatch
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
