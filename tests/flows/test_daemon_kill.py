"""Tests that a daemon that is killed at random moments loses and repeats no events, and runs no tool twice."""

import asyncio
import random
import sqlite3
import sys
from collections import Counter

import httpx2
import pytest

from tests.support.daemons import PROCESS_WAIT_S, Follower, Program, check_log, whole_log
from tests.support.mcp import COUNTING
from tests.support.model_server import Scripted, calls, says

pytestmark = [pytest.mark.anyio, pytest.mark.long]
KILLS = 10
TURNS = 3
"""Number of turns that are submitted for each kill."""
PAUSE_S = 0.004
TOOL_S = 0.03


def script(body):
    """Return a tool call with the note of the turn, followed by forty tokens."""
    last = body["messages"][-1]
    if last["role"] == "user":
        return calls(("counting__count", {"note": last["content"].split()[-1]}), text=("Let ", "me ", "count. "))
    steps = []
    for step in says(*(f"word{at} " for at in range(40))):
        steps += [step, PAUSE_S]
    return steps


@pytest.fixture
def upstream():
    with Scripted(script) as upstream:
        yield upstream


async def submit(program, turn_id):
    """Submit a turn with an id, so that the request can be repeated."""
    body = {"turn_id": turn_id, "content": turn_id}
    async with program.client() as http:
        answer = await http.post("/sessions/s/turns", json=body)
    assert answer.status_code in (200, 202), answer.text


async def submit_until_killed(program, turn_ids, accepted):
    for turn_id in turn_ids:
        await submit(program, turn_id)
        accepted.add(turn_id)


# Each start may take seconds on a busy computer.
@pytest.mark.timeout(900)
async def test_a_daemon_that_is_killed_at_any_moment_loses_and_repeats_nothing(tmp_path, upstream):
    notes = tmp_path / "notes.txt"
    program = Program(tmp_path, upstream.url).start()
    follower = Follower(program)
    submitted = []
    try:
        await set_up(program, notes)
        async with follower.following():
            await kill_repeatedly(program, follower, submitted)
            await follower.until_ended(submitted)
        await check(program, follower, submitted, notes)
    finally:
        if program.process.poll() is None:
            program.stop()


async def kill_repeatedly(program, follower, submitted):
    chance = random.Random(7)
    for kill in range(KILLS):
        turn_ids = [f"turn-{kill}-{number}" for number in range(TURNS)]
        submitted += turn_ids
        accepted = set()
        submitting = asyncio.create_task(submit_until_killed(program, turn_ids, accepted))
        await wait_for_moment(chance, follower, early=kill % 4 == 0)
        program.kill()
        (failed,) = await asyncio.gather(submitting, return_exceptions=True)
        assert failed is None or isinstance(failed, httpx2.TransportError), failed
        await asyncio.to_thread(program.start)
        # The turns whose answer was lost, and those that the daemon did not receive.
        for turn_id in turn_ids:
            if turn_id not in accepted:
                await submit(program, turn_id)


async def wait_for_moment(chance, follower, *, early):
    """Wait for the moment of the kill: during start or recovery, or in a turn after another one has ended."""
    if early:
        await asyncio.sleep(chance.uniform(0.0, 0.5))
        return
    seen = len(follower.events)

    def has_worked():
        return any(event["event"] == "turn.done" for event in follower.events[seen:])

    async with follower.changed:
        await asyncio.wait_for(follower.changed.wait_for(has_worked), PROCESS_WAIT_S)
    await asyncio.sleep(chance.uniform(0.0, 0.3))


async def set_up(program, notes):
    async with program.client() as http:
        server = {
            "name": "counting",
            "command": sys.executable,
            "args": [str(COUNTING), str(notes), str(TOOL_S)],
            "permission": "allow",
        }
        assert (await http.post("/mcp/servers", json=server)).status_code == 201
        assert (await http.post("/sessions", json={"session_id": "s"})).status_code == 201


async def check(program, follower, submitted, notes):
    check_log(follower.events)
    async with program.client() as http:
        whole = await whole_log(http)
    seen = {event["seq"]: event for event in follower.events}
    assert [event["seq"] for event in whole] == list(seen), "a client that resumes has the whole log"
    assert whole == follower.events
    ended = Counter(event["turn_id"] for event in whole if event["event"] in ("turn.done", "turn.error"))
    assert ended == Counter(submitted), "every accepted turn ended once, and no other"
    started = Counter(event["turn_id"] for event in whole if event["event"] == "tool.start")
    noted = Counter((await asyncio.to_thread(notes.read_text, encoding="utf-8")).split())
    assert max(noted.values()) == 1, "no started tool ran again"
    assert set(noted) <= set(started), "a tool is in the log before it runs"
    done = [event["turn_id"] for event in whole if event["event"] == "turn.done"]
    assert set(done) <= set(noted), "what ended well had its tool"
    cut = [event for event in whole if event["event"] == "turn.error"]
    assert {event["data"]["error"]["code"] for event in cut} == {"daemon-restarted"}
    async with program.client() as http:
        shown = (await http.get("/sessions/s")).json()
    assert (shown["status"], shown["queued_turn_ids"], shown["permissions"]) == ("idle", [], [])
    program.stop()
    with sqlite3.connect(program.folder / "daemon.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    assert len(done) >= KILLS // 2, "turns came through"
    assert len(cut) >= KILLS // 4, "turns were cut"
