"""Send chat requests in three ways (whole, streamed, over a WebSocket) and return how they ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from lmx_lab.notebook import Lab
from tests.flows.conftest import chat_body, events

CHAT = "/v1/chat/completions"
WAIT_S = 60


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of one request; exactly one of ``text`` and ``error`` is set."""

    text: str | None = None
    error: dict[str, Any] | None = None
    status: int | None = None
    """HTTP status; None for streams and WebSockets."""


def whole(lab: Lab, body: dict[str, Any]) -> End:
    answer = httpx2.post(lab.url + CHAT, json=body, timeout=WAIT_S)
    if answer.status_code != 200:
        return End(error=answer.json()["error"], status=answer.status_code)
    return End(text=answer.json()["choices"][0]["message"]["content"], status=200)


def streamed(lab: Lab, body: dict[str, Any]) -> End:
    answer = httpx2.post(lab.url + CHAT, json=body | {"stream": True}, timeout=WAIT_S)
    if answer.status_code != 200:
        return End(error=answer.json()["error"], status=answer.status_code)
    *chunks, last = events(answer.text)
    shown = [json.loads(chunk) for chunk in chunks]
    assert not [chunk for chunk in shown if "error" in chunk], "an error is the last event"
    if last != "[DONE]":
        return End(error=json.loads(last)["error"])
    return End(text="".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in shown))


def by_socket(lab: Lab, body: dict[str, Any]) -> End:
    text, ends = "", []
    with connect(lab.url.replace("http", "ws") + "/v1/chat/stream") as socket:
        socket.send(json.dumps(body))
        try:
            while True:
                message = json.loads(socket.recv(timeout=WAIT_S))
                text += message.get("token", "")
                if "done" in message or "error" in message:
                    ends.append(message)
                    if "done" in message:
                        socket.close()
        except ConnectionClosed:
            pass
    (end,) = ends
    assert socket.close_code == (1011 if "error" in end else 1000)
    return End(error=end["error"]) if "error" in end else End(text=text)


Way = Callable[[Lab, dict[str, Any]], End]
WAYS: dict[str, Way] = {"whole": whole, "streamed": streamed, "by_socket": by_socket}


def send_all(lab: Lab, ways: list[Way], **changes: Any) -> list[Future[End]]:
    """Send one request for each way at the same time, without waiting for the responses."""
    pool = ThreadPoolExecutor(len(ways))
    futures = [pool.submit(way, lab, chat_body(**changes)) for way in ways]
    pool.shutdown(wait=False)
    return futures
