"""Start the components of a daemon in order on its event loop, and stop them in order, even after a failed start."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from lmx_lab.daemon.app import create_daemon_app
from lmx_lab.daemon.encoding import timestamp
from lmx_lab.daemon.home import DaemonHome
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.mcp.servers import McpServers
from lmx_lab.daemon.services import Services, Subscribers
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.retention import run_retention
from lmx_lab.daemon.storage.store import Store
from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.daemon.tools.toolbox import CombinedToolbox
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.daemon.turns.runner import TurnRunner
from lmx_lab.errors import HostingError, LabError
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.http.middleware import VERSION
from lmx_lab.http.uvicorn_server import RunningServer, serve
from lmx_lab.settings import Settings
from lmx_lab.wire.daemon import StateFile
from lmx_lab.wire.events import DaemonStarted, DaemonStopping

log = logging.getLogger(__name__)
ShutdownMode = Literal["drain", "now"]
DATABASE = "daemon.db"
SUBSCRIBERS_S = 2.0
"""Time in which subscribers can receive the last events."""
COMPONENT_STOP_S = 15.0
"""Maximum time for which the stop of one component is awaited before the next one is stopped."""
STOP_ORDER = ("turns", "retention", "subscribers", "MCP servers", "server", "model client", "store", "state file")
MESSAGE_BYTES = 65_536
"""Maximum size of a WebSocket message from a client. The content of such messages is ignored."""


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """The identity of a daemon, and the values from which its components are created."""

    daemon_id: str
    token: str = field(repr=False)
    settings: Settings
    limits: Limits
    home: DaemonHome
    tools: PythonTools
    upstream_url: str
    upstream_key: str | None = field(repr=False)
    upstream_headers: Mapping[str, str] | None = field(default=None, repr=False)


class Lifespan:
    """The components of one daemon, from ``start()`` until the stop that ``begin_stop()`` begins."""

    def __init__(self, config: DaemonConfig, *, on_stopped: Callable[[], None]) -> None:
        """
        Args:
            on_stopped: Called on the event loop when all components have stopped after ``begin_stop()``.
        """
        self._config = config
        self._on_stopped = on_stopped
        self._status: Literal["ok", "stopping"] = "ok"
        self._services: Services | None = None
        self._stop_task: asyncio.Task[None] | None = None
        self._stop_now: asyncio.Event | None = None
        self._stop_functions: dict[str, Callable[[], Awaitable[object]]] = {}
        """How to stop the components that were started, by their names in ``STOP_ORDER``."""

    @property
    def services(self) -> Services:
        """The services of the routes.

        Raises:
            HostingError: The daemon was not started.
        """
        if self._services is None:
            raise HostingError("this daemon was not started; call start() first")
        return self._services

    async def start(self, sock: socket.socket, policy: Callable[[], GuardPolicy]) -> RunningServer:
        """Start all components. Returns when requests are accepted and the state file is written.

        Raises:
            LabError: A component could not be started. Those that were started have been stopped.
        """
        try:
            return await self._start(sock, policy)
        except BaseException:
            await self._stop_components()
            raise

    async def _start(self, sock: socket.socket, policy: Callable[[], GuardPolicy]) -> RunningServer:
        config = self._config
        services = self._services = await self._create_services()
        asgi, _ = create_daemon_app(services, policy=policy, max_body_bytes=config.settings.max_body_bytes)
        host = await serve(asgi, sock, ws_max_bytes=MESSAGE_BYTES)
        self._stop_functions["server"] = host.stop
        state = StateFile(
            pid=os.getpid(),
            started_at=services.started_at,
            daemon_id=config.daemon_id,
            # The address for this computer, even if the daemon listens on all interfaces.
            host=urlsplit(host.url).hostname or "",
            port=host.port,
            token=config.token,
        )
        self._stop_functions["state file"] = lambda: asyncio.to_thread(config.home.withdraw, config.daemon_id)
        await asyncio.to_thread(config.home.publish, state)
        started = DaemonStarted(daemon_id=config.daemon_id, version=VERSION)
        await services.store.write(lambda tx: tx.append("daemon.started", started))
        return host

    async def _create_services(self) -> Services:
        config, limits = self._config, self._config.limits
        store = await Store.open(config.home.folder / DATABASE)
        self._stop_functions["store"] = store.close
        events = EventLog(store, limits)
        await events.start()
        subscribers = Subscribers(limits.subscribers)
        self._stop_functions["subscribers"] = lambda: subscribers.close(SUBSCRIBERS_S)
        servers = McpServers(store=store, runtime_folder=config.home.folder)
        self._stop_functions["MCP servers"] = servers.stop
        await servers.start()
        upstream = ModelClient(config.upstream_url, api_key=config.upstream_key, headers=config.upstream_headers)
        self._stop_functions["model client"] = upstream.aclose
        toolbox = CombinedToolbox(config.tools, servers)
        turns = TurnRunner(store=store, upstream=upstream, toolbox=toolbox, limits=limits)
        self._stop_functions["turns"] = lambda: turns.stop(mode="now", grace_s=0)
        await turns.start()
        retention = asyncio.create_task(run_retention(store, events, limits), name="lmx-lab retention")
        self._stop_functions["retention"] = lambda: _cancel(retention)
        return Services(
            daemon_id=config.daemon_id,
            started_at=timestamp(),
            limits=limits,
            store=store,
            log=events,
            turns=turns,
            servers=servers,
            toolbox=toolbox,
            upstream=upstream,
            subscribers=subscribers,
            status=lambda: self._status,
            shut_down=lambda request: self.begin_stop(request.mode, request.grace_s),
        )

    # Stopping

    def begin_stop(self, mode: ShutdownMode, grace_s: float) -> None:
        """Begin to stop and return immediately. ``now`` also shortens a stop that has begun with ``drain``."""
        if self._stop_task is None:
            self._status = "stopping"
            self._stop_now = asyncio.Event()
            self._stop_task = asyncio.create_task(self._stop(mode, grace_s), name="lmx-lab daemon stops")
        if mode == "now" and self._stop_now is not None:
            self._stop_now.set()

    async def _stop(self, mode: ShutdownMode, grace_s: float) -> None:
        try:
            await self._append_stopping(self.services, mode)
            if mode == "drain":
                await self._drain(self.services, grace_s)
        finally:
            await self._stop_components()
            self._on_stopped()

    async def _append_stopping(self, services: Services, mode: ShutdownMode) -> None:
        try:
            stopping = DaemonStopping(mode=mode)
            await services.store.write(lambda tx: tx.append("daemon.stopping", stopping))
        except LabError as exc:
            log.warning("the event daemon.stopping could not be written: %s", exc)

    async def _drain(self, services: Services, grace_s: float) -> None:
        """Wait until the running turns have ended, unless ``begin_stop`` is called with ``now``."""
        assert self._stop_now is not None
        drain = asyncio.ensure_future(services.turns.stop(mode="drain", grace_s=grace_s))
        stop_now = asyncio.ensure_future(self._stop_now.wait())
        try:
            await asyncio.wait(
                {drain, stop_now}, timeout=grace_s + COMPONENT_STOP_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await _cancel(drain, stop_now)

    async def _stop_components(self) -> None:
        """Stop the components one after the other. A component that fails or hangs does not affect the others."""
        for name in STOP_ORDER:
            stop = self._stop_functions.pop(name, None)
            if stop is None:
                continue
            try:
                await asyncio.wait_for(stop(), COMPONENT_STOP_S)
            except Exception:
                log.exception("stopping the component %r failed", name)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            log.error("an exception occurred while the daemon was stopping: %r", result)
