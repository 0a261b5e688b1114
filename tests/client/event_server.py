"""A server of events whose messages a test defines."""

import asyncio
import http
import json
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import websockets
from websockets.asyncio.server import serve
from websockets.datastructures import Headers
from websockets.http11 import Response

CUT = "cut"
STAY = "stay"
"""Keep the connection open until the client closes it."""
HALF = "half"
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


def frame(kind, data, *, seq=None, stream_id=STREAM, **fields):
    made = {"event": kind, "seq": seq, "at": "2026-11-21T10:00:00.123Z", "stream_id": stream_id, "data": data}
    return json.dumps(made | {"session_id": None, "turn_id": None} | fields)


def hello(cursor, *, heartbeat_s=15.0, stream_id=STREAM):
    data = {"daemon_id": "dmn_1", "cursor": cursor, "latest_seq": cursor, "heartbeat_s": heartbeat_s}
    return frame("stream.hello", data, stream_id=stream_id)


def synced(cursor, *, stream_id=STREAM):
    return frame("stream.synced", {"cursor": cursor}, stream_id=stream_id)


def heartbeat(cursor):
    return frame("stream.heartbeat", {"cursor": cursor})


def event(seq, *, session_id=None, stream_id=STREAM, text=""):
    data = {"message_id": "msg_1", "text": text}
    return frame("turn.token", data, seq=seq, session_id=session_id, turn_id="trn_1", stream_id=stream_id)


def reset(cursor, reason="pruned", *, stream_id=STREAM):
    data = {"reason": reason, "cursor": cursor, "oldest_seq": 1, "latest_seq": cursor}
    return frame("stream.reset", data, stream_id=stream_id)


def snapshot(session_id, cursor, *, stream_id=STREAM):
    session = {
        **dict.fromkeys(("title", "model", "system_prompt", "tools", "active_turn_id")),
        **dict.fromkeys(("queued_turn_ids", "messages", "permissions"), ()),
        **{"session_id": session_id, "status": "idle", "archived": False, "metadata": {}, "cursor": cursor},
        **{"revision": 1, "created_at": "", "updated_at": ""},
    }
    return frame("stream.snapshot", {"session": session}, session_id=session_id, stream_id=stream_id)


class EventServer:
    """A server on the loopback interface. Its records can be read at any time."""

    def __init__(self, *scripts):
        self._scripts = scripts
        self.queries = []
        """The query of each request for events, with the last value of each name."""
        self.headers = []
        self._changed = asyncio.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self):
        self._server = await serve(self._talk, "127.0.0.1", 0, process_request=self._begin, compression=None)
        return self

    async def __aexit__(self, *exc_info):
        self._server.close()
        await self._server.wait_closed()

    async def wait_for_requests(self, count):
        """Wait until this number of requests has arrived."""
        async with asyncio.timeout(20):
            while len(self.queries) < count:
                self._changed.clear()
                await self._changed.wait()

    def _begin(self, connection, request):
        script = self._scripts[min(len(self.queries), len(self._scripts) - 1)]
        query = parse_qs(urlsplit(request.path).query)
        self.queries.append({name: values[-1] for name, values in query.items()})
        self.headers.append(request.headers)
        self._changed.set()
        connection.script = script
        if not isinstance(script, Refused):
            return None
        headers = Headers({"Content-Type": script.kind, "Content-Length": str(len(script.body)), **script.headers})
        return Response(script.status, http.HTTPStatus(script.status).phrase, headers, script.body.encode())

    async def _talk(self, connection):
        try:
            for step in connection.script:
                await self._do(connection, step)
        except websockets.ConnectionClosed:
            return

    async def _do(self, connection, step):
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
