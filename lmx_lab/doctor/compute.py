"""Check what MLX computes with: the device, the memory for models and the BLAS library."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from lmx_lab.doctor import Finding
from lmx_lab.engine.cpu_blas import configure_blas
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.speeds import replaced_cuda_package
from lmx_lab.settings import Settings


def check_device(_: Settings) -> Iterator[Finding]:
    """Check whether MLX uses a GPU."""
    name = f"{mx.default_device()}, {mx.device_info().get('device_name', 'unknown')}"
    if (package := replaced_cuda_package()) is not None:
        yield Finding(
            topic="device",
            verdict="bad",
            found=f"{name}, although {package} is installed",
            means="mlx-cpu was installed after it and has replaced its library, so MLX does not use the GPU",
            remedy=f"pip install --force-reinstall --no-deps {package}",
        )
    elif mx.default_device() == mx.cpu:
        means = "MLX has no GPU that it can use, so only small models are practical"
        yield Finding(topic="device", verdict="note", found=name, means=means)
    else:
        yield Finding(topic="device", verdict="fine", found=name)


def check_memory(settings: Settings) -> Iterator[Finding]:
    """Report the memory, and the part of it that models may use."""
    total, limit = memory.total_bytes(), memory.limit_bytes(settings.memory_limit_bytes)
    yield Finding(topic="memory", verdict="fine", found=f"{total / 1e9:.1f} GB, {limit / 1e9:.1f} GB for models")


def check_blas(settings: Settings) -> Iterator[Finding]:
    """Check that MLX uses a fast BLAS library on the CPU."""
    report = configure_blas(settings.blas, settings.threads)
    parts = [report.detail]
    if report.threads is not None:
        parts.append(f"{report.threads} thread{'s' * (report.threads > 1)}")
    if report.gflops is not None:
        parts.append(f"{report.gflops:.0f} GFLOP/s")
    if report.gemv:
        parts.append("sgemv for products with one row")
    if report.fma_exp:
        parts.append("exp with fused multiply-add")
    if report.name != "reference":
        yield Finding(topic="blas", verdict="fine", found=", ".join(parts))
        return
    yield Finding(
        topic="blas",
        verdict="note",
        found=", ".join(("the slow reference BLAS of MLX's wheel", *parts)),
        means="MLX models run ten times slower than this machine allows",
        remedy="unset LMX_LAB_BLAS" if settings.blas == "off" else "pip install scipy-openblas32",
    )
