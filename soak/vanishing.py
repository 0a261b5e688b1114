"""Clients of another machine that vanish without a word: their connections are cut in 30 s, and their slots are free.

The machines are two network namespaces with a cable between them. This module is run three times: as a part, as the
servers' machine (``near``) and as the clients' (``far``), which only opens sockets and sends what it is told.
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
from soak.chats import Body, Good, long_body
from soak.row import Row
from soak.served import Daemon, Home, Server, end_well, until
from soak.soak import Soak
from tests.tiny import write_tiny_llama

NOTICED_S = 30.0
WATCHED_S = 60.0
"""After which nobody waits any more for a connection to be cut."""
NEAR, FAR = "10.83.0.1", "10.83.0.2"
CONTEXT = 400_000
"""Of a model whose answers are not over before their clients are missed."""
TOKENS = 300_000
NOBODY = "http://127.0.0.1:9"
LOOK_S = 0.05
LIMIT_S = 300.0
PATIENCE_S = 60.0
"""Of a client that has not vanished yet."""
WEBSOCKET = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
WEBSOCKET += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
Opened = dict[str, tuple[int, int]]
"""What a connection is for: the server's process, and the client's port."""


def run(soak: Soak, *, code: str = "") -> list[Row]:
    """
    Args:
        code: Python for both servers to run before they start.
    """
    row = Row(part="load: peers that vanish")
    refusal = _refusal()
    if refusal is not None:
        row.notes = f"not done: {refusal}"
        return [row]
    settings = json.dumps({"folder": str(soak.folder.absolute()), "code": code})
    command = ["unshare", "--net", sys.executable, "-m", "soak.vanishing", "near", settings]
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
        row.wrong.append(f"could not be run: exit status {process.returncode}")
        return [row]
    return [Row(**json.loads(output))]


def _refusal() -> str | None:
    """Why there can be no two machines here."""
    if sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("ip")):
        return "there are no network namespaces, or not the programs unshare and ip"
    trial = "ip link add near type veth peer name far"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", trial], capture_output=True, text=True, check=False)
    return f"network namespaces are not permitted: {tried.stderr.strip()[:200]}" if tried.returncode else None


# The servers' machine


def near(folder: Path, code: str) -> Row:
    _ip("link set lo up")
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name, _far() as far:
        model = Path(name) / "tiny-endless"
        write_tiny_llama(model, folder, seed=0, context=CONTEXT)
        allowed = ("--host", "0.0.0.0", "--allow-host", NEAR)
        with (
            Server(Home(Path(name) / "s"), model, *allowed, code=code) as server,
            Daemon(Home(Path(name) / "d"), NOBODY, *allowed, code=code) as daemon,
        ):
            row = _vanished(server, daemon, far)
            end_well(server, row)
            end_well(daemon, row)
    return row


def _vanished(server: Server, daemon: Daemon, far: _Far) -> Row:
    row = Row(part="load: peers that vanish")
    good = asyncio.run(Good.first(server.url))
    opened: Opened = {}
    for what, (command, exchange) in _requests(server, daemon).items():
        port = urlsplit(server.url if command is server else daemon.state.url).port
        said = [(base64.b64encode(sent).decode(), answer) for sent, answer in exchange]
        opened[what] = command.pid, far.ask(port=port, exchange=said)["port"]
    row.requests = row.faults = len(opened)
    if not until(lambda: server.busy() == 3, PATIENCE_S):
        row.wrong.append(f"3 requests should be computed: {server.figures()}")
    far.ask(vanish=True)
    noticed = _noticed(opened, server)
    for what in [*opened, "slots"]:
        if noticed.get(what, WATCHED_S) > NOTICED_S:
            row.hung += 1
            row.wrong.append(f"{what}: noticed after {noticed.get(what, WATCHED_S):.1f} s or later")
    row.notes = "noticed after " + ", ".join(f"{seconds:.1f} s ({what})" for what, seconds in noticed.items())
    end = asyncio.run(good.again(server.url))
    row.requests += 1
    row.slowest_s = round(end.seconds, 2)
    if not end.finished:
        row.lost += 1
        row.wrong.append(f"afterwards the good request was {end.outcome}")
    return row


def _requests(server: Server, daemon: Daemon) -> dict[str, tuple[Server | Daemon, list[tuple[bytes, str]]]]:
    """To which program; what is sent, and what comes before more is sent, or the client vanishes."""
    token = f"Authorization: Bearer {daemon.state.token}\r\n"
    asked = {name: value for name, value in long_body(3, TOKENS).items() if not name.startswith("stream")}
    on_socket = [(_get("/v1/chat/stream", WEBSOCKET), "\r\n\r\n"), (_frame(json.dumps(asked)), "token")]
    whole = long_body(2, TOKENS) | {"stream": False, "stream_options": None}
    return {
        "SSE chat": (server, [(_post(long_body(1, TOKENS)), "delta")]),
        # Nothing comes before its end.
        "whole chat": (server, [(_post(whole), "")]),
        "WebSocket chat": (server, on_socket),
        "SSE events": (server, [(_get("/admin/events", ""), "uptime")]),
        "idle WebSocket": (daemon, [(_get("/v3/events", WEBSOCKET + token), "stream.synced")]),
    }


def _post(body: Body) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {NEAR}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _get(path: str, fields: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {NEAR}\r\n{fields}\r\n".encode()


def _frame(text: str) -> bytes:
    """As a client sends it, with a mask of zeros."""
    data = text.encode()
    return bytes([0x81, 0x80 | 126]) + len(data).to_bytes(2) + bytes(4) + data


def _noticed(opened: Opened, server: Server) -> dict[str, float]:
    """When each connection was gone, and when no slot was taken any more, in seconds."""
    began, noticed = time.monotonic(), dict[str, float]()
    pids = {pid for pid, _ in opened.values()}
    while len(noticed) <= len(opened) and time.monotonic() - began < WATCHED_S:
        held = {(pid, each.raddr.port) for pid in pids for each in psutil.Process(pid).net_connections() if each.raddr}
        now = time.monotonic() - began
        for what, connection in opened.items():
            if connection not in held:
                noticed.setdefault(what, now)
        if server.busy() == 0:
            noticed.setdefault("slots", now)
        time.sleep(LOOK_S)
    return noticed


class _Far:
    """The clients' machine."""

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
def _far() -> Iterator[_Far]:
    """Another machine, with a cable to this one."""
    command = ["unshare", "--net", sys.executable, "-m", "soak.vanishing", "far"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            far = _Far(process)
            far.ask(ready=True)
            _ip(f"link add near type veth peer name far netns {process.pid}")
            _ip(f"addr add {NEAR}/24 dev near")
            _ip("link set near up")
            far.ask(arrive=True)
            yield far
        finally:
            process.kill()


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, stdout=subprocess.DEVNULL)


# The clients' machine


def far() -> None:
    """Carry out orders, a line of JSON each, until there are no more."""
    sockets: list[socket.socket] = []
    for line in sys.stdin:
        order, reply = json.loads(line), dict[str, Any]()
        if "arrive" in order:
            _ip(f"addr add {FAR}/24 dev far")
            _ip("link set far up")
        elif "vanish" in order:
            # The cable stays, as where a switch is between: nothing that is sent to this address is answered any more.
            _ip(f"addr del {FAR}/24 dev far")
        elif "port" in order:
            sockets.append(_open(order))
            reply["port"] = sockets[-1].getsockname()[1]
        print(json.dumps(reply), flush=True)


def _open(order: dict[str, Any]) -> socket.socket:
    """Send and wait for what shall come, again and again, and then take whatever comes."""
    sock = socket.create_connection((NEAR, order["port"]), PATIENCE_S)
    for sent, answer in order["exchange"]:
        sock.sendall(base64.b64decode(sent))
        received = b""
        while answer.encode() not in received:
            piece = sock.recv(65536)
            if not piece:
                raise ConnectionError(f"closed by the server: {received[-300:]!r}")
            received += piece
    sock.settimeout(None)
    threading.Thread(target=_take, args=(sock,), daemon=True).start()
    return sock


def _take(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(65536):
            pass


if __name__ == "__main__":
    if sys.argv[1] == "far":
        far()
    else:
        # Leave by way of the contexts that end the programs.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        given = json.loads(sys.argv[2])
        made = near(Path(given["folder"]), given["code"])
        print(json.dumps({name: getattr(made, name) for name in Row.__dataclass_fields__}))
