"""Start kernels for tests that run in parallel."""

from __future__ import annotations

import tempfile
from pathlib import Path
from uuid import uuid4

from jupyter_client import KernelManager
from traitlets.config import Config


def without_ports() -> Config:
    """Return the configuration of a kernel manager whose kernel listens on UNIX sockets.

    With TCP, the manager chooses five free ports, and the kernel binds them a second later. Sometimes a client of
    another test gets one of them in between, and the kernel fails to start.
    """
    files = Path(tempfile.gettempdir(), f"kernel-{uuid4().hex[:12]}")
    return Config({"KernelManager": {"transport": "ipc", "ip": str(files)}})


def a_kernel() -> KernelManager:
    """Return the manager of a kernel that is not started yet."""
    return KernelManager(kernel_name="python3", config=without_ports())
