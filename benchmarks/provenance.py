"""What a result was measured with, without saying whose machine it was."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

import lmx_lab

PACKAGES = ("mlx", "mlx-lm", "numpy", "uvicorn", "fastapi", "starlette", "pydantic", "websockets")


def provenance() -> dict[str, Any]:
    return {
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--", ".")),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "machine": {
            "system": platform.system(),
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "processor": _processor(),
            "cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "mlx_device": str(mx.default_device()),
            "load_average_at_start": os.getloadavg(),
        },
    }


def _git(*arguments: str) -> str | None:
    """In the repository of the package that is measured; None where it is not one."""
    folder = Path(lmx_lab.__file__).parent
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
