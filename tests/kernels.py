"""Kernels that tests start, one beside another."""

from __future__ import annotations

import tempfile
from pathlib import Path
from uuid import uuid4

from jupyter_client import KernelManager
from traitlets.config import Config


def without_ports() -> Config:
    """For the manager of one kernel, which then listens on files.

    The five ports of a kernel are chosen, let go and bound anew by the kernel a second later. Another
    test's client gets one of them in between now and then, and the kernel dies as it starts.
    """
    files = Path(tempfile.gettempdir(), f"kernel-{uuid4().hex[:12]}")
    return Config({"KernelManager": {"transport": "ipc", "ip": str(files)}})


def a_kernel() -> KernelManager:
    """Not started yet."""
    return KernelManager(kernel_name="python3", config=without_ports())
