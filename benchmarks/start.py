"""Measure how long it takes to import the package, to show the help, and to start a server with a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.bench import Bench, BenchError
from benchmarks.models import gguf_starter
from benchmarks.report import Limit, Row

FIGURE = "start"
ROUNDS, QUICK_ROUNDS = 7, 3
COMMAND = (sys.executable, "-P", "-c", "from lmx_lab.cli import main; main()")
EMPTY = (sys.executable, "-P", "-c", "pass")
IMPORT = (sys.executable, "-P", "-c", "import lmx_lab")
HELP = (*COMMAND, "--help")


def measure(bench: Bench) -> list[Row]:
    rounds = QUICK_ROUNDS if bench.quick else ROUNDS
    model = gguf_starter().path
    imports_s = [_run_s(IMPORT) - _run_s(EMPTY) for _ in range(rounds)]
    return [
        _row("import lmx_lab - an empty program", imports_s, bound_ms=60),
        _row("lmx-lab --help", [_run_s(HELP) for _ in range(rounds)], bound_ms=400),
        _row("lmx-lab serve: ready with a GGUF file", _timed(lambda: _ready_s(model), rounds), bound_ms=2000),
        _row(
            "lmx-lab serve: ready with a folder for MLX", _timed(lambda: _ready_s(bench.folder), rounds), bound_ms=None
        ),
    ]


def _timed(measure_s: Callable[[], float], rounds: int) -> list[float]:
    """Measure once to fill the caches of the system, and return the results of the next measurements."""
    measure_s()
    return [measure_s() for _ in range(rounds)]


def _environment(**more: str) -> dict[str, str]:
    """Return the environment of a user, whose modules were compiled by an earlier start."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | more


def _run_s(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=_environment())
    return time.perf_counter() - began


def _ready_s(model: Path) -> float:
    """Start a server and return the seconds until it has printed that it is ready."""
    with tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        # Without --engine: a path names the files, and therefore the engine.
        with subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", "--model", str(model)],
            env=_environment(LMX_LAB_HOME=home),
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            try:
                assert server.stdout is not None
                if any(" is ready at " in line for line in server.stdout):
                    return time.perf_counter() - began
            finally:
                server.send_signal(signal.SIGTERM)
                server.communicate()
    raise BenchError(f"the server with {model.name} ended before it was ready")


def _row(figure: str, times_s: list[float], *, bound_ms: float | None) -> Row:
    return Row(
        figure=figure,
        case=f"median of {len(times_s)}",
        model="-",
        value=median(times_s) * 1e3,
        unit="ms",
        limit=None if bound_ms is None else Limit(sign="≤", bound=bound_ms),
        summary=f"{min(times_s) * 1e3:.0f} to {max(times_s) * 1e3:.0f} ms",
        detail={"times_s": times_s},
    )
