"""A server of events whose messages a test defines."""

from __future__ import annotations

import asyncio
import http
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

import websockets
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

CUT: Literal["cut"] = "cut"
STAY: Literal["stay"] = "stay"
"""Keep the connection open until the client closes it."""
HALF: Literal["half"] = "half"
"""Send the start of a frame, then close the connection."""
STREAM = "stm_1"


@dataclass(frozen=True)
class Raw:
    """Bytes to send below the WebSocket protocol."""

    bytes: bytes


@dataclass(frozen=True)
class Refused:
    """A response that refuses the WebSocket."""

    status: int
    body: str = ""
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


Step = str | bytes | Raw | Literal["cut", "stay", "half"]
Script = Sequence[Step] | Refused


def frame(kind: str, data: Any, *, seq: int | None = None, stream_id: str = STREAM, **fields: Any) -> str:
    return json.dumps(
        {
            "event": kind,
            "seq": seq,
            "at": "2026-11-21T10:00:00.123Z",
            "stream_id": stream_id,
            "session_id": None,
            "turn_id": None,
            "data": data,
            **fields,
        }
    )


def hello(cursor: int, *, heartbeat_s: float = 15.0, stream_id: str = STREAM) -> str:
    data = {"daemon_id": "dmn_1", "cursor": cursor, "latest_seq": cursor, "heartbeat_s": heartbeat_s}
    return frame("stream.hello", data, stream_id=stream_id)


def synced(cursor: int, *, stream_id: str = STREAM) -> str:
    return frame("stream.synced", {"cursor": cursor}, stream_id=stream_id)


def heartbeat(cursor: int) -> str:
    return frame("stream.heartbeat", {"cursor": cursor})


def event(seq: int, *, session_id: str | None = None, stream_id: str = STREAM, text: str = "") -> str:
    data = {"message_id": "msg_1", "text": text}
    return frame("turn.token", data, seq=seq, session_id=session_id, turn_id="trn_1", stream_id=stream_id)


def reset(cursor: int, reason: str = "pruned", *, stream_id: str = STREAM) -> str:
    data = {"reason": reason, "cursor": cursor, "oldest_seq": 1, "latest_seq": cursor}
    return frame("stream.reset", data, stream_id=stream_id)


def snapshot(session_id: str, cursor: int, *, stream_id: str = STREAM) -> str:
    session = {
        **dict.fromkeys(("title", "model", "system_prompt", "tools", "active_turn_id")),
        **dict.fromkeys(("queued_turn_ids", "messages", "permissions"), ()),
        **{"session_id": session_id, "status": "idle", "archived": False, "metadata": {}, "cursor": cursor},
        **{"revision": 1, "created_at": "", "updated_at": ""},
    }
    return frame("stream.snapshot", {"session": session}, session_id=session_id, stream_id=stream_id)


class EventServer:
    """A server on the loopback interface. Its records can be read at any time."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self._server: Server
        self.queries: list[dict[str, str]] = []
        """The query of each request for events, with the last value of each name."""
        self.headers: list[Headers] = []
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await serve(self._talk, "127.0.0.1", 0, process_request=self._begin, compression=None)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def wait_for_requests(self, count: int) -> None:
        """Wait until this number of requests has arrived."""
        async with asyncio.timeout(20):
            while len(self.queries) < count:
                self._changed.clear()
                await self._changed.wait()

    def _begin(self, connection: ServerConnection, request: Request) -> Response | None:
        script = self._scripts[min(len(self.queries), len(self._scripts) - 1)]
        query = parse_qs(urlsplit(request.path).query)
        self.queries.append({name: values[-1] for name, values in query.items()})
        self.headers.append(request.headers)
        self._changed.set()
        connection.script = script  # type: ignore[attr-defined]
        if not isinstance(script, Refused):
            return None
        headers = Headers({"Content-Type": script.kind, "Content-Length": str(len(script.body)), **script.headers})
        return Response(script.status, http.HTTPStatus(script.status).phrase, headers, script.body.encode())

    async def _talk(self, connection: ServerConnection) -> None:
        script: Sequence[Step] = connection.script  # type: ignore[attr-defined]
        try:
            for step in script:
                await self._do(connection, step)
        except websockets.ConnectionClosed:
            return

    async def _do(self, connection: ServerConnection, step: Step) -> None:
        transport = connection.transport
        match step:
            case "cut":
                transport.abort()
                await connection.wait_closed()
            case "half":
                # The header announces a hundred bytes; ten are sent.
                transport.write(b"\x81\x64" + b'{"event": ')
                transport.close()
                await connection.wait_closed()
            case "stay":
                await connection.wait_closed()
            case Raw():
                transport.write(step.bytes)
            case _:
                await connection.send(step)
