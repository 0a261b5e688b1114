"""Long runs against the running programs: ``make soak``, or ``python -m soak`` in the checkout.

Each part starts the programs as separate processes, injects faults, and counts the consequences. A part has passed if
its columns from ``lost`` to ``processes`` are zero. The exit status is 0 if all parts have passed, and 1 otherwise.

    python -m soak                                   everything
    python -m soak --quick                           a small version, in a few minutes
    python -m soak --only fuzz --seed 7              one part, with another seed
    python -m soak --only kills --kills 250 --seed 1 only kills of the daemon; another seed gives other kills
    python -m soak --only memory --seconds 300       five minutes of long streams with little memory
    python -m soak --only mutations --count 500      500 mutated models; with ``--only fuzz``, 500 requests

| part        | what it does                                                                                      |
|-------------|---------------------------------------------------------------------------------------------------|
| fuzz        | sends 20,000 mutated requests and WebSockets to the inference server and the daemon, and a part   |
|             | of them again with llama.cpp and the echo engine; after each batch of 250, valid requests of      |
|             | every kind must be answered as before                                                             |
| bodies      | sends bodies of up to 8 MB that are slow to process, one and then six at once, to every route     |
|             | with a body; they must be refused within 2 s, without delaying health requests, and the memory    |
|             | must be returned                                                                                  |
| hostile     | attacks a server with long texts, slow tokenizers, templates and grammars, impossible models,     |
|             | clients that do not read, and floods of frames, one by one and then all at once; health requests  |
|             | and the short chats of another client must be answered as without the attack                      |
| load        | sends 200 long requests whose clients disconnect, and then one that must be answered in time;     |
|             | slow readers; clients that become unreachable                                                     |
| connections | opens hundreds of idle streams and WebSockets during a chat and during turns                      |
| cycles      | loads and unloads a model 1,000 times, 200 times with llama.cpp                                   |
| kills       | ends the programs by SIGTERM under load and by SIGKILL at random moments, and starts them again   |
| files       | puts FIFOs, devices and folders where a model's files should be, and uses a disk that hangs       |
| memory      | serves two streams of 8,000 tokens for 20 minutes in a process with 3 GB, while caches of ended   |
|             | requests fill the rest; the footprint must not exceed its limit by more than 3 %                  |
| mutations   | loads 200 models, each with one randomly changed file; the model that was loaded before must      |
|             | answer as before                                                                                  |

The columns: requests sent; faults injected; accepted work that was lost, or done twice; what was not answered or did
not end in time; by how much memory, descriptors, threads and child processes grew beyond what the part allows (see its
notes); the slowest valid answer. Below the table is a line for each problem. ``build/soak/<time>.json`` has everything,
including each request that was answered incorrectly. The same seed repeats the same cases.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from benchmarks.models import folder_of
from lmx_lab.results.provenance import provenance
from soak import report
from soak.report import Row, Soak

PARTS = ("fuzz", "bodies", "hostile", "load", "connections", "cycles", "kills", "files", "memory", "mutations")
"""Modules of this package with a ``run``."""
Run = Callable[[Soak], list[Row]]
INTERRUPTED = 130
END_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    # Raise SystemExit, so that the context managers end the programs.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = {name: getattr(chosen, name) for name in ("quick", "seed", "kills", "seconds", "count")}
    soak = Soak(folder=folder_of("tiny"), **options)
    settings = options | {"only": chosen.only}
    facts = provenance(mlx_device=str(mx.default_device()), settings=settings)
    return carry_out({name: _run_of(name) for name in chosen.only or PARTS}, soak, facts)


def carry_out(parts: Mapping[str, Run], soak: Soak, facts: dict[str, Any], *, folder: Path = report.BUILD) -> int:
    """Run the parts, print and store their rows, and return the exit status."""
    rows: list[Row] = []
    interrupted = False
    try:
        for name, run in parts.items():
            rows += _rows(name, run, soak)
    except KeyboardInterrupt:
        interrupted = True
    report.print_table(rows)
    report.print_line(f"stored in {report.store(rows, facts, folder)}")
    return INTERRUPTED if interrupted else int(not all(row.passed for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m soak", description="Long runs against the running programs.")
    parser.add_argument("--only", action="append", choices=PARTS, help="run this part; repeatable; default: all parts")
    parser.add_argument("--quick", action="store_true", help="run a small version of each part")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices; default: 0")
    parser.add_argument(
        "--kills", type=_positive, help="number of kills of the daemon; the part kills then kills nothing else"
    )
    parser.add_argument("--seconds", type=_positive, help="duration of the part memory; default: 1200")
    parser.add_argument(
        "--count",
        type=_positive,
        help="number of models of the part mutations, and of requests to MLX of the part fuzz",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _run_of(name: str) -> Run:
    def run(soak: Soak) -> list[Row]:
        # Imported only now, so that a part that cannot be imported does not stop the others.
        module: Any = importlib.import_module(f"soak.{name}")
        rows: list[Row] = module.run(soak)
        return rows

    return run


def _rows(name: str, run: Run, soak: Soak) -> list[Row]:
    """Run a part and return its rows. An exception, and processes that the part leaves running, are rows too."""
    started, before = time.perf_counter(), _children()
    rows: list[Row] = []
    try:
        rows += run(soak)
    except Exception as exc:
        failed = Row(part=name, wrong=[f"failed with {type(exc).__name__}: {exc}"])
        failed.detail["traceback"] = traceback.format_exc()
        rows.append(failed)
    finally:
        if left := list(_ended([process for process in _children() if process not in before])):
            rows.append(Row(part=f"{name}: processes left running", leaked_processes=len(left), wrong=left))
    verdict = "passed" if all(row.passed for row in rows) else "FAILED"
    report.print_line(f"{name}: {verdict}  ({time.perf_counter() - started:.0f} s)")
    return rows


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _ended(left: Sequence[psutil.Process]) -> Iterator[str]:
    """Kill processes that a part has left running; yield a sentence for each."""
    for process in left:
        try:
            command = " ".join(process.cmdline())
            process.kill()
        except psutil.NoSuchProcess:
            continue
        yield f"process {process.pid} was left running: {command[:200]}"
    psutil.wait_procs(list(left), timeout=END_S)


if __name__ == "__main__":
    sys.exit(main())
