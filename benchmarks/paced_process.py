"""Child process: a chat-format server whose model takes the same time for every token, to the clock's precision.

What a real model takes varies by more than a turn costs.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from benchmarks.processes import child_settings, serve_lines, take_channel

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"paced","object":"model"}]}'


def main() -> None:
    channel = take_channel()
    settings = child_settings()
    loop = asyncio.new_event_loop()
    serving = asyncio.start_server(_Paced(settings["tokens"], settings["pace_s"]).handle, "127.0.0.1", 0)
    server = loop.run_until_complete(serving)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    port = server.sockets[0].getsockname()[1]
    serve_lines(channel, {"url": f"http://127.0.0.1:{port}"}, lambda question: {})


class _Paced:
    def __init__(self, tokens: int, pace_s: float) -> None:
        self._tokens = tokens
        self._pace_s = pace_s

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closes = False
        while not closes and (head := await _head(reader)):
            fields = dict(line.partition(b": ")[::2] for line in head.lower().splitlines())
            closes = fields.get(b"connection") == b"close"
            await reader.readexactly(int(fields.get(b"content-length", 0)))
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(MODELS) + MODELS)
            else:
                await self._answer(writer)
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        writer.write(HEAD.encode())
        for number in range(1, self._tokens + 1):
            await asyncio.sleep(began + number * self._pace_s - loop.time())
            writer.write(_chunk({"content": " word"}))
        usage = {"prompt_tokens": 10, "completion_tokens": self._tokens, "total_tokens": 10 + self._tokens}
        writer.write(_chunk({}, finish_reason="length", usage=usage) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def _chunk(delta: dict[str, Any], *, finish_reason: str | None = None, **fields: Any) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "paced"}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    data = f"data: {json.dumps({**head, 'choices': choices, **fields})}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


if __name__ == "__main__":
    main()
