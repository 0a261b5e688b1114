"""Provide ``Daemon``, which runs the daemon's server in a thread of this process, with blocking methods.

``Lifespan`` starts its components in order on its event loop, and stops them in order, even after a failed start.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401  (registers its exit function before ours: see the end of this module)
import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, overload

from fastapi import FastAPI

from lmx_lab.daemon.encoding import timestamp
from lmx_lab.daemon.home import DaemonHome, LogFile
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.mcp.servers import McpServers
from lmx_lab.daemon.mcp.watchdog import ServerProcesses
from lmx_lab.daemon.routes.events import PATH, event_routes
from lmx_lab.daemon.routes.resources import (
    HEALTH,
    daemon_routes,
    mcp_routes,
    permission_routes,
    session_routes,
    turn_routes,
)
from lmx_lab.daemon.services import Services, Subscribers
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.retention import run_retention
from lmx_lab.daemon.storage.sessions import LIST_LIMIT
from lmx_lab.daemon.storage.store import Store
from lmx_lab.daemon.toolbox import Toolbox
from lmx_lab.daemon.tools import PythonTools
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.daemon.turns.runner import TurnRunner
from lmx_lab.errors import HostingError, InvalidRequestError, LabError
from lmx_lab.http.guard import ASGIApp, GuardPolicy, LivePolicy, local_policy
from lmx_lab.http.middleware import VERSION, wrap_app
from lmx_lab.http.openapi import DescribedAPI
from lmx_lab.http.uvicorn_server import RunningServer, bind, loopback_for, serve
from lmx_lab.portal import LoopThread
from lmx_lab.settings import Settings
from lmx_lab.wire.base import new_id
from lmx_lab.wire.daemon import StateFile
from lmx_lab.wire.events import EVENT_DATA, DaemonStarted, DaemonStopping, Envelope

log = logging.getLogger(__name__)
ShutdownMode = Literal["drain", "now"]
COMPONENT_STOP_S = 15.0
"""Maximum time for which the stop of one component is awaited before the next one is stopped."""
STOP_ORDER = ("turns", "retention", "subscribers", "MCP servers", "server", "model client", "store", "state file")
METHODS = ("GET", "POST", "PATCH", "DELETE")
POLLS = ("events_events", "events_events_of_session")
"""Operation ids of the routes that poll events."""
KEY_HINT = (
    "send the header Authorization: Bearer TOKEN; the token is new at each start, in state.json in the daemon's folder "
    "($LMX_LAB_HOME/daemon)"
)


def create_daemon_app(
    services: Services, *, policy: Callable[[], GuardPolicy], max_body_bytes: int
) -> tuple[ASGIApp, FastAPI]:
    """Create the application with its routes, error bodies, guard, CORS and request ids. Starts nothing."""
    limits = services.limits
    api = DescribedAPI(
        title="LMX Lab daemon",
        version=VERSION,
        redirect_slashes=False,
        openapi_url="/v3/openapi.json",
        docs_url=None,
        redoc_url=None,
        extra_models=(Envelope, *EVENT_DATA),
        key=("token", KEY_HINT),
        open_paths=frozenset({HEALTH}),
        maximums={
            **{(operation, "wait"): limits.wait_s for operation in (*POLLS, "turns_read")},
            **{(operation, "limit"): limits.page_events for operation in POLLS},
            ("sessions_listed", "limit"): LIST_LIMIT,
        },
    )
    api.state.max_body_bytes = max_body_bytes
    # Routes are tried in this order, so those of turns come first.
    for routes in (turn_routes, daemon_routes, session_routes, permission_routes, event_routes, mcp_routes):
        api.include_router(routes(services))
    return wrap_app(api, policy, methods=METHODS), api


def daemon_policy(settings: Settings, port: int, token: str, own_names: Sequence[str] = ()) -> GuardPolicy:
    """Return the rules for callers of the daemon: loopback and the hosts and origins of the settings are accepted, and
    all routes except health need the token.

    Args:
        own_names: Names and addresses of this computer that are accepted with this port.

    Raises:
        InvalidRequestError: ``allowed_hosts`` or ``cors_origins`` has an entry that can never match.
    """
    host = settings.daemon_host.strip("[]")
    names = [*own_names, *([] if host in ("0.0.0.0", "::", "localhost") else [host])]
    own_hosts = [f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names]
    policy = local_policy(port, hosts=[*own_hosts, *settings.allowed_hosts], origins=settings.cors_origins, key=token)
    return replace(policy, key_hint=KEY_HINT, open_paths=frozenset({HEALTH}), query_key_paths=frozenset({PATH}))


@dataclass(kw_only=True, eq=False)
class Lifespan:
    """The components of one daemon, and the values from which they are created.

    They run from ``start()`` until they are stopped after ``begin_stop()``.
    """

    daemon_id: str
    token: str = field(repr=False)
    settings: Settings
    limits: Limits
    home: DaemonHome
    tools: PythonTools
    upstream_url: str
    upstream_key: str | None = field(repr=False)
    upstream_headers: Mapping[str, str] | None = field(repr=False)
    on_stopped: Callable[[], None]
    """Called on the event loop when all components have stopped after ``begin_stop()``."""
    _status: Literal["ok", "stopping"] = field(default="ok", init=False)
    _services: Services | None = field(default=None, init=False, repr=False)
    _stop_task: asyncio.Task[None] | None = field(default=None, init=False)
    _stop_now: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stop_functions: dict[str, Callable[[], Awaitable[object]]] = field(default_factory=dict, init=False)
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
            limits = self.limits
            store = await Store.open(self.home.folder / "daemon.db")
            self._stop_functions["store"] = store.close
            events = EventLog(store, limits)
            await events.start()
            subscribers = Subscribers(limits.subscribers)
            # In this time they can receive the last events.
            self._stop_functions["subscribers"] = lambda: subscribers.close(2.0)
            servers = McpServers(store=store, processes=ServerProcesses(self.home.folder))
            self._stop_functions["MCP servers"] = servers.stop
            await servers.start()
            upstream = ModelClient(self.upstream_url, api_key=self.upstream_key, headers=self.upstream_headers)
            self._stop_functions["model client"] = upstream.aclose
            toolbox = Toolbox(self.tools, servers)
            turns = TurnRunner(store=store, upstream=upstream, toolbox=toolbox, limits=limits)
            self._stop_functions["turns"] = lambda: turns.stop(mode="now", grace_s=0)
            await turns.start()
            retention = asyncio.create_task(run_retention(store, events, limits), name="lmx-lab retention")
            self._stop_functions["retention"] = lambda: _cancel(retention)
            services = self._services = Services(
                daemon_id=self.daemon_id,
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
            asgi, _ = create_daemon_app(services, policy=policy, max_body_bytes=self.settings.max_body_bytes)
            host, port = sock.getsockname()[:2]
            state = StateFile(
                pid=os.getpid(),
                started_at=services.started_at,
                daemon_id=self.daemon_id,
                # The address for this computer, even if the daemon listens on all interfaces.
                host=loopback_for(host),
                port=port,
                token=self.token,
            )
            self._stop_functions["state file"] = lambda: asyncio.to_thread(self.home.withdraw, self.daemon_id)
            # Before requests are accepted, because programs wait for GET /v3/health and then read the token. Requests
            # of programs that read it earlier wait on the socket.
            await asyncio.to_thread(self.home.publish, state)
            # The content of WebSocket messages from clients is ignored.
            server = await serve(asgi, sock, ws_max_bytes=65_536)
            self._stop_functions["server"] = server.stop
            started = DaemonStarted(daemon_id=self.daemon_id, version=VERSION)
            await store.write(lambda tx: tx.append("daemon.started", started))
            return server
        except BaseException:
            await self._stop_components()
            raise

    # Stopping

    def begin_stop(self, mode: ShutdownMode, grace_s: float) -> None:
        """Begin to stop and return immediately. ``now`` also shortens a stop that has begun with ``drain``."""
        if self._stop_task is None:
            self._status = "stopping"
            self._stop_task = asyncio.create_task(self._stop(mode, grace_s), name="lmx-lab daemon stops")
        if mode == "now":
            self._stop_now.set()

    async def _stop(self, mode: ShutdownMode, grace_s: float) -> None:
        try:
            services, stopping = self.services, DaemonStopping(mode=mode)
            try:
                await services.store.write(lambda tx: tx.append("daemon.stopping", stopping))
            except LabError as exc:
                log.warning("the event daemon.stopping could not be written: %s", exc)
            if mode == "drain":
                # Wait until the running turns have ended, or ``begin_stop`` is called with ``now``.
                drain = asyncio.ensure_future(services.turns.stop(mode="drain", grace_s=grace_s))
                stop_now = asyncio.ensure_future(self._stop_now.wait())
                try:
                    await asyncio.wait(
                        {drain, stop_now}, timeout=grace_s + COMPONENT_STOP_S, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    await _cancel(drain, stop_now)
        finally:
            await self._stop_components()
            self.on_stopped()

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


T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
GRACE_S = 3.0
"""Time in which running turns can end after ``stop``."""


class Daemon:
    """A server for sessions, turns, events and MCP servers. A daemon that was stopped cannot be started again.

    ``start()`` and ``stop()`` block and can be called in any thread. The daemon is independent of the notebook's event
    loop: a cell that runs or is interrupted does not affect it.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        limits: Limits | None = None,
        explicit_port: bool = True,
        upstream_url: str | None = None,
        upstream_api_key: str | None = None,
        upstream_headers: Mapping[str, str] | None = None,
        tools: PythonTools | None = None,
        own_names: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """
        Args:
            explicit_port: Whether only ``settings.daemon_port`` is acceptable. Otherwise the next free port is used.
            upstream_url: Address of the chat-format server that runs the model; by default that of the settings, or the
                default address of a lab.
            upstream_api_key: Key of the server at ``upstream_url``.
            upstream_headers: Additional headers of each request to this server.
            tools: Tools of a daemon that was stopped, to use them again.
            own_names: Returns the names and addresses under which other computers reach this one. It is called again
                every few seconds.

        Raises:
            InvalidRequestError: A setting is invalid.
        """
        key = upstream_api_key if upstream_url else settings.upstream_api_key
        self._lifespan = lifespan = Lifespan(
            daemon_id=new_id("dmn"),
            token=secrets.token_urlsafe(32),
            settings=settings,
            limits=limits or Limits(),
            home=DaemonHome(settings.daemon_folder),
            tools=tools or PythonTools(),
            upstream_url=upstream_url or settings.upstream or "http://127.0.0.1:8400",
            upstream_key=key,
            upstream_headers=upstream_headers,
            on_stopped=self._close,
        )
        self.daemon_id = lifespan.daemon_id
        """Id of this daemon. Each daemon has a new one."""
        self.settings = settings
        """The settings that the daemon was created with."""
        self.python_tools = lifespan.tools
        """The functions that were registered with ``tool``."""
        self.upstream_url = lifespan.upstream_url
        """Address of the server that runs the model."""
        self.folder = lifespan.home.folder
        """Folder of the state file, the database and the log file."""
        # Called here only for its errors, so that a daemon with invalid settings is not started.
        daemon_policy(settings, 1, self.token)
        self._explicit_port = explicit_port
        self._own_names = own_names
        self._log_file = LogFile(self.folder, token=self.token)
        self._thread = LoopThread("lmx-lab-daemon")
        self._host: RunningServer | None = None
        self._start_lock = threading.Lock()
        self._ended = threading.Event()
        self._pid = 0

    def __repr__(self) -> str:
        return f"<daemon {self.daemon_id}: {self.url if self.running else 'not running'}>"

    # Properties

    @property
    def token(self) -> str:
        """The token that every request needs. It is stored in the state file and nowhere else, not even in an attribute
        of this object, which a debugger would show."""
        return self._lifespan.token

    @property
    def services(self) -> Services:
        """The services of the routes, for use in ``run()``."""
        return self._lifespan.services

    @property
    def running(self) -> bool:
        """Whether the daemon was started and has not ended."""
        return self._host is not None and not self._ended.is_set()

    @property
    def url(self) -> str:
        """Address of the daemon for programs on this computer."""
        return self._started_host.url

    @property
    def port(self) -> int:
        """Port of the daemon."""
        return self._started_host.port

    @property
    def _started_host(self) -> RunningServer:
        if self._host is None:
            raise HostingError("this daemon was not started; call start() first")
        return self._host

    # Tools

    @overload
    def tool(self, function: Function, **options: Any) -> Function: ...
    @overload
    def tool(self, function: None = None, **options: Any) -> Callable[[Function], Function]: ...
    def tool(self, function: Function | None = None, **options: Any) -> Any:
        """Register a Python function that turns can call.

        Also a decorator, with or without options. Registering a function of the same name again, for instance when a
        cell is run again, replaces it. This method can be called from any thread.

        Args:
            options: ``name``, ``description``, ``read_only`` (calls need no permission), ``permission`` (``ask``,
                ``allow`` or ``deny``), ``timeout_s``.

        Raises:
            InvalidRequestError: The function cannot be a tool. The message contains the reason.
        """
        if function is None:
            return functools.partial(self.tool, **options)
        self.python_tools.register(function, **options)
        return function

    # Start and stop

    def start(self) -> None:
        """Start the daemon. Returns when requests are accepted and the state file is written.

        Does nothing if the daemon is running.

        Raises:
            DaemonRunningError: Another daemon uses this folder. The message contains its address.
            PortTakenError, HostingError: The daemon could not be started. Nothing is left running.
        """
        with self._start_lock:
            if self.running:
                return
            if self._ended.is_set():
                raise HostingError("this daemon was stopped; create a new one")
            self._lifespan.home.acquire()
            try:
                self._host = self._start()
            except BaseException:
                self._close()
                raise
            self._pid = os.getpid()
            _RUNNING.add(self)

    def _start(self) -> RunningServer:
        sock = bind(self.settings.daemon_host, self.settings.daemon_port, explicit=self._explicit_port)
        try:
            port = sock.getsockname()[1]
            policy = LivePolicy(
                lambda: daemon_policy(self.settings, port, self.token, self._own_names()), self._own_names
            )
            self._log_file.open()
            self._thread.start()
            return self._thread.run(self._lifespan.start(sock, policy))
        except BaseException:
            sock.close()
            raise

    def stop(self, *, mode: ShutdownMode = "drain", grace_s: float = GRACE_S) -> None:
        """Stop turns, event streams, MCP servers and the server, and release the port and the lock.

        Idempotent. This method can be called from any thread.

        Args:
            mode: With ``drain``, running turns have ``grace_s`` seconds to end by themselves. ``now`` ends them
                immediately. In both cases queued turns run at the next start.
        """
        if mode not in ("drain", "now"):
            raise InvalidRequestError(f"mode is {mode!r:.80}; it can be 'drain' or 'now'", param="mode")
        if not self.begin_stop(mode=mode, grace_s=grace_s):
            return
        # One more minute for turns, MCP servers and connections that do not end in time.
        if not self.wait((grace_s if mode == "drain" else 0.0) + 60.0):
            log.error("the daemon has not stopped in time; its thread is abandoned")
            self._close()

    def begin_stop(self, *, mode: ShutdownMode = "drain", grace_s: float = GRACE_S) -> bool:
        """Begin to stop without waiting for the end; usable in signal handlers.

        ``now`` also shortens a stop that has begun with ``drain``.

        Returns:
            Whether the daemon was running, so that ``wait`` is useful.
        """
        if not self.running or self._pid != os.getpid():
            return False  # A fork has a copy of the daemon's memory, but not its threads.
        with contextlib.suppress(HostingError, RuntimeError):  # The daemon has ended at the same moment.
            self._thread.loop.call_soon_threadsafe(self._lifespan.begin_stop, mode, grace_s)
        return True

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the daemon's event loop and return its result. Call this from another thread.

        Raises:
            HostingError: The daemon is not running.
            TimeoutError: The coroutine did not end within ``timeout_s`` seconds.
        """
        if not isinstance(work, Coroutine):
            raise InvalidRequestError(
                f"work is {work!r:.80}; pass a coroutine, such as daemon.services.turns.list_permissions()"
            )
        return self._thread.run(work, timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the daemon has ended, through ``stop()`` or ``POST /v3/daemon/shutdown``.

        Returns:
            Whether it has ended within ``timeout_s`` seconds.
        """
        ended = self._ended.wait(timeout_s)
        if ended:
            # _close could not wait for the thread if it was called on that thread.
            self._thread.stop()
        return ended

    def _close(self) -> None:
        """Stop the event loop's thread, close the log file and release the lock.

        If this is called on that thread, the loop ends after the call.
        """
        _RUNNING.discard(self)
        try:
            self._thread.stop()
            self._log_file.close()
        finally:
            self._lifespan.home.release()
            self._ended.set()


def check_daemon(settings: Settings, *, explicit_port: bool, replaced: Daemon | None) -> None:
    """Check that a daemon with these settings can be started.

    Args:
        replaced: A running daemon that will be stopped before this one starts.

    Raises:
        InvalidRequestError, DaemonRunningError, PortTakenError, HostingError: as ``Daemon`` and its start.
    """
    daemon_policy(settings, 1, "any-token")
    home = DaemonHome(settings.daemon_folder)
    if replaced is None or replaced.folder != home.folder:
        home.acquire()
        home.release()
    keeps_port = replaced is not None and settings.daemon_port == replaced.port
    port = settings.daemon_port if explicit_port and not keeps_port else 0
    bind(settings.daemon_host, port, explicit=True).close()


_RUNNING: set[Daemon] = set()


def _stop_all() -> None:
    for daemon in list(_RUNNING):
        with contextlib.suppress(Exception):
            daemon.stop(mode="now")


# At exit, Python ends the threads of executors, which the database needs for its last writes, before it calls the
# functions of atexit. Functions that are registered in threading are called before these threads end, the last
# registered first. There is no public name for this registration.
_register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
_register(_stop_all)
