"""Send 20,000 almost valid requests, and after each batch valid requests whose answers are known.

All of them are sent to a server with a tiny MLX model, and a part of them again to servers with the other engines.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2

from benchmarks.paths import ROOT
from soak.fuzzing.checks import answer_problems, socket_problems
from soak.fuzzing.corpus import MODEL
from soak.fuzzing.exchange import Endpoint, HttpClient, Outcome, socket_exchange
from soak.fuzzing.families import Family, families
from soak.fuzzing.frames import SocketCase
from soak.fuzzing.known_answers import KnownAnswers
from soak.fuzzing.requests import Case
from soak.fuzzing.values import draw_cases
from soak.models import Engine, on_each_engine, write_models
from soak.programs import Command, Daemon, Home, Server, end_and_check, wait_until
from soak.report import Row, Soak, SoakError, print_line
from soak.resources import POOL, Allowance, ResourceMonitor

FuzzedEngine = Engine | Literal["echo"]
SHARES: Mapping[FuzzedEngine, float] = {"echo": 0.5, "MLX": 1.0, "llama.cpp": 0.25}
TOTAL = sum(family.count for family in families())
BATCH = 250
QUICK_SHARE = 0.04
"""Share of all requests in a quick run."""
AT_ONCE = 8
LIMIT_S = 120.0
"""Limit for one request, and for a WebSocket from its handshake to its end. A request without ``max_tokens`` fills the
context, which takes 30 s on a busy machine."""
KEPT_FAILURES = 100
KEPT_BYTES = 20_000
PREFIX_CACHE_GB = "0.002"
"""A prefix cache that is full before the first measurement. Otherwise its growth would look like a leak."""
SETTLED = Allowance(rss_mb=8.0, threads=POOL)
"""Allowance after the warm-up. The log keeps 8 MB in memory, and a model that is loaded again lies elsewhere. RSS
therefore varies by 10 MB, while the memory that malloc has in use stays the same within 1 MB. A leak of 1.4 kB per
request is detected."""
MCP_SERVERS = {"asking": "ask", "free": "allow"}
"""MCP servers of the daemon during the whole run, and their permissions."""
COUNTING = ROOT / "tests" / "support" / "mcp_servers" / "counting.py"
# uvicorn logs to memory only; this prints its messages about exceptions with the rest of the output.
PRINT_UVICORN_LOG = "import logging; logging.getLogger('uvicorn').addHandler(logging.StreamHandler())"
COMPLAINT = re.compile(r"^Traceback| ERROR |^Exception |never retrieved|never awaited|Warning: ", re.MULTILINE)
COMPLAINT_CHARACTERS = 8000


def run(soak: Soak) -> list[Row]:
    whole = soak.count / TOTAL if soak.count is not None else QUICK_SHARE if soak.quick else 1.0
    rows = fuzz(soak, families("echo"), share=SHARES["echo"] * whole, engine="echo")
    for engine, _ in on_each_engine(soak, "fuzz", rows):
        chosen = [family for family in families() if family.of_engine or engine == "MLX"]
        rows += fuzz(soak, chosen, share=SHARES[engine] * whole, engine=engine)
    requests, faults = (sum(getattr(row, name) for row in rows) for name in ("requests", "faults"))
    print_line(f"seed {soak.seed}: {faults} changed requests and {requests - faults} valid ones")
    return rows


def fuzz(soak: Soak, chosen: Sequence[Family], *, share: float, engine: FuzzedEngine = "MLX") -> list[Row]:
    """Return a row for each family, and one for the whole run.

    Args:
        chosen: Families whose requests are sent.
        share: Share of the requests of each family to send.
    """
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        homes = Home(Path(name, "s")), Home(Path(name, "d"))
        options = ["--no-downloads", "--prefix-cache", PREFIX_CACHE_GB]
        if engine != "echo":
            write_models(homes[0].folder / "models", soak, engine)
            options += ["--embedder", "tiny-embedder", "--reranker", "tiny-reranker"]
        with (
            Server(homes[0], _model_of(engine), *options, code=PRINT_UVICORN_LOG) as server,
            Daemon(homes[1], server.url, code=PRINT_UVICORN_LOG) as daemon,
        ):
            _add_mcp_servers(daemon, Path(name, "calls"))
            rows = asyncio.run(_FuzzRun(soak, server, daemon, share, engine).run(chosen))
            if not server.wait_until_idle():
                rows[-1].hung += 1
                rows[-1].wrong.append(f"slots are still in use: {server.metrics()}")
            for command in (daemon, server):
                end_and_check(command, rows[-1])
    return rows


def _model_of(engine: FuzzedEngine) -> str:
    return "echo" if engine == "echo" else MODEL


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

        if not wait_until(ready, LIMIT_S):
            raise SoakError(f"the MCP servers do not start: {client.get('/v3/mcp/servers').text[:2000]}")


@dataclass(kw_only=True)
class _Program:
    """One of the two programs that receive the requests."""

    command: Command
    endpoint: Endpoint
    monitor: ResourceMonitor
    """Measures the second halves of all families."""
    searched: int = 0
    """Number of characters of the output that have been searched."""

    @classmethod
    def of(cls, command: Command, url: str, token: str = "") -> _Program:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(
            command=command,
            endpoint=Endpoint(parts.hostname, parts.port, token=token, limit_s=LIMIT_S),
            monitor=ResourceMonitor(command.pid, allowance=SETTLED),
        )

    def complaints(self) -> list[str]:
        """Return new output that no request may cause, such as a traceback."""
        output = self.command.output
        new_output, self.searched = output[self.searched :], len(output)
        found = COMPLAINT.search(new_output)
        if found is None:
            return []
        begin = new_output.rfind("\n", 0, found.start()) + 1
        return [f"it printed: {new_output[begin : begin + COMPLAINT_CHARACTERS]}"]


class _FuzzRun:
    """A run against both programs."""

    def __init__(self, soak: Soak, server: Server, daemon: Daemon, share: float, engine: FuzzedEngine) -> None:
        self._seed = soak.seed
        self._engine = engine
        self._share = share
        self._known = KnownAnswers(server.url, daemon.state, model=_model_of(engine), servers=frozenset(MCP_SERVERS))
        self._programs = {
            "server": _Program.of(server, server.url),
            "daemon": _Program.of(daemon, daemon.state.url, daemon.state.token),
        }

    async def run(self, chosen: Sequence[Family]) -> list[Row]:
        """Send half of each family, then the other halves; memory has settled after the first halves."""
        rows = {family.name: Row(part=f"fuzz: {family.name}, {self._engine}") for family in chosen}
        async with self._known:
            await self._known.delete_created()
            for half in range(2):
                for program in self._programs.values() if half else ():
                    program.monitor.begin()
                for family in chosen:
                    await self._half(family, half, rows[family.name])
        whole = Row(part=f"fuzz: all of it, {self._engine}", slowest_s=max(row.slowest_s for row in rows.values()))
        for program in self._programs.values():
            program.monitor.add_to(whole)
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
        print_line(f"{row.part}: {row.requests} requests, {'passed' if row.passed else 'FAILED'}  ({seconds:.0f} s)")

    async def _batch(self, family: Family, number: int, count: int, row: Row) -> None:
        """Send ``count`` cases, then the valid requests; record problems in the row."""
        program = self._programs[family.program]
        cases = draw_cases(family.draw, f"{self._seed}/{family.name}/{number}", count - bool(family.longest))
        if family.longest is not None:
            cases.append(family.longest())
        outcomes = await _all(program.endpoint, cases)
        for place, (case, outcome) in enumerate(zip(cases, outcomes, strict=True)):
            if isinstance(case, SocketCase):
                problems = socket_problems(case, outcome, family.refusals)
            else:
                problems = answer_problems(case, outcome, family.refusals)
            for why in problems:
                row.hung += outcome.ended == "hung"
                _note(row, f"batch {number}, {place}: {why}", case, outcome)
        row.requests += len(cases)
        row.faults += len(cases)
        requests = self._known.requests
        wrong = await self._known.check()
        row.lost += len(wrong)
        row.requests += self._known.requests - requests
        row.wrong += [f"after batch {number}: {why}" for why in wrong]
        if family.program == "daemon":
            row.wrong += [f"after batch {number}: {why}" for why in await self._known.delete_created()]
        for each in self._programs.values():
            row.wrong += [f"in batch {number}: {why}" for why in each.complaints()]


async def _all(endpoint: Endpoint, cases: Sequence[Case | SocketCase]) -> list[Outcome]:
    """Return the outcome of each case. ``AT_ONCE`` clients send them, each with a reused connection if possible."""
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
    """Record a problem, and what was sent, so that it can be repeated without the other requests."""
    row.wrong.append(why)
    failures = row.detail.setdefault("failures", [])
    if len(failures) < KEPT_FAILURES:
        sent = case.handshake + case.frames if isinstance(case, SocketCase) else case.wire
        answer: dict[str, Any] = {"status": outcome.status, "ended": outcome.ended, "seconds": outcome.seconds}
        answer["body"] = outcome.body[:KEPT_BYTES].decode("latin-1")
        answer["messages"] = outcome.messages[:20]
        shown = sent[:KEPT_BYTES].decode("latin-1")
        failures.append({"why": why, "sent_latin1": shown, "sent_bytes": len(sent), "end": case.end, **answer})
