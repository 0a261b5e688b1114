"""Let clients on another machine become unreachable: their connections are closed and slots freed within 30 s.

The machines are two network namespaces with a virtual cable between them. This module runs three times: as a part, as
the servers' machine (``server``), and as the clients' machine (``client``), which opens sockets and sends on command.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil

from benchmarks.paths import ROOT
from soak.chat_requests import Body, ReferenceChat, long_body
from soak.programs import Daemon, Home, Server, end_and_check, wait_until
from soak.report import Row, Soak
from tests.support.models import write_tiny_llama

NOTICED_S = 30.0
WATCHED_S = 60.0
"""Time after which the part no longer waits for a connection to be closed."""
SERVER_IP, CLIENT_IP = "10.83.0.1", "10.83.0.2"
CONTEXT = 400_000
"""Context length, so large that no answer ends before its client is missed."""
TOKENS = 300_000
NO_UPSTREAM = "http://127.0.0.1:9"
POLL_S = 0.05
LIMIT_S = 300.0
PATIENCE_S = 60.0
"""Limit for opening a connection, and for the start of all requests."""
WEBSOCKET = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
WEBSOCKET += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
Opened = dict[str, tuple[int, int]]
"""For each kind of connection, the process id of the server and the client's port."""


def run(soak: Soak, *, code: str = "") -> list[Row]:
    """Run the part.

    Args:
        code: Python that both servers run before they start.
    """
    row = Row(part="load: clients that become unreachable")
    missing = _missing_requirement()
    if missing is not None:
        row.notes = f"skipped: {missing}"
        return [row]
    settings = json.dumps({"folder": str(soak.folder.absolute()), "code": code})
    command = ["unshare", "--net", sys.executable, "-m", "soak.unreachable_clients", "server", settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            row.hung += 1
            row.wrong.append(f"no answer within {LIMIT_S:g} s")
            return [row]
        finally:
            process.terminate()
    if process.returncode:
        row.wrong.append(f"failed with exit status {process.returncode}")
        return [row]
    return [Row(**json.loads(output))]


def _missing_requirement() -> str | None:
    """Return why two network namespaces are not possible here, or None."""
    if sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("ip")):
        return "there are no network namespaces, or the programs unshare and ip are missing"
    trial = "ip link add near type veth peer name far"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", trial], capture_output=True, text=True, check=False)
    return f"network namespaces are not permitted: {tried.stderr.strip()[:200]}" if tried.returncode else None


# The servers' machine


def run_server_machine(folder: Path, code: str) -> Row:
    _ip("link set lo up")
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name, _client_machine() as run_client_machine:
        model = Path(name) / "tiny-endless"
        write_tiny_llama(model, folder, seed=0, context=CONTEXT)
        allowed = ("--host", "0.0.0.0", "--allow-host", SERVER_IP)
        with (
            Server(Home(Path(name) / "s"), model, *allowed, code=code) as server,
            Daemon(Home(Path(name) / "d"), NO_UPSTREAM, *allowed, code=code) as daemon,
        ):
            row = _disconnect_clients(server, daemon, run_client_machine)
            end_and_check(server, row)
            end_and_check(daemon, row)
    return row


def _disconnect_clients(server: Server, daemon: Daemon, run_client_machine: _ClientMachine) -> Row:
    row = Row(part="load: clients that become unreachable")
    reference = asyncio.run(ReferenceChat.record(server.url))
    opened: Opened = {}
    for what, (command, exchange) in _requests(server, daemon).items():
        port = urlsplit(server.url if command is server else daemon.state.url).port
        pairs = [(base64.b64encode(sent).decode(), answer) for sent, answer in exchange]
        opened[what] = command.pid, run_client_machine.ask(port=port, exchange=pairs)["port"]
    row.requests = row.faults = len(opened)
    if not wait_until(lambda: server.unfinished_requests() == 3, PATIENCE_S):
        row.wrong.append(f"3 requests should be active: {server.metrics()}")
    run_client_machine.ask(vanish=True)
    noticed = _watch_connections(opened, server)
    for what in [*opened, "slots"]:
        if noticed.get(what, WATCHED_S) > NOTICED_S:
            row.hung += 1
            row.wrong.append(f"{what}: noticed after {noticed.get(what, WATCHED_S):.1f} s or later")
    row.notes = "noticed after " + ", ".join(f"{seconds:.1f} s ({what})" for what, seconds in noticed.items())
    end = asyncio.run(reference.repeat(server.url))
    row.requests += 1
    row.slowest_s = round(end.seconds, 2)
    if not end.finished:
        row.lost += 1
        row.wrong.append(f"afterwards the reference request ended with {end.outcome}")
    return row


def _requests(server: Server, daemon: Daemon) -> dict[str, tuple[Server | Daemon, list[tuple[bytes, str]]]]:
    """Return each kind of request: its program, and pairs of what is sent and what must then be received."""
    token = f"Authorization: Bearer {daemon.state.token}\r\n"
    request = {name: value for name, value in long_body(3, TOKENS).items() if not name.startswith("stream")}
    over_websocket = [(_get("/v1/chat/stream", WEBSOCKET), "\r\n\r\n"), (_frame(json.dumps(request)), "token")]
    whole = long_body(2, TOKENS) | {"stream": False, "stream_options": None}
    return {
        "SSE chat": (server, [(_post(long_body(1, TOKENS)), "delta")]),
        # Nothing is received before its end.
        "whole chat": (server, [(_post(whole), "")]),
        "WebSocket chat": (server, over_websocket),
        "SSE events": (server, [(_get("/admin/events", ""), "uptime")]),
        "idle WebSocket": (daemon, [(_get("/v3/events", WEBSOCKET + token), "stream.synced")]),
    }


def _post(body: Body) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {SERVER_IP}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _get(path: str, fields: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {SERVER_IP}\r\n{fields}\r\n".encode()


def _frame(text: str) -> bytes:
    """Return a text frame as a client sends it, with a mask of zeros."""
    data = text.encode()
    return bytes([0x81, 0x80 | 126]) + len(data).to_bytes(2) + bytes(4) + data


def _watch_connections(opened: Opened, server: Server) -> dict[str, float]:
    """Return after how many seconds each connection was closed, and after how many all slots were free (``slots``)."""
    began, noticed = time.monotonic(), dict[str, float]()
    pids = {pid for pid, _ in opened.values()}
    while len(noticed) <= len(opened) and time.monotonic() - began < WATCHED_S:
        held = {(pid, each.raddr.port) for pid in pids for each in psutil.Process(pid).net_connections() if each.raddr}
        now = time.monotonic() - began
        for what, connection in opened.items():
            if connection not in held:
                noticed.setdefault(what, now)
        if server.unfinished_requests() == 0:
            noticed.setdefault("slots", now)
        time.sleep(POLL_S)
    return noticed


class _ClientMachine:
    """The clients' machine, which is controlled by commands on its standard input."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in: IO[str] = process.stdin
        self._out: IO[str] = process.stdout

    def ask(self, **order: Any) -> dict[str, Any]:
        self._in.write(json.dumps(order) + "\n")
        self._in.flush()
        reply: dict[str, Any] = json.loads(self._out.readline())
        return reply


@contextlib.contextmanager
def _client_machine() -> Iterator[_ClientMachine]:
    """Start the clients' machine and connect it to this one by a virtual cable."""
    command = ["unshare", "--net", sys.executable, "-m", "soak.unreachable_clients", "client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            run_client_machine = _ClientMachine(process)
            run_client_machine.ask(ready=True)
            _ip(f"link add near type veth peer name far netns {process.pid}")
            _ip(f"addr add {SERVER_IP}/24 dev near")
            _ip("link set near up")
            run_client_machine.ask(arrive=True)
            yield run_client_machine
        finally:
            process.kill()


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, stdout=subprocess.DEVNULL)


# The clients' machine


def run_client_machine() -> None:
    """Carry out commands, one line of JSON each, until standard input is closed."""
    sockets: list[socket.socket] = []
    for line in sys.stdin:
        order, reply = json.loads(line), dict[str, Any]()
        if "arrive" in order:
            _ip(f"addr add {CLIENT_IP}/24 dev far")
            _ip("link set far up")
        elif "vanish" in order:
            # The cable stays connected, as with a switch in between; nothing sent to this address is answered any more.
            _ip(f"addr del {CLIENT_IP}/24 dev far")
        elif "port" in order:
            sockets.append(_open(order))
            reply["port"] = sockets[-1].getsockname()[1]
        print(json.dumps(reply), flush=True)


def _open(order: dict[str, Any]) -> socket.socket:
    """Send each message and wait for its answer, and then discard everything received."""
    sock = socket.create_connection((SERVER_IP, order["port"]), PATIENCE_S)
    for sent, answer in order["exchange"]:
        sock.sendall(base64.b64decode(sent))
        received = b""
        while answer.encode() not in received:
            piece = sock.recv(65536)
            if not piece:
                raise ConnectionError(f"closed by the server: {received[-300:]!r}")
            received += piece
    sock.settimeout(None)
    threading.Thread(target=_discard, args=(sock,), daemon=True).start()
    return sock


def _discard(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(65536):
            pass


if __name__ == "__main__":
    if sys.argv[1] == "client":
        run_client_machine()
    else:
        # Raise SystemExit, so that the context managers end the programs.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        given = json.loads(sys.argv[2])
        made = run_server_machine(Path(given["folder"]), given["code"])
        print(json.dumps({name: getattr(made, name) for name in Row.__dataclass_fields__}))
