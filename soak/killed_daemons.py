"""The daemon killed in turns, again and again: nothing that it has said is lost, nothing is done or told twice."""

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
from soak.row import Row
from soak.served import END_S, Command, Daemon, Home, note_left
from soak.soak import Soak
from tests.daemon.daemon_process import TERMINAL, Follower, Program, check_log, whole_log
from tests.daemon.scripted import Scripted, calls, says

KILLS, QUICK_KILLS = 30, 3
TURNS = 3
"""Submitted for each kill."""
PAUSE_S = 0.004
TOOL_S = 0.03
MOMENT_S = 0.5
"""A kill comes so long after the submissions begin, or sooner."""
WORKED_S = 60.0
TOOL = ROOT / "tests" / "daemon" / "counting_mcp.py"
"""An MCP server whose tool writes down each of its calls."""


def run(soak: Soak) -> list[Row]:
    row = Row(part="kills: SIGKILL of the daemon in turns")
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name, Scripted(_script) as upstream:
        home = Home(Path(name))
        asyncio.run(_killed(soak, _Restarted(home, upstream.url), row))
        note_left(home, row)
    return [row]


def _script(body: dict[str, Any]) -> list[Any]:
    """A call with the turn's own note, then forty words."""
    last = body["messages"][-1]
    if last["role"] == "user":
        return calls(("counting__count", {"note": last["content"]}), text=("Let ", "me ", "count. "))
    return [part for step in says(*(f"word{at} " for at in range(40))) for part in (step, PAUSE_S)]


class _Restarted(Program):
    """The daemon of one home, again and again."""

    def __init__(self, home: Home, upstream: str) -> None:
        super().__init__(home.folder, upstream)
        self._home = home

    def start(self) -> Self:
        daemon = Daemon(self._home, self.upstream)
        self.process, self.state = daemon.process, daemon.state
        return self

    def second(self) -> tuple[int | None, str]:
        """Start another one beside it: its exit status, and what it says."""
        with Command(self._home, "daemon", "--port", "0", "--upstream", self.upstream) as command:
            return command.wait(END_S), command.output


async def _killed(soak: Soak, program: _Restarted, row: Row) -> None:
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
                row.wrong.append("turns that were accepted have not ended")
            await _refuse_a_second(program, row)
        await _check(program, follower, submitted, notes, row)
    finally:
        program.stop()
    with closing(sqlite3.connect(program.folder / "daemon.db")) as connection:
        if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            row.wrong.append("the database is damaged")


async def _set_up(program: _Restarted, notes: Path) -> None:
    arguments = [str(TOOL), str(notes), str(TOOL_S)]
    server = {"name": "counting", "command": sys.executable, "args": arguments, "permission": "allow"}
    async with program.client() as http:
        (await http.post("/mcp/servers", json=server)).raise_for_status()
        (await http.post("/sessions", json={"session_id": "s"})).raise_for_status()


async def _kill(program: _Restarted, follower: Follower, turn_ids: list[str], chance: random.Random, row: Row) -> None:
    """Every other time in a turn's work, else in the start, its recovery, or the submissions."""
    submitting = asyncio.create_task(_submit(program, turn_ids, row))
    if chance.random() < 0.5:
        await _worked(follower, len(follower.events))
    await asyncio.sleep(chance.uniform(0.0, MOMENT_S))
    program.kill()
    row.faults += 1
    (failed,) = await asyncio.gather(submitting, return_exceptions=True)
    if failed is not None and not isinstance(failed, httpx2.TransportError):
        row.wrong.append(f"a submission failed: {failed!r:.200}")
    await asyncio.to_thread(program.start)
    # As a careful client does: all of them again, those that were answered too. Nothing may run twice for it.
    await _submit(program, turn_ids, row)


async def _submit(program: _Restarted, turn_ids: list[str], row: Row) -> None:
    async with program.client() as http:
        for turn_id in turn_ids:
            row.requests += 1
            (await http.post("/sessions/s/turns", json={"turn_id": turn_id, "content": turn_id})).raise_for_status()


async def _worked(follower: Follower, seen: int) -> None:
    """Until a turn has ended well since."""
    async with follower.changed:
        await asyncio.wait_for(
            follower.changed.wait_for(lambda: any(e["event"] == "turn.done" for e in follower.events[seen:])), WORKED_S
        )


async def _refuse_a_second(program: _Restarted, row: Row) -> None:
    row.requests += 1
    row.faults += 1
    status, said = await asyncio.to_thread(program.second)
    if status != 1 or program.state.url not in said:
        row.wrong.append(f"a second daemon ended with {status}: {said[-300:]}")
    async with program.client() as http:
        if (await http.get("/daemon")).status_code != 200:
            row.lost += 1


async def _check(program: _Restarted, follower: Follower, submitted: list[str], notes: Path, row: Row) -> None:
    """What the log says, what a client that resumed was told, and what the tool has done, are the same thing."""
    async with program.client() as http:
        whole = await whole_log(http)
    told, logged = Counter(e["seq"] for e in follower.events), Counter(e["seq"] for e in whole)
    row.lost += (logged - told).total()
    row.doubled += (told - logged).total()
    if {e["seq"]: e for e in whole} != {e["seq"]: e for e in follower.events}:
        row.wrong.append("an event is another in the log than it was told")
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
        row.wrong.append(f"turns ended by {dict(codes)}")
    try:
        check_log(whole)
    except AssertionError as exc:
        row.wrong.append(f"the log is not as every log is: {exc!s:.300}")
    row.notes = f"{len(submitted)} turns, {len(done)} ended well, {codes.total()} cut; {len(whole)} events"
