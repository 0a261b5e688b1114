"""Tests that a model stops computing for a client that disconnects, in each phase of its request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from websockets.sync.client import connect

from lmx_lab.notebook import Lab
from tests.flows.conftest import chat_body, serving, wait_until, wait_until_idle

PATH = "/v1/chat/completions"
Way = Literal["sse", "whole", "socket"]
LONG: list[Any] = [{"role": "user", "content": "word " * 7000}]
BUSY: dict[str, Any] = {"model": "default", "max_tokens": 7500, "ignore_eos": True}


@pytest.fixture(scope="module")
def one_slot(long_home: Path) -> Iterator[Lab]:
    # Without a prefix cache, so that the second long prompt takes as long as the first.
    with serving(long_home, "tiny-long", slots=1, prefix_cache_bytes=0) as lab:
        yield lab


@contextmanager
def open_request(lab: Lab, way: Way, body: dict[str, Any]) -> Iterator[None]:
    """Send a request, and close the connection at the end of the block."""
    if way == "socket":
        with connect(lab.url.replace("http", "ws") + "/v1/chat/stream") as client:
            client.send(json.dumps(body))
            yield
            client.socket.shutdown(socket.SHUT_RDWR)
        return
    content = json.dumps({**body, "stream": way == "sse"}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost:{lab.port}\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", lab.port)) as client:
        client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        yield


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("way", ["sse", "whole", "socket"])
def test_the_model_stops_computing(one_slot: Lab, way: Way, phase: str) -> None:
    before = one_slot.engine.snapshot
    messages = {"messages": LONG} if phase == "prefill" else {}
    with open_request(one_slot, way, chat_body(**BUSY, **messages)):
        if phase == "prefill":
            wait_until(lambda: one_slot.engine.snapshot.active_requests == 1)
        else:
            wait_until(lambda: one_slot.engine.snapshot.output_tokens > before.output_tokens)
    wait_until_idle(one_slot)
    generated = one_slot.engine.snapshot.output_tokens - before.output_tokens
    assert generated == 0 if phase == "prefill" else 0 < generated < BUSY["max_tokens"]
    fresh = httpx2.post(f"{one_slot.url}{PATH}", json=chat_body(model="tiny-long"), timeout=30)
    assert fresh.status_code == 200
