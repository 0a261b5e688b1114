"""Run programs in a new process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
"""The working directory of scripts that import from ``tests``."""


def script_result(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script, which can import from ``tests``, in a new process."""
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, check=False)


def run_script(source: str, *arguments: str) -> str:
    """Return what a script prints, which must neither fail nor write to standard error."""
    done = script_result(source, *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed; the browser tests run the same code")


def node(*arguments: str) -> str:
    assert NODE is not None
    done = subprocess.run([NODE, *arguments], capture_output=True, text=True, timeout=180, check=False)
    assert not done.returncode, done.stderr
    return done.stdout
