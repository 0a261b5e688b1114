"""Tests that a client that accepts no data loses its slot, over server-sent events and over a WebSocket."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from websockets.frames import Frame, Opcode

from lmx_lab.http import protocol, websocket_protocol
from lmx_lab.http.slow_clients import SendWatch
from lmx_lab.notebook import Lab
from tests.flows.conftest import ENDLESS, PACE, echo_body, serving, wait_until, wait_until_idle

pytestmark = pytest.mark.slow
PATHS = {"sse": "/v1/chat/completions", "completions": "/v1/completions", "socket": "/v1/chat/stream"}
Way = Literal["sse", "completions", "socket"]
NOTICED = "the client has accepted no data"
CLOSE_CODE = (1008).to_bytes(2) + NOTICED.encode()
UPGRADE = (
    "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@contextmanager
def unread_stream(lab: Lab, way: Way, **changes: Any) -> Iterator[socket.socket]:
    """Start a stream without reading it, and yield the connection."""
    body = {**echo_body(**changes), **({} if way == "socket" else {"stream": True})}
    if way == "completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    content = json.dumps(body).encode()
    head = f" {PATHS[way]} HTTP/1.1\r\nhost: localhost:{lab.port}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        client.connect(("127.0.0.1", lab.port))
        if way == "socket":
            client.sendall(f"GET{head}{UPGRADE}\r\n".encode())
            while not client.recv(1, socket.MSG_PEEK):
                pass
            client.sendall(Frame(Opcode.TEXT, content).serialize(mask=True))
        else:
            head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
            client.sendall(f"POST{head}\r\n".encode() + content)
        yield client


def read_until(client: socket.socket, end: bytes) -> bytes:
    """Read until the data contains ``end``, or the server closes the connection."""
    data = b""
    with suppress(ConnectionError):
        while end not in data and (piece := client.recv(65536)):
            data += piece
    return data


@pytest.mark.parametrize("way", PATHS)
def test_a_client_that_accepts_no_data_is_disconnected_and_its_generation_cancelled(
    echo_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: Way
) -> None:
    for module in (protocol, websocket_protocol):
        monkeypatch.setattr(module, "LINGER_S", 20.0)
    # A client that does not answer pings is also disconnected, possibly earlier.
    monkeypatch.setattr(websocket_protocol.WebSocketProtocol, "start_keepalive", lambda self: None)
    with serving(echo_home, "echo", echo_tokens_per_s=PACE, slow_client_s=1) as lab:
        with unread_stream(lab, way, **ENDLESS) as client:
            wait_until(lambda: NOTICED in caplog.text)
            wait_until_idle(lab)
            assert 0 < lab.engine.snapshot.output_tokens < ENDLESS["max_tokens"]
            data = read_until(client, CLOSE_CODE)
        metrics = httpx2.get(f"{lab.url}/metrics", timeout=30).text
    assert caplog.text.count(NOTICED) == 1
    assert "Traceback" not in caplog.text
    assert b"[DONE]" not in data
    # Over a WebSocket, the close code follows the tokens that were sent.
    assert (CLOSE_CODE in data) is (way == "socket")
    assert re.search(r"lmx_lab_requests_total.*cancelled.* 1\.0", metrics)


@pytest.mark.parametrize("way", ["sse", "socket"])
def test_a_slot_for_which_others_wait_is_free_earlier(echo_home: Path, way: Way) -> None:
    with (
        serving(echo_home, "echo", slots=1, echo_tokens_per_s=PACE, slow_client_s=3600) as lab,
        unread_stream(lab, way, **ENDLESS),
    ):
        wait_until(lambda: lab.engine.snapshot.active_requests == 1)
        answer = httpx2.post(f"{lab.url}{PATHS['sse']}", json=echo_body(), timeout=60)
        assert answer.status_code == 200
        assert lab.engine.snapshot.output_tokens < ENDLESS["max_tokens"]


def test_a_client_may_pause_after_its_generation_has_ended(echo_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked_s: list[float] = []
    check = SendWatch._check
    monkeypatch.setattr(SendWatch, "_check", lambda watch: (check(watch), blocked_s.append(watch.blocked_s)))
    with (
        # Deltas are merged if the server sends more slowly than the engine, and may then fit in the buffers.
        serving(echo_home, "echo", echo_tokens_per_s=PACE, slow_client_s=3) as lab,
        unread_stream(lab, "sse", max_tokens=2000, ignore_eos=True) as client,
    ):
        wait_until(lambda: lab.engine.snapshot.output_tokens == 2000)
        wait_until_idle(lab)
        wait_until(lambda: max(blocked_s, default=0) >= 3)
        data = read_until(client, b"data: [DONE]")
    assert b"data: [DONE]" in data
