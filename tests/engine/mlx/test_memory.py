"""Tests of the memory of an NVIDIA GPU, which MLX alone uses. The GPU is simulated by what MLX reports about it."""

import os
from types import SimpleNamespace

import mlx.core as mx
import pytest

from lmx_lab.engine import ModelManager
from lmx_lab.engine import memory as machine
from lmx_lab.engine.interface import EngineHost
from lmx_lab.engine.mlx import kv_cache, memory
from lmx_lab.engine.mlx.state import MlxCore
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot

GB = 10**9
H100 = {"device_name": "NVIDIA H100 80GB HBM3", "free_memory": 70 * GB, "total_memory": 80 * GB}


def report_device(monkeypatch, info):
    device = SimpleNamespace(
        device_info=lambda: info, get_active_memory=lambda: 3 * GB, get_cache_memory=lambda: 2 * GB
    )
    device.set_memory_limit = lambda limit: info.update(limit=limit)
    monkeypatch.setattr(memory, "mx", device)


def test_the_memory_limit_is_80_percent_of_what_other_programs_leave_of_the_gpu(monkeypatch):
    report_device(monkeypatch, info := dict(H100))
    assert (memory.total_bytes(), memory.limit_bytes(None), memory.limit_bytes(5)) == (80 * GB, 60 * GB, 5)
    memory.limit_kept_bytes(60 * GB)
    assert info["limit"] == 60 * GB
    report_device(monkeypatch, {**H100, "free_memory": 79 * GB})
    assert memory.limit_bytes(None) == 64 * GB
    report_device(monkeypatch, {"memory_size": 32 * GB})
    assert (memory.total_bytes(), memory.is_of_device()) == (32 * GB, False)
    report_device(monkeypatch, {"device_name": "cpu"})
    assert (memory.total_bytes(), memory.is_of_device()) == (machine.total_bytes(), False)


def test_engines_on_the_cpu_do_not_reduce_the_memory_of_the_gpu(monkeypatch):
    monkeypatch.setattr(memory, "is_of_device", lambda: False)
    core = MlxCore(Settings(), EngineHost(used_by_others=lambda: 7))
    assert (core._other_bytes(), core.snapshot.memory_is_of_device) == (7, False)
    monkeypatch.setattr(memory, "is_of_device", lambda: True)
    assert core._other_bytes() == 0


def test_memory_of_the_gpu_is_not_counted_for_engines_on_the_cpu():
    manager = ModelManager(Settings())
    for is_of_device, used in ((False, 5), (True, 0)):
        snapshot = EngineSnapshot(memory_used_bytes=5, memory_is_of_device=is_of_device)
        manager._engines["mlx"] = SimpleNamespace(snapshot=snapshot)
        assert manager._used_bytes(excluding="llama.cpp") == used


def test_products_are_exact_and_any_number_of_shapes_is_allowed():
    names = ("MLX_ENABLE_CACHE_THRASHING_CHECK", "MLX_ENABLE_TF32")
    assert [os.environ[name] for name in names] == ["0", "0"]


@pytest.mark.parametrize(
    ("dtype", "head_size", "stored"), [(mx.float32, 64, True), (mx.bfloat16, 256, True), (mx.bfloat16, 128, False)]
)
def test_scores_that_cudnn_cannot_compute_in_one_kernel_use_memory(monkeypatch, dtype, head_size, *, stored):
    layer = SimpleNamespace(keys=mx.zeros((1, 1, 1, head_size), dtype=dtype))
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(memory, "is_of_device", lambda: True)
    assert kv_cache._stores_scores([layer, object()]) is stored
    monkeypatch.setattr(memory, "is_of_device", lambda: False)
    assert not kv_cache._stores_scores([layer])
