"""What ``lmx-lab doctor`` looks at. Each finding has a verdict and, where one is needed, the remedy."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
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
IMPORT_LIMIT_S = 60.0
LIBRARY = re.compile(r"([\w.+-]+\.so[.\d]*): cannot open shared object file")
"""One that the bindings of llama.cpp are linked with and that this system lacks."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    topic: str
    verdict: Literal["fine", "note", "bad"]
    text: str


def examine(settings: Settings, *, measure: bool = False) -> list[Finding]:
    """Look at everything; a part that fails is itself a finding.

    Args:
        measure: Measure the engines even if figures of before still hold. It takes some ten seconds.
    """
    looks: dict[str, Look] = {
        "versions": _versions,
        "device": _device,
        "memory": _memory,
        "blas": _blas,
        "disk": _disk,
        "models": _models,
        "port": _port,
        "engines": functools.partial(examine_engines, measure=measure),
    }
    findings: list[Finding] = []
    for topic, look in looks.items():
        try:
            findings += look(settings)
        except (LabError, OSError, ImportError, RuntimeError) as exc:
            findings.append(Finding(topic=topic, verdict="bad", text=str(exc)))
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


def examine_engines(settings: Settings, *, measure: bool = False) -> Iterator[Finding]:
    """Whether llama.cpp can be used, and which engine decodes faster here.

    Args:
        measure: As of ``examine``.
    """
    from lmx_lab.engine.preference import problem, versions

    if (missing := problem("gguf")) is not None:
        yield Finding(topic="llama.cpp", verdict="note", text=missing)
        return
    failure = _import_failure()
    found = str(versions()["llama.cpp"])
    if failure is not None:
        yield Finding(topic="llama.cpp", verdict="bad", text=f"{found} is installed, but does not start: {failure}")
        return
    yield Finding(topic="llama.cpp", verdict="fine", text=found)
    yield _speeds(settings, measure=measure)


def _import_failure() -> str | None:
    """What happens when the bindings of llama.cpp are imported, in a process that may die of it."""
    from lmx_lab.engine.gguf.process import PACKAGE

    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import {PACKAGE}"],
            capture_output=True, text=True, check=False, timeout=IMPORT_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"importing {PACKAGE} takes more than {IMPORT_LIMIT_S:g} s"
    return import_failure(done.returncode, done.stderr)


def import_failure(code: int, said: str) -> str | None:
    """What a process that imports the bindings of llama.cpp has died of, and what to do; None if it has not.

    Args:
        code: Its exit code; negative if a signal ended it.
        said: Its standard error.
    """
    if code == 0:
        return None
    if missing := LIBRARY.search(said):
        return f"the system has no {missing[1]}; on Debian or Ubuntu: apt-get install libgomp1 libstdc++6"
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        processor = "; its wheel was made for newer processors" if -code == signal.SIGILL else ""
        return f"it is ended by {name}{processor}; MLX models run all the same"
    return (said.strip().splitlines() or [f"it ends with {code}"])[-1]


def _speeds(settings: Settings, *, measure: bool) -> Finding:
    """Which engine decodes faster here: from what was measured before, else measured now if the models are here."""
    from lmx_lab.engine.preference import MODELS, keep_speeds, kept_speeds, since
    from lmx_lab.engine.speed import measure_speeds

    speeds = None if measure else kept_speeds(settings)
    if speeds is None:
        here = {entry.id: entry for entry in Catalog(settings).scan()}
        missing = [name for name in MODELS.values() if name not in here]
        if missing:
            pull = " && ".join(f"lmx-lab pull {name}" for name in missing)
            text = f"which is faster here is not measured, for lack of models; {pull} && lmx-lab doctor"
            return Finding(topic="engines", verdict="note", text=text)
        try:
            speeds = measure_speeds(settings, {format: here[name] for format, name in MODELS.items()})
        except LabError as exc:
            return Finding(topic="engines", verdict="note", text=f"which is faster here could not be measured: {exc}")
        with contextlib.suppress(OSError):  # "home" says that nothing can be written there
            keep_speeds(settings, speeds)
    text = f"on this machine, {speeds} (measured {since(speeds.measured_at)}"
    if speeds.disturbed:
        return Finding(topic="engines", verdict="note", text=f"{text})")
    return Finding(topic="engines", verdict="fine", text=f"{text}; lmx-lab doctor --measure does so anew)")
