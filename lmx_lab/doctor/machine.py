"""This Python, its packages, and what computes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from lmx_lab.doctor.finding import Finding
from lmx_lab.settings import Settings
from lmx_lab.weights.starters import STARTERS

PACKAGES = ("lmx-lab", "mlx", "mlx-lm", "transformers", "huggingface_hub", "fastapi", "uvicorn")
OPTIONAL_PACKAGES = ("jupyterlab", "openai")
LOW_DISK_BYTES = 2 * 10**9
PYTHON = "Programming Language :: Python :: 3."


def examine_packages(_: Settings) -> Iterator[Finding]:
    yield python_finding(sys.version_info[:3])
    for name in PACKAGES:
        yield Finding(topic=name, verdict="fine", found=metadata.version(name))
    for name in OPTIONAL_PACKAGES:
        try:
            yield Finding(topic=name, verdict="fine", found=metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(topic=name, verdict="note", found="not installed", remedy="pip install 'lmx-lab[lab]'")


def python_finding(version: tuple[int, int, int]) -> Finding:
    """Whether the lab was tried with this Python."""
    tried = sorted(
        int(line.removeprefix(PYTHON)) for line in _classifiers() if re.fullmatch(r"\d+", line[len(PYTHON) :])
    )
    found = f"{'.'.join(map(str, version))}, {platform.platform()}, {sys.executable}"
    if not tried or (3, tried[0]) <= version[:2] <= (3, tried[-1]):
        return Finding(topic="python", verdict="fine", found=found)
    return Finding(
        topic="python",
        verdict="note" if version[:2] > (3, tried[-1]) else "bad",
        found=found,
        means=f"the lab was tried with 3.{tried[0]} to 3.{tried[-1]}",
        remedy=f"install it with one of those: python3.{tried[-1]} -m venv .venv",
    )


def _classifiers() -> list[str]:
    return [line for line in metadata.metadata("lmx-lab").get_all("Classifier", []) if line.startswith(PYTHON)]


def examine_device(_: Settings) -> Iterator[Finding]:
    import mlx.core as mx

    info = mx.device_info()
    name = f"{mx.default_device()}, {info.get('device_name', 'unknown')}"
    if mx.default_device() == mx.cpu:
        means = "no GPU that MLX can use, so small models only"
        yield Finding(topic="device", verdict="note", found=name, means=means)
    else:
        yield Finding(topic="device", verdict="fine", found=name)


def examine_memory(settings: Settings) -> Iterator[Finding]:
    from lmx_lab.engine.mlx import memory

    total, limit = memory.total_bytes(), memory.limit_bytes(settings.memory_limit_bytes)
    yield Finding(topic="memory", verdict="fine", found=f"{total / 1e9:.1f} GB, {limit / 1e9:.1f} GB for models")


def examine_blas(settings: Settings) -> Iterator[Finding]:
    from lmx_lab.engine.cpu_blas import configure_blas

    report = configure_blas(settings.blas, settings.threads)
    parts = [report.detail]
    if report.threads is not None:
        parts.append(f"{report.threads} thread{'s' * (report.threads > 1)}")
    if report.gflops is not None:
        parts.append(f"{report.gflops:.0f} GFLOP/s")
    if report.gemv:
        parts.append("products of one row by sgemv")
    if report.name != "reference":
        yield Finding(topic="blas", verdict="fine", found=", ".join(parts))
        return
    yield Finding(
        topic="blas",
        verdict="note",
        found=", ".join(("the slow reference BLAS of MLX's wheel", *parts)),
        means="models on MLX answer ten times slower than this machine could",
        remedy="unset LMX_LAB_BLAS" if settings.blas == "off" else "pip install scipy-openblas32",
    )


def examine_disk(settings: Settings) -> Iterator[Finding]:
    folder = _existing(settings.home)
    free = shutil.disk_usage(folder).free
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield Finding(
            topic="home",
            verdict="bad",
            found=f"{settings.home} cannot be written",
            means="no model can be fetched there, and the daemon cannot start",
            remedy="export LMX_LAB_HOME=FOLDER",
        )
        return
    found = f"{free / 1e9:.1f} GB free for {settings.home}"
    starter = STARTERS["smollm2-135m"].needed_bytes + settings.disk_reserve_bytes
    if free >= max(LOW_DISK_BYTES, starter):
        yield Finding(topic="disk", verdict="fine", found=found)
        return
    if free < starter:
        means = f"not even the smallest starter can be fetched, for which {starter / 1e9:.1f} GB have to be free"
    else:
        means = "few models fit there"
    yield Finding(
        topic="disk", verdict="bad", found=found, means=means, remedy="free some, or export LMX_LAB_HOME=FOLDER"
    )


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)
