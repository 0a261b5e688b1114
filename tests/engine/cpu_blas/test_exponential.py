"""MLX's ``exp`` is replaced by a faster function with the same results, and restored."""

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine.cpu_blas import configure_blas, elf, exponential, openblas
from tests.engine.cpu_blas.helpers import needs_x86

needs_fma = pytest.mark.skipif(not exponential.has_flags(exponential.FLAGS), reason="the processor has no FMA")


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
    replacement = exponential.Exponential(library)
    replacement.replace()
    try:
        after = [np.array(result) for result in (mx.exp(mx.array(values)), mx.softmax(finite), mx.sigmoid(finite))]
    finally:
        replacement.restore()
    assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(before, after, strict=True))


@needs_x86
@needs_fma
def test_the_function_is_replaced_with_the_blas_and_restored_with_it(library):
    address = elf.symbol(library, exponential.SYMBOL)
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
        ("CODE", b"\xc3" + exponential.CODE[1:], "the results differ"),
    ],
)
def test_another_processor_or_build_of_mlx_keeps_its_function(monkeypatch, library, name, value, reason: str):
    monkeypatch.setattr(exponential, name, value)
    with pytest.raises(OSError, match=reason):
        exponential.Exponential(library).replace()
    assert np.allclose(np.array(mx.exp(mx.array([1.0, -2.0]))), np.exp([1.0, -2.0]))
    # The rest of the replacement does not depend on it.
    report = configure_blas("auto")
    assert (report.name, report.fma_exp) == ("openblas", False)


def test_a_processor_without_a_list_of_features_has_none(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx fma\n\nprocessor : 1\n")
    assert exponential.has_flags(frozenset({"fma"}), tmp_path / "cpuinfo")
    assert not exponential.has_flags(frozenset({"fma", "avx512f"}), tmp_path / "cpuinfo")
    assert not exponential.has_flags(frozenset({"fma"}), tmp_path / "missing")
