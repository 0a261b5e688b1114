"""Run an ASGI application on the running event loop: a kernel's, or that of a ``LoopThread``.

Stock uvicorn owns its process: it exits when the port is taken or the lifespan fails, takes over SIGINT and logs to the
terminal. Here the socket is bound first, a failure is an exception in the caller, and signals stay whose they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn

from lmx_lab.errors import HostingError, PortTakenError
from lmx_lab.http.protocol import HttpProtocol, WebSocketProtocol
from lmx_lab.portal import loops_serving, note_serving
from lmx_lab.sanitize import RecentLines

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

BACKLOG = 2048
"""Connections that wait while the loop is busy, as a kernel's is with a long cell; the system may allow fewer."""
ACCEPTED_AT_ONCE = 16
"""Then the loop goes on with what it has accepted, so that their number is seen. asyncio has one number for this and
for ``BACKLOG``; where no file descriptor is left it logs as many errors as this, each second."""
PORTS_TRIED = 50
"""How many ports after the preferred one are tried when that one was not asked for explicitly."""
GRACE_S = 3
"""How long running requests may go on after ``stop``."""
CANCEL_S = 2.0
"""How long cancelled work may take to end before it is left alone."""
PROBE_S = 0.4
ANSWER_S = 2.0
"""How long whoever holds a port may take to say what it is, once it has accepted: a lab's loop may be busy."""
LOG_RECORDS = 500


def bind(host: str, port: int, *, explicit: bool) -> socket.socket:
    """A listening socket: requests wait in it from now on and are answered once ``serve`` runs.

    Port 0 is any free one. If ``port`` is taken and was not asked for explicitly, one of the next 50 is used.

    Raises:
        PortTakenError: the explicit port, or every port tried, is in use.
        HostingError: an address that is not this machine's, a port that is none or that needs more rights.
    """
    host = host.strip("[]")
    if not 0 <= port <= 65535:
        raise HostingError(f"port is {port}; it must be between 0 (any free one) and 65535", param="port")
    last = port if explicit or port == 0 else min(port + PORTS_TRIED, 65535)
    for candidate in range(port, last + 1):
        try:
            return _listen(host, candidate)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise HostingError(f"cannot listen on {host!r} port {candidate}: {exc.strerror}", param="host") from exc
        except ValueError as exc:
            raise HostingError(f"cannot listen on {host!r}: no such name can exist", param="host") from exc
    raise PortTakenError(_taken(host, port, last), param="port")


def _listen(host: str, port: int) -> socket.socket:
    # Without the protocol spelled out asyncio leaves Nagle's algorithm on: 44 ms instead of 0.3 ms a request.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform != "linux" and port and _answers(host, port):
            # Elsewhere SO_REUSEADDR lets a specific address share the port of a wildcard.
            raise OSError(errno.EADDRINUSE, "Address already in use")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, ValueError):
        sock.close()
        raise
    return sock


def _loopback_for(host: str) -> str:
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((_loopback_for(host), port), PROBE_S):
        return True
    return False


def _taken(host: str, first: int, last: int) -> str:
    if last > first:
        return f"ports {first} to {last} on {host} are all in use; free one, or use port 0 for any free one"
    holder = _holder(host, first)
    remedy = "stop it, use port 0 for any free one" if holder else "use port 0 for any free one"
    return f"port {first} on {host} is in use by {holder or 'another program'}; {remedy}, or choose another port"


def _holder(host: str, port: int) -> str | None:
    """What holds the port if it is LMX Lab, else ``None``; takes at most ``PROBE_S + ANSWER_S``."""
    # A server on this very loop could not answer while we wait for it.
    if loops_serving(port):
        return "an LMX Lab server of this process"
    answer = _probe(_loopback_for(host), port).lower()
    head, _, body = answer.partition(b"\r\n\r\n")
    with contextlib.suppress(ValueError):
        described = json.loads(body)
        if isinstance(described, dict) and described.get("name") == "lmx-lab":
            return "another LMX Lab server"
    return "another LMX Lab server" if b"\r\nx-lmx-lab:" in head else None


def _probe(host: str, port: int) -> bytes:
    name = f"[{host}]" if ":" in host else host
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), PROBE_S) as sock:
        deadline = time.monotonic() + ANSWER_S
        # HTTP/1.0: no chunks, and the end of the body is the end of the connection.
        sock.sendall(f"GET /healthz HTTP/1.0\r\nHost: {name}:{port}\r\n\r\n".encode())
        while len(answer) < 65536 and (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            if not (piece := sock.recv(8192)):
                break
            answer += piece
    return answer


def _without_keys(record: logging.LogRecord) -> bool:
    """Takes queries, where WebSocket clients may send a key, out of addresses. Below INFO there are headers, too."""
    if isinstance(record.args, tuple):
        record.args = tuple(re.sub(r"(?s)\?.*", "?…", arg) if isinstance(arg, str) else arg for arg in record.args)
    return record.levelno >= logging.INFO


_LOGS = RecentLines(LOG_RECORDS)


def recent_logs() -> list[str]:
    """The last 500 log records of all servers of this process, oldest first."""
    return list(_LOGS.lines)


def _divert_logs() -> None:
    logger = logging.getLogger("uvicorn")
    logger.propagate = False
    logger.addHandler(_LOGS)
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).addFilter(_without_keys)


class _Lifespan:
    """The application, with hold of its lifespan: the error that uvicorn would only log, and the task to end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._task: asyncio.Task[Any] | None = None
        self.error: BaseException | None = None
        self.reason = ""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        run = self._live if scope["type"] == "lifespan" else self._app
        await run(scope, receive, send)

    async def _live(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def noting_send(message: Message) -> None:
            if message["type"].endswith(".failed"):
                self.reason = str(message.get("message", "")).strip().rpartition("\n")[2]
            await send(message)

        self._task = asyncio.current_task()
        try:
            await self._app(scope, receive, noting_send)
        except BaseException as exc:
            self.error = exc
            raise

    async def end(self) -> None:
        """Cancel a lifespan that hangs, or that a cancelled start has left behind."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CANCEL_S)


class _Server(uvicorn.Server):
    """uvicorn without its hold on the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)
        self.accepting.set()


class Host:
    """One running server, made by ``serve``. Its coroutines belong to its own ``loop``."""

    def __init__(self, server: _Server, lifespan: _Lifespan, task: asyncio.Task[None], url: str, port: int) -> None:
        self.url = url
        self.port = port
        self.loop = task.get_loop()
        self._server = server
        self._lifespan = lifespan
        self._task = task
        # Whoever waits for the start gets the failure; a later one is in the log, not in a message of the collector.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    @property
    def running(self) -> bool:
        """Whether it accepts requests, or will in a moment; from any thread."""
        return not self._task.done()

    async def wait(self) -> None:
        """Return when the server has ended, whoever ended it."""
        await asyncio.wait({self._task})

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop accepting, let running requests end for ``grace_s``, then cancel them; the port is free afterwards.

        Idempotent, and bounded whatever the application does.

        Raises:
            HostingError: called on another loop than the server's.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise HostingError("this server runs on another loop; stop it there: thread.run(host.stop())")
        # uvicorn counts whole seconds by its types, and waits for fractions all the same.
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        await asyncio.wait({self._task}, timeout=grace_s + CANCEL_S)
        await self._lifespan.end()
        await asyncio.wait({self._task}, timeout=CANCEL_S)
        await self._abandon()

    def stop_at_exit(self) -> None:
        """For ``atexit``: stop soon, from any thread but the loop's, in any state of the loop; never raises."""
        if not self.running or self.loop.is_closed():
            return
        with contextlib.suppress(Exception):
            if self.loop.is_running():
                asyncio.run_coroutine_threadsafe(self.stop(1), self.loop).result(1 + 2 * CANCEL_S)
            else:
                stopping = self.loop.create_task(self.stop(1))
                stopping.add_done_callback(lambda _: self.loop.stop())
                # Again and again: an ended kernel has a stop of its loop still scheduled, which would end this early.
                while not stopping.done():
                    self.loop.run_forever()

    async def _accepting(self) -> None:
        """Return when requests are accepted; raise what prevented it."""
        accepting = asyncio.ensure_future(self._server.accepting.wait())
        try:
            await asyncio.wait({accepting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._abandon()
            raise
        finally:
            accepting.cancel()
        if self._task.done():
            await self._lifespan.end()
            self._task.result()

    async def _abandon(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task, *self._server.server_state.tasks}, timeout=CANCEL_S)
        await self._lifespan.end()


async def serve(app: ASGIApp, sock: socket.socket, *, ws_max_bytes: int = 8 * 2**20) -> Host:
    """Serve the application on a socket of ``bind``, on the running loop; returns once requests are accepted.

    The socket belongs to the server from here on: it is closed when the start fails, too.

    Raises:
        HostingError: the application's start (its lifespan) failed; the cause is chained.
    """
    _divert_logs()
    lifespan = _Lifespan(app)
    server = _Server(_config(lifespan, ws_max_bytes))
    name, port = sock.getsockname()[:2]
    name = _loopback_for(name)
    task = asyncio.create_task(_run(server, lifespan, sock, port), name=f"lmx-lab server on port {port}")
    host = Host(server, lifespan, task, f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}", port)
    note_serving(host)
    await host._accepting()
    return host


def _config(app: ASGIApp, ws_max_bytes: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        lifespan="on",
        loop="none",
        # h11 bounds headers (64 KiB) and refuses doubled Host headers; httptools is 0.2 ms a request faster.
        http=HttpProtocol,
        ws=WebSocketProtocol,
        ws_max_size=ws_max_bytes,
        # On loopback there is nothing to gain, and each connection would keep two windows of it in memory.
        ws_per_message_deflate=False,
        log_config=None,
        log_level="info",
        access_log=False,
        server_header=False,
        # The guard and the admin rules need the true peer; on Hubs FORWARDED_ALLOW_IPS may trust everybody.
        proxy_headers=False,
        workers=1,
        backlog=ACCEPTED_AT_ONCE,
        # Longer than the 5 s for which httpx keeps idle connections, so that it never sends into a closing one.
        timeout_keep_alive=30,
        timeout_graceful_shutdown=GRACE_S,
    )


async def _run(server: _Server, lifespan: _Lifespan, sock: socket.socket, port: int) -> None:
    try:
        await server.serve(sockets=[sock])
    except (SystemExit, Exception) as exc:
        # A SystemExit that leaves its task ends the loop, and with it the kernel.
        cause = lifespan.error or exc
        why = lifespan.reason or f"{type(cause).__name__}: {cause}"
        raise HostingError(f"the server on port {port} could not start: {why}; recent_logs() has the rest") from cause
    finally:
        # The listeners first: they still watch the socket.
        for listener in getattr(server, "servers", []):
            listener.close()
        sock.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
