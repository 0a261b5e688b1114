"""Run Jupyter servers with their own folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import until, until_listening

END_S = 10


@dataclass(frozen=True, kw_only=True)
class JupyterServer:
    """A running server."""

    pid: int
    port: int
    log: Path


@contextmanager
def jupyter_server(
    folder: Path, *options: str, app: Sequence[str] = ("jupyter_server",), **environ: str
) -> Iterator[JupyterServer]:
    """Run a server until the end of the block.

    Args:
        folder: Parent of its folders, among them ``config`` and ``runtime``.
        app: The module that is run, and its arguments.
        environ: Additional environment variables.
    """
    own = {f"JUPYTER_{name.upper()}_DIR": str(folder / name) for name in ("config", "data", "runtime")}
    command = [*(sys.executable, "-m", *app, "--no-browser", "--allow-root"), *options]
    log = folder / "jupyter.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, **own, **environ}, stdout=file, stderr=file)
    try:
        # Written when the server has its port.
        state = folder / "runtime" / f"jpserver-{process.pid}.json"
        until(lambda: (state.exists() and state.stat().st_size > 0) or process.poll() is not None)
        assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")
        port = json.loads(state.read_bytes())["port"]
        until_listening(port)
        yield JupyterServer(pid=process.pid, port=port, log=log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()
