"""Run the lab's commands as processes, each with a home of its own, and detect what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import psutil

from benchmarks.paths import ROOT
from lmx_lab.wire.daemon import StateFile
from soak.report import Row, SoakError
from soak.resources import FREE_MEMORY_ON_SIGNAL

START_S = 120.0
END_S = 60.0
POLL_S = 0.01
LEFTOVERS_S = 15.0
"""Time in which the child processes of a killed process must end by themselves."""
MARK = "LMX_SOAK_HOME"
"""Environment variable that marks all processes of a home, including those that its programs start."""
SMALL_CACHE = ("--prefix-cache", "0.002")
"""A prefix cache that is soon full. Until then its growth would look like a leak."""
RUN_COMMAND = "from lmx_lab.cli import main\nmain()"
READY = re.compile(r"ready at (http://[\w.]+:\d+)")


class Home:
    """A home folder for programs, with the hub's cache and the temporary folder below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "t"
        """Temporary folder; its name is short, because socket paths have a maximum length."""
        self.hub_cache = folder / "hub"
        self._mark = secrets.token_hex(8)
        self.temporary.mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """Return the environment of this home's programs, without the caller's settings of the lab."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(("LMX_LAB_", "HF_", "PIP_"))}
        return others | {
            "LMX_LAB_HOME": str(self.folder),
            "LMX_LAB_LOG_LEVEL": "warning",
            "HF_HUB_CACHE": str(self.hub_cache),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TMPDIR": str(self.temporary),
            "PYTHONUNBUFFERED": "1",
            MARK: self._mark,
        }

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of this home, including those that its programs have started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def kill_leftovers(self, limit_s: float) -> list[str]:
        """Kill the processes that still run after ``limit_s``, and return a sentence for each."""
        wait_until(lambda: not self.processes(), limit_s)
        left = self.processes()
        for process in left:
            process.kill()
        sentences = [f"left running: {_command_line(process)}" for process in left]
        psutil.wait_procs(left, timeout=limit_s)
        return sentences

    def temporary_files(self) -> list[str]:
        """Return the names in the temporary folder, except the kernels that MLX keeps there for all processes."""
        return sorted(path.name for path in self.temporary.iterdir() if path.name != "mlx")


class Command:
    """``lmx-lab …`` in a process of its own. As a context manager, it kills the process at the end."""

    def __init__(self, home: Home, *arguments: str, code: str = "", **environment: str) -> None:
        """
        Args:
            arguments: The command and its arguments.
            code: Python to run before the command, for what no argument can change.
            environment: Environment variables in addition to those of the home.
        """
        self.home = home
        self._printed = home.folder / f"{secrets.token_hex(8)}.txt"
        with self._printed.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"{FREE_MEMORY_ON_SIGNAL}{code}\n{RUN_COMMAND}",
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env=home.environment() | environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        """The output of the program and of its child processes so far."""
        return self._printed.read_text(errors="replace")

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.process.kill()
        self.process.wait()

    def terminate(self, limit_s: float = END_S) -> int | None:
        """Send SIGTERM; return the exit status, or None if the program did not end in time and was killed."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(limit_s)

    def wait(self, limit_s: float = END_S) -> int | None:
        """Return the exit status, or None if the program did not end in time and was killed."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Server(Command):
    """``lmx-lab serve``, on a free port unless ``port`` is given."""

    def __init__(
        self,
        home: Home,
        model: Path | str | None,
        *options: str,
        port: int = 0,
        code: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        loaded = () if model is None else ("--model", str(model))
        super().__init__(home, "serve", "--port", str(port), *loaded, *options, code=code, **environment or {})
        self._url = ""

    @property
    def url(self) -> str:
        """The server's address. Waits until its model is loaded.

        Raises:
            SoakError: the server has ended, or is not ready in time.
        """
        if not self._url:
            wait_until(lambda: READY.search(self.output) is not None or not self.running, START_S)
            found = READY.search(self.output)
            if found is None:
                raise SoakError(f"the server did not start: {self.output[-2000:]}")
            self._url = found[1]
        return self._url

    def metrics(self) -> dict[str, float]:
        """Return the metrics of ``GET /metrics`` that have no labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        pairs = (line.split() for line in text.splitlines() if line.startswith("lmx_lab_") and "{" not in line)
        return {pair[0].removeprefix("lmx_lab_"): float(pair[1]) for pair in pairs if len(pair) == 2}

    def unfinished_requests(self) -> float:
        """Return the number of active and queued requests."""
        now = self.metrics()
        return now["requests_active"] + now["requests_queued"]

    def wait_until_idle(self, limit_s: float = 60.0) -> bool:
        # Not more often, because the loop that serves requests also computes the metrics.
        return wait_until(lambda: self.unfinished_requests() == 0, limit_s, every_s=0.1)


class Daemon(Command):
    """``lmx-lab daemon`` on a free port, in front of a chat-format server."""

    def __init__(self, home: Home, upstream: str, *options: str, code: str = "") -> None:
        super().__init__(home, "daemon", "--port", "0", "--upstream", upstream, *options, code=code)
        self._state: StateFile | None = None

    @property
    def state(self) -> StateFile:
        """The daemon's state file. Waits until the daemon accepts requests.

        Raises:
            SoakError: the daemon has ended, or has not written the file in time.
        """
        if self._state is None:
            wait_until(lambda: self._read_state_file() is not None or not self.running, START_S)
            self._state = self._read_state_file()
        if self._state is None:
            raise SoakError(f"the daemon did not start: {self.output[-2000:]}")
        return self._state

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=f"{self.state.url}/v3",
            headers={"authorization": f"Bearer {self.state.token}"},
            timeout=60.0,
            trust_env=False,
            # Without TLS; loading the certificates would take 35 ms for each client.
            verify=False,
        )

    def _read_state_file(self) -> StateFile | None:
        with contextlib.suppress(OSError, ValueError):
            state = StateFile.model_validate_json((self.home.folder / "daemon" / "state.json").read_bytes())
            return state if state.pid == self.pid else None
        return None


def end_and_check(command: Command, row: Row, *, limit_s: float = END_S) -> None:
    """End the last program of a home by SIGTERM, and record a wrong status, processes and temporary files left."""
    end_program(command, row, limit_s=limit_s)
    record_leftovers(command.home, row)


def end_program(command: Command, row: Row, *, limit_s: float = END_S) -> None:
    """End a program by SIGTERM and record a wrong status. Other programs of its home may continue to run."""
    status = command.terminate(limit_s)
    if status is None:
        row.hung += 1
        row.wrong.append(f"it did not end within {limit_s:g} s of SIGTERM")
    elif status != 0:
        row.wrong.append(f"exit status {status} after SIGTERM: {command.output[-500:]}")


def record_leftovers(home: Home, row: Row, *, limit_s: float = LEFTOVERS_S) -> None:
    """Record processes and temporary files of a home whose programs have ended."""
    left = home.kill_leftovers(limit_s)
    row.leaked_processes += len(left)
    row.wrong += left
    if files := home.temporary_files():
        row.wrong.append(f"left in the temporary folder: {', '.join(files)[:300]}")


def wait_until(condition: Callable[[], bool], limit_s: float, *, every_s: float = POLL_S) -> bool:
    """Check a condition repeatedly; return whether it became true within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[-200:]
    except psutil.Error:
        return f"process {process.pid}"
