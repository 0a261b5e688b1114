"""Long runs against the running programs: ``make soak``, or ``python -m soak`` in the checkout.

Each part starts the programs as processes of their own, does to them what nobody should, and counts what comes of it.
A line of the table is zero from ``lost`` to ``processes`` where all is well; the exit status is 1 unless every line is.

    python -m soak                                   everything
    python -m soak --quick                           a look, in a few minutes
    python -m soak --only fuzz --seed 7              one part, drawn from another seed

| part        | what it does                                                                                      |
|-------------|---------------------------------------------------------------------------------------------------|
| fuzz        | 20,000 mutated requests and WebSockets at the inference server and the daemon, 3,750 of them once |
|             | more on llama.cpp; after each batch of 250 a good request of every kind is answered as before     |
| bodies      | bodies of up to 8 MB made to take long, one and then six at once, at every route that takes one:  |
|             | refused within 2 s, with health answered as ever and the memory given back                        |
| load        | 200 long requests whose clients give up, and the one after them                                   |
| connections | idle streams and sockets by the hundred, slow readers, peers that vanish                          |
| cycles      | 1,000 loads and unloads, 200 on llama.cpp                                                         |
| kills       | signals under load, SIGKILL at any moment, and the start after it                                 |
| files       | FIFOs, devices and folders where a model's files should be, and a disk that does not answer       |

The columns: requests begun; faults injected; work that was accepted and lost, or done twice; what was not answered or
ended in its time; by how much memory, descriptors, threads and child processes grew beyond what the part allows (its
notes say what that is); the slowest good answer. Below the table is a line for each thing that was wrong. Everything,
with each request that was answered wrongly, is kept in ``build/soak/<time>.json``; the same seed draws the same again.
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
from lmx_lab.bench.provenance import provenance
from soak import report
from soak.row import Row
from soak.soak import Soak

PARTS = ("fuzz", "bodies", "load", "connections", "cycles", "kills", "files")
"""Modules of this package with a ``run``."""
Run = Callable[[Soak], list[Row]]
INTERRUPTED = 130
END_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    # Leave by way of the contexts that end the programs.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    soak = Soak(folder=folder_of("tiny"), quick=chosen.quick, seed=chosen.seed)
    settings = {"quick": soak.quick, "only": chosen.only, "seed": soak.seed}
    facts = provenance(mlx_device=str(mx.default_device()), settings=settings)
    return carry_out({name: _run_of(name) for name in chosen.only or PARTS}, soak, facts)


def carry_out(parts: Mapping[str, Run], soak: Soak, facts: dict[str, Any], *, folder: Path = report.BUILD) -> int:
    """Run the parts, show and keep their rows; the exit status."""
    rows: list[Row] = []
    interrupted = False
    try:
        for name, run in parts.items():
            rows += _rows(name, run, soak)
    except KeyboardInterrupt:
        interrupted = True
    report.show(rows)
    report.say(f"kept as {report.keep(rows, facts, folder).name} in {folder.name}")
    return INTERRUPTED if interrupted else int(not all(row.holds for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m soak", description="Long runs against the running programs.")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeatable; default: all")
    parser.add_argument("--quick", action="store_true", help="a look, instead of the whole")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn by chance is drawn from it; default: 0")
    return parser


def _run_of(name: str) -> Run:
    def run(soak: Soak) -> list[Row]:
        # When it is its turn: a part that cannot be imported is no reason not to run the others.
        module: Any = importlib.import_module(f"soak.{name}")
        rows: list[Row] = module.run(soak)
        return rows

    return run


def _rows(name: str, run: Run, soak: Soak) -> list[Row]:
    """A part's rows; one that could not be run is a row too, and so is one that leaves processes."""
    started, before = time.perf_counter(), _children()
    rows: list[Row] = []
    try:
        rows += run(soak)
    except Exception as exc:
        failed = Row(part=name, wrong=[f"could not be run to its end: {type(exc).__name__}: {exc}"])
        failed.detail["traceback"] = traceback.format_exc()
        rows.append(failed)
    finally:
        if left := list(_ended([process for process in _children() if process not in before])):
            rows.append(Row(part=f"{name}: left behind", leaked_processes=len(left), wrong=left))
    well = "all well" if all(row.holds for row in rows) else "NOT WELL"
    report.say(f"{name}: {well}  ({time.perf_counter() - started:.0f} s)")
    return rows


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _ended(left: Sequence[psutil.Process]) -> Iterator[str]:
    """Ends processes that a part has left; a sentence for each."""
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
