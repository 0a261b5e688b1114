"""Run turns on a real store, with a scripted upstream and tools that a test controls."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lmx_lab.daemon import sessions
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.store import Store
from lmx_lab.daemon.tools.tool import DaemonTool, ToolResult
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.daemon.turns.runner import TurnRunner
from lmx_lab.wire.sessions import CreateSession, PermissionRecord, SessionSnapshot, SubmitTurn, TurnRecord
from tests.daemon.scripted import Scripted

WAIT_S = 20.0
TERMINAL = ("turn.done", "turn.error")
FREE, ASKS = "add", "write"


async def until(true: Callable[[], bool]) -> None:
    """Poll a condition for which there is no notification."""
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class ScriptedToolbox:
    """A toolbox with the tool ``add``, which needs no permission, and ``write``, which does. ``work`` handles calls."""

    def __init__(self) -> None:
        self.work: Callable[[str, dict[str, Any], Callable[[str], None]], Any] = lambda name, arguments, note: "done"
        """Sync or async function that returns a text or a ``ToolResult``."""
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.absences: dict[str, str] = {}
        """Why tools are not available, by name."""
        self.running = 0
        self.most_running = 0
        self.listed = [
            DaemonTool(name=FREE, description="Adds.", parameters={"type": "object", "properties": {}}, read_only=True),
            DaemonTool(name=ASKS, description="Writes.", parameters={"type": "object", "properties": {}}),
        ]

    def list_tools(self) -> list[DaemonTool]:
        return self.listed

    is_starting = False

    async def wait_started(self) -> None:
        """Return immediately."""

    async def explain_absence(self, name: str) -> str | None:
        return self.absences.get(name)

    async def call(self, name: str, arguments: dict[str, Any], *, on_progress: Callable[[str], None]) -> ToolResult:
        self.called.append((name, arguments))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            result = self.work(name, arguments, on_progress)
            if asyncio.iscoroutine(result):
                result = await result
        finally:
            self.running -= 1
        return result if isinstance(result, ToolResult) else ToolResult(status="ok", text=result)


class TurnHarness:
    """The components of a daemon that turns need."""

    def __init__(
        self, store: Store, log: EventLog, upstream: ModelClient, toolbox: ScriptedToolbox, limits: Limits
    ) -> None:
        self.store, self.log, self.upstream, self.toolbox = store, log, upstream, toolbox
        self.turns = TurnRunner(store=store, upstream=upstream, toolbox=toolbox, limits=limits)

    async def session(self, **fields: Any) -> str:
        body = CreateSession(**fields)
        made, _ = await self.store.write(lambda tx: sessions.create(tx, body))
        return made.session_id

    async def submit(self, session_id: str, content: str = "hello", **fields: Any) -> str:
        accepted, _ = await self.turns.submit(session_id, SubmitTurn(content=content, **fields))
        return accepted.turn_id

    async def ended(self, session_id: str, turn_id: str) -> TurnRecord:
        record = await self.turns.read(session_id, turn_id, wait_s=WAIT_S)
        assert record.ended_at is not None, f"{turn_id} is {record.status} after {WAIT_S} s"
        return record

    async def run(self, session_id: str, content: str = "hello", **fields: Any) -> TurnRecord:
        return await self.ended(session_id, await self.submit(session_id, content, **fields))

    async def events(self, session_id: str | None = None, turn_id: str | None = None) -> list[dict[str, Any]]:
        """Return all events in the log, or those of one session or turn."""
        rows = await self.store.read(lambda reading: reading.fetch_all("SELECT * FROM events ORDER BY seq"))
        fits = [
            {**row, "data": json.loads(row["data"])}
            for row in map(dict, rows)
            if session_id in (None, row["session_id"]) and turn_id in (None, row["turn_id"])
        ]
        return fits

    async def kinds(self, session_id: str, turn_id: str | None = None) -> list[str]:
        """Return the names of a session's or turn's events, without text and progress."""
        left_out = ("turn.token", "turn.thinking", "turn.progress", "session.created")
        return [e["event"] for e in await self.events(session_id, turn_id) if e["event"] not in left_out]

    async def seen(self, event: str, count: int = 1, session_id: str | None = None) -> list[dict[str, Any]]:
        """Wait until ``count`` events of this name are in the log."""
        async with asyncio.timeout(WAIT_S):
            while True:
                grown = self.log.watch()
                found = [item for item in await self.events(session_id) if item["event"] == event]
                if len(found) >= count:
                    return found
                # Not awaited directly, because a timeout would cancel the shared future.
                await asyncio.wait([grown])

    async def asked(self, count: int = 1) -> list[PermissionRecord]:
        """Return the pending permissions once ``count`` were requested."""
        await self.seen("permission.request", count)
        return (await self.turns.list_permissions()).permissions

    async def snapshot(self, session_id: str) -> SessionSnapshot:
        return await self.store.read(lambda reading: sessions.read_snapshot(reading, session_id))


@asynccontextmanager
async def daemon(
    folder: Path, upstream: Scripted | str, toolbox: ScriptedToolbox | None = None, *, stop: bool = True, **limits: Any
) -> AsyncIterator[TurnHarness]:
    """
    Args:
        stop: Whether the turns are stopped at the end. Otherwise the database is closed first, which looks like
            ``kill -9`` in the database.
    """
    allowed = Limits(**limits)
    store = await Store.open(folder / "daemon.db")
    log = EventLog(store, allowed)
    await log.start()
    far = ModelClient(upstream if isinstance(upstream, str) else upstream.url)
    made = TurnHarness(store, log, far, toolbox or ScriptedToolbox(), allowed)
    await made.turns.start()
    try:
        yield made
    finally:
        if not stop:
            # From here on nothing can be written.
            await store.close()
        await made.turns.stop(mode="now", grace_s=0)
        await far.aclose()
        await store.close()


def check_invariants(events: Iterable[Mapping[str, Any]]) -> None:
    """Check the invariants 1, 2, 5 and 6 of the design, and 3 as far as the log shows it, for every accepted turn."""
    turns: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["turn_id"] is not None:
            turns[event["session_id"], event["turn_id"]].append(event)
    for of_turn in turns.values():
        _check_turn(of_turn)


def _check_turn(events: list[Mapping[str, Any]]) -> None:
    kinds = [event["event"] for event in events]
    assert kinds[0] == "turn.queued", kinds
    assert sum(kind in TERMINAL for kind in kinds) == 1, kinds
    assert kinds[-1] in TERMINAL, kinds
    started = Counter(event["data"]["call_id"] for event in events if event["event"] == "tool.start")
    ended = Counter(event["data"]["call_id"] for event in events if event["event"] == "tool.end")
    asked_for = Counter(
        call["call_id"]
        for event in events
        if event["event"] == "message.done"
        for call in event["data"]["message"]["tool_calls"]
    )
    assert max([*started.values(), *ended.values()], default=1) == 1
    assert set(started) <= set(ended)
    assert ended == asked_for
    requested = Counter(_permission(event) for event in events if event["event"] == "permission.request")
    resolved = Counter(_permission(event) for event in events if event["event"] == "permission.resolved")
    assert requested == resolved
    assert max(resolved.values(), default=1) == 1
    _check_texts(events)


def _permission(event: Mapping[str, Any]) -> str:
    return str(event["data"]["permission"]["permission_id"])


def _check_texts(events: list[Mapping[str, Any]]) -> None:
    streamed: dict[tuple[str, str], str] = defaultdict(str)
    done: dict[tuple[str, str], str] = defaultdict(str)
    for event in events:
        if event["event"] in ("turn.token", "turn.thinking"):
            assert event["data"]["text"]
            streamed[event["event"], event["data"]["message_id"]] += event["data"]["text"]
        elif event["event"] == "message.done":
            message = event["data"]["message"]
            for kind, text in (
                ("turn.token", message["content"]),
                ("turn.thinking", message["reasoning_content"] or ""),
            ):
                if text:
                    done[kind, message["message_id"]] = text
    assert streamed == done
    last = [event["data"]["message"] for event in events if event["event"] == "message.done"]
    assert events[-1]["data"]["text"] in {message["content"] for message in last[-1:]} | {""}
