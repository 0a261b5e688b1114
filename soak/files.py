"""Put special files into the models folder, and use a disk that hangs: requests and the stop must end in time."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx2

from soak.chat_requests import ReferenceChat, record_reference
from soak.models import tiny
from soak.programs import Home, Server, end_and_check
from soak.report import Row, Soak
from soak.resources import POOL, Allowance, ResourceMonitor

ROUNDS, QUICK_ROUNDS = 20, 3
AT_ONCE = 40
LISTS = ("/v1/models", "/admin/models")
LIST_S = 2.0
"""Limit for a list of models if the disk works."""
HUNG_LIST_S = 6.0
"""Limit for a list if the disk hangs: the deadline of a scan, and the time behind other requests."""
LOAD_S = 2.0
"""Limit for refusing a load."""
STOP_S = 5.0
TIMEOUT_S = 30.0
SPECIAL: Mapping[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}
NAMES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
HANGS = """
import threading
import lmx_lab.weights.scanner
lmx_lab.weights.scanner.read_entry = lambda place: threading.Event().wait()
"""


def run(soak: Soak) -> list[Row]:
    return [special_files(soak), hanging_disk(soak)]


def special_files(soak: Soak) -> Row:
    """Add a model for each kind of special file and each file name. A loaded model must keep answering."""
    row = Row(part="files: FIFOs, links to /dev/zero, folders")
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        home = Home(Path(name))
        bad = _write_models(home.folder / "models", soak.folder)
        with Server(home, tiny(soak, "MLX")) as server:
            reference = asyncio.run(ReferenceChat.record(server.url))
            monitor = ResourceMonitor(server.pid, allowance=Allowance(rss_mb=20.0, threads=POOL))
            for number in range(1 + (QUICK_ROUNDS if soak.quick else ROUNDS)):
                if number == 1:
                    monitor.begin()
                asyncio.run(_ask(server.url, row, bad, limit_s=LIST_S))
                record_reference(row, asyncio.run(reference.repeat(server.url)))
            monitor.add_to(row)
            end_and_check(server, row, limit_s=STOP_S)
    return row


def hanging_disk(soak: Soak) -> Row:
    """Let the scan of the models hang: lists must have the known models, and name the folder."""
    row = Row(part="files: a disk that does not answer")
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        home = Home(Path(name))
        _write_models(home.folder / "models", soak.folder)
        with Server(home, tiny(soak, "MLX"), code=HANGS) as server:
            reference = asyncio.run(ReferenceChat.record(server.url))
            monitor = ResourceMonitor(server.pid, allowance=Allowance(rss_mb=20.0, threads=POOL))
            for number in range(1 + (QUICK_ROUNDS if soak.quick else ROUNDS)):
                if number == 1:
                    monitor.begin()
                texts = asyncio.run(_ask(server.url, row, [], limit_s=HUNG_LIST_S))
                row.wrong += [
                    f"a list does not name the problem: {text[:80]}" for text in texts if "not been read" not in text
                ]
                record_reference(row, asyncio.run(reference.repeat(server.url)))
            monitor.add_to(row)
            end_and_check(server, row, limit_s=STOP_S)
    return row


def _write_models(models: Path, reference: Path) -> list[str]:
    """Write a model for each kind of special file; return their ids, whose loads must be refused."""
    ids = []
    for name in NAMES:
        for kind, make in SPECIAL.items():
            folder = models / f"{name.partition('.')[0]}-{kind}"
            shutil.copytree(reference, folder)
            (folder / name).unlink(missing_ok=True)
            make(folder / name)
            ids.append(folder.name)
    for kind in ("FIFO", "zero"):
        SPECIAL[kind](models / f"{kind}.gguf")
        ids.append(f"{kind}.gguf")
    return ids


async def _ask(url: str, row: Row, bad: list[str], *, limit_s: float) -> list[str]:
    """Request many lists at once, then a load of each bad model; return the bodies of the lists."""
    limits = httpx2.Limits(max_connections=AT_ONCE)
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits) as http:

        async def timed(what: str, limit: float, request: httpx2.Request, status: int) -> str:
            began = time.perf_counter()
            row.requests += 1
            try:
                response = await http.send(request)
            except httpx2.TimeoutException:
                row.hung += 1
                row.wrong.append(f"{what} was not answered within {TIMEOUT_S:g} s")
                return ""
            if (took_s := time.perf_counter() - began) > limit:
                row.hung += 1
                row.wrong.append(f"{what} took {took_s:.1f} s; at most {limit:g} s")
            if response.status_code != status:
                row.wrong.append(f"{what} was answered with {response.status_code}: {response.text[:200]}")
            row.slowest_s = max(row.slowest_s, round(took_s, 2))
            return response.text

        routes = [LISTS[number % len(LISTS)] for number in range(AT_ONCE)]
        texts = await asyncio.gather(
            *(timed(f"GET {route}", limit_s, http.build_request("GET", route), 200) for route in routes)
        )
        for name in bad:
            row.faults += 1
            row.wrong += [f"{name} is listed as usable" for text in texts[:2] if f'"{name}"' in text]
            load = http.build_request("POST", "/admin/models/load", json={"model": name})
            text = await timed(f"the load of {name}", LOAD_S, load, 400)
            if "must be regular files" not in text:
                row.wrong.append(f"the refusal of {name} does not name the rule: {text[:200]}")
    return texts
