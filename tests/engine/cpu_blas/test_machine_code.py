"""Functions of MLX and OpenBLAS are replaced with faster ones that have the same results, and restored."""

import ctypes
import itertools
import platform

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine.cpu_blas import configure_blas, elf, machine_code, openblas
from tests.engine.cpu_blas.helpers import needs_x86

needs_fma = pytest.mark.skipif(
    not set(machine_code.processor_facts().get("flags", "").split()) >= machine_code.FLAGS,
    reason="the processor has no FMA",
)


@pytest.fixture
def library():
    """MLX's library with its own ``exp``."""
    configure_blas("off")
    yield openblas._mlx_library()
    configure_blas("auto")


@needs_x86
@needs_fma
def test_the_results_are_the_same_bits_in_all_operations_that_compute_exp(library):
    random = np.random.default_rng(3)
    values = np.concatenate(
        [
            random.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32),
            random.uniform(-90, 90, 20_000).astype(np.float32),
            np.array([0, -0.0, 88, -88, np.nextafter(np.float32(88), np.float32(89))], dtype=np.float32),
        ]
    )
    finite = mx.array(values[np.isfinite(values)])
    before = [np.array(result) for result in (mx.exp(mx.array(values)), mx.softmax(finite), mx.sigmoid(finite))]
    replacement = machine_code.Exponential(library)
    replacement.replace()
    try:
        after = [np.array(result) for result in (mx.exp(mx.array(values)), mx.softmax(finite), mx.sigmoid(finite))]
    finally:
        replacement.restore()
    assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(before, after, strict=True))


@needs_x86
@needs_fma
def test_the_function_is_replaced_with_the_blas_and_restored_with_it(library):
    address = elf.symbol(library, machine_code.SYMBOL)
    assert address is not None
    original = elf.read(address)
    assert configure_blas("auto").fma_exp
    assert elf.read(address) != original
    assert not configure_blas("off").fma_exp
    assert elf.read(address) == original


@needs_x86
@needs_fma
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SYMBOL", "_ZN3mlx4core4simd3noneEv", "another exp function"),
        ("ENTRY", b"\x90" * 8, "another exp function"),
        ("FLAGS", frozenset({"avx", "no_such_flag"}), "no_such_flag"),
        ("CODE", b"\xc3" + machine_code.CODE[1:], "the results differ"),
    ],
)
def test_another_processor_or_build_of_mlx_keeps_its_function(monkeypatch, library, name, value, reason):
    monkeypatch.setattr(machine_code, name, value)
    with pytest.raises(OSError, match=reason):
        machine_code.Exponential(library).replace()
    assert np.allclose(np.array(mx.exp(mx.array([1.0, -2.0]))), np.exp([1.0, -2.0]))
    # The rest of the replacement does not depend on it.
    report = configure_blas("auto")
    assert (report.name, report.fma_exp) == ("openblas", False)


ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112


def product_of_rows():
    """Return a ``cblas_sgemm`` that uses sgemv for single rows."""
    library = openblas.OpenBlas(1, platform.machine())
    number, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(None, *[number] * 6, real, pointer, number, pointer, number, real, pointer, number)
    return kind(machine_code.build_sgemm(library.address("cblas_sgemm"), library.address("cblas_sgemv")))


@needs_x86
def test_sgemv_gives_the_same_product_of_a_row_as_sgemm():
    product = product_of_rows()
    random = np.random.default_rng(2)
    cases = itertools.product((1, 2), (PLAIN, TRANSPOSED), (PLAIN, TRANSPOSED), (0.0, 0.5), range(40))
    for rows, trans_a, trans_b, beta, _ in cases:
        inner, columns = (int(size) for size in random.integers(1, 300, 2))
        padding_a, padding_b = (int(padding) for padding in random.integers(0, 5, 2))
        a, b = random.random((rows, inner), np.float32), random.random((inner, columns), np.float32)
        stored_a, stored_b = a.T if trans_a == TRANSPOSED else a, b.T if trans_b == TRANSPOSED else b
        stored_a, stored_b = (
            np.ascontiguousarray(np.pad(m, ((0, 0), (0, padding))))
            for m, padding in ((stored_a, padding_a), (stored_b, padding_b))
        )
        # beta = 0 overwrites everything: MLX passes uninitialized memory.
        c = np.full((rows + 1, columns), np.nan if beta == 0 else 3.0, np.float32)
        c[rows] = 7
        where = [m.ctypes.data for m in (stored_a, stored_b, c)]
        sizes = (rows, columns, inner)
        lengths = stored_a.shape[1], stored_b.shape[1]
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
def test_other_products_are_computed_by_sgemm():
    """Column-major order, or an inner size of 0: sgemv would return another result or none."""
    product = product_of_rows()
    a, b, c = np.ones(3, np.float32), np.ones(6, np.float32), np.full(2, 5, np.float32)
    product(102, PLAIN, PLAIN, 1, 2, 3, 1.0, a.ctypes.data, 1, b.ctypes.data, 3, 0.0, c.ctypes.data, 1)
    assert c.tolist() == [3, 3]
    product(101, PLAIN, PLAIN, 1, 2, 0, 1.0, a.ctypes.data, 3, b.ctypes.data, 2, 0.5, c.ctypes.data, 2)
    assert c.tolist() == [1.5, 1.5]
