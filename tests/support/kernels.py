"""Start kernels and run cells in them, as a notebook does."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from jupyter_client.manager import KernelManager
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


WAIT_S = 60


def setting(module: str, **constants: Any) -> str:
    """Return a program text that sets constants of a module. It fails if the module does not have one of them."""
    changes = [f"module.{name}; module.{name} = {value!r}" for name, value in constants.items()]
    return "; ".join([f"import importlib; module = importlib.import_module({module!r})", *changes])


@dataclass
class Output:
    """The output of a cell so far."""

    text: str = ""
    stderr: str = ""
    error: str | None = None
    message: str = ""
    traceback: list[str] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)


class Notebook:
    """A running kernel, and its cells."""

    def __init__(self, home: Path, *, folder: Path | None = None, environ: Mapping[str, str] = os.environ) -> None:
        """
        Args:
            home: The lab's home.
            folder: The working directory.
        """
        self.home = home
        self.stderr = ""
        self.manager = a_kernel()
        # A kernel is terminated after half of this time; the tests check that it ends by itself.
        self.manager.shutdown_wait_time = 2 * WAIT_S
        self._asked = ""
        self.manager.start_kernel(cwd=folder and str(folder), env={**environ, "LMX_LAB_HOME": str(home)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)
        provisioner: Any = self.manager.provisioner
        self.process = provisioner.process

    def start(self, code: str) -> None:
        self._asked = self.client.execute(textwrap.dedent(code), store_history=False)

    def read(self, until: str | None = None) -> Output:
        """Return the output up to a text, or to the end of the cell."""
        output = Output()
        while until is None or until not in output.text:
            message = self.client.get_iopub_msg(timeout=WAIT_S)
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                output.text += content["text"]
            elif kind == "stream":
                output.stderr += content["text"]
                self.stderr += content["text"]
            elif kind == "error":
                output.error, output.message = content["ename"], content["evalue"]
                output.traceback = "\n".join(content["traceback"]).splitlines()
            elif kind == "update_display_data" and "lmx-snapshot" in content.get("data", {}).get("text/html", ""):
                pass  # An update of an earlier output.
            elif kind in ("display_data", "execute_result", "update_display_data"):
                output.shown.append(content["data"])
            # During the start, several requests have asked whether the kernel is ready; their replies are skipped.
            is_of_cell = message["parent_header"].get("msg_id") == self._asked
            if kind == "status" and content["execution_state"] == "idle" and is_of_cell:
                break
        return output

    def run(self, code: str) -> str:
        """Return the printed text of a cell that must not fail."""
        self.start(code)
        output = self.read()
        assert output.error is None, (output.error, output.message, output.text)
        return output.text.strip()

    def fail(self, code: str) -> Output:
        self.start(code)
        output = self.read()
        assert output.error is not None, output.text
        return output

    def interrupt(self, code: str) -> Output:
        """Run a cell until it has printed "started", press the stop button, and return the rest of its output."""
        self.start(code)
        self.read(until="started")
        self.manager.interrupt_kernel()
        return self.read()

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            # Ends the kernel at once, except while coverage is measured, which then stores its data.
            self.manager.signal_kernel(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(WAIT_S)
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


def healthz(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    finally:
        connection.close()
