"""Tests that a session is not busy with a turn anymore when a client receives the terminal event of that turn."""

import asyncio
import json
import random

import pytest
import websockets

from tests.support.daemons import PROCESS_WAIT_S, TERMINAL, Program
from tests.support.model_server import Scripted, refuses, says

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TURNS = 60


async def test_a_session_is_idle_once_the_terminal_event_of_its_turn_is_visible(tmp_path):
    chance = random.Random(11)
    answers = [says("a"), says(*("b" * 30)), refuses(503, "no-model-loaded"), [*says("c")[:2], 0.05, *says("c")[2:]]]
    with Scripted(lambda body: chance.choice(answers)) as upstream:
        program = Program(tmp_path, upstream.url).start()
        try:
            seen = await asyncio.wait_for(ends_and_looks(program, chance), 200)
        finally:
            assert program.stop() == 0
    assert len(seen) == TURNS
    assert {"turn.done", "turn.error"} == set(seen)


async def ends_and_looks(program, chance):
    """Submit turns to some sessions, cancel some of them, and read the session at each terminal event."""
    state = program.state
    address = f"{state.url.replace('http', 'ws', 1)}/v3/events?types=turn.done,turn.error"
    headers = {"Authorization": f"Bearer {state.token}"}
    seen = []
    async with (
        program.client() as http,
        websockets.connect(address, additional_headers=headers, proxy=None, open_timeout=PROCESS_WAIT_S) as events,
    ):
        for session_id in "abc":
            await http.post("/sessions", json={"session_id": session_id})
        left = [f"{chance.choice('abc')} turn-{number}" for number in range(TURNS)]
        while len(seen) < TURNS:
            for one in left[:3]:
                session_id, turn_id = one.split()
                answer = await http.post(f"/sessions/{session_id}/turns", json={"turn_id": turn_id, "content": "go"})
                assert answer.status_code == 202, answer.text
                if chance.random() < 0.3:
                    await http.post(f"/sessions/{session_id}/turns/{turn_id}/cancel")
            del left[:3]
            event = json.loads(await events.recv())
            if event["event"] not in TERMINAL:
                continue
            seen.append(event["event"])
            shown = (await http.get(f"/sessions/{event['session_id']}")).json()
            assert event["turn_id"] not in (shown["active_turn_id"], *shown["queued_turn_ids"])
            assert shown["status"] != "idle" or shown["active_turn_id"] is None
            turn = (await http.get(f"/sessions/{event['session_id']}/turns/{event['turn_id']}")).json()
            assert (turn["status"], turn["ended_at"] is not None) == (event["event"].partition(".")[2], True)
    return seen
