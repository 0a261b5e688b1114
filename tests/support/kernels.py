"""Start kernels and run cells in them, as a notebook does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
from jupyter_client.manager import KernelManager
from traitlets.config import Config


def without_ports() -> Config:
    """Return the configuration of a kernel manager whose kernel listens on UNIX sockets.

    With TCP, the manager chooses five free ports, and the kernel binds them a second later. Sometimes a client of
    another test gets one of them in between, and the kernel fails to start.
    """
    files = Path(tempfile.gettempdir(), f"kernel-{uuid4().hex[:12]}")
    return Config({"KernelManager": {"transport": "ipc", "ip": str(files)}})


WAIT_S = 60


@dataclass
class Output:
    """The output of a cell so far."""

    text: str = ""
    stderr: str = ""
    error: str | None = None
    message: str = ""
    traceback: list[str] = field(default_factory=list)
    """Lines without colours."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """What was displayed, and the value of the last expression."""
    value: dict[str, Any] | None = None
    """The value of the last expression."""
    kinds: list[str] = field(default_factory=list)
    """The types of the messages."""
    ended: bool = False


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
        self.on_comm: Callable[[str, dict[str, Any]], None] = lambda comm, data: None
        """Receives the id of a widget's comm, and the data of a message that the kernel has sent through it."""
        self.manager = KernelManager(kernel_name="python3", config=without_ports())
        # A kernel is terminated after half of this time; the tests check that it ends by itself.
        self.manager.shutdown_wait_time = 2 * WAIT_S
        self._cells: dict[str, Output] = {}
        self._last = Output()
        self.manager.start_kernel(cwd=folder and str(folder), env={**environ, "LMX_LAB_HOME": str(home)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)
        provisioner: Any = self.manager.provisioner
        self.process = provisioner.process

    def start(self, code: str) -> Output:
        """Run a cell without waiting."""
        cell = self.client.execute(textwrap.dedent(code), store_history=False)
        self._last = self._cells[cell] = Output()
        return self._last

    def until(self, condition: Callable[[], Any]) -> None:
        """Process the kernel's messages until a condition is true."""
        while not condition():
            self._take(self.client.get_iopub_msg(timeout=WAIT_S))

    def _take(self, message: dict[str, Any]) -> None:
        kind, content, parent = message["msg_type"], message["content"], message["parent_header"].get("msg_id")
        if kind == "status":
            # Other requests than those of cells end too, such as those that ask whether the kernel is ready.
            if content["execution_state"] == "idle" and parent in self._cells:
                self._cells[parent].ended = True
            return
        if kind == "comm_msg":
            self.on_comm(content["comm_id"], content["data"])
        if kind in ("comm_msg", "comm_open", "comm_close", "execute_input"):
            return
        output = self._cells.get(parent, self._last)
        output.kinds.append(kind)
        if kind == "stream" and content["name"] == "stdout":
            output.text += content["text"]
        elif kind == "stream":
            output.stderr += content["text"]
            self.stderr += content["text"]
        elif kind == "error":
            output.error, output.message = content["ename"], content["evalue"]
            output.traceback = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"])).splitlines()
        elif kind == "update_display_data" and "lmx-snapshot" in content.get("data", {}).get("text/html", ""):
            pass  # An update of an earlier output.
        elif kind in ("display_data", "execute_result", "update_display_data"):
            output.shown.append(content["data"])
            output.value = content["data"] if kind == "execute_result" else output.value

    def read(self, until: str | None = None) -> Output:
        """Return the output of the last cell up to a text, or to its end."""
        output = self._last
        self.until(lambda: output.ended or (until is not None and until in output.text))
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
        """Run a cell until it has printed "started", press the stop button, and return its output."""
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
    return httpx2.get(f"http://127.0.0.1:{port}/healthz", timeout=30).status_code
