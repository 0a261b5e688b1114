"""Kill the daemon during turns: no reported event is lost, nothing is done or reported twice, and no process is left.

Its MCP servers ignore SIGTERM and the end of their input, and have children that leave their session.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import httpx2

from benchmarks.paths import ROOT
from soak.programs import END_S, Command, Daemon, Home, record_leftovers
from soak.row import Row
from soak.soak import Soak
from tests.daemon.daemon_process import TERMINAL, Follower, Program, check_log, whole_log
from tests.daemon.scripted import Scripted, calls, says

KILLS, QUICK_KILLS = 30, 3
TURNS = 3
"""Turns submitted for each kill."""
PAUSE_S = 0.004
TOOL_S = 0.03
MOMENT_S = 0.5
"""Longest time between the start of the submissions and a kill."""
WORKED_S = 60.0
TOOL = ROOT / "tests" / "daemon" / "counting_mcp.py"
"""An MCP server whose tool records each of its calls."""


def run(soak: Soak) -> list[Row]:
    row = Row(part="kills: SIGKILL of the daemon in turns")
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name, Scripted(_script) as upstream:
        home = Home(Path(name))
        asyncio.run(_kill_repeatedly(soak, _RestartedDaemon(home, upstream.url), row))
        record_leftovers(home, row)
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

    def start(self) -> Self:
        daemon = Daemon(self._home, self.upstream)
        self.process, self.state = daemon.process, daemon.state
        return self

    def second(self) -> tuple[int | None, str]:
        """Start a second daemon for the same home; return its exit status and output."""
        with Command(self._home, "daemon", "--port", "0", "--upstream", self.upstream) as command:
            return command.wait(END_S), command.output


async def _kill_repeatedly(soak: Soak, program: _RestartedDaemon, row: Row) -> None:
    chance, submitted = random.Random(soak.seed), list[str]()
    follower = Follower(program.start())
    notes = program.home / "notes.txt"
    try:
        await _set_up(program, notes)
        async with follower.following():
            for kill in range(QUICK_KILLS if soak.quick else KILLS):
                turn_ids = [f"turn-{kill}-{number}" for number in range(TURNS)]
                submitted += turn_ids
                await _kill(program, follower, turn_ids, chance, row)
            try:
                await follower.until_ended(submitted)
            except TimeoutError:
                row.hung += 1
                row.wrong.append("accepted turns have not ended")
            await _check_second_is_refused(program, row)
        await _check(program, follower, submitted, notes, row)
    finally:
        program.stop()
    with closing(sqlite3.connect(program.folder / "daemon.db")) as connection:
        if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            row.wrong.append("the database is damaged")


async def _set_up(program: _RestartedDaemon, notes: Path) -> None:
    arguments = [str(TOOL), str(notes), str(TOOL_S)]
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
    row.faults += 1
    (failed,) = await asyncio.gather(submitting, return_exceptions=True)
    if failed is not None and not isinstance(failed, httpx2.TransportError):
        row.wrong.append(f"a submission failed: {failed!r:.200}")
    await asyncio.to_thread(program.start)
    # Like a careful client, submit all of them again, also those that were answered. Nothing may run twice.
    await _submit(program, turn_ids, row)


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
        if (await http.get("/daemon")).status_code != 200:
            row.lost += 1


async def _check(program: _RestartedDaemon, follower: Follower, submitted: list[str], notes: Path, row: Row) -> None:
    """Compare the log, the events that a resumed client received, and the calls that the tool recorded."""
    async with program.client() as http:
        whole = await whole_log(http)
    received, logged = Counter(e["seq"] for e in follower.events), Counter(e["seq"] for e in whole)
    row.lost += (logged - received).total()
    row.doubled += (received - logged).total()
    if {e["seq"]: e for e in whole} != {e["seq"]: e for e in follower.events}:
        row.wrong.append("a received event differs from the one in the log")
    ended = Counter(e["turn_id"] for e in whole if e["event"] in TERMINAL)
    row.lost += (Counter(submitted) - ended).total()
    row.doubled += (ended - Counter(submitted)).total()
    text = await asyncio.to_thread(notes.read_text, encoding="utf-8")
    noted = Counter(text.split())
    row.doubled += sum(count - 1 for count in noted.values())
    done = {e["turn_id"] for e in whole if e["event"] == "turn.done"}
    row.lost += len(done - noted.keys())
    codes = Counter(e["data"]["error"]["code"] for e in whole if e["event"] == "turn.error")
    if set(codes) - {"daemon-restarted"}:
        row.wrong.append(f"turns ended with {dict(codes)}")
    try:
        check_log(whole)
    except AssertionError as exc:
        row.wrong.append(f"the log violates an invariant: {exc!s:.300}")
    row.notes = f"{len(submitted)} turns, {len(done)} succeeded, {codes.total()} interrupted; {len(whole)} events"
