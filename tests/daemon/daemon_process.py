"""Run ``lmx-lab daemon`` as a process, and follow its events with a minimal client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Set
from pathlib import Path
from typing import Any, Self

import httpx2
import websockets

from lmx_lab.wire.daemon import StateFile

WAIT_S = 60.0
TERMINAL = ("turn.done", "turn.error")


class Program:
    """A daemon in one home. ``start()`` after ``kill()`` restarts it."""

    def __init__(self, home: Path, upstream: str) -> None:
        self.home = home
        self.upstream = upstream
        self.state: StateFile
        self.process: subprocess.Popen[bytes]

    @property
    def folder(self) -> Path:
        return self.home / "daemon"

    def start(self) -> Self:
        environment = {**os.environ, "LMX_LAB_HOME": str(self.home), "LMX_LAB_LOG_LEVEL": "warning"}
        command = [sys.executable, "-m", "lmx_lab", "daemon", "--port", "0", "--upstream", self.upstream]
        with (self.home / "out.txt").open("ab") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        self.state = self._state()
        return self

    def _state(self) -> StateFile:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                state = StateFile.model_validate_json((self.folder / "state.json").read_bytes())
                if state.pid == self.process.pid:
                    return state
            assert self.process.poll() is None, (self.home / "out.txt").read_text()
            time.sleep(0.005)
        raise AssertionError("no state file")

    def kill(self) -> None:
        """Kill the process without a warning."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=f"{self.state.url}/v3",
            headers={"authorization": f"Bearer {self.state.token}"},
            timeout=WAIT_S,
            trust_env=False,
            # Without TLS; loading the certificates would take 35 ms for each client.
            verify=False,
        )


class Follower:
    """Collects all events. Reconnects with the cursor of the last event, also after a restart of the daemon."""

    def __init__(self, program: Program, query: str = "") -> None:
        self.program = program
        self.query = query
        self.cursor = 0
        self.events: list[dict[str, Any]] = []
        self.connections = 0
        self.changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the events within the block."""
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled(), task.exception()

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(OSError, websockets.WebSocketException):
                await self.connect_once()
            await asyncio.sleep(0.01)

    async def connect_once(self, most: int | None = None) -> None:
        """Receive events on one connection, to its end or up to ``most`` events."""
        state = self.program.state
        address = f"{state.url.replace('http', 'ws', 1)}/v3/events?after={self.cursor}{self.query}"
        headers = {"Authorization": f"Bearer {state.token}"}
        connecting = websockets.connect(address, additional_headers=headers, proxy=None, open_timeout=WAIT_S)
        async with connecting as socket:
            self.connections += 1
            async for text in socket:
                event = json.loads(text)
                if event["seq"] is None:
                    assert event["event"] != "stream.reset", event
                    continue
                self.cursor = event["seq"]
                async with self.changed:
                    self.events.append(event)
                    self.changed.notify_all()
                if most is not None and (most := most - 1) == 0:
                    return

    @property
    def ended_turns(self) -> int:
        """Number of turns whose end was received."""
        return sum(event["event"] in TERMINAL for event in self.events)

    async def until_ended(self, turn_ids: list[str]) -> None:
        """Wait until these turns have ended.

        Raises:
            TimeoutError: no turn has ended for ``WAIT_S``.
        """

        def ended() -> bool:
            return set(turn_ids) <= {event["turn_id"] for event in self.events if event["event"] in TERMINAL}

        async with self.changed:
            while not ended():
                so_far = self.ended_turns
                more = self.changed.wait_for(lambda: self.ended_turns > so_far)  # noqa: B023
                await asyncio.wait_for(more, WAIT_S)


def check_log(events: list[dict[str, Any]], *, without_tokens: Set[str] = frozenset()) -> None:
    """Check the invariants of a complete log.

    Args:
        without_tokens: Ids of turns whose token events may have been deleted, because the turns ended long ago.
    """
    seqs = [event["seq"] for event in events]
    assert seqs == sorted(set(seqs)), "in order, and each once"
    turns: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["turn_id"] is not None:
            turns.setdefault(event["turn_id"], []).append(event)
    for turn_id, of_turn in turns.items():
        check_turn(of_turn, has_tokens=turn_id not in without_tokens)


def check_turn(events: list[dict[str, Any]], *, has_tokens: bool = True) -> None:
    kinds = [event["event"] for event in events]
    assert kinds[0] == "turn.queued"
    assert [kind for kind in kinds if kind in TERMINAL] == [kinds[-1]], f"exactly one end, at the end: {kinds}"
    for begin, end in (("tool.start", "tool.end"), ("permission.request", "permission.resolved")):
        key = "call_id" if begin == "tool.start" else "permission_id"

        def found(kind: str, key: str = key) -> Counter[str]:
            values = [e["data"] if key == "call_id" else e["data"]["permission"] for e in events if e["event"] == kind]
            return Counter(value[key] for value in values)

        assert found(begin) <= found(end), "all that began has ended"
        assert max(found(end).values(), default=1) == 1
    texts: dict[str, str] = {}
    for event in events:
        data = event["data"]
        if event["event"] == "turn.token":
            texts[data["message_id"]] = texts.get(data["message_id"], "") + data["text"]
        elif event["event"] == "message.done" and has_tokens:
            message = data["message"]
            assert texts.get(message["message_id"], "") == message["content"]


async def whole_log(http: httpx2.AsyncClient) -> list[dict[str, Any]]:
    """Return all events, read by polling."""
    events: list[dict[str, Any]] = []
    cursor, more = 0, True
    while more:
        page = (await http.get("/events", params={"after": cursor})).json()
        events += page["events"]
        cursor, more = page["cursor"], page["more"]
    return events
