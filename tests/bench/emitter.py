"""Child process: a chat-format server that emits tokens at an exact rate, to each stream by the clock.

As an argument it takes the seconds between two tokens; it prints its port, and goes when its input ends. What it emits
late it does not make others wait for: each token has its moment from the stream's begin.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"emitter","object":"model"}]}'


def event(delta: dict[str, str], **fields: object) -> bytes:
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "emitter"}
    choices = [{"index": 0, "delta": delta, "finish_reason": fields.pop("finish_reason", None)}]
    data = f"data: {json.dumps({**head, 'choices': choices, **fields})}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = event({"content": " word"})
NUMBERS = itertools.count()
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Emitter(asyncio.Protocol):
    """One connection. Every token has its moment, whatever became of those before it."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._request = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._request += data
        head, end, body = self._request.partition(b"\r\n\r\n")
        size = re.search(rb"(?i)content-length: *(\d+)", head)
        if not end or len(body) < int(size[1] if size else 0):
            return
        self._request = b""
        if head.startswith(b"GET"):
            whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
            self._transport.write(b"%b%d\r\n\r\n%b" % (whole, len(MODELS), MODELS))
            self._transport.close()
            return
        asked = json.loads(body)
        self._tokens, self._sent = asked["max_tokens"], 0
        self._prompt = len(asked["messages"][-1]["content"].split())
        # Streams that begin together shall not speak together: that would be easy to read.
        self._began = self._loop.time() + self._pace_s * (next(NUMBERS) % 64) / 64
        self._transport.write(HEAD)
        self._wait()

    def _wait(self) -> None:
        self._loop.call_at(self._began + (self._sent + 1) * self._pace_s, self._emit)

    def _emit(self) -> None:
        if self._transport.is_closing():
            return None
        self._transport.write(TOKEN)
        self._sent += 1
        if self._sent < self._tokens:
            return self._wait()
        counts = {"prompt_tokens": self._prompt, "completion_tokens": self._tokens}
        self._transport.write(event({}, finish_reason="length", usage=counts) + DONE)
        return self._transport.close()


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Emitter(float(sys.argv[1])), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
