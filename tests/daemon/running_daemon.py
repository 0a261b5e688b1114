"""Run a daemon in this process, and connect clients to it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import websockets
from websockets.asyncio.client import ClientConnection

from lmx_lab.daemon.daemon import Daemon
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.store import Transaction
from lmx_lab.settings import Settings
from lmx_lab.wire.events import TurnText

WAIT_S = 20.0
UPSTREAM = "http://127.0.0.1:9"
"""An address without a server, for tests that call no model."""


@contextlib.contextmanager
def serving(home: Path, limits: Limits | None = None, **settings: Any) -> Iterator[Daemon]:
    settings = {"home": home, "daemon_port": 0, "upstream": UPSTREAM, **settings}
    daemon = Daemon(settings=Settings(**settings), limits=limits)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop(mode="now")


@contextlib.contextmanager
def client(daemon: Daemon, **headers: str) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {daemon.token}", **headers}
    with httpx2.Client(base_url=daemon.url, headers=headers, timeout=WAIT_S, trust_env=False) as http:
        yield http


def connect(daemon: Daemon, query: str = "", *, token: str | None = None, **options: Any) -> Any:
    """Open a WebSocket of events, with the token in a header."""
    headers = {"Authorization": f"Bearer {token or daemon.token}", **options.pop("headers", {})}
    address = f"{daemon.url.replace('http', 'ws', 1)}/v3/events{query}"
    return websockets.connect(address, additional_headers=headers, proxy=None, open_timeout=WAIT_S, **options)


async def frames_until(socket: ClientConnection, kind: str) -> list[dict[str, Any]]:
    """Receive frames up to and including the first of this name."""
    frames: list[dict[str, Any]] = []
    while not frames or frames[-1]["event"] != kind:
        frames.append(json.loads(await socket.recv()))
    return frames


def write_tokens(daemon: Daemon, count: int, session_id: str = "s", text: str = "word") -> int:
    """Write ``count`` events in one transaction and return the seq of the last."""
    data = TurnText(message_id="msg_1", text=text)

    def work(transaction: Transaction) -> int:
        return [transaction.append("turn.token", data, session_id=session_id, turn_id="t") for _ in range(count)][-1]

    return daemon.run(daemon.services.store.write(work))


def raw_subscriber(daemon: Daemon, query: str = "", *, receive_bytes: int | None = None) -> socket.socket:
    """Subscribe with a plain socket from which only the status line of the handshake was read."""
    bare = socket.socket()
    bare.settimeout(WAIT_S)
    if receive_bytes is not None:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    bare.connect(("127.0.0.1", daemon.port))
    lines = [
        f"GET /v3/events{query} HTTP/1.1",
        f"Host: 127.0.0.1:{daemon.port}",
        f"Authorization: Bearer {daemon.token}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    bare.sendall("\r\n".join([*lines, "", ""]).encode())
    assert bare.recv(12) == b"HTTP/1.1 101"
    return bare


def settled(daemon: Daemon, condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true on the daemon's event loop within ``WAIT_S``."""

    async def look() -> bool:
        import asyncio

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                return True
        return False

    return daemon.run(look())
