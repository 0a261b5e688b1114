"""End and kill the inference server under load, and start it again."""

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

from lmx_lab.errors import EngineDeadError, NotLoadedError, QueueFullError
from soak.chat_requests import (
    CUT,
    HUNG,
    MODES,
    TIMEOUT_S,
    ChatResult,
    ReferenceChat,
    long_body,
    record_reference,
    send_chat,
)
from soak.models import ENGINES, Engine, is_installed, on_each_engine, tiny
from soak.programs import Home, Server, end_and_check, record_leftovers, wait_until
from soak.report import Row, Soak
from tests.support.sockets import free_port

KILLS, QUICK_KILLS = 30, 3
TERMS, QUICK_TERMS = 10, 2
AT_ONCE = 24
"""Simultaneous requests: eight have a slot, the others wait."""
LONG_TOKENS = 6000
FIRST_S = 10.0
"""Limit for the first reference request of a server that has just started."""
DECLARED = {NotLoadedError.code, EngineDeadError.code, QueueFullError.code}
"""Error codes with which a stopping server may end a request."""


def run(soak: Soak) -> list[Row]:
    rows: list[Row] = []
    for engine, _ in on_each_engine(soak, "kills: servers", rows):
        rows += [terminated_under_load(soak, engine), killed_with_streams(soak, engine)]
    return [*rows, killed_in_loads(soak)]


@contextmanager
def _home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        yield Home(Path(name))


# SIGTERM


def terminated_under_load(soak: Soak, engine: Engine = "MLX") -> Row:
    row, chance, outcomes = Row(part=f"kills: SIGTERM under load, {engine}"), random.Random(soak.seed), Counter[str]()
    with _home() as home:
        for _ in range(QUICK_TERMS if soak.quick else TERMS):
            with Server(home, tiny(soak, engine)) as server:
                results = asyncio.run(_disturb_requests(server, row, partial(end_and_check, server, row), chance))
            outcomes.update(result.outcome for result in results)
            for result in results:
                _record_result(row, result)
    row.notes = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return row


def _record_result(row: Row, result: ChatResult) -> None:
    if result.outcome == HUNG:
        row.hung += 1
    elif not result.finished and result.outcome not in DECLARED:
        row.lost += 1
        row.wrong.append(f"an accepted request ended with {result.outcome}: {result.text[-80:]!r}")


async def _disturb_requests(
    server: Server, row: Row, disturb: Callable[[], None], chance: random.Random
) -> list[ChatResult]:
    """Send requests in every mode, call ``disturb`` at a random moment after all have arrived; return the results."""
    url = server.url
    bodies = [long_body(number, LONG_TOKENS) for number in range(AT_ONCE)]
    requests = [
        asyncio.create_task(send_chat(url, body, mode=MODES[number % len(MODES)], limit_s=TIMEOUT_S))
        for number, body in enumerate(bodies)
    ]
    row.requests += AT_ONCE
    await asyncio.to_thread(wait_until, lambda: server.unfinished_requests() >= AT_ONCE, TIMEOUT_S, every_s=0.1)
    await asyncio.sleep(chance.uniform(0.0, 1.0))
    await asyncio.to_thread(disturb)
    row.faults += 1
    return list(await asyncio.gather(*requests))


# SIGKILL


def killed_with_streams(soak: Soak, engine: Engine = "MLX") -> Row:
    """Kill the server repeatedly, each time with the same home and port."""
    row, chance = Row(part=f"kills: SIGKILL with streams, {engine}"), random.Random(soak.seed)
    port = free_port()
    reference: ReferenceChat | None = None
    with _home() as home:
        for _ in range(QUICK_KILLS if soak.quick else KILLS):
            with Server(home, tiny(soak, engine), port=port) as server:
                reference = reference or asyncio.run(ReferenceChat.record(server.url))
                _check_first_request(server, reference, row)
                for result in asyncio.run(_disturb_requests(server, row, server.kill, chance)):
                    # A killed server cannot send an error, but its clients must not wait.
                    row.hung += result.outcome == HUNG
                    if not result.finished and result.outcome not in (CUT, HUNG):
                        row.wrong.append(f"a request to a killed server ended with {result.outcome}")
            record_leftovers(home, row)
        assert reference is not None
        with Server(home, tiny(soak, engine), port=port) as server:
            _check_first_request(server, reference, row)
            end_and_check(server, row)
    return row


def _check_first_request(server: Server, reference: ReferenceChat, row: Row) -> None:
    row.requests += 1
    record_reference(row, asyncio.run(reference.repeat(server.url, limit_s=TIMEOUT_S)), bound_s=FIRST_S)


def killed_in_loads(soak: Soak) -> Row:
    """Kill the server while it loads a model, of each installed engine in turns."""
    row, chance = Row(part="kills: SIGKILL in loads"), random.Random(soak.seed)
    models = [tiny(soak, engine) for engine in ENGINES if is_installed(engine)]
    with _home() as home:
        first: dict[Path, tuple[float, ReferenceChat]] = {}
        for model in models:
            with Server(home, None) as server:
                took_s = _load(server.url, model)
                first[model] = took_s, asyncio.run(ReferenceChat.record(server.url))
                end_and_check(server, row)
        for number in range(QUICK_KILLS if soak.quick else KILLS):
            model = models[number % len(models)]
            took_s, reference = first[model]
            with Server(home, None) as server:
                _kill_while_loading(server, model, chance.uniform(0.0, 1.2 * took_s))
                row.requests += 1
                row.faults += 1
            record_leftovers(home, row)
            # Each engine's last kill is followed by a complete start, which would fail on what the kill has left.
            if number >= (QUICK_KILLS if soak.quick else KILLS) - len(models):
                with Server(home, model) as server:
                    _check_first_request(server, reference, row)
                    end_and_check(server, row)
    row.notes = ", ".join(f"{model.name}: {seconds:.2f} s per load" for model, (seconds, _) in first.items())
    return row


def _load(url: str, model: Path) -> float:
    began = time.perf_counter()
    httpx2.post(
        f"{url}/admin/models/load", json={"model": str(model)}, timeout=60.0, trust_env=False
    ).raise_for_status()
    return time.perf_counter() - began


def _kill_while_loading(server: Server, model: Path, after_s: float) -> None:
    def load() -> None:
        with suppress(httpx2.HTTPError):
            _load(server.url, model)

    assert server.url
    loading = threading.Thread(target=load)
    loading.start()
    time.sleep(after_s)
    server.kill()
    loading.join()
