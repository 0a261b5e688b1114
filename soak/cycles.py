"""Loads and unloads by the hundred, with a request between each: what a model took is given back."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx2

from soak.chats import GIVE_UP_S, Good, note_good
from soak.models import Engine, on_each_engine
from soak.row import Row
from soak.served import SMALL_CACHE, Home, Server, end_well, until
from soak.soak import Soak
from soak.watch import POOL, Allowance, Watch

CYCLES: Mapping[Engine, int] = {"MLX": 1000, "llama.cpp": 200}
QUICK_CYCLES: Mapping[Engine, int] = {"MLX": 50, "llama.cpp": 5}
WARM_UP = 25
"""Cycles: what allocators keep, they have by then."""
LOAD_S = 60.0
"""A tiny model that is not loaded, or not unloaded, by then never will be."""
EMPTY_S = 5.0
BOUND_S = 10.0
"""For the good request after a load."""


def run(soak: Soak) -> list[Row]:
    rows: list[Row] = []
    for engine, model in on_each_engine(soak, "cycles: load and unload", rows):
        count = (QUICK_CYCLES if soak.quick else CYCLES)[engine]
        rows.append(cycled(model, count, Row(part=f"cycles: load and unload, {engine}")))
    return rows


def cycled(model: Path, count: int, row: Row) -> Row:
    """Load and unload one model so often; afterwards the server holds what it held after the first few."""
    with (
        tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
        Server(Home(Path(name)), None, *SMALL_CACHE) as server,
        httpx2.Client(base_url=server.url, timeout=LOAD_S, trust_env=False) as http,
    ):
        _change(http, "load", Row(part="warm-up"), model=str(model))
        good = asyncio.run(Good.first(server.url))
        watch = Watch(server.pid, allowance=Allowance(threads=POOL))
        for _ in range(WARM_UP):
            _cycle(server, http, model, good, Row(part="warm-up"))
        watch.begin()
        began = time.perf_counter()
        for _ in range(count):
            _cycle(server, http, model, good, row)
        row.notes = f"{count} cycles, {(time.perf_counter() - began) / count:.2f} s each"
        _check_empty(server, row)
        watch.add_to(row)
        end_well(server, row)
    return row


def _cycle(server: Server, http: httpx2.Client, model: Path, good: Good, row: Row) -> None:
    _change(http, "load", row, model=str(model))
    row.requests += 1
    note_good(row, asyncio.run(good.again(server.url, limit_s=GIVE_UP_S)), bound_s=BOUND_S)
    _change(http, "unload", row)


def _change(http: httpx2.Client, what: str, row: Row, **body: str) -> None:
    row.requests += 1
    try:
        answer = http.post(f"/admin/models/{what}", json=body)
    except httpx2.TimeoutException:
        row.hung += 1
        row.wrong.append(f"{what} was not answered within {LOAD_S:g} s")
        return
    if answer.status_code != 200:
        row.lost += 1
        row.wrong.append(f"{what}: {answer.text[:200]}")


def _check_empty(server: Server, row: Row) -> None:
    """With nothing loaded there is no process beside the server, and no folder of a socket."""
    until(lambda: len(server.home.family()) == 1 and not server.home.litter(), EMPTY_S)
    beside = [process for process in server.home.family() if process.pid != server.pid]
    row.leaked_processes += len(beside)
    row.wrong += [f"with nothing loaded there runs {process}" for process in beside]
    if litter := server.home.litter():
        row.wrong.append(f"with nothing loaded there is {', '.join(litter)[:300]} in the temporary folder")
