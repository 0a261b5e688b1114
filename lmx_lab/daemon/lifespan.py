"""A daemon's parts, on its loop: built in order, ended in order, whatever was built of them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from lmx_lab.daemon.app import create_daemon_app
from lmx_lab.daemon.clock import iso
from lmx_lab.daemon.home import DaemonHome
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.mcp.servers import McpServers
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.storage.log import EventLog
from lmx_lab.daemon.storage.retention import keep
from lmx_lab.daemon.storage.store import Store
from lmx_lab.daemon.subscribers import Subscribers
from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.daemon.tools.toolbox import AllTools
from lmx_lab.daemon.turns.model_client import Upstream
from lmx_lab.daemon.turns.runner import Turns
from lmx_lab.errors import HostingError, LabError
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.http.middleware import VERSION
from lmx_lab.http.uvicorn_server import RunningServer, serve
from lmx_lab.settings import Settings
from lmx_lab.wire.daemon import StateFile
from lmx_lab.wire.events import DaemonStarted, DaemonStopping

log = logging.getLogger(__name__)
Mode = Literal["drain", "now"]
DATABASE = "daemon.db"
SOCKETS_S = 2.0
"""How long watchers have to take the last events."""
STEP_S = 15.0
"""How long one part may take to end before the next one is ended."""
ENDS = ("turns", "retention", "sockets", "MCP servers", "server", "upstream", "store", "state file")
"""The order in which parts end."""
MESSAGE_BYTES = 65_536
"""Of a message from a watcher, none of which means anything."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a life is made of, and how it is known."""

    daemon_id: str
    token: str = field(repr=False)
    settings: Settings
    limits: Limits
    home: DaemonHome
    tools: PythonTools
    upstream_url: str
    upstream_key: str | None = field(repr=False)


class Life:
    """From ``rise()`` to the end that ``fall()`` begins, all on the daemon's loop."""

    def __init__(self, plan: Plan, *, on_end: Callable[[], None]) -> None:
        """
        Args:
            on_end: Called last, on the loop, after an end that ``fall()`` began.
        """
        self._plan = plan
        self._on_end = on_end
        self._status: Literal["ok", "stopping"] = "ok"
        self._services: Services | None = None
        self._ending: asyncio.Task[None] | None = None
        self._hurry: asyncio.Event | None = None
        self._ends: dict[str, Callable[[], Awaitable[object]]] = {}
        """Of the parts that were built."""

    @property
    def services(self) -> Services:
        """
        Raises:
            HostingError: it has not begun.
        """
        if self._services is None:
            raise HostingError("this daemon was not started; call start() first")
        return self._services

    async def rise(self, sock: socket.socket, policy: Callable[[], GuardPolicy]) -> RunningServer:
        """Build everything; returns once requests are accepted and the state file says where.

        Raises:
            LabError: nothing is left of it.
        """
        try:
            return await self._rise(sock, policy)
        except BaseException:
            await self._end_parts()
            raise

    async def _rise(self, sock: socket.socket, policy: Callable[[], GuardPolicy]) -> RunningServer:
        plan = self._plan
        services = self._services = await self._build()
        asgi, _ = create_daemon_app(services, policy=policy, max_body_bytes=plan.settings.max_body_bytes)
        host = await serve(asgi, sock, ws_max_bytes=MESSAGE_BYTES)
        self._ends["server"] = host.stop
        state = StateFile(
            pid=os.getpid(),
            started_at=services.started_at,
            daemon_id=plan.daemon_id,
            # Where this machine reaches it, also where it listens everywhere.
            host=urlsplit(host.url).hostname or "",
            port=host.port,
            token=plan.token,
        )
        self._ends["state file"] = lambda: asyncio.to_thread(plan.home.withdraw, plan.daemon_id)
        await asyncio.to_thread(plan.home.publish, state)
        started = DaemonStarted(daemon_id=plan.daemon_id, version=VERSION)
        await services.store.write(lambda transaction: transaction.append("daemon.started", started))
        return host

    async def _build(self) -> Services:
        plan, limits = self._plan, self._plan.limits
        store = await Store.open(plan.home.folder / DATABASE)
        self._ends["store"] = store.close
        events = EventLog(store, limits)
        await events.start()
        subscribers = Subscribers(limits.subscribers)
        self._ends["sockets"] = lambda: subscribers.close(SOCKETS_S)
        servers = McpServers(store=store, limits=limits, runtime_folder=plan.home.folder)
        self._ends["MCP servers"] = servers.stop
        await servers.start()
        upstream = Upstream(plan.upstream_url, api_key=plan.upstream_key)
        self._ends["upstream"] = upstream.aclose
        toolbox = AllTools(plan.tools, servers, limits)
        turns = Turns(store=store, upstream=upstream, toolbox=toolbox, limits=limits)
        self._ends["turns"] = lambda: turns.stop(mode="now", grace_s=0)
        await turns.start()
        keeping = asyncio.create_task(keep(store, events, limits), name="lmx-lab retention")
        self._ends["retention"] = lambda: _cancelled(keeping)
        return Services(
            daemon_id=plan.daemon_id,
            started_at=iso(),
            limits=limits,
            store=store,
            log=events,
            turns=turns,
            servers=servers,
            toolbox=toolbox,
            upstream=upstream,
            subscribers=subscribers,
            status=lambda: self._status,
            shut_down=lambda asked: self.fall(asked.mode, asked.grace_s),
        )

    # The end

    def fall(self, mode: Mode, grace_s: float) -> None:
        """Begin the end, and return at once; ``now`` also cuts an end short that was begun before."""
        if self._ending is None:
            self._status = "stopping"
            self._hurry = asyncio.Event()
            self._ending = asyncio.create_task(self._fall(mode, grace_s), name="lmx-lab daemon ends")
        if mode == "now" and self._hurry is not None:
            self._hurry.set()

    async def _fall(self, mode: Mode, grace_s: float) -> None:
        try:
            await self._say_so(self.services, mode)
            if mode == "drain":
                await self._drain(self.services, grace_s)
        finally:
            await self._end_parts()
            self._on_end()

    async def _say_so(self, services: Services, mode: Mode) -> None:
        try:
            stopping = DaemonStopping(mode=mode)
            await services.store.write(lambda transaction: transaction.append("daemon.stopping", stopping))
        except LabError as exc:
            log.warning("the end could not be written to the log: %s", exc)

    async def _drain(self, services: Services, grace_s: float) -> None:
        """Let turns end, unless somebody hurries."""
        assert self._hurry is not None
        work = {asyncio.ensure_future(services.turns.stop(mode="drain", grace_s=grace_s))}
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({*work, hurry}, timeout=grace_s + STEP_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(*work, hurry)

    async def _end_parts(self) -> None:
        """One after the other, each for itself: what fails or hangs in one is no reason to leave the others running."""
        for name in ENDS:
            end = self._ends.pop(name, None)
            if end is None:
                continue
            try:
                await asyncio.wait_for(end(), STEP_S)
            except Exception:
                log.exception("%s did not end well", name)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            log.error("while the daemon ended: %r", result)
