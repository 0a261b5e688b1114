"""A daemon for the events panel whose events are set by tests, parsed from frames of the wire format."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from lmx_lab.client.daemon_events import DaemonEvent, UnknownEvent, daemon_event
from lmx_lab.client.event_receiver import ConnectionState
from lmx_lab.wire.events import EVENT_CLASSES

LIVE = ConnectionState(state="live")
AT = "2026-11-22T10:00:00.123Z"
STATS = {
    **{"tokens": 3, "prompt_tokens": 9, "completion_tokens": 3, "tool_calls": 1, "steps": 2, "elapsed_s": 1.5},
    **{"tokens_per_second": 20.0, "ttft_ms": 40.0},
}


class ScriptedLog:
    """Makes the events of one log, numbered in order."""

    def __init__(self, stream_id: str = "log-1") -> None:
        self._numbers = itertools.count(1)
        self.stream_id = stream_id

    def event(self, kind: str, data: Any, *, session: str | None = "ses-1", turn: str | None = "turn-1") -> Any:
        more = {"stats": STATS} if kind == "turn.done" else {}
        return self._parsed(kind, data, seq=next(self._numbers), session_id=session, turn_id=turn, **more)

    def control(self, kind: str, data: Any, *, session: str | None = None) -> Any:
        return self._parsed(kind, data, seq=None, session_id=session)

    def _parsed(self, kind: str, data: Any, **fields: Any) -> DaemonEvent:
        frame = {"event": kind, "at": AT, "stream_id": self.stream_id, "data": data, **fields}
        event: Any = daemon_event(json.dumps(frame))
        assert isinstance(event, UnknownEvent) == (kind not in EVENT_CLASSES), f"not valid on the wire: {frame}"
        return event

    def token(self, text: str, *, message: str = "msg-1", kind: str = "turn.token", **where: Any) -> Any:
        return self.event(kind, {"message_id": message, "text": text}, **where)

    def message(self, text: str, *, message: str = "msg-1", role: str = "assistant") -> Any:
        return self.event("message.done", {"message": {"message_id": message, "role": role, "content": text}})

    def created(self, session: str = "ses-1", title: str = "Weather") -> Any:
        return self.event("session.created", {"session": session_record(session, title)}, session=session, turn=None)

    def permission_request(self, permission: str = "per-1", *, tool: str = "shell", arguments: Any = None) -> Any:
        return self.event(
            "permission.request", {"permission": permission_record(permission, tool, arguments or {"command": "ls"})}
        )

    def resolved(self, permission: str = "per-1", decision: str = "allow") -> Any:
        record = permission_record(permission, "shell", {}) | {
            "decision": decision,
            "scope": "once",
            "resolved_by": "client",
        }
        return self.event("permission.resolved", {"permission": record})

    def done(self, text: str) -> Any:
        return self.event("turn.done", {"stop_reason": "end", "text": text, "stats": STATS})

    def reset(self, cursor: int) -> Any:
        self._numbers = itertools.count(cursor + 1)
        data = {"reason": "pruned", "cursor": cursor, "oldest_seq": cursor, "latest_seq": cursor}
        return self.control("stream.reset", data)

    def snapshot(self, cursor: int, *, session: str = "ses-1", partial: str = "", waiting: Any = ()) -> Any:
        record = session_record(session, "Weather", status="running") | {"active_turn_id": "turn-1"}
        record |= {"messages": [], "partial_text": partial, "permissions": list(waiting), "cursor": cursor}
        return self.control("stream.snapshot", {"session": record}, session=session)


def session_record(session: str, title: str, status: str = "idle") -> dict[str, Any]:
    empty = dict.fromkeys(("model", "system_prompt", "tools", "active_turn_id", "forked_from"))
    more = {"session_id": session, "title": title, "status": status, "created_at": AT, "updated_at": AT}
    return {**empty, **more, "metadata": {}, "archived": False, "revision": 1, "queued_turn_ids": []}


def permission_record(
    permission: str, tool: str, arguments: Mapping[str, Any], session: str = "ses-1"
) -> dict[str, Any]:
    where = {"permission_id": permission, "session_id": session, "turn_id": "turn-1", "call_id": "call-1"}
    return {**where, "tool": tool, "arguments": arguments, "requested_at": AT, "expires_at": "2026-11-22T10:05:00.000Z"}


class ScriptedDaemon:
    """An ``EventSource`` over a queue; records decisions and cancellations."""

    place = "http://127.0.0.1:8401"

    def __init__(self) -> None:
        self.given: asyncio.Queue[Any] = asyncio.Queue()
        """Events and states of the connection; an exception is raised, None is the end."""
        self.calls: list[tuple[str, ...]] = []
        self.readers = 0
        self.refusal: Exception | None = None

    async def events(self) -> AsyncGenerator[DaemonEvent | ConnectionState, None]:
        self.readers += 1
        while (given := await self.given.get()) is not None:
            if isinstance(given, BaseException):
                raise given
            yield given

    async def decide(self, permission_id: str, decision: str, scope: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(("decide", permission_id, decision, scope))

    async def cancel(self, session_id: str) -> None:
        self.calls.append(("cancel", session_id))


class Flood(ScriptedDaemon):
    """Sends a number of events per second without an end, and those of the queue."""

    def __init__(self, per_second: int) -> None:
        super().__init__()
        self._per_second = per_second
        self.sent = 0

    async def events(self) -> AsyncGenerator[DaemonEvent | ConnectionState, None]:
        log = ScriptedLog()
        loop = asyncio.get_running_loop()
        started = loop.time()
        yield LIVE
        while True:
            for _ in range(int((loop.time() - started) * self._per_second) - self.sent):
                while not self.given.empty():
                    yield self.given.get_nowait()
                self.sent += 1
                # Eight batches of a message, then its end, like the answer of a model.
                message = f"msg-{self.sent // 9}"
                end = self.sent % 9 == 8
                yield log.message("all of it", message=message) if end else log.token("word ", message=message)
            await asyncio.sleep(0.005)
