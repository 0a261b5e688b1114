"""A server and its lifetime: start, serve, stop, in either mode; and the way of blocking callers to its loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import socket
import time
from collections.abc import Coroutine, Generator, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from lmx_lab.engine import ModelManager
from lmx_lab.errors import EngineError, HostingError
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.http.uvicorn_server import GRACE_S, Host, bind, serve
from lmx_lab.notebook.addresses import Addresses
from lmx_lab.notebook.loop_lag import LoopLag
from lmx_lab.notebook.modes import LoopChoice, choose_loop
from lmx_lab.portal import LoopThread, receive, run_nested
from lmx_lab.server import InferenceServer, create_server
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog

if TYPE_CHECKING:
    from lmx_lab.daemon.tools.python_tools import PythonTools
    from lmx_lab.notebook.daemon import LabDaemon

T = TypeVar("T")
LAST_WORDS_S = 1.0
"""The least time that clients have to receive the end of their answers."""
REQUESTS_S = 2.5
"""How long running requests may continue before they end with an error."""
LATE_S = 0.7
"""How much longer the engine may take to end them: a step may be under way."""


class Serving:
    """An engine behind a server: ``with``, ``async with``, or ``start()`` and ``stop()``. Once stopped it stays so."""

    def __init__(self, settings: Settings, *, loop: LoopChoice = "auto", explicit_port: bool = True) -> None:
        self.settings = settings
        self.loop_choice = loop
        self.mode = choose_loop(loop, settings)
        self.explicit_port = explicit_port
        self.catalog = Catalog(settings)
        self.engine = ModelManager(settings, self.catalog)
        self._addresses = Addresses(settings=settings, port=settings.port)
        # Already now, whatever host and port will be: a setting that could never match shall start nothing.
        self._policy = Addresses(settings=replace(settings, host="localhost"), port=1).live_policy()
        self.lag = LoopLag()
        """How late the server's loop is."""
        self._server: InferenceServer = create_server(
            manager=self.engine, catalog=self.catalog, settings=settings, policy=self._current_policy
        )
        self._thread: LoopThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host: Host | None = None
        self._stopped = False
        self._daemon: LabDaemon | None = None
        self._daemon_tools: PythonTools | None = None

    def _current_policy(self) -> GuardPolicy:
        return self._policy()

    def start(self, sock: socket.socket | None = None) -> None:
        """Bind, start the engine, serve; returns once requests are accepted. Does nothing if that has happened.

        Raises:
            HostingError, PortTakenError: nothing was left behind.
        """
        if self._host is None:
            with self._starting(sock) as serving:
                self._host = self._block(serving)

    async def astart(self) -> None:
        if self._host is None:
            with self._starting(None) as serving:
                self._host = await self._hand_over(serving)

    @contextlib.contextmanager
    def _starting(self, sock: socket.socket | None) -> Iterator[Coroutine[Any, Any, Host]]:
        """Everything before the server and, if that or the server fails, the way back."""
        sock = sock or bind(self.settings.host, self.settings.port, explicit=self.explicit_port)
        self._addresses = Addresses(settings=self.settings, port=sock.getsockname()[1])
        self._policy = self._addresses.live_policy()
        try:
            if self.mode == "thread":
                self._thread = LoopThread()
                self._thread.start()
            self._loop = self._thread.loop if self._thread else asyncio.get_running_loop()
            self.engine.start()
            # After the engine's own, so that it comes first: requests end before what answers them.
            atexit.register(self._stop_at_exit)
            yield self._serve(sock)
        except BaseException:
            sock.close()
            self._close()
            raise

    async def _serve(self, sock: socket.socket) -> Host:
        host = await serve(self._server.asgi, sock, ws_max_bytes=self.settings.max_body_bytes)
        self.lag.start()
        return host

    @property
    def services(self) -> InferenceServer:
        """What is behind the routes, for callers in this process."""
        return self._server

    @property
    def running(self) -> bool:
        """Whether the server accepts requests."""
        return not self._stopped and self._host is not None and self._host.running

    async def wait(self) -> None:
        """Return when the server has ended, whoever ended it; on the server's loop."""
        if self._host is not None:
            await self._host.wait()

    def stop(self) -> None:
        """Stop serving, unload, free the port. Running requests have 2.5 s to end. Idempotent."""
        try:
            if self.running:
                self._block(self._end())
        except KeyboardInterrupt:
            self._close()
            raise
        self._close()

    async def astop(self) -> None:
        if self.running:
            await self._hand_over(self._end())
        await asyncio.to_thread(self._close)

    async def _end(self) -> None:
        # The daemon before all: its turns ask this very server.
        if self._daemon is not None:
            await asyncio.to_thread(self._daemon.stop)
        # Then the watchers, who would never leave by themselves.
        self._server.feed.close()
        # And the loads and the generations, so that each request gets its answer before its connection goes.
        began = time.monotonic()
        await asyncio.gather(self.engine.cancel_loads(), self._quiesce())
        assert self._host is not None
        await self._host.stop(max(LAST_WORDS_S, GRACE_S - (time.monotonic() - began)))

    async def _quiesce(self) -> None:
        """Let running requests end, within a time that a load or a step that hangs does not extend."""
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self.engine.quiesce(REQUESTS_S), REQUESTS_S + LATE_S)

    def _close(self) -> None:
        self._stopped = True
        if self._daemon is not None:
            self._daemon.stop(mode="now")
        self.lag.stop()
        self.engine.stop()
        if self._thread is not None:
            self._thread.stop()
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        if self._host is not None:
            self._host.stop_at_exit()
        self._close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        await self.astart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.astop()

    # The way to the server's loop

    def _block(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work where the server runs, and wait. An interrupt cancels it."""
        try:
            loop = self._check_running(work)
            return self._thread.run(work) if self._thread is not None else run_nested(loop, work)
        except KeyboardInterrupt:
            # Before anything looked out for interrupts; what has begun is cancelled where it runs.
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            raise

    async def _hand_over(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._check_running(work)
        if loop is asyncio.get_running_loop():
            return await work
        return await receive(
            self._thread.submit(work) if self._thread else asyncio.run_coroutine_threadsafe(work, loop)
        )

    def _check_running(self, work: Coroutine[Any, Any, Any] | None = None) -> asyncio.AbstractEventLoop:
        if self._stopped or self._loop is None or self._loop.is_closed():
            if work is not None:
                work.close()
            state = "was stopped" if self._stopped else "does not run"
            raise HostingError(f"this lab {state}; launch() starts one")
        return self._loop
