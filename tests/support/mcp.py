"""Run MCP servers on a real store, and check that no processes are left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lmx_lab.daemon.mcp.process_cleanup import MARK, is_alive
from lmx_lab.daemon.mcp.servers import McpServers, RestartPolicy
from lmx_lab.daemon.mcp.watchdog import ServerProcesses
from lmx_lab.daemon.storage.store import Store
from lmx_lab.daemon.tools import ToolResult
from lmx_lab.wire.events import McpStatus
from lmx_lab.wire.mcp import McpServerConfig, McpServerRecord

COUNTING, HOSTILE = (Path(__file__).parent / "mcp_servers" / f"{name}.py" for name in ("counting", "hostile"))
SECRET = "sk-0123456789abcdef"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
"""A program that ignores SIGTERM. It prints a line when it does."""
RUN = {"TEST_RUN": str(os.getpid())}
"""Environment of the servers that must have ended at the end of a test; other tests may run at the same time."""


def hostile(*modes: str, name: str = "bad", **fields: Any) -> McpServerConfig:
    args = ("-I", str(HOSTILE), *modes)
    given = {"start_timeout_s": 60.0, "tool_timeout_s": 10.0, "env": {"API_KEY": SECRET}, **fields}
    given["env"] = {**RUN, **given["env"]}
    return McpServerConfig(name=name, command=sys.executable, args=args, **given)


def quick(**fields: Any) -> RestartPolicy:
    return RestartPolicy(**{"delays_s": (0.01, 0.01), "list_interval_s": 0.01, **fields})


@dataclass
class McpHarness:
    """A store and MCP servers on it. ``again`` creates new ``McpServers`` on the same store."""

    store: Store
    folder: Path
    restarts: RestartPolicy = field(default_factory=quick)
    processes: ServerProcesses = field(init=False)
    servers: McpServers = field(init=False)
    notes: list[str] = field(default_factory=list)

    async def again(self) -> McpServers:
        # Short times, since many tests have servers that must be killed.
        self.processes = ServerProcesses(self.folder, stdin_grace_s=0.3, term_grace_s=0.3)
        self.servers = McpServers(store=self.store, processes=self.processes, restarts=self.restarts)
        await self.servers.start()
        return self.servers

    async def until(self, name: str, holds: Callable[[McpServerRecord], bool]) -> McpServerRecord:
        async with asyncio.timeout(30):
            while not holds(record := await self.servers.read(name)):  # noqa: ASYNC110 (not all of it has an event)
                await asyncio.sleep(0.01)
        return record

    async def ready(self, config: McpServerConfig) -> McpServerRecord:
        await self.servers.add(config)
        record = await self.until(config.name, lambda record: record.state not in ("starting", "restarting"))
        assert record.state == "ready", record
        return record

    async def call(self, name: str, /, **arguments: Any) -> ToolResult:
        result = await self.servers.call(name, arguments, self.notes.append)
        assert result is not None
        return result

    async def events(self) -> list[dict[str, Any]]:
        """Return the status events, once the last one of each server describes the server as it is now.

        A new status can be read shortly before its event is stored.
        """
        async with asyncio.timeout(30):
            while True:
                rows = await self.store.read(
                    lambda reading: reading.fetch_all("SELECT data FROM events WHERE event = 'mcp.status' ORDER BY seq")
                )
                events = [json.loads(row["data"]) for row in rows]
                last = {event["name"]: event for event in events}
                records = (await self.servers.list_servers()).servers
                if all(last.get(it.name) == it.model_dump(include=set(McpStatus.model_fields)) for it in records):
                    return events
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def open_harness(tmp_path: Path) -> AsyncIterator[McpHarness]:
    store = await Store.open(tmp_path / "daemon.db")
    harness = McpHarness(store, tmp_path)
    await harness.again()
    try:
        yield harness
    finally:
        await harness.servers.stop()
        await store.close()
        assert left_over() == []


DAEMON = """
import asyncio, json, os, signal, sys
from pathlib import Path
from lmx_lab.daemon.storage.store import Store
from tests.support.mcp import McpHarness, hostile

async def main():
    folder, how = Path(sys.argv[1]), sys.argv[2]
    harness = McpHarness(await Store.open(folder / "daemon.db"), folder)
    await harness.again()
    for name in ("one", "two"):
        await harness.ready(hostile("ignore_term", name=name))
    pids = [server.pid for server in (await harness.servers.list_servers()).servers]
    for name in ("one", "two"):
        pids += json.loads((await harness.call(f"{name}__family")).text)
    if how == "at start":
        # The mark of this server is not known to anything but its environment.
        await harness.servers.add(hostile("mute", name="three", start_timeout_s=600.0))
        pids.append((await harness.until("three", lambda record: record.pid is not None)).pid)
    print(json.dumps({"servers": pids, "watchdog": harness.processes.watchdog_pid}), flush=True)
    if how == "fork" and os.fork() == 0:
        # Like a worker of multiprocessing: it has copies of all of the daemon's descriptors.
        signal.pause()
    if how == "with its watchdog":
        os.kill(harness.processes.watchdog_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
"""A daemon with two servers, each of which has two children. It kills itself."""


def killed_daemon(folder: Path, *arguments: str, program: str = DAEMON) -> Any:
    """Run a program with servers that kills itself, and return the line of JSON that it has printed."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, str(folder), *arguments]
    environment = {"PYTHONPATH": str(root), "LMX_TEST": str(folder)}
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        # Does not read to the end of the output, because a fork can hold it open.
        return json.loads(process.stdout.readline())


def left_over() -> list[psutil.Process]:
    """Return the living processes of servers of this test run, and of their children."""
    found = []
    for process in psutil.process_iter():
        try:
            given = process.environ()
            if MARK in given and given.items() >= RUN.items() and is_alive(process):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
