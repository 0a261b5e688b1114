"""Child process: a chat-format server that emits tokens at an exact rate.

The speed of a real model varies too much to check a measurement with it. Each token is due at a fixed time after the
start of its stream, so a late token does not delay the following ones. Settings: ``pace_s``, the seconds between two
tokens of a stream, and ``streams``, the number of streams that start together. Their tokens are due at different times,
because simultaneous tokens would be easier to read.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

from benchmarks.processes import child_settings, serve_lines, take_channel

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"paced","object":"model"}]}'
MODELS_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(MODELS),
    MODELS,
)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
CLOSE = re.compile(rb"(?i)\r\nconnection: *close")


def _event(delta: dict[str, str], *, finish_reason: str | None = None, **fields: Any) -> bytes:
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "paced"}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    data = f"data: {json.dumps({**head, 'choices': choices, **fields})}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = _event({"content": " word"})


def main() -> None:
    channel = take_channel()
    settings = child_settings()
    pace_s, streams = settings["pace_s"], settings.get("streams", 1)
    delays_s = itertools.cycle([pace_s * number / streams for number in range(streams)])
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(lambda: _Connection(pace_s, delays_s), "127.0.0.1", 0))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    port = server.sockets[0].getsockname()[1]
    serve_lines(channel, {"url": f"http://127.0.0.1:{port}"}, lambda question: {})


class _Connection(asyncio.Protocol):
    """Handle one request after the other."""

    def __init__(self, pace_s: float, delays_s: Iterator[float]) -> None:
        self._pace_s = pace_s
        self._delays_s = delays_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not separator or len(body) < int(length[1] if length else 0):
            return
        self._received, self._closes = b"", bool(CLOSE.search(head))
        if head.startswith(b"GET"):
            self._transport.write(MODELS_RESPONSE)
            self._end()
            return
        request = json.loads(body)
        self._tokens, self._sent = request["max_tokens"], 0
        self._prompt_tokens = len(request["messages"][-1]["content"].split())
        self._began = self._loop.time() + next(self._delays_s)
        self._transport.write(HEAD)
        self._wait()

    def _wait(self) -> None:
        self._loop.call_at(self._began + (self._sent + 1) * self._pace_s, self._emit)

    def _emit(self) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(TOKEN)
        self._sent += 1
        if self._sent < self._tokens:
            self._wait()
            return
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens}
        usage = counts | {"total_tokens": self._prompt_tokens + self._tokens}
        self._transport.write(_event({}, finish_reason="length", usage=usage) + DONE)
        self._end()

    def _end(self) -> None:
        if self._closes:
            self._transport.close()


if __name__ == "__main__":
    main()
