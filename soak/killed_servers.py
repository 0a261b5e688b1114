"""The inference server under load: told to end, and killed; and the start after that."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx2

from benchmarks.processes import free_port
from lmx_lab.errors import EngineDeadError, NotLoadedError, QueueFullError
from soak.chats import CUT, GIVE_UP_S, HUNG, WAYS, End, Good, ask, long_body, note_good
from soak.models import ENGINES, Engine, installed, on_each_engine, tiny
from soak.row import Row
from soak.served import Home, Server, end_well, note_left, until
from soak.soak import Soak

KILLS, QUICK_KILLS = 30, 3
TERMS, QUICK_TERMS = 10, 2
AT_ONCE = 24
"""Requests: eight have a slot, the others wait."""
LONG_TOKENS = 6000
FIRST_S = 10.0
"""For the first good request of a server that has just started."""
DECLARED = {NotLoadedError.code, EngineDeadError.code, QueueFullError.code}
"""What a request may be told by a server that ends."""


def run(soak: Soak) -> list[Row]:
    rows: list[Row] = []
    for engine, _ in on_each_engine(soak, "kills: servers", rows):
        rows += [told_to_end(soak, engine), killed_with_streams(soak, engine)]
    return [*rows, killed_in_loads(soak)]


@contextmanager
def _home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        yield Home(Path(name))


# SIGTERM


def told_to_end(soak: Soak, engine: Engine = "MLX") -> Row:
    row, chance, outcomes = Row(part=f"kills: SIGTERM under load, {engine}"), random.Random(soak.seed), Counter[str]()
    with _home() as home:
        for _ in range(QUICK_TERMS if soak.quick else TERMS):
            with Server(home, tiny(soak, engine)) as server:
                ends = asyncio.run(_while_asking(server, row, partial(end_well, server, row), chance))
            outcomes.update(end.outcome for end in ends)
            for end in ends:
                _note_end(row, end)
    row.notes = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return row


def _note_end(row: Row, end: End) -> None:
    if end.outcome == HUNG:
        row.hung += 1
    elif not end.finished and end.outcome not in DECLARED:
        row.lost += 1
        row.wrong.append(f"a request that was accepted ended by {end.outcome}: {end.text[-80:]!r}")


async def _while_asking(server: Server, row: Row, strike: Callable[[], None], chance: random.Random) -> list[End]:
    """Ask in every way at once, and strike at some moment after all are there."""
    url = server.url
    bodies = [long_body(number, LONG_TOKENS) for number in range(AT_ONCE)]
    asking = [
        asyncio.create_task(ask(url, body, way=WAYS[number % len(WAYS)], limit_s=GIVE_UP_S))
        for number, body in enumerate(bodies)
    ]
    row.requests += AT_ONCE
    await asyncio.to_thread(until, lambda: server.busy() >= AT_ONCE, GIVE_UP_S, every_s=0.1)
    await asyncio.sleep(chance.uniform(0.0, 1.0))
    await asyncio.to_thread(strike)
    row.faults += 1
    return list(await asyncio.gather(*asking))


# SIGKILL


def killed_with_streams(soak: Soak, engine: Engine = "MLX") -> Row:
    """Each time on the same home and the same port."""
    row, chance = Row(part=f"kills: SIGKILL with streams, {engine}"), random.Random(soak.seed)
    port = free_port()
    good: Good | None = None
    with _home() as home:
        for _ in range(QUICK_KILLS if soak.quick else KILLS):
            with Server(home, tiny(soak, engine), port=port) as server:
                good = good or asyncio.run(Good.first(server.url))
                _ask_first(server, good, row)
                for end in asyncio.run(_while_asking(server, row, server.kill, chance)):
                    # Without a word, as there is nobody to say one; but the clients are not left waiting.
                    row.hung += end.outcome == HUNG
                    if not end.finished and end.outcome not in (CUT, HUNG):
                        row.wrong.append(f"a request to a server that was killed ended by {end.outcome}")
            note_left(home, row)
        assert good is not None
        with Server(home, tiny(soak, engine), port=port) as server:
            _ask_first(server, good, row)
            end_well(server, row)
    return row


def _ask_first(server: Server, good: Good, row: Row) -> None:
    row.requests += 1
    note_good(row, asyncio.run(good.again(server.url, limit_s=GIVE_UP_S)), bound_s=FIRST_S)


def killed_in_loads(soak: Soak) -> Row:
    """Of either engine in turns, if there are two."""
    row, chance = Row(part="kills: SIGKILL in loads"), random.Random(soak.seed)
    models = [tiny(soak, engine) for engine in ENGINES if installed(engine)]
    with _home() as home:
        first: dict[Path, tuple[float, Good]] = {}
        for model in models:
            with Server(home, None) as server:
                took_s = _load(server.url, model)
                first[model] = took_s, asyncio.run(Good.first(server.url))
                end_well(server, row)
        for number in range(QUICK_KILLS if soak.quick else KILLS):
            model = models[number % len(models)]
            took_s, good = first[model]
            with Server(home, None) as server:
                _kill_in_load(server, model, chance.uniform(0.0, 1.2 * took_s))
                row.requests += 1
                row.faults += 1
            note_left(home, row)
            # It takes two starts for what the first one left to be seen; the last one is looked at in full.
            if number >= (QUICK_KILLS if soak.quick else KILLS) - len(models):
                with Server(home, model) as server:
                    _ask_first(server, good, row)
                    end_well(server, row)
    row.notes = ", ".join(f"{model.name}: {seconds:.2f} s a load" for model, (seconds, _) in first.items())
    return row


def _load(url: str, model: Path) -> float:
    began = time.perf_counter()
    httpx2.post(
        f"{url}/admin/models/load", json={"model": str(model)}, timeout=60.0, trust_env=False
    ).raise_for_status()
    return time.perf_counter() - began


def _kill_in_load(server: Server, model: Path, after_s: float) -> None:
    def load() -> None:
        with suppress(httpx2.HTTPError):
            _load(server.url, model)

    assert server.url
    loading = threading.Thread(target=load)
    loading.start()
    time.sleep(after_s)
    server.kill()
    loading.join()
