"""Run daemons in this process or in another one, follow their events, and check their logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Self

import httpx2
import websockets
from websockets.asyncio.client import ClientConnection

from lmx_lab.client.credentials import STATE
from lmx_lab.daemon.daemon import Daemon
from lmx_lab.daemon.home import DaemonHome
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import sessions
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.daemon.toolbox import Toolbox
from lmx_lab.daemon.tools import ToolResult
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.daemon.turns.runner import TurnRunner
from lmx_lab.settings import Settings
from lmx_lab.wire.daemon import StateFile
from lmx_lab.wire.events import TurnText
from lmx_lab.wire.mcp import ToolRecord
from lmx_lab.wire.sessions import CreateSession, Decision, PermissionRecord, SessionSnapshot, SubmitTurn, TurnRecord
from tests.support.model_server import Scripted, Scripts
from tests.support.sockets import HANDSHAKE
from tests.support.waiting import WAIT_S, auntil

UPSTREAM = "http://127.0.0.1:9"
"""An address without a server, for tests that call no model."""


@contextlib.contextmanager
def serving(home: Path, limits: Limits | None = None, **settings: Any) -> Iterator[Daemon]:
    settings = {"home": home, "daemon_port": 0, "upstream": UPSTREAM, **settings}
    daemon = Daemon(settings=Settings(**settings), limits=limits)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop(mode="now")


@contextlib.contextmanager
def client(daemon: Daemon | StateFile, **headers: str) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {daemon.token}", **headers}
    with httpx2.Client(base_url=daemon.url, headers=headers, timeout=WAIT_S, trust_env=False) as http:
        yield http


def connect(daemon: Daemon, query: str = "", *, token: str | None = None, **options: Any) -> Any:
    """Open a WebSocket of events, with the token in a header."""
    headers = {"Authorization": f"Bearer {token or daemon.token}", **options.pop("headers", {})}
    address = f"{daemon.url.replace('http', 'ws', 1)}/v3/events{query}"
    return websockets.connect(address, additional_headers=headers, proxy=None, open_timeout=WAIT_S, **options)


async def frames_until(socket: ClientConnection, kind: str) -> list[dict[str, Any]]:
    """Receive frames up to and including the first of this name."""
    frames: list[dict[str, Any]] = []
    while not frames or frames[-1]["event"] != kind:
        frames.append(json.loads(await socket.recv()))
    return frames


def write_tokens(daemon: Daemon, count: int, session_id: str = "s", text: str = "word") -> int:
    """Write ``count`` events in one transaction and return the seq of the last."""
    data = TurnText(message_id="msg_1", text=text)

    def work(transaction: Transaction) -> int:
        return [transaction.append("turn.token", data, session_id=session_id, turn_id="t") for _ in range(count)][-1]

    return daemon.run(daemon.services.store.write(work))


def raw_subscriber(daemon: Daemon, query: str = "", *, receive_bytes: int | None = None) -> socket.socket:
    """Subscribe with a plain socket from which only the status line of the handshake was read."""
    bare = socket.socket()
    bare.settimeout(WAIT_S)
    if receive_bytes is not None:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    bare.connect(("127.0.0.1", daemon.port))
    lines = [
        f"GET /v3/events{query} HTTP/1.1",
        f"Host: 127.0.0.1:{daemon.port}",
        f"Authorization: Bearer {daemon.token}",
        *(f"{name}: {value}" for name, value in HANDSHAKE),
    ]
    bare.sendall("\r\n".join([*lines, "", ""]).encode())
    assert bare.recv(12) == b"HTTP/1.1 101"
    return bare


def settled(daemon: Daemon, condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true on the daemon's event loop within ``WAIT_S``."""
    with contextlib.suppress(TimeoutError):
        daemon.run(auntil(condition))
        return True
    return False


TOKEN = "open-sesame-42"


def write_state(home: Path, **changes: Any) -> Path:
    """Write the state file of a daemon, which need not run."""
    fields = {"pid": 1, "started_at": "2026-11-21T10:00:00.123Z", "daemon_id": "dmn_1", "host": "127.0.0.1"}
    folder = home / "daemon"
    folder.mkdir(parents=True, exist_ok=True)
    DaemonHome(folder).publish(StateFile.model_validate({**fields, "port": 4321, "token": TOKEN, **changes}))
    return folder / STATE


PROCESS_WAIT_S = 60.0
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
        deadline = time.monotonic() + PROCESS_WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                self.state = StateFile.model_validate_json((self.folder / STATE).read_bytes())
                if self.state.pid == self.process.pid:
                    return self
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
        return self.process.wait(PROCESS_WAIT_S)

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=f"{self.state.url}/v3",
            headers={"authorization": f"Bearer {self.state.token}"},
            timeout=PROCESS_WAIT_S,
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
                await self._receive()
            await asyncio.sleep(0.01)

    async def _receive(self) -> None:
        """Receive events on one connection, to its end."""
        state = self.program.state
        address = f"{state.url.replace('http', 'ws', 1)}/v3/events?after={self.cursor}{self.query}"
        headers = {"Authorization": f"Bearer {state.token}"}
        connecting = websockets.connect(address, additional_headers=headers, proxy=None, open_timeout=PROCESS_WAIT_S)
        async with connecting as socket:
            async for text in socket:
                event = json.loads(text)
                if event["seq"] is None:
                    assert event["event"] != "stream.reset", event
                    continue
                self.cursor = event["seq"]
                async with self.changed:
                    self.events.append(event)
                    self.changed.notify_all()

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
                await asyncio.wait_for(more, PROCESS_WAIT_S)


def check_log(events: Sequence[Mapping[str, Any]], *, without_tokens: Set[str] = frozenset()) -> None:
    """Check the invariants of a log, for every turn that was accepted.

    Args:
        without_tokens: Ids of turns whose token events may have been deleted, because the turns ended long ago.
    """
    seqs = [event["seq"] for event in events]
    assert seqs == sorted(set(seqs)), "in order, and each once"
    turns: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["turn_id"] is not None:
            turns[event["session_id"], event["turn_id"]].append(event)
    for (_, turn_id), of_turn in turns.items():
        _check_turn(of_turn, has_tokens=turn_id not in without_tokens)


def _check_turn(events: list[Mapping[str, Any]], *, has_tokens: bool) -> None:
    kinds = [event["event"] for event in events]
    assert kinds[0] == "turn.queued", kinds
    assert [kind for kind in kinds if kind in TERMINAL] == [kinds[-1]], f"exactly one end, at the end: {kinds}"

    def data(kind: str) -> list[Any]:
        return [event["data"] for event in events if event["event"] == kind]

    messages = [found["message"] for found in data("message.done")]
    started, ended = (Counter(found["call_id"] for found in data(kind)) for kind in ("tool.start", "tool.end"))
    assert max([*started.values(), *ended.values()], default=1) == 1
    assert set(started) <= set(ended), "all that began has ended"
    assert ended == Counter(call["call_id"] for message in messages for call in message["tool_calls"])
    requested, resolved = (
        Counter(found["permission"]["permission_id"] for found in data(kind))
        for kind in ("permission.request", "permission.resolved")
    )
    assert requested == resolved
    assert max(resolved.values(), default=1) == 1
    streamed: dict[tuple[str, str], str] = defaultdict(str)
    for kind in ("turn.token", "turn.thinking"):
        for found in data(kind):
            assert found["text"]
            streamed[kind, found["message_id"]] += found["text"]
    done = {
        (kind, message["message_id"]): message[field]
        for message in messages
        for kind, field in (("turn.token", "content"), ("turn.thinking", "reasoning_content"))
        if message[field]
    }
    assert streamed == done or not has_tokens
    assert events[-1]["data"]["text"] in ({messages[-1]["content"]} if messages else set()) | {""}


async def whole_log(http: httpx2.AsyncClient) -> list[dict[str, Any]]:
    """Return all events, read by polling."""
    events: list[dict[str, Any]] = []
    cursor, more = 0, True
    while more:
        page = (await http.get("/events", params={"after": cursor})).json()
        events += page["events"]
        cursor, more = page["cursor"], page["more"]
    return events


FREE, ASKS = "add", "write"


class ScriptedToolbox(Toolbox):
    """A toolbox with the tool ``add``, which needs no permission, and ``write``, which does. ``work`` handles calls."""

    def __init__(self) -> None:
        self.work: Callable[[str, dict[str, Any], Callable[[str], None]], Any] = lambda name, arguments, note: "done"
        """Sync or async function that returns a text or a ``ToolResult``."""
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.absences: dict[str, str] = {}
        """Why tools are not available, by name."""
        self.running = 0
        self.most_running = 0
        schema = {"type": "object", "properties": {}}
        self.listed = [
            ToolRecord(name=FREE, description="Adds.", parameters=schema, read_only=True, permission="ask"),
            ToolRecord(name=ASKS, description="Writes.", parameters=schema, read_only=False, permission="ask"),
        ]

    def list_tools(self) -> list[ToolRecord]:
        return self.listed

    @property
    def is_starting(self) -> bool:
        return False

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
        self, store: Store, log: EventLog, model: Scripted | None, toolbox: ScriptedToolbox, turns: TurnRunner
    ) -> None:
        self.store, self.log, self.model, self.toolbox, self.turns = store, log, model, toolbox, turns

    async def session(self, *scripts: Scripts, **fields: Any) -> str:
        """Append scripts to those of the model, and create a session."""
        if scripts:
            assert self.model is not None
            self.model.then(*scripts)
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

    async def begin(self, *scripts: Scripts, **fields: Any) -> tuple[str, str]:
        """Append scripts to those of the model, submit a turn in a new session, and return the ids of both."""
        session_id = await self.session(*scripts)
        return session_id, await self.submit(session_id, **fields)

    async def run(self, session_id: str, content: str = "hello", **fields: Any) -> TurnRecord:
        return await self.ended(session_id, await self.submit(session_id, content, **fields))

    async def answer(self, *scripts: Scripts, **fields: Any) -> TurnRecord:
        """Append scripts to those of the model, and run a turn in a new session."""
        return await self.ended(*await self.begin(*scripts, **fields))

    async def events(self, session_id: str | None = None, turn_id: str | None = None) -> list[dict[str, Any]]:
        """Return all events in the log, or those of one session or turn."""
        rows = await self.store.read(lambda reading: reading.fetch_all("SELECT * FROM events ORDER BY seq"))
        return [
            {**row, "data": json.loads(row["data"])}
            for row in map(dict, rows)
            if session_id in (None, row["session_id"]) and turn_id in (None, row["turn_id"])
        ]

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

    async def decide(self, decision: Literal["allow", "deny"], *, scope: Literal["once", "session"] = "once") -> None:
        """Wait for a permission request, and decide the only pending one."""
        (permission,) = await self.asked()
        await self.turns.decide(permission.permission_id, Decision(decision=decision, scope=scope))

    async def snapshot(self, session_id: str) -> SessionSnapshot:
        return await self.store.read(lambda reading: sessions.read_snapshot(reading, session_id))


@asynccontextmanager
async def daemon(
    folder: Path,
    upstream: Scripted | str,
    toolbox: ScriptedToolbox | None = None,
    *,
    stop: bool = True,
    retry_s: float = 0.01,
    tools_start_s: float = 10.0,
    **limits: Any,
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
    tools = toolbox or ScriptedToolbox()
    parts: dict[str, Any] = {"store": store, "upstream": far, "toolbox": tools, "limits": allowed}
    turns = TurnRunner(**parts, retry_s=retry_s, tools_start_s=tools_start_s)
    made = TurnHarness(store, log, None if isinstance(upstream, str) else upstream, tools, turns)
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
