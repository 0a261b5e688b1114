"""Describe the software and the machine of a measurement, without personal data."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lmx_lab.errors import counted
from lmx_lab.extras import installed_version

if TYPE_CHECKING:
    import pandas as pd

PACKAGES = (
    *("mlx", "mlx-lm", "scipy-openblas32", "numpy", "llguidance", "xllamacpp"),
    *("uvicorn", "fastapi", "starlette", "pydantic", "websockets", "httpx2", "pandas"),
)
"""Packages whose versions are recorded. The BLAS that a target uses is in its rows; on Linux it is scipy-openblas32."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LMX_LAB_THREADS", "LMX_LAB_BLAS")
FOLDER = Path(__file__).parent.parent


def provenance(*, seeds: Iterable[int] = (), **facts: Any) -> dict[str, Any]:
    """Return versions, commit, machine and time as JSON values. Values that are not known are ``None``.

    The result contains no host names, user names or folders. Runs ``git`` (and ``sysctl`` on macOS), and observes the
    CPU for 0.2 s.

    Args:
        seeds: The seeds of the cases.
        facts: Further values, which replace values of the same name.
    """
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "lmx_lab": installed_version("lmx-lab"),
        **checkout(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "machine": machine(),
        "environment": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "seeds": sorted(set(seeds)),
        **facts,
    }


def describe_machine(rows: pd.DataFrame) -> str:
    """Return a text that describes where rows were measured, and whether other programs used the CPU just before.

    Args:
        rows: The result of ``lab.bench``, ``run`` or ``load``. If they contain several runs, the run on the busiest
            machine is described.
    """
    known = rows.attrs.get("provenance") or {}
    runs = [known] if "machine" in known else [one for one in known.values() if isinstance(one, dict)]
    machines = [one["machine"] for one in runs if isinstance(one.get("machine"), dict)]
    if not machines:
        return "The machine of this measurement is not known."
    found = max(machines, key=lambda one: one.get("busy_share") or 0.0)
    threads = counted(found["threads"], "thread") if found.get("threads") else "an unknown number of threads"
    place = f"Measured on {found.get('cpu') or 'an unknown CPU'} with {threads}."
    busy = found.get("busy_share") or 0.0
    if busy < 0.15:
        return place
    return (
        f"{place} Other programs used {busy:.0%} of the CPU when the measurement began, so the results are lower "
        "than on an idle machine; measure again when it is idle."
    )


def _busy_share() -> float:
    """Return the share of all cores that other processes use now."""
    before, own_before = psutil.cpu_times(), sum(psutil.Process().cpu_times()[:2])
    time.sleep(0.2)
    after, own_after = psutil.cpu_times(), sum(psutil.Process().cpu_times()[:2])
    total = sum(after) - sum(before)
    idle = sum(getattr(after, name, 0.0) - getattr(before, name, 0.0) for name in ("idle", "iowait"))
    return round(min(1.0, max(0.0, 1 - (idle + own_after - own_before) / total)), 2) if total > 0 else 0.0


def machine() -> dict[str, Any]:
    """Return the properties of this machine that affect its speed."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        cpu = _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or None
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu": cpu,
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()),
        "busy_share": _busy_share(),
    }


def checkout(folder: Path = FOLDER) -> dict[str, Any]:
    """Return the commit of the checkout that contains this package, and whether files in it have changed. An installed
    package may lie in a checkout of another project, which does not count."""
    is_ours = _output("git", "ls-files", "--error-unmatch", "__init__.py", folder=folder) is not None
    commit = _output("git", "rev-parse", "HEAD", folder=folder) if is_ours else None
    status = None if commit is None else bool(_output("git", "status", "--porcelain", "--", ".", folder=folder))
    return {"commit": commit, "dirty": status}


def _output(*command: str, folder: Path = FOLDER) -> str | None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
