"""Kill the daemon during turns: no reported event is lost, nothing is done or reported twice, and no process is left.

Its MCP servers ignore SIGTERM and the end of their input, and have children that leave their session.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Set
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import httpx2
import psutil

from benchmarks.paths import ROOT
from lmx_lab.daemon.encoding import timestamp
from lmx_lab.daemon.limits import Limits
from soak.programs import END_S, Command, Daemon, Home, record_leftovers, wait_until
from soak.report import print_line
from soak.row import Row
from soak.soak import Soak
from tests.support.daemons import TERMINAL, Follower, Program, check_log, whole_log
from tests.support.model_server import Scripted, calls, says

KILLS, QUICK_KILLS = 100, 3
ROUND = 25
"""Maximum number of kills in one home."""
TOKENS = ("turn.token", "turn.thinking")
"""Events that the log deletes some time after the end of their turn."""
TURNS = 3
"""Turns submitted for each kill."""
UNFINISHED = 30
"""Number of unfinished turns above which no more are submitted. A session has at most 64 queued turns."""
PAUSE_S = 0.004
TOOL_S = 0.03
MOMENT_S = 0.5
"""Longest time between the start of the submissions and a kill."""
WORKED_S = 60.0
SERVERS_S = 5.0
"""Time after a kill in which all processes of the daemon's MCP servers must have ended."""
WATCHDOG_SHARE = 0.1
"""Share of the kills after which the daemon is started only when its MCP servers have ended. After the others, the next
daemon may also have ended them."""
CLOCK_S = 1.0
"""Allowed difference between the time of an event and the end of its turn in the database."""
TOOL = ROOT / "tests" / "support" / "mcp_servers" / "counting.py"
"""An MCP server whose tool records each of its calls."""


def run(soak: Soak) -> list[Row]:
    kills = soak.kills if soak.kills is not None else QUICK_KILLS if soak.quick else KILLS
    row = Row(part="kills: SIGKILL of the daemon in turns")
    totals, started = Counter[str](), time.monotonic()
    for first in range(0, kills, ROUND):
        chance = random.Random(f"{soak.seed} {first}")
        with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name, Scripted(_script) as upstream:
            home = Home(Path(name))
            program = _RestartedDaemon(home, upstream.url)
            totals += asyncio.run(_kill_repeatedly(program, min(ROUND, kills - first), chance, row))
            record_leftovers(home, row, limit_s=SERVERS_S)
        print_line(f"{totals['kills']} of {kills} kills with seed {soak.seed}: {len(row.wrong)} problems")
    per_kill_s = (time.monotonic() - started) / max(kills, 1)
    row.notes = (
        f"seed {soak.seed}: {', '.join(f'{count} {name}' for name, count in totals.items())}; {per_kill_s:.2f} s a kill"
    )
    return [row]


def _script(body: dict[str, Any]) -> list[Any]:
    """Script of the model: a tool call with the name of the turn, then forty words."""
    last = body["messages"][-1]
    if last["role"] == "user":
        return calls(("counting__count", {"note": last["content"]}), text=("Let ", "me ", "count. "))
    return [part for step in says(*(f"word{at} " for at in range(40))) for part in (step, PAUSE_S)]


class _RestartedDaemon(Program):
    """The daemon of one home, which is killed and started repeatedly."""

    def __init__(self, home: Home, upstream: str) -> None:
        super().__init__(home.folder, upstream)
        self._home = home
        self.checks: list[asyncio.Task[None]] = []
        """One for each kill: waits, and records the processes of MCP servers that have not ended."""

    def start(self) -> Self:
        daemon = Daemon(self._home, self.upstream)
        self.process, self.state = daemon.process, daemon.state
        return self

    def processes_before(self, started: float) -> list[psutil.Process]:
        """Return the processes of this home that were started before a time, as psutil reports it."""
        return [process for process in self._home.processes() if _start_time(process) < started]

    def second(self) -> tuple[int | None, str]:
        """Start a second daemon for the same home; return its exit status and output."""
        with Command(self._home, "daemon", "--port", "0", "--upstream", self.upstream) as command:
            return command.wait(END_S), command.output


async def _kill_repeatedly(program: _RestartedDaemon, kills: int, chance: random.Random, row: Row) -> Counter[str]:
    """Kill the daemon of one home ``kills`` times. Returns counts for the notes."""
    submitted = list[str]()
    follower = Follower(program.start())
    notes = program.home / "notes.txt"
    try:
        await _set_up(program, notes)
        async with follower.following():
            for kill in range(kills):
                if len(submitted) - follower.ended_turns > UNFINISHED:
                    await follower.until_ended(submitted)
                turn_ids = [f"turn-{kill}-{number}" for number in range(TURNS)]
                submitted += turn_ids
                await _kill(program, follower, turn_ids, chance, row)
            try:
                await follower.until_ended(submitted)
            except TimeoutError:
                row.hung += 1
                row.wrong.append("accepted turns have not ended")
            await _check_second_is_refused(program, row)
        await asyncio.gather(*program.checks)
        counts = await _check(program, follower, submitted, notes, row)
    finally:
        program.stop()
    with closing(sqlite3.connect(program.folder / "daemon.db")) as connection:
        if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            row.wrong.append("the database is damaged")
    return Counter({"kills": kills, **counts})


async def _set_up(program: _RestartedDaemon, notes: Path) -> None:
    arguments = [str(TOOL), str(notes), str(TOOL_S), "stubborn"]
    server = {"name": "counting", "command": sys.executable, "args": arguments, "permission": "allow"}
    async with program.client() as http:
        (await http.post("/mcp/servers", json=server)).raise_for_status()
        (await http.post("/sessions", json={"session_id": "s"})).raise_for_status()


async def _kill(
    program: _RestartedDaemon, follower: Follower, turn_ids: list[str], chance: random.Random, row: Row
) -> None:
    """Kill the daemon and start it again: during a turn, or during start, recovery or submission, equally often."""
    submitting = asyncio.create_task(_submit(program, turn_ids, row))
    if chance.random() < 0.5:
        await _wait_for_finished_turn(follower, len(follower.events))
    await asyncio.sleep(chance.uniform(0.0, MOMENT_S))
    program.kill()
    killed = time.monotonic()
    row.faults += 1
    (failed,) = await asyncio.gather(submitting, return_exceptions=True)
    if failed is not None and not isinstance(failed, httpx2.TransportError):
        row.wrong.append(f"a submission failed: {failed!r:.200}")
    if chance.random() < WATCHDOG_SHARE:
        await _check_servers_end(program, float("inf"), killed, row)
    await asyncio.to_thread(program.start)
    started = _start_time(psutil.Process(program.process.pid))
    program.checks.append(asyncio.create_task(_check_servers_end(program, started, killed, row)))
    # Like a careful client, submit all of them again, also those that were answered. Nothing may run twice.
    await _submit(program, turn_ids, row)


async def _check_servers_end(program: _RestartedDaemon, before: float, killed: float, row: Row) -> None:
    """Record the processes started before a time that still run ``SERVERS_S`` after the kill."""

    def has_ended() -> bool:
        return not program.processes_before(before)

    # Not more often, because each search reads the environment of all processes.
    limit_s = killed + SERVERS_S - time.monotonic()
    if not await asyncio.to_thread(wait_until, has_ended, limit_s, every_s=0.25):
        left = await asyncio.to_thread(program.processes_before, before)
        row.leaked_processes += len(left)
        row.wrong += [f"left {SERVERS_S:g} s after a kill: {process}" for process in left]


def _start_time(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.Error:
        return float("inf")


async def _submit(program: _RestartedDaemon, turn_ids: list[str], row: Row) -> None:
    async with program.client() as http:
        for turn_id in turn_ids:
            row.requests += 1
            (await http.post("/sessions/s/turns", json={"turn_id": turn_id, "content": turn_id})).raise_for_status()


async def _wait_for_finished_turn(follower: Follower, seen: int) -> None:
    """Wait until a turn has ended successfully after the first ``seen`` events."""
    async with follower.changed:
        await asyncio.wait_for(
            follower.changed.wait_for(lambda: any(e["event"] == "turn.done" for e in follower.events[seen:])), WORKED_S
        )


async def _check_second_is_refused(program: _RestartedDaemon, row: Row) -> None:
    row.requests += 1
    row.faults += 1
    status, output = await asyncio.to_thread(program.second)
    if status != 1 or program.state.url not in output:
        row.wrong.append(f"a second daemon ended with {status}: {output[-300:]}")
    async with program.client() as http:
        if (status := (await http.get("/daemon")).status_code) != 200:
            row.lost += 1
            row.wrong.append(f"/daemon answers {status} after a second daemon was refused")


async def _check(
    program: _RestartedDaemon, follower: Follower, submitted: list[str], notes: Path, row: Row
) -> dict[str, int]:
    """Compare the log, the events that a resumed client received, and the calls that the tool recorded.

    Returns:
        Counts for the notes.
    """
    async with program.client() as http:
        whole = await whole_log(http)
    expired = turns_ended_before(whole, time.time() - Limits().fold_after_s + CLOCK_S)
    events, whole = without_tokens(follower.events, expired), without_tokens(whole, expired)
    received, logged = Counter(e["seq"] for e in events), Counter(e["seq"] for e in whole)
    row.lost += (logged - received).total()
    row.doubled += (received - logged).total()
    if {e["seq"]: e for e in whole} != {e["seq"]: e for e in events}:
        row.wrong.append("a received event differs from the one in the log")
    ended = Counter(e["turn_id"] for e in whole if e["event"] in TERMINAL)
    row.lost += (Counter(submitted) - ended).total()
    row.doubled += (ended - Counter(submitted)).total()
    text = await asyncio.to_thread(notes.read_text, encoding="utf-8")
    noted = Counter(text.split())
    row.doubled += sum(count - 1 for count in noted.values())
    done = {e["turn_id"] for e in whole if e["event"] == "turn.done"}
    if missing := done - noted.keys():
        row.lost += len(missing)
        last = [e["data"] for e in whole if e.get("turn_id") in missing and e["event"].startswith("tool.")]
        row.wrong.append(f"turns succeeded without a call of their tool: {sorted(missing)}, {last!s:.600}")
    codes = Counter(e["data"]["error"]["code"] for e in whole if e["event"] == "turn.error")
    if set(codes) - {"daemon-restarted"}:
        row.wrong.append(f"turns ended with {dict(codes)}")
    try:
        check_log(whole, without_tokens=expired)
    except AssertionError as exc:
        row.wrong.append(f"the log violates an invariant: {exc!s:.300}")
    return {"turns": len(submitted), "succeeded": len(done), "interrupted": codes.total(), "events": len(whole)}


def turns_ended_before(events: list[dict[str, Any]], unix_s: float) -> set[str]:
    """Return the ids of the turns that ended before a time. The log may have deleted their tokens."""
    before = timestamp(unix_s)
    return {event["turn_id"] for event in events if event["event"] in TERMINAL and event["at"] < before}


def without_tokens(events: list[dict[str, Any]], turn_ids: Set[str]) -> list[dict[str, Any]]:
    """Return the events except the tokens of these turns."""
    return [event for event in events if event["event"] not in TOKENS or event["turn_id"] not in turn_ids]
