"""Products with a single row are computed by sgemv with the same results as by sgemm."""

import ctypes
import itertools
import platform

import numpy as np

from lmx_lab.engine.cpu_blas import gemv, openblas
from tests.engine.cpu_blas.helpers import needs_x86

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112


@needs_x86
def test_sgemv_gives_the_same_product_of_a_row_as_sgemm():
    library = openblas.OpenBlas(1, platform.machine())
    number, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(None, *[number] * 6, real, pointer, number, pointer, number, real, pointer, number)
    product = kind(gemv.build(library.address("cblas_sgemm"), library.address("cblas_sgemv")))
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
    library = openblas.OpenBlas(1, platform.machine())
    number, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(None, *[number] * 6, real, pointer, number, pointer, number, real, pointer, number)
    product = kind(gemv.build(library.address("cblas_sgemm"), library.address("cblas_sgemv")))
    a, b, c = np.ones(3, np.float32), np.ones(6, np.float32), np.full(2, 5, np.float32)
    product(102, PLAIN, PLAIN, 1, 2, 3, 1.0, a.ctypes.data, 1, b.ctypes.data, 3, 0.0, c.ctypes.data, 1)
    assert c.tolist() == [3, 3]
    product(101, PLAIN, PLAIN, 1, 2, 0, 1.0, a.ctypes.data, 3, b.ctypes.data, 2, 0.5, c.ctypes.data, 2)
    assert c.tolist() == [1.5, 1.5]
