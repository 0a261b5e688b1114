"""Run an inference server in this process, with the kernel's event loop or in a thread: start, serve, stop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lmx_lab.engine import ModelManager
from lmx_lab.engine.registry import engine_for
from lmx_lab.errors import EngineError, HostingError, InvalidRequestError
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.http.uvicorn_server import GRACE_S, RunningServer, bind, serve
from lmx_lab.instrument.recorder import RequestRecorder
from lmx_lab.notebook.addresses import Addresses
from lmx_lab.notebook.lab_server import LabServer
from lmx_lab.notebook.verbs import LoopPortal, in_thread, on_loop
from lmx_lab.portal import HostedLoop, LoopThread
from lmx_lab.server import InferenceServer, create_server
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import LoadSpec, capacity_in_words, with_reason
from lmx_lab.weights import Catalog

if TYPE_CHECKING:
    from lmx_lab.daemon.tools.python_tools import PythonTools
    from lmx_lab.notebook.daemon import LabDaemon
    from lmx_lab.notebook.discovery import Announcement
    from lmx_lab.panels.events import EventsPanel
    from lmx_lab.panels.workbench import Workbench

LoopChoice = Literal["auto", "kernel", "thread"]
LoopMode = Literal["kernel", "thread"]
"""Who runs the server's loop: the kernel's own loop together with a thread, or a thread alone."""

LAST_ANSWERS_S = 1.0
"""Minimum time for clients to receive the end of their answers before their connections are closed."""
REQUESTS_S = 2.5
"""Time for running requests to end before they are ended with an error."""
STEP_S = 0.7
"""Additional time for the engine to end these requests, because a step may be running."""


class LocalServer(LabServer):
    """The engine, the services and the HTTP server of a lab in this process. Cannot be started again after a stop.

    See ``Lab`` for the arguments.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        loop: LoopChoice = "auto",
        explicit_port: bool = True,
        engine: ModelManager | None = None,
    ) -> None:
        self.settings = settings
        self.loop_choice = loop
        self.mode = choose_loop(loop)
        self.explicit_port = explicit_port
        self.engine = engine if engine is not None else ModelManager(settings)
        self.catalog: Catalog = self.engine.catalog
        self.addresses = Addresses(settings=settings, port=settings.port)
        # Computed now, for any host and port, so that a setting that can never match is refused before anything starts.
        self._policy = Addresses(settings=replace(settings, host="localhost"), port=1).live_policy()
        if (announcement := self._new_announcement()) is not None:
            announcement.check()
        self.recorder = RequestRecorder(settings.record_to if settings.record != "off" else None)
        try:
            self.services: InferenceServer = create_server(
                manager=self.engine,
                catalog=self.catalog,
                settings=settings,
                policy=self._current_policy,
                save_record=self.recorder.save,
            )
            """The services behind the routes."""
        except BaseException:
            self.recorder.close()
            raise
        self.daemon: LabDaemon | None = None
        """The daemon in front of this server, even after it was stopped."""
        self.daemon_tools: PythonTools | None = None
        """The Python functions of the daemon, even if it could not be started."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that serves; None before the start."""
        self._portal: LoopPortal | None = None
        self.thread: LoopThread | None = None
        """The thread that runs the loop, alone or together with the kernel's loop; None before the start."""
        self._host: RunningServer | None = None
        self._stopped = False
        self.announced_name = ""
        """The name under which the server is announced on the local network; empty if it is not."""
        self._announcement: Announcement | None = None
        self._callbacks: list[Callable[[], None]] = []

    def _current_policy(self) -> GuardPolicy:
        return self._policy()

    # Lifetime

    async def start(self, sock: socket.socket | None = None) -> None:
        """Bind the socket, start the engine and serve; return when requests are accepted. Does nothing if the server
        was started.

        Args:
            sock: A listening socket, instead of a new one.

        Raises:
            HostingError, PortTakenError: the server could not start; all that had been started was stopped.
            InvalidRequestError: ``loop`` is ``kernel``, and no event loop runs in this thread.
        """
        if self._host is not None:
            return
        # The thread that starts the server need not be the one that created it.
        self.mode = choose_loop(self.loop_choice)
        self.services.open()
        try:
            sock = sock or bind(self.settings.host, self.settings.port, explicit=self.explicit_port)
        except BaseException:
            self.services.close()
            raise
        self.addresses = Addresses(settings=self.settings, port=sock.getsockname()[1])
        self._policy = self.addresses.live_policy()
        try:
            self.thread = HostedLoop(asyncio.get_running_loop()) if self.mode == "kernel" else LoopThread()
            self.thread.start()
            self.loop = self.thread.loop
            self._portal = LoopPortal(self.thread, check=self.check_running)
            self.engine.start()
            # Registered after the engine's own function, and therefore called before it: requests end first.
            atexit.register(self._stop_at_exit)
            announcement = self._new_announcement()
            self._host = await on_loop(self._serve(sock))
            if announcement is not None:
                self._announcement = announcement
                self.announced_name = await in_thread(announcement.start)
        except BaseException:
            sock.close()
            self._close()
            raise

    def _new_announcement(self) -> Announcement | None:
        settings = self.settings
        if not settings.announce:
            return None
        # Imported here, because few labs are announced.
        from lmx_lab.notebook.discovery import Announcement

        return Announcement(
            settings.announce_name,
            port=self.addresses.port,
            addresses=self.addresses.lan_names,
            key_needed=settings.api_key is not None,
        )

    async def _serve(self, sock: socket.socket) -> RunningServer:
        settings = self.settings
        return await serve(
            self.services.asgi, sock, ws_max_bytes=settings.max_body_bytes, ws_pong_s=settings.slow_client_s
        )

    async def stop(self) -> None:
        """Stop serving, unload the models and free the port. Running requests have 2.5 s to end. Idempotent."""
        try:
            if self.running:
                await on_loop(self._end())
        finally:
            await in_thread(self._close)

    @property
    def running(self) -> bool:
        """Whether the server accepts requests."""
        return self._host is not None and not self.stopped

    @property
    def stopped(self) -> bool:
        """Whether the server has ended, for whatever reason."""
        return self._stopped or (self._host is not None and not self._host.running)

    async def wait(self) -> None:
        """Wait until the server has ended, for whatever reason. Can be awaited on any loop."""
        if self._host is not None:
            await self._host.wait()

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Register a function to call when the server has stopped. It is called in a thread that may wait."""
        self._callbacks.append(callback)

    async def _end(self) -> None:
        if self._announcement is not None:
            await asyncio.to_thread(self._announcement.stop)
        # The daemon first: its turns send requests to this server.
        if self.daemon is not None:
            await asyncio.to_thread(self.daemon.stop)
        # Streams of events do not end by themselves.
        self.services.feed.close()
        # Loads and generations end next, so that each request gets its answer before its connection is closed.
        began = time.monotonic()
        await asyncio.gather(self.engine.cancel_loads(), self._quiesce())
        assert self._host is not None
        await self._host.stop(max(LAST_ANSWERS_S, GRACE_S - (time.monotonic() - began)))

    async def _quiesce(self) -> None:
        """Wait until running requests have ended. A load or a step that hangs does not extend the time limit."""
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self.engine.quiesce(REQUESTS_S), REQUESTS_S + STEP_S)

    def _close(self) -> None:
        self._stopped = True
        if self._announcement is not None:
            self._announcement.stop()
        if self.daemon is not None:
            self.daemon.stop(mode="now")
        self.engine.stop()
        if self.thread is not None:
            self.thread.stop()
        self.services.close()
        self.recorder.close()
        atexit.unregister(self._stop_at_exit)
        for callback in self._callbacks:
            callback()

    def _stop_at_exit(self) -> None:
        if self._host is not None:
            self._host.stop_at_exit()
        self._close()

    # The server's loop

    @property
    def portal(self) -> LoopPortal:
        """The event loop of the server.

        Raises:
            HostingError: the server was stopped, or not started.
        """
        self.check_running()
        assert self._portal is not None
        return self._portal

    def check_running(self) -> None:
        """Check that the server can be used.

        Raises:
            HostingError: the server was stopped, or not started.
        """
        if self._stopped or self.loop is None or self.loop.is_closed():
            state = "was stopped" if self._stopped else "is not running"
            raise HostingError(f"this lab {state}; launch() starts a new one")

    def start_daemon(
        self,
        workbench: Workbench,
        events_panel: Callable[[], EventsPanel],
        *,
        explicit_port: bool,
        tools: PythonTools | None,
    ) -> LabDaemon:
        """Start a daemon for this server, or return the running one; see ``Lab.start_daemon``."""
        self.check_running()
        # Stored also if the start fails: the next attempt finds them.
        self.daemon_tools = tools = tools or self.daemon_tools
        # Imported here, because MCP takes half a second to import.
        from lmx_lab.notebook.daemon import LabDaemon

        if (running := self.running_daemon) is not None:
            return running
        daemon = LabDaemon(
            workbench,
            events_panel,
            settings=self.settings,
            explicit_port=explicit_port,
            upstream_url=self.url,
            upstream_api_key=self.api_key,
            upstream_headers=self.services.inference.recording.own_headers,
            tools=tools,
        )
        self.daemon_tools = daemon.tools
        daemon.start()
        self.daemon = daemon
        return daemon

    # Description

    @property
    def url(self) -> str:
        """The address for programs on this machine."""
        return self.addresses.url

    @property
    def api_key(self) -> str | None:
        return self.settings.api_key

    @property
    def bench_folder(self) -> Path:
        """The folder in which runs of ``bench`` are stored."""
        return self.settings.home / "bench"

    @property
    def place(self) -> str:
        """Where the server runs, for display."""
        return "the kernel's loop" if self.mode == "kernel" else "a separate thread"

    @property
    def running_daemon(self) -> LabDaemon | None:
        return self.daemon if self.daemon is not None and self.daemon.running else None

    def facts(self) -> dict[str, str]:
        """Return the name and the value of each line that describes the lab."""
        now, daemon = self.engine.snapshot, self.running_daemon
        facts = {
            "LMX Lab": f"running on {self.place}" if self.running else "stopped",
            "address": self.url,
            "LAN address": next(iter(self.addresses.lan_urls), ""),
            "announced as": self.announced_name,
            "browser address": self.addresses.proxy_url or self.addresses.browser_step or "",
            "model": _model_fact(now),
            "engine": with_reason(engine_for(now.entry.format).name, now.entry.engine_reason) if now.entry else "",
            "capacity": capacity_in_words(now.slots, now.context_length),
            "daemon": daemon.url if daemon is not None else "",
            "also loaded": ", ".join(f"{it.entry.id} ({it.memory_bytes / 1e9:.2f} GB)" for it in now.pinned),
        }
        return {name: value for name, value in facts.items() if value}

    def unpinned(self) -> Sequence[LoadSpec]:
        """Return the encoders that the settings name and that are not in memory."""
        return self.engine.unpinned()

    def panels_shown(self) -> None:
        """Does nothing: the registry of launched labs keeps the server."""


def _model_fact(now: EngineSnapshot) -> str:
    if now.model is None:
        return "none loaded"
    loaded = f"{now.model} ({now.model_memory_bytes / 1e9:.2f} GB)"
    return f"{loaded}, {now.unloading}" if now.unloading is not None else loaded


def choose_loop(loop: LoopChoice) -> LoopMode:
    """Return who runs the loop. ``auto`` is ``kernel`` if a loop runs in this thread.

    Raises:
        InvalidRequestError: ``kernel`` was given and no loop runs, or the value is not one of the three.
    """
    running = asyncio._get_running_loop()
    if loop == "auto":
        return "kernel" if running is not None else "thread"
    if loop not in ("kernel", "thread"):
        raise InvalidRequestError(f"loop is {loop!r}; it can be auto, kernel or thread", param="loop")
    if loop == "kernel" and running is None:
        raise InvalidRequestError(
            "loop='kernel' needs a running event loop, as in a notebook; use loop='thread'", param="loop"
        )
    return loop
