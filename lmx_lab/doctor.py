"""What ``lmx-lab doctor`` looks at. Each finding has a verdict and, where one is needed, the remedy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmx_lab.errors import LabError
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog

PACKAGES = ("lmx-lab", "mlx", "mlx-lm", "transformers", "huggingface_hub", "fastapi", "uvicorn")
OPTIONAL_PACKAGES = ("jupyterlab", "ipykernel", "openai")
LOW_DISK_BYTES = 2 * 10**9


@dataclass(frozen=True, kw_only=True)
class Finding:
    topic: str
    verdict: Literal["fine", "note", "bad"]
    text: str


def examine(settings: Settings) -> list[Finding]:
    """Look at everything; a part that fails is itself a finding."""
    findings: list[Finding] = []
    for look in (_versions, _device, _memory, _blas, _disk, _models, _port):
        try:
            findings += look(settings)
        except (LabError, OSError, ImportError, RuntimeError) as exc:
            findings.append(Finding(topic=look.__name__.strip("_"), verdict="bad", text=str(exc)))
    return findings


Look = Callable[[Settings], Iterator[Finding]]


def _versions(_: Settings) -> Iterator[Finding]:
    yield Finding(topic="python", verdict="fine", text=f"{platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        yield Finding(topic=name, verdict="fine", text=importlib.metadata.version(name))
    for name in OPTIONAL_PACKAGES:
        try:
            yield Finding(topic=name, verdict="fine", text=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(topic=name, verdict="note", text="not installed; pip install 'lmx-lab[lab]' brings it")


def _device(_: Settings) -> Iterator[Finding]:
    import mlx.core as mx

    info = mx.device_info()
    name = f"{mx.default_device()}, {info.get('device_name', 'unknown')}"
    if mx.default_device() == mx.cpu:
        yield Finding(topic="device", verdict="note", text=f"{name}: no GPU that MLX can use, so small models only")
    else:
        yield Finding(topic="device", verdict="fine", text=name)


def _memory(settings: Settings) -> Iterator[Finding]:
    from lmx_lab.engine import memory

    total, limit = memory.total_bytes(), memory.limit_bytes(settings.memory_limit_bytes)
    yield Finding(topic="memory", verdict="fine", text=f"{total / 1e9:.1f} GB, {limit / 1e9:.1f} GB for models")


def _blas(settings: Settings) -> Iterator[Finding]:
    from lmx_lab.engine import blas

    report = blas.bind(settings.blas, settings.threads)
    parts = [report.detail]
    if report.threads is not None:
        parts.append(f"{report.threads} thread{'s' * (report.threads > 1)}")
    if report.gflops is not None:
        parts.append(f"{report.gflops:.0f} GFLOP/s")
    if report.gemv:
        parts.append("products of one row by sgemv")
    if report.name == "reference":
        parts.insert(0, "the slow reference BLAS of MLX's wheel")
    yield Finding(topic="blas", verdict="note" if report.name == "reference" else "fine", text=", ".join(parts))


def _disk(settings: Settings) -> Iterator[Finding]:
    folder = _existing(settings.home)
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free for {settings.home}"
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield Finding(topic="home", verdict="bad", text=f"{settings.home} cannot be written; set LMX_LAB_HOME")
        return
    low = free < LOW_DISK_BYTES
    yield Finding(topic="disk", verdict="bad" if low else "fine", text=text + (": free some" if low else ""))


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def _models(settings: Settings) -> Iterator[Finding]:
    ids = [entry.id for entry in Catalog(settings).scan()]
    if ids:
        yield Finding(topic="models", verdict="fine", text=", ".join(ids))
    else:
        yield Finding(
            topic="models", verdict="note", text="none on disk; lmx-lab pull smollm2-135m fetches a small one"
        )


def _port(settings: Settings) -> Iterator[Finding]:
    from lmx_lab.hosting import bind

    name = f"{settings.host}:{settings.port}"
    try:
        bind(settings.host, settings.port, explicit=True).close()
        yield Finding(topic="port", verdict="fine", text=f"{name} is free")
    except LabError as exc:
        yield Finding(topic="port", verdict="note", text=str(exc))
    yield Finding(topic="hostname", verdict="fine", text=socket.gethostname())
