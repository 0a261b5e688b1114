"""Provide ``Daemon``, which runs the daemon's server in a thread of this process, with blocking methods."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (registers its exit function before ours: see the end of this module)
import contextlib
import functools
import logging
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from lmx_lab.daemon.app import daemon_policy
from lmx_lab.daemon.home import DaemonHome, LogFile
from lmx_lab.daemon.lifespan import DaemonConfig, Lifespan, ShutdownMode
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.errors import HostingError, InvalidRequestError
from lmx_lab.http.guard import LivePolicy
from lmx_lab.http.uvicorn_server import RunningServer, bind
from lmx_lab.portal import LoopThread
from lmx_lab.settings import Settings
from lmx_lab.wire.base import new_id

log = logging.getLogger(__name__)
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
UPSTREAM = "http://127.0.0.1:8400"
TOKEN_BYTES = 32
GRACE_S = 3.0
"""Time in which running turns can end after ``stop``."""
STOP_S = 60.0
"""Maximum time that a stop takes after that, for turns, MCP servers and connections that do not end in time."""


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
        self._config = DaemonConfig(
            daemon_id=new_id("dmn"),
            token=secrets.token_urlsafe(TOKEN_BYTES),
            settings=settings,
            limits=limits or Limits(),
            home=DaemonHome(settings.daemon_folder),
            tools=tools or PythonTools(),
            upstream_url=upstream_url or settings.upstream or UPSTREAM,
            upstream_key=key,
            upstream_headers=upstream_headers,
        )
        # Called here only for its errors, so that a daemon with invalid settings is not started.
        daemon_policy(settings, 1, self.token)
        self._explicit_port = explicit_port
        self._own_names = own_names
        self._log_file = LogFile(self.folder, token=self.token)
        self._thread = LoopThread("lmx-lab-daemon")
        self._lifespan = Lifespan(self._config, on_stopped=self._close)
        self._host: RunningServer | None = None
        self._start_lock = threading.Lock()
        self._ended = threading.Event()
        self._pid = 0

    def __repr__(self) -> str:
        return f"<daemon {self.daemon_id}: {self.url if self.running else 'not running'}>"

    # Properties

    @property
    def daemon_id(self) -> str:
        """Id of this daemon. Each daemon has a new one."""
        return self._config.daemon_id

    @property
    def token(self) -> str:
        """The token that every request needs. It is stored in the state file and nowhere else."""
        return self._config.token

    @property
    def settings(self) -> Settings:
        """The settings that the daemon was created with."""
        return self._config.settings

    @property
    def tools(self) -> PythonTools:
        """The functions that were registered with ``tool``."""
        return self._config.tools

    @property
    def upstream_url(self) -> str:
        """Address of the server that runs the model."""
        return self._config.upstream_url

    @property
    def folder(self) -> Path:
        """Folder of the state file, the database and the log file."""
        return self._config.home.folder

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
        self.tools.register(function, **options)
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
            self._config.home.acquire()
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
        if not self.wait((grace_s if mode == "drain" else 0.0) + STOP_S):
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
            self._config.home.release()
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
