"""Scripts of ours in processes of their own, for what cannot be trusted to end or to bound its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path


def start(script: Path, environ: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run a script, which is told the number of its end of a pipe and the process that it ends with.

    Raises:
        OSError: no process can be started.
    """
    ours, theirs = Pipe()
    with theirs:
        # Without the script's own folder on the path: its modules have names like those of other packages.
        process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
        )
    return process, ours
