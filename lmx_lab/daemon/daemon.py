"""The daemon's life: what is started in which order, and how all of it ends."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (its end has to be registered before ours: see the bottom)
import contextlib
import functools
import logging
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from lmx_lab.daemon.app import daemon_policy
from lmx_lab.daemon.home import DaemonHome
from lmx_lab.daemon.lifespan import Life, Mode, Plan
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.logfile import LogFile
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.errors import HostingError, InvalidRequestError
from lmx_lab.http.guard import LivePolicy
from lmx_lab.http.uvicorn_server import RunningServer, bind
from lmx_lab.portal import LoopThread
from lmx_lab.settings import Settings
from lmx_lab.wire.identifiers import new_id

log = logging.getLogger(__name__)
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
UPSTREAM = "http://127.0.0.1:8400"
TOKEN_BYTES = 32
GRACE_S = 3.0
"""How long running turns may go on after ``stop``."""
END_S = 60.0
"""The longest that an end takes beyond that: turns, MCP servers and connections that do not heed."""


class Daemon:
    """Sessions, turns, events and MCP servers on a port and a thread of their own. Once stopped it stays so.

    ``start()`` and ``stop()`` block, in any thread; a cell that is busy or interrupted changes nothing for it.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        limits: Limits | None = None,
        explicit_port: bool = True,
        upstream_url: str | None = None,
        upstream_api_key: str | None = None,
        tools: PythonTools | None = None,
        own_names: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """
        Args:
            explicit_port: Whether ``settings.daemon_port`` alone will do; otherwise the next free one is taken.
            upstream_url: The chat-format server that turns ask; by default that of the settings, else the lab's port.
            upstream_api_key: Its key, where ``upstream_url`` is given.
            tools: Of a daemon that was stopped, to go on with them.
            own_names: Names and addresses of this machine under which others reach it; read again every few seconds.
        """
        key = upstream_api_key if upstream_url else settings.upstream_api_key
        self._plan = Plan(
            daemon_id=new_id("dmn"),
            token=secrets.token_urlsafe(TOKEN_BYTES),
            settings=settings,
            limits=limits or Limits(),
            home=DaemonHome(settings.daemon_folder),
            tools=tools or PythonTools(),
            upstream_url=upstream_url or settings.upstream or UPSTREAM,
            upstream_key=key,
        )
        # Already now: a setting that could never match shall start nothing.
        daemon_policy(settings, 1, self.token)
        self._explicit_port = explicit_port
        self._own_names = own_names
        self._logfile = LogFile(self.folder, token=self.token)
        self._thread = LoopThread("lmx-lab-daemon")
        self._life = Life(self._plan, on_end=self._close)
        self._host: RunningServer | None = None
        self._gate = threading.Lock()
        self._ended = threading.Event()
        self._pid = 0

    def __repr__(self) -> str:
        return f"<daemon {self.daemon_id}: {self.url if self.running else 'not running'}>"

    # What it is

    @property
    def daemon_id(self) -> str:
        """New with each daemon."""
        return self._plan.daemon_id

    @property
    def token(self) -> str:
        """What every request needs; also in the state file, and nowhere else."""
        return self._plan.token

    @property
    def settings(self) -> Settings:
        return self._plan.settings

    @property
    def tools(self) -> PythonTools:
        """The functions that ``tool`` has registered."""
        return self._plan.tools

    @property
    def upstream_url(self) -> str:
        return self._plan.upstream_url

    @property
    def folder(self) -> Path:
        """With the state file, the database and the log."""
        return self._plan.home.folder

    @property
    def services(self) -> Services:
        """What is behind the routes; for ``run()``."""
        return self._life.services

    @property
    def running(self) -> bool:
        return self._host is not None and not self._ended.is_set()

    @property
    def url(self) -> str:
        """The address for programs on this machine."""
        return self._served.url

    @property
    def port(self) -> int:
        return self._served.port

    @property
    def _served(self) -> RunningServer:
        if self._host is None:
            raise HostingError("this daemon was not started; call start() first")
        return self._host

    # Tools

    @overload
    def tool(self, function: Function, **options: Any) -> Function: ...
    @overload
    def tool(self, function: None = None, **options: Any) -> Callable[[Function], Function]: ...
    def tool(self, function: Function | None = None, **options: Any) -> Any:
        """Let turns call a Python function; also as a decorator, with options or without. It may be called from any
        thread, and registering one of the same name again, as a re-run cell does, replaces it.

        Args:
            options: ``name``, ``description``, ``read_only`` (needs no permission), ``permission`` (``ask``, ``allow``,
                ``deny``), ``timeout_s``.

        Raises:
            InvalidRequestError: what cannot be a tool, and why.
        """
        if function is None:
            return functools.partial(self.tool, **options)
        self.tools.register(function, **options)
        return function

    # Life

    def start(self) -> None:
        """Take the lock, bind, serve; returns once requests are accepted and the state file says where. Does nothing if
        that has happened.

        Raises:
            DaemonRunningError: this home has one already; the message says where.
            PortTakenError, HostingError: nothing is left behind.
        """
        with self._gate:
            if self.running:
                return
            if self._ended.is_set():
                raise HostingError("this daemon was stopped; make a new one")
            self._plan.home.acquire()
            try:
                self._host = self._rise()
            except BaseException:
                self._close()
                raise
            self._pid = os.getpid()
            _RUNNING.add(self)

    def _rise(self) -> RunningServer:
        sock = bind(self.settings.daemon_host, self.settings.daemon_port, explicit=self._explicit_port)
        try:
            port = sock.getsockname()[1]
            policy = LivePolicy(
                lambda: daemon_policy(self.settings, port, self.token, self._own_names()), self._own_names
            )
            self._logfile.open()
            self._thread.start()
            return self._thread.run(self._life.rise(sock, policy))
        except BaseException:
            sock.close()
            raise

    def stop(self, *, mode: Mode = "drain", grace_s: float = GRACE_S) -> None:
        """End turns, watchers, MCP servers and the server; free the port and the lock. Idempotent, from any thread.

        Args:
            mode: ``drain`` lets running turns end for ``grace_s`` seconds; ``now`` cuts them. Either way queued ones
                run at the next start.
        """
        if mode not in ("drain", "now"):
            raise InvalidRequestError(f"mode is {mode!r:.80}; it can be 'drain' or 'now'", param="mode")
        if not self.begin_stop(mode=mode, grace_s=grace_s):
            return
        if not self.wait((grace_s if mode == "drain" else 0.0) + END_S):
            log.error("the daemon did not end within its time, and is left alone")
            self._close()

    def begin_stop(self, *, mode: Mode = "drain", grace_s: float = GRACE_S) -> bool:
        """The same without waiting for it, also for signal handlers; ``now`` cuts short what was begun before. Returns
        whether there is an end to wait for."""
        if not self.running or self._pid != os.getpid():
            return False  # a fork has the daemon's memory, and none of its threads
        with contextlib.suppress(HostingError, RuntimeError):  # it ends at this very moment
            self._thread.loop.call_soon_threadsafe(self._life.fall, mode, grace_s)
        return True

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine over the services on the daemon's loop, and wait, on any other thread.

        Raises:
            HostingError: the daemon does not run.
            TimeoutError: after ``timeout_s``.
        """
        if not isinstance(work, Coroutine):
            raise InvalidRequestError(
                f"work is {work!r:.80}; give a coroutine, such as daemon.services.turns.permissions()"
            )
        return self._thread.run(work, timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, by ``stop()`` or ``POST /v3/daemon/shutdown``, within this time."""
        ended = self._ended.wait(timeout_s)
        if ended:
            self._thread.stop()  # again, since from here it can be waited for
        return ended

    def _close(self) -> None:
        """What is not the loop's, after the rest; on the loop's own thread the loop ends after this."""
        _RUNNING.discard(self)
        try:
            self._thread.stop()
            self._logfile.close()
        finally:
            self._plan.home.release()
            self._ended.set()


_RUNNING: set[Daemon] = set()


def _stop_all() -> None:
    for daemon in list(_RUNNING):
        with contextlib.suppress(Exception):
            daemon.stop(mode="now")


# Python ends the threads of executors, which the database needs for its last words, before it comes to atexit. This is
# where it ends them, the last that was registered first; there is no public name for it.
_register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
_register(_stop_all)
