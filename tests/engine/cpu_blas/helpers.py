"""Skip conditions, and running code in a process of its own."""

import os
import platform
import subprocess
import sys

import mlx.core as mx
import pytest

from lmx_lab.engine.cpu_blas import machine_code

LINUX_CPU = sys.platform == "linux" and mx.default_device() == mx.cpu
needs_slots = pytest.mark.skipif(not LINUX_CPU, reason="MLX calls a BLAS through import slots on Linux CPUs only")
needs_x86 = pytest.mark.skipif(
    not LINUX_CPU or platform.machine() != machine_code.MACHINE, reason="the instructions are for x86-64 only"
)


def run(code, **environ):
    """Run Python code in a new process without OPENBLAS variables; return what it prints."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=unset | environ, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()
