"""20,000 requests that are nearly right, and after each batch of them good ones whose answers are known."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from benchmarks.paths import ROOT
from soak.fuzzing.drawing import drawn
from soak.fuzzing.exchange import Endpoint, HttpClient, Outcome, socket_exchange
from soak.fuzzing.families import FAMILIES, Family
from soak.fuzzing.frames import SocketCase
from soak.fuzzing.known import Known
from soak.fuzzing.requests import Case
from soak.fuzzing.verdict import wrong_answer, wrong_socket
from soak.models import Engine, on_each_engine, write_models
from soak.report import say
from soak.row import Row
from soak.served import Command, Daemon, Home, Server, end_well, until
from soak.soak import Soak, SoakError
from soak.watch import POOL, Allowance, Watch

SHARES: Mapping[Engine, float] = {"MLX": 1.0, "llama.cpp": 0.25}
ENGINES_OWN = tuple(family for family in FAMILIES if family.of_engine)
"""What is not the same whichever engine computes."""
BATCH = 250
QUICK_SHARE = 0.04
"""Of all, for a look."""
AT_ONCE = 8
LIMIT_S = 30.0
"""For one request, and for a WebSocket from its handshake to its end."""
KEPT_FAILURES = 100
KEPT_BYTES = 20_000
PREFIX_CACHE_GB = "0.002"
"""Full before the first reading: what it keeps on purpose is no leak."""
SETTLED = Allowance(rss_mb=8.0, threads=POOL)
"""The log's pages in memory are 8 MB, and a model that is loaded anew lies elsewhere: RSS goes 10 MB up and down with
that, while what malloc has in use stays the same to 1 MB. Of a request's leak, 1.4 kB are seen."""
MCP_SERVERS = {"asking": "ask", "free": "allow"}
"""Of the daemon, all the time, and whether a call of theirs needs a permission."""
COUNTING = ROOT / "tests" / "daemon" / "counting_mcp.py"
# uvicorn's log stays in memory; what it has to say about exceptions belongs with the rest.
TELL_ALL = "import logging; logging.getLogger('uvicorn').addHandler(logging.StreamHandler())"
COMPLAINT = re.compile(r"^Traceback| ERROR |^Exception |never retrieved|never awaited|Warning: ", re.MULTILINE)
COMPLAINT_CHARACTERS = 8000


def run(soak: Soak) -> list[Row]:
    rows: list[Row] = []
    for engine, _ in on_each_engine(soak, "fuzz", rows):
        share = SHARES[engine] * (QUICK_SHARE if soak.quick else 1.0)
        rows += fuzz(soak, share=share, families=FAMILIES if engine == "MLX" else ENGINES_OWN, engine=engine)
    return rows


def fuzz(soak: Soak, *, share: float, families: Sequence[Family] = FAMILIES, engine: Engine = "MLX") -> list[Row]:
    """A row for each family, and one for the whole.

    Args:
        share: Of the 20,000.
    """
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        homes = Home(Path(name, "s")), Home(Path(name, "d"))
        write_models(homes[0].folder / "models", soak, engine)
        options = ["--no-downloads", "--embedder", "tiny-embedder", "--reranker", "tiny-reranker"]
        options += ["--prefix-cache", PREFIX_CACHE_GB]
        with (
            Server(homes[0], "tiny", *options, code=TELL_ALL) as server,
            Daemon(homes[1], server.url, code=TELL_ALL) as daemon,
        ):
            _add_mcp_servers(daemon, Path(name, "calls"))
            rows = asyncio.run(_Fuzz(soak, server, daemon, share, engine).run(families))
            for command in (daemon, server):
                end_well(command, rows[-1])
    return rows


def _add_mcp_servers(daemon: Daemon, calls: Path) -> None:
    head = {"authorization": f"Bearer {daemon.state.token}"}
    with httpx2.Client(base_url=daemon.state.url, headers=head, timeout=LIMIT_S, trust_env=False) as client:
        for name, permission in MCP_SERVERS.items():
            program = {"command": sys.executable, "args": ["-I", str(COUNTING), str(calls), "0"]}
            body = {"name": name, "permission": permission, **program}
            client.post("/v3/mcp/servers", json=body).raise_for_status()

        def ready() -> bool:
            listed = client.get("/v3/mcp/servers").json()["servers"]
            return all(server["state"] == "ready" for server in listed)

        if not until(ready, LIMIT_S):
            raise SoakError(f"the MCP servers do not start: {client.get('/v3/mcp/servers').text[:2000]}")


@dataclass(kw_only=True)
class _Program:
    """One of the two under fire."""

    command: Command
    endpoint: Endpoint
    watch: Watch
    """Of all second halves."""
    heard: int = 0
    """Characters of its output that were looked through."""

    @classmethod
    def of(cls, command: Command, url: str, token: str = "") -> _Program:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(
            command=command,
            endpoint=Endpoint(parts.hostname, parts.port, token=token, limit_s=LIMIT_S),
            watch=Watch(command.pid, allowance=SETTLED),
        )

    def complaints(self) -> list[str]:
        """What it has printed since the last look that no request may be the cause of."""
        output = self.command.output
        news, self.heard = output[self.heard :], len(output)
        found = COMPLAINT.search(news)
        if found is None:
            return []
        begin = news.rfind("\n", 0, found.start()) + 1
        return [f"it printed: {news[begin : begin + COMPLAINT_CHARACTERS]}"]


class _Fuzz:
    """One run against running programs."""

    def __init__(self, soak: Soak, server: Server, daemon: Daemon, share: float, engine: Engine) -> None:
        self._seed = soak.seed
        self._engine = engine
        self._share = share
        self._known = Known(server.url, daemon.state, servers=frozenset(MCP_SERVERS))
        self._programs = {
            "server": _Program.of(server, server.url),
            "daemon": _Program.of(daemon, daemon.state.url, daemon.state.token),
        }

    async def run(self, families: Sequence[Family]) -> list[Row]:
        """Half of each family, then the other halves: what has to settle in memory has done so in the first."""
        rows = {family.name: Row(part=f"fuzz: {family.name}, {self._engine}") for family in families}
        async with self._known:
            await self._known.tidy()
            for half in range(2):
                for program in self._programs.values() if half else ():
                    program.watch.begin()
                for family in families:
                    await self._half(family, half, rows[family.name])
        whole = Row(part=f"fuzz: all of it, {self._engine}", slowest_s=max(row.slowest_s for row in rows.values()))
        for program in self._programs.values():
            program.watch.add_to(whole)
        return [*rows.values(), whole]

    async def _half(self, family: Family, half: int, row: Row) -> None:
        program, started = self._programs[family.program], time.perf_counter()
        left = max(2, round(family.count * self._share / 2))
        batches = -(-left // BATCH)
        self._known.slowest_s = row.slowest_s
        for number in range(batches):
            count = left // (batches - number)
            left -= count
            await self._batch(family, half * batches + number, count, row)
            if not program.command.running:
                row.wrong.append(f"the {family.program} has ended: {program.command.output[-COMPLAINT_CHARACTERS:]}")
                return
        row.slowest_s = self._known.slowest_s
        seconds = time.perf_counter() - started
        say(f"{row.part}: {row.requests} requests, {'all well' if row.holds else 'NOT WELL'}  ({seconds:.0f} s)")

    async def _batch(self, family: Family, number: int, count: int, row: Row) -> None:
        """So many cases, then good requests; what is wrong goes into the row."""
        program = self._programs[family.program]
        cases = drawn(family.cases, f"{self._seed}/{family.name}/{number}", count - bool(family.longest))
        if family.longest is not None:
            cases.append(family.longest())
        outcomes = await _all(program.endpoint, cases)
        for place, (case, outcome) in enumerate(zip(cases, outcomes, strict=True)):
            judge = wrong_socket if isinstance(case, SocketCase) else wrong_answer
            for why in judge(case, outcome, family.refusals):
                row.hung += outcome.ended == "hung"
                _note(row, f"batch {number}, {place}: {why}", case, outcome)
        row.requests += len(cases)
        row.faults += len(cases)
        asked = self._known.asked
        wrong = await self._known.check()
        row.lost += len(wrong)
        row.requests += self._known.asked - asked
        row.wrong += [f"after batch {number}: {why}" for why in wrong]
        if family.program == "daemon":
            row.wrong += [f"after batch {number}: {why}" for why in await self._known.tidy()]
        for each in self._programs.values():
            row.wrong += [f"in batch {number}: {why}" for why in each.complaints()]


async def _all(endpoint: Endpoint, cases: Sequence[Case | SocketCase]) -> list[Outcome]:
    """The outcome of each, some at a time; each of those has a connection that it keeps if it can."""
    outcomes: dict[int, Outcome] = {}
    waiting = iter(enumerate(cases))

    async def work() -> None:
        client = HttpClient(endpoint)
        try:
            for place, case in waiting:
                if isinstance(case, SocketCase):
                    outcomes[place] = await socket_exchange(endpoint, case)
                else:
                    outcomes[place] = await client.exchange(case)
        finally:
            await client.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    return [outcomes[place] for place in range(len(cases))]


def _note(row: Row, why: str, case: Case | SocketCase, outcome: Outcome) -> None:
    """With what was sent, for the file: it shall be possible to have this again without the other 20,000."""
    row.wrong.append(why)
    failures = row.detail.setdefault("failures", [])
    if len(failures) < KEPT_FAILURES:
        sent = case.handshake + case.frames if isinstance(case, SocketCase) else case.wire
        answer: dict[str, Any] = {"status": outcome.status, "ended": outcome.ended, "seconds": outcome.seconds}
        answer["body"] = outcome.body[:KEPT_BYTES].decode("latin-1")
        answer["messages"] = outcome.messages[:20]
        shown = sent[:KEPT_BYTES].decode("latin-1")
        failures.append({"why": why, "sent_latin1": shown, "sent_bytes": len(sent), "end": case.end, **answer})
