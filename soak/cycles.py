"""Load and unload a model hundreds of times, with a request in between, and check that its memory is returned."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx2

from soak.chat_requests import TIMEOUT_S, ReferenceChat, record_reference
from soak.models import Engine, on_each_engine
from soak.programs import SMALL_CACHE, Home, Server, end_and_check, wait_until
from soak.report import Row, Soak
from soak.resources import POOL, Allowance, ResourceMonitor

CYCLES: Mapping[Engine, int] = {"MLX": 1000, "llama.cpp": 200}
QUICK_CYCLES: Mapping[Engine, int] = {"MLX": 50, "llama.cpp": 5}
WARM_UP = 25
"""Cycles before the measurement, after which allocators keep no more memory than they already do."""
LOAD_S = 60.0
"""Limit for loading or unloading a tiny model."""
EMPTY_S = 5.0
BOUND_S = 10.0
"""Limit for the reference request after a load."""


def run(soak: Soak) -> list[Row]:
    rows: list[Row] = []
    for engine, model in on_each_engine(soak, "cycles: load and unload", rows):
        count = (QUICK_CYCLES if soak.quick else CYCLES)[engine]
        rows.append(load_and_unload(model, count, Row(part=f"cycles: load and unload, {engine}")))
    return rows


def load_and_unload(model: Path, count: int, row: Row) -> Row:
    """Load and unload a model ``count`` times; the server's resources must then be those after the warm-up."""
    with (
        tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
        Server(Home(Path(name)), None, *SMALL_CACHE) as server,
        httpx2.Client(base_url=server.url, timeout=LOAD_S, trust_env=False) as http,
    ):
        _load_or_unload(http, "load", Row(part="warm-up"), model=str(model))
        reference = asyncio.run(ReferenceChat.record(server.url))
        monitor = ResourceMonitor(server.pid, allowance=Allowance(threads=POOL))
        for _ in range(WARM_UP):
            _load_chat_unload(server, http, model, reference, Row(part="warm-up"))
        monitor.begin()
        began = time.perf_counter()
        for _ in range(count):
            _load_chat_unload(server, http, model, reference, row)
        row.notes = f"{count} cycles, {(time.perf_counter() - began) / count:.2f} s each"
        _check_empty(server, row)
        monitor.add_to(row)
        end_and_check(server, row)
    return row


def _load_chat_unload(server: Server, http: httpx2.Client, model: Path, reference: ReferenceChat, row: Row) -> None:
    _load_or_unload(http, "load", row, model=str(model))
    row.requests += 1
    record_reference(row, asyncio.run(reference.repeat(server.url, limit_s=TIMEOUT_S)), bound_s=BOUND_S)
    _load_or_unload(http, "unload", row)


def _load_or_unload(http: httpx2.Client, what: str, row: Row, **body: str) -> None:
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
    """Check that without a model there is no other process than the server, and no folder of a socket."""
    wait_until(lambda: len(server.home.processes()) == 1 and not server.home.temporary_files(), EMPTY_S)
    others = [process for process in server.home.processes() if process.pid != server.pid]
    row.leaked_processes += len(others)
    row.wrong += [f"{process} runs although no model is loaded" for process in others]
    if files := server.home.temporary_files():
        row.wrong.append(f"the temporary folder has {', '.join(files)[:300]} although no model is loaded")
