"""Run child processes that read questions as lines of JSON from standard input and reply on standard output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.bench import BenchError
from benchmarks.paths import LOGS, ROOT

START_S = 120.0
STOP_S = 20.0
Reply = dict[str, Any]


def clean_environment() -> dict[str, str]:
    """Return the environment of this process without the variables that configure the servers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LMX_LAB_")} | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def spawn(name: str, arguments: list[str], *, channel: bool, python: Path | None = None) -> subprocess.Popen[str]:
    """Start a Python process whose messages go to a log file, optionally with the ``python`` of another environment."""
    LOGS.mkdir(parents=True, exist_ok=True)
    pipe = subprocess.PIPE if channel else subprocess.DEVNULL
    with (LOGS / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [str(python or sys.executable), *arguments],
            stdin=pipe,
            stdout=pipe,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=clean_environment(),
        )


def end(process: subprocess.Popen[str]) -> None:
    """Terminate the process, and kill it if it does not exit in time."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def log_tail(name: str) -> str:
    """Return the last five lines of a process's log."""
    return "\n".join((LOGS / f"{name}.log").read_text(errors="replace").splitlines()[-5:])


class Worker:
    """A child process, as a context manager. Leaving the context ends the process."""

    def __init__(self, module: str, *, python: Path | None = None, **settings: Any) -> None:
        self._name = module.rpartition(".")[2]
        self._process = spawn(self._name, ["-m", module, json.dumps(settings)], channel=True, python=python)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        try:
            self.ready = self._read(START_S)
        except BenchError:
            end(self._process)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, *, limit_s: float = 600.0, **question: Any) -> Reply:
        """Send a question and return the reply.

        Raises:
            BenchError: The child failed, or exceeded the limit and was killed.
        """
        self._in.write(json.dumps(question) + "\n")
        self._in.flush()
        return self._read(limit_s)

    def _read(self, limit_s: float) -> Reply:
        alarm = threading.Timer(limit_s, self._process.kill)
        alarm.start()
        try:
            line = self._out.readline()
        finally:
            alarm.cancel()
        if not line:
            raise BenchError(f"{self._name} exited or did not reply within {limit_s:g} s: {log_tail(self._name)}")
        reply: Reply = json.loads(line)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A server shuts down properly at the end of its input.
        self._in.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            end(self._process)
        self._out.close()


def child_settings() -> dict[str, Any]:
    """Return the settings that a child process was started with."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    return settings


def take_channel() -> IO[str]:
    """Reserve standard output for replies, and return it. Other output goes to the log."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve_lines(channel: IO[str], ready: Reply, answer: Callable[[Reply], Reply]) -> None:
    """Reply to questions until the parent closes the pipe."""
    channel.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        channel.write(json.dumps(answer(json.loads(line))) + "\n")


def folder_argument(path: Path) -> str:
    return str(path.absolute())
