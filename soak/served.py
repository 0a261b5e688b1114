"""The lab's own commands as processes, each on a home of its own, and what is left of them afterwards."""

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
from soak.row import Row
from soak.soak import SoakError
from soak.watch import GIVES_BACK

START_S = 120.0
END_S = 60.0
POLL_S = 0.01
FAMILY_S = 15.0
"""How long what a killed process has started may take to end by itself."""
MARK = "LMX_SOAK_HOME"
"""In the environment of everything that is started for a home, and of what that starts."""
SMALL_CACHE = ("--prefix-cache", "0.002")
"""Soon full: what a server keeps on purpose looks like a leak until then."""
READY = re.compile(r"ready at (http://[\w.]+:\d+)")


class Home:
    """A folder in the place of the user's own, with the hub's cache and the temporary folder below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "t"
        """Short: sockets are made in it."""
        self.hub_cache = folder / "hub"
        self._mark = secrets.token_hex(8)
        self.temporary.mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """For programs of this home: nothing that the caller has chosen for its own labs."""
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

    def family(self) -> list[psutil.Process]:
        """What runs of all that was started for this home, with what that has started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def left(self, limit_s: float) -> list[str]:
        """What of the family still runs after the limit, in words; it is killed, so that it is counted once."""
        until(lambda: not self.family(), limit_s)
        left = self.family()
        for process in left:
            process.kill()
        said = [f"left running: {_command(process)}" for process in left]
        psutil.wait_procs(left, timeout=limit_s)
        return said

    def litter(self) -> list[str]:
        """What is left in the temporary folder, but for the kernels that MLX keeps there for all processes."""
        return sorted(path.name for path in self.temporary.iterdir() if path.name != "mlx")


class Command:
    """``lmx-lab …`` in a process of its own, as a context: leaving it kills what still runs."""

    def __init__(self, home: Home, *arguments: str, code: str = "", **environment: str) -> None:
        """
        Args:
            arguments: Of the command line, the command first.
            code: Python to run before it, for what no argument can choose.
            environment: Beside the home's own.
        """
        self.home = home
        self._printed = home.folder / f"{secrets.token_hex(8)}.txt"
        with self._printed.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{GIVES_BACK}{code}\nfrom lmx_lab.cli import main\nmain()", *arguments],
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
        """What it has printed, and what it has started."""
        return self._printed.read_text(errors="replace")

    def kill(self) -> None:
        """As nobody can prepare for."""
        self.process.kill()
        self.process.wait()

    def terminate(self, limit_s: float = END_S) -> int | None:
        """SIGTERM; its exit status, or None if it did not end in time and was killed."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(limit_s)

    def wait(self, limit_s: float = END_S) -> int | None:
        """Its exit status, or None if it did not end in time and was killed."""
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
    """``lmx-lab serve``, on a free port unless another is given."""

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
        """Where it answers, from when on its model is loaded.

        Raises:
            SoakError: it has ended, or is not ready in time.
        """
        if not self._url:
            until(lambda: READY.search(self.output) is not None or not self.running, START_S)
            found = READY.search(self.output)
            if found is None:
                raise SoakError(f"the server did not start: {self.output[-2000:]}")
            self._url = found[1]
        return self._url

    def figures(self) -> dict[str, float]:
        """Of ``GET /metrics``, those without labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        pairs = (line.split() for line in text.splitlines() if line.startswith("lmx_lab_") and "{" not in line)
        return {pair[0].removeprefix("lmx_lab_"): float(pair[1]) for pair in pairs if len(pair) == 2}

    def busy(self) -> float:
        """Requests that have not ended."""
        now = self.figures()
        return now["requests_active"] + now["requests_queued"]

    def until_idle(self, limit_s: float = 60.0) -> bool:
        # Not too often: the figures are made by the loop that serves.
        return until(lambda: self.busy() == 0, limit_s, every_s=0.1)


class Daemon(Command):
    """``lmx-lab daemon`` on a free port, in front of a chat-format server."""

    def __init__(self, home: Home, upstream: str, *options: str, code: str = "") -> None:
        super().__init__(home, "daemon", "--port", "0", "--upstream", upstream, *options, code=code)
        self._state: StateFile | None = None

    @property
    def state(self) -> StateFile:
        """What it has written down, from when on it accepts requests.

        Raises:
            SoakError: it has ended, or has written nothing in time.
        """
        if self._state is None:
            until(lambda: self._published() is not None or not self.running, START_S)
            self._state = self._published()
        if self._state is None:
            raise SoakError(f"the daemon did not start: {self.output[-2000:]}")
        return self._state

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=f"{self.state.url}/v3",
            headers={"authorization": f"Bearer {self.state.token}"},
            timeout=60.0,
            trust_env=False,
        )

    def _published(self) -> StateFile | None:
        with contextlib.suppress(OSError, ValueError):
            state = StateFile.model_validate_json((self.home.folder / "daemon" / "state.json").read_bytes())
            return state if state.pid == self.pid else None
        return None


def end_well(command: Command, row: Row, *, limit_s: float = END_S) -> None:
    """End the last program of a home by SIGTERM, and note what is not as it should be: its status, its family, its
    litter."""
    end(command, row, limit_s=limit_s)
    note_left(command.home, row)


def end(command: Command, row: Row, *, limit_s: float = END_S) -> None:
    """End a program by SIGTERM, beside others of its home; note a wrong status."""
    status = command.terminate(limit_s)
    if status is None:
        row.hung += 1
        row.wrong.append(f"it did not end within {limit_s:g} s of SIGTERM")
    elif status != 0:
        row.wrong.append(f"exit status {status} after SIGTERM: {command.output[-500:]}")


def note_left(home: Home, row: Row, *, limit_s: float = FAMILY_S) -> None:
    """Note what still runs of a home whose programs have ended, and what lies in its temporary folder."""
    left = home.left(limit_s)
    row.leaked_processes += len(left)
    row.wrong += left
    if litter := home.litter():
        row.wrong.append(f"left in the temporary folder: {', '.join(litter)[:300]}")


def until(true: Callable[[], bool], limit_s: float, *, every_s: float = POLL_S) -> bool:
    """Look again and again; whether it came true within the limit."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[-200:]
    except psutil.Error:
        return f"process {process.pid}"
