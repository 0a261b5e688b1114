"""Special files in the models folder, and a disk that does not answer: all answers and the end are bounded."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx2

from soak.chats import Good, note_good
from soak.models import tiny
from soak.row import Row
from soak.served import Home, Server, end_well
from soak.soak import Soak
from soak.watch import Allowance, Watch

ROUNDS, QUICK_ROUNDS = 20, 3
AT_ONCE = 40
LISTS = ("/v1/models", "/admin/models")
LIST_S = 2.0
"""For a list where the disk answers."""
HUNG_LIST_S = 6.0
"""For a list where it does not: the deadline of a scan, and the wait behind other requests."""
LOAD_S = 2.0
"""For the refusal of a load."""
STOP_S = 5.0
GIVE_UP_S = 30.0
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
    """A model for each kind of special file in each place, beside one that is loaded and answers all the time."""
    row = Row(part="files: FIFOs, links to /dev/zero, folders")
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        home = Home(Path(name))
        bad = _write_models(home.folder / "models", soak.folder)
        with Server(home, tiny(soak, "MLX")) as server:
            good = asyncio.run(Good.first(server.url))
            watch = Watch(server.pid, allowance=Allowance(rss_mb=20.0))
            for number in range(1 + (QUICK_ROUNDS if soak.quick else ROUNDS)):
                if number == 1:
                    watch.begin()
                asyncio.run(_ask(server.url, row, bad, limit_s=LIST_S))
                note_good(row, asyncio.run(good.again(server.url)))
            watch.add_to(row)
            end_well(server, row, limit_s=STOP_S)
    return row


def hanging_disk(soak: Soak) -> Row:
    """The scan never ends: lists come from what is known, and name the folder."""
    row = Row(part="files: a disk that does not answer")
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        home = Home(Path(name))
        _write_models(home.folder / "models", soak.folder)
        with Server(home, tiny(soak, "MLX"), code=HANGS) as server:
            good = asyncio.run(Good.first(server.url))
            watch = Watch(server.pid, allowance=Allowance(rss_mb=20.0))
            for number in range(1 + (QUICK_ROUNDS if soak.quick else ROUNDS)):
                if number == 1:
                    watch.begin()
                texts = asyncio.run(_ask(server.url, row, [], limit_s=HUNG_LIST_S))
                row.wrong += [
                    f"a list without its problem: {text[:80]}" for text in texts if "not been read" not in text
                ]
                note_good(row, asyncio.run(good.again(server.url)))
            watch.add_to(row)
            end_well(server, row, limit_s=STOP_S)
    return row


def _write_models(models: Path, good: Path) -> list[str]:
    """The ids of those that must be refused."""
    ids = []
    for name in NAMES:
        for kind, make in SPECIAL.items():
            folder = models / f"{name.partition('.')[0]}-{kind}"
            shutil.copytree(good, folder)
            (folder / name).unlink(missing_ok=True)
            make(folder / name)
            ids.append(folder.name)
    for kind in ("FIFO", "zero"):
        SPECIAL[kind](models / f"{kind}.gguf")
        ids.append(f"{kind}.gguf")
    return ids


async def _ask(url: str, row: Row, bad: list[str], *, limit_s: float) -> list[str]:
    """Many lists at once, then a load of each bad model; the texts of the lists."""
    limits = httpx2.Limits(max_connections=AT_ONCE)
    async with httpx2.AsyncClient(base_url=url, timeout=GIVE_UP_S, trust_env=False, limits=limits) as http:

        async def timed(what: str, limit: float, answer: httpx2.Request, status: int) -> str:
            began = time.perf_counter()
            row.requests += 1
            try:
                found = await http.send(answer)
            except httpx2.TimeoutException:
                row.hung += 1
                row.wrong.append(f"{what} was not answered within {GIVE_UP_S:g} s")
                return ""
            if (took_s := time.perf_counter() - began) > limit:
                row.hung += 1
                row.wrong.append(f"{what} took {took_s:.1f} s; at most {limit:g} s")
            if found.status_code != status:
                row.wrong.append(f"{what} was answered with {found.status_code}: {found.text[:200]}")
            row.slowest_s = max(row.slowest_s, round(took_s, 2))
            return found.text

        routes = [LISTS[number % len(LISTS)] for number in range(AT_ONCE)]
        texts = await asyncio.gather(
            *(timed(f"GET {it}", limit_s, http.build_request("GET", it), 200) for it in routes)
        )
        for name in bad:
            row.faults += 1
            row.wrong += [f"{name} is listed as usable" for text in texts[:2] if f'"{name}"' in text]
            load = http.build_request("POST", "/admin/models/load", json={"model": name})
            said = await timed(f"the load of {name}", LOAD_S, load, 400)
            if "must be regular files" not in said:
                row.wrong.append(f"the load of {name} was refused without the rule: {said[:200]}")
    return texts
