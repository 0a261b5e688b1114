"""Activations of encoders."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from lmx_lab.engine.encoders.layers import gelu


def test_gelu_is_exact_for_small_and_large_numbers() -> None:
    small = np.linspace(-8, 8, 20_001, dtype=np.float32)
    expected = [0.5 * x * math.erfc(-x / math.sqrt(2)) for x in small.tolist()]
    assert np.abs(np.array(gelu(mx.array(small))) - expected).max() < 1e-6
    large = np.array([-1e38, -1e9, -100, 100, 1e9, 1e38], dtype=np.float32)
    assert np.array_equal(np.array(gelu(mx.array(large))), np.maximum(large, 0))
    assert float(gelu(mx.array(0.0))) == 0
