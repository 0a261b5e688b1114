"""Tests of the checks for what MLX computes with."""

import mlx.core as mx

from lmx_lab.doctor import compute
from lmx_lab.settings import Settings


def test_the_device_is_a_fault_if_mlx_cpu_has_replaced_the_library_for_gpus(monkeypatch):
    (usual,) = compute.check_device(Settings())
    assert usual.verdict == ("note" if mx.default_device() == mx.cpu else "fine")
    monkeypatch.setattr(compute, "replaced_cuda_package", lambda: "mlx-cuda-13==0.32.4")
    (fault,) = compute.check_device(Settings())
    assert (fault.verdict, fault.found) == ("bad", f"{usual.found}, although mlx-cuda-13==0.32.4 is installed")
    assert fault.remedy == "pip install --force-reinstall --no-deps mlx-cuda-13==0.32.4"
