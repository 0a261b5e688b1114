"""Run an ASGI application with uvicorn on the running event loop, usually that of a ``LoopThread``.

uvicorn normally owns its process: it exits if the port is taken or the lifespan fails, handles SIGINT and logs to the
terminal. Here, the socket is bound in advance, a failure is an exception in the caller, and signals are not touched.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import json
import logging
import re
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import uvicorn

from lmx_lab.errors import HostingError, PortTakenError
from lmx_lab.http import Limits
from lmx_lab.http.connections import HttpProtocol, WebSocketProtocol
from lmx_lab.http.guard import ASGIApp, Message, Receive, Scope, Send
from lmx_lab.sanitize import RecentLinesHandler

BACKLOG = 2048
"""Number of connections that may wait while the loop is busy, for instance because native code in a cell keeps the
interpreter's lock. The system may allow fewer."""
ACCEPTED_AT_ONCE = 16
"""Number of connections accepted at once. The loop then processes them, so that their number is noticed. asyncio has
one parameter for this and for ``BACKLOG``. Without free file descriptors, it logs this many errors per second."""
PORTS_TRIED = 50
"""Number of ports after the preferred one that are tried if the port was not requested explicitly."""
GRACE_S = 3
"""Time that running requests get to finish after ``stop``."""
PROBE_S = 0.4
REQUEST_LOGGERS = ("lmx_lab.http", "lmx_lab.server")
"""Loggers of the packages that answer requests. Their records concern requests of all clients."""


def bind(
    host: str, port: int, *, explicit: bool, ports_tried: int = PORTS_TRIED, response_s: float = 2.0
) -> socket.socket:
    """Create a listening socket. Requests wait in it and are answered once ``serve`` runs.

    Args:
        port: 0 means any free port.
        explicit: Whether only this port is allowed. If not, and it is taken, one of the next 50 is used.
        ports_tried: Number of ports after the preferred one that are tried.
        response_s: Time in which the program on a taken port has to respond after it has accepted the connection, for
            the error to name it. It is long because the loop of a lab may be busy.

    Raises:
        PortTakenError: the port, or every port that was tried, is in use.
        HostingError: the address does not belong to this machine, or the port is invalid or requires more rights.
    """
    host = host.strip("[]")
    if not 0 <= port <= 65535:
        raise HostingError(f"port is {port}; it must be between 0 (any free port) and 65535", param="port")
    last = port if explicit or port == 0 else min(port + ports_tried, 65535)
    for candidate in range(port, last + 1):
        try:
            return _listen(host, candidate)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise HostingError(f"cannot listen on {host!r} port {candidate}: {exc.strerror}", param="host") from exc
        except ValueError as exc:
            raise HostingError(f"cannot listen on {host!r}: it is not a valid name", param="host") from exc
    remedy = "use port 0 for any free port"
    if last > port:
        raise PortTakenError(f"ports {port} to {last} on {host} are all in use; free one, or {remedy}", param="port")
    owner = "another program"
    if _is_own(host, port, response_s):
        owner, remedy = "another LMX Lab server", f"stop it, {remedy}"
    raise PortTakenError(f"port {port} on {host} is in use by {owner}; {remedy}, or choose another port", param="port")


def _listen(host: str, port: int) -> socket.socket:
    # Unless the protocol is given explicitly, asyncio does not disable Nagle's algorithm: 44 ms a request, not 0.3 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform != "linux" and port and _is_accepting(host, port):
            # On other systems, SO_REUSEADDR lets a specific address share the port of a wildcard address.
            raise OSError(errno.EADDRINUSE, "Address already in use")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, ValueError):
        sock.close()
        raise
    return sock


def loopback_for(host: str) -> str:
    """Return the address for programs on this machine, even if the server listens everywhere."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _is_accepting(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((loopback_for(host), port), PROBE_S):
        return True
    return False


def _is_own(host: str, port: int, response_s: float) -> bool:
    """Whether the program on a port is LMX Lab; takes at most ``PROBE_S + response_s``."""
    host = loopback_for(host)
    name = f"[{host}]" if ":" in host else host
    response = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), PROBE_S) as sock:
        deadline = time.monotonic() + response_s
        # With HTTP/1.0 there are no chunks, and the body ends with the connection.
        sock.sendall(f"GET /healthz HTTP/1.0\r\nHost: {name}:{port}\r\n\r\n".encode())
        while len(response) < 65536 and (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            if not (piece := sock.recv(8192)):
                break
            response += piece
    head, _, body = response.lower().partition(b"\r\n\r\n")
    with contextlib.suppress(ValueError):
        described = json.loads(body)
        if isinstance(described, dict) and described.get("name") == "lmx-lab":
            return True
    return b"\r\nx-lmx-lab:" in head


def _remove_keys(record: logging.LogRecord) -> bool:
    """Remove the queries of URLs, which may contain the key of a WebSocket. Drop records below INFO with headers."""
    if isinstance(record.args, tuple):
        record.args = tuple(re.sub(r"(?s)\?.*", "?…", arg) if isinstance(arg, str) else arg for arg in record.args)
    return record.levelno >= logging.INFO


_LOGS = RecentLinesHandler(500)


def recent_logs() -> list[str]:
    """Return the last 500 log records of all servers of this process and of their requests, oldest first."""
    return list(_LOGS.lines)


class _Lifespan:
    """Wraps an application to keep the error of its lifespan, which uvicorn would only log, and the task to cancel."""

    def __init__(self, app: ASGIApp, cancel_s: float) -> None:
        self._app = app
        self.cancel_s = cancel_s
        self._task: asyncio.Task[Any] | None = None
        self.error: BaseException | None = None
        self.reason = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._run if scope["type"] == "lifespan" else self._app
        await run(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_record(message: Message) -> None:
            if message["type"].endswith(".failed"):
                self.reason = str(message.get("message", "")).strip().rpartition("\n")[2]
            await send(message)

        self._task = asyncio.current_task()
        try:
            await self._app(scope, receive, send_and_record)
        except BaseException as exc:
            self.error = exc
            raise

    async def end(self) -> None:
        """Cancel a lifespan that hangs, or that remains after a cancelled start."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=self.cancel_s)


class _Server(uvicorn.Server):
    """uvicorn without its control of the process, and without its steps of 0.1 s, in two of which it would stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)
        self.accepting.set_result(None)

    def stop(self) -> None:
        """Begin the shutdown."""
        self.should_exit = True
        self.stopping.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                # The Date header of responses is updated once a second.
                await asyncio.wait_for(self.stopping.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await asyncio.sleep(0.01)
                while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn has no event for their end
                    await asyncio.sleep(0.01)
                for listener in self.servers:
                    await listener.wait_closed()
        except TimeoutError:
            for task in state.tasks:
                task.cancel("the server was stopped")
        await self.lifespan.shutdown()


class RunningServer:
    """A running server, created by ``serve``. Its coroutines have to run on its ``loop``."""

    def __init__(self, server: _Server, lifespan: _Lifespan, task: asyncio.Task[None], url: str, port: int) -> None:
        self.url = url
        self.port = port
        self.loop = task.get_loop()
        self._server = server
        self._lifespan = lifespan
        self._task = task
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Errors of the start are raised in ``serve``, and later ones are logged, so asyncio should not report them.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        task.add_done_callback(lambda _: self._ended.set_result(None))

    @property
    def running(self) -> bool:
        """Whether the server accepts requests, or will do so in a moment. Any thread may read it."""
        return not self._task.done()

    async def wait(self) -> None:
        """Wait until the server has ended for any reason. Can be awaited on any loop."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop accepting requests, let running ones finish for ``grace_s``, then cancel them. This frees the port.

        It can be called repeatedly, and takes a limited time even if the application does not respond.

        Raises:
            HostingError: it was called on a loop other than the server's.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise HostingError("this server runs on another loop; stop it there: thread.run(server.stop())")
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.stop()
        await asyncio.wait({self._task}, timeout=grace_s + self._lifespan.cancel_s)
        await self._lifespan.end()
        await asyncio.wait({self._task}, timeout=self._lifespan.cancel_s)
        await self._abandon()

    def stop_at_exit(self) -> None:
        """Stop the server soon; never raises.

        For ``atexit``, and only for the loop of a ``LoopThread``. Code on that loop must not call it.
        """
        if not self.running or self.loop.is_closed():
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self.stop(1), self.loop).result(1 + 2 * self._lifespan.cancel_s)

    async def _abandon(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task, *self._server.server_state.tasks}, timeout=self._lifespan.cancel_s)
        await self._lifespan.end()


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    *,
    ws_max_bytes: int = 8 * 2**20,
    ws_pong_s: float = 20.0,
    limits: Limits | None = None,
) -> RunningServer:
    """Serve an application on a socket of ``bind``, on the running loop. Returns once requests are accepted.

    The socket then belongs to the server. It is also closed if the start fails.

    Args:
        ws_max_bytes: Largest size of a message of a WebSocket.
        ws_pong_s: Time in which the client of a WebSocket must answer a ping. Pings are sent at half of this interval.

    Raises:
        HostingError: the start of the application (its lifespan) failed; the cause is chained.
    """
    logging.getLogger("uvicorn").propagate = False
    for name in ("uvicorn", *REQUEST_LOGGERS):
        logging.getLogger(name).addHandler(_LOGS)
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).addFilter(_remove_keys)
    limits = limits or Limits()
    lifespan = _Lifespan(app, limits.cancel_s)
    config = uvicorn.Config(
        lifespan,
        interface="asgi3",
        lifespan="on",
        loop="none",
        # h11 limits headers (64 KiB) and rejects duplicate Host headers; httptools is 0.2 ms per request faster.
        http=partial(HttpProtocol, limits=limits),  # type: ignore[arg-type]
        ws=partial(WebSocketProtocol, limits=limits),  # type: ignore[arg-type]
        ws_max_size=ws_max_bytes,
        ws_ping_interval=ws_pong_s / 2,
        ws_ping_timeout=ws_pong_s,
        # Compression gains nothing on loopback, and each connection would keep two windows in memory.
        ws_per_message_deflate=False,
        log_config=None,
        log_level="info",
        access_log=False,
        server_header=False,
        # The guard and the admin rules need the true peer; on Hubs, FORWARDED_ALLOW_IPS may trust every address.
        proxy_headers=False,
        workers=1,
        backlog=ACCEPTED_AT_ONCE,
        # uvicorn's type is a number of whole seconds, but fractions work.
        timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    name, port = sock.getsockname()[:2]
    name = loopback_for(name)
    url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
    task = asyncio.create_task(_run(server, lifespan, sock, port), name=f"lmx-lab server on port {port}")
    # This imports what the first streamed response would import otherwise, which takes 4 ms.
    async with anyio.create_task_group():
        pass
    running = RunningServer(server, lifespan, task, url, port)
    try:
        await asyncio.wait({server.accepting, task}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await running._abandon()
        raise
    if task.done():
        await lifespan.end()
        # Raises the error that prevented the start.
        task.result()
    return running


async def _run(server: _Server, lifespan: _Lifespan, sock: socket.socket, port: int) -> None:
    try:
        await server.serve(sockets=[sock])
    except (SystemExit, Exception) as exc:
        # A SystemExit that leaves its task would end the loop, and with it the kernel.
        cause = lifespan.error or exc
        why = lifespan.reason or f"{type(cause).__name__}: {cause}"
        raise HostingError(f"the server on port {port} could not start: {why}; see recent_logs() for more") from cause
    finally:
        # The listeners first, because they still watch the socket.
        for listener in getattr(server, "servers", []):
            listener.close()
        sock.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
