"""A backend and a daemon that a test scripts, for panels."""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any, Self, get_args

from lmx_lab.backend import Backend, FinishedAnswer, Progress, Ranking, RunningAnswer, ServerState
from lmx_lab.client.daemon_events import DaemonEvent, UnknownEvent, daemon_event
from lmx_lab.client.subscription import ConnectionState
from lmx_lab.panels.panel import Panel
from lmx_lab.panels.summary import FIELDS
from lmx_lab.panels.workbench import Workbench
from lmx_lab.server.translate import timings, usage
from lmx_lab.values.models import DiskUse, EngineChoice, LoadReport, LoadSpec, ModelEvent, Stored, TimeToLive
from lmx_lab.values.outputs import Delta, FinishReason, Vectors
from lmx_lab.wire.admin import (
    EngineRecord,
    KeepAnswer,
    ModelRecord,
    ModelRecords,
    Preference,
    RequestEvent,
    RunningRequest,
    Sample,
)
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.events import EVENT_CLASSES
from lmx_lab.wire.rerank import RerankBody
from tests.support.asking import report

WAIT_S = 60.0
QUICK = {"tick_s": 0.05, "frame_s": 0.02}
"""Arguments of a ``Workbench`` whose panels read their lab 20 times a second, and update 50 times a second."""


class ScriptedAnswer:
    """An answer whose deltas come from a queue. A text there is a status, a cost ends the answer, None does too."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self.status = "sent"
        self._backend = backend
        self.end: FinishedAnswer | None = None
        """The step with which the answer has ended."""
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            while not self._ended:
                step = await _next(self._backend.steps)
                if isinstance(step, Delta):
                    return step
                if isinstance(step, str):
                    self.status = step
                else:
                    self.end, self._ended = step, True
        except Exception:
            self._ended = True
            raise
        raise StopAsyncIteration

    def close(self) -> None:
        self._backend.stopped += not self._ended
        self._ended = True


class ScriptedBackend:
    """A ``Backend`` whose results come from queues; an exception in a queue is raised."""

    def __init__(self) -> None:
        self.job = ""
        self.now = ServerState(state="running", place="in this kernel", url="http://127.0.0.1:8400")
        self.measured: Sample | None = None
        self.preference: Preference | None = None
        self.engines = [
            EngineRecord(name=name, version="1", tokens_per_second=None) for name in get_args(EngineChoice)[1:]
        ]
        self.records = [record("tiny"), record("tiny-two")]
        self.scans = 0
        self.use = DiskUse(items=(), free_bytes=2 * 10**9)
        self.removals: asyncio.Queue[Any] = asyncio.Queue()
        self.requests: list[tuple[str, Any]] = []
        self.loads: asyncio.Queue[Any] = asyncio.Queue()
        self.unloads: asyncio.Queue[Any] = asyncio.Queue()
        self.published: asyncio.Queue[Any] = asyncio.Queue()
        self.steps: asyncio.Queue[Any] = asyncio.Queue()
        """The steps of answers: see ``ScriptedAnswer``."""
        self.rankings: asyncio.Queue[Any] = asyncio.Queue()
        self.stopped = 0
        """Number of answers that were stopped before their end."""

    def set_state(self, **values: Any) -> None:
        self.now = replace(self.now, **values)

    def state(self) -> ServerState:
        return self.now

    def sample(self) -> Sample | None:
        return self.measured

    async def events(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        while True:
            yield await _next(self.published)

    async def clients(self) -> list[RunningRequest]:
        return []

    async def models(self) -> ModelRecords:
        self.scans += 1
        return ModelRecords(models=list(self.records), engines=self.engines, preference=self.preference)

    async def load(self, spec: LoadSpec, *, progress: Progress | None = None) -> LoadReport:
        self.requests.append(("load", (spec.model, spec.options) if spec.options else spec.model))
        await _next(self.loads)
        return LoadReport(model=spec.model, load_time_ms=1.0, vram_gb=0.1)

    async def cancel_load(self, model: str, *, shared: bool = True) -> None:
        self.requests.append(("cancel", model))

    async def unload(
        self, model: str | None = None, *, wait: bool | None = None, progress: Progress | None = None
    ) -> float:
        self.requests.append(("unload", model if wait is None else (model, wait)))
        return float(await _next(self.unloads))

    async def keep(self, model: str, *, pin: bool | None = None, ttl_s: TimeToLive | None = None) -> KeepAnswer:
        self.requests.append(("keep", (model, pin, ttl_s)))
        return KeepAnswer(model=model, pinned=bool(pin), ttl_s=None if ttl_s == "never" else ttl_s)

    async def disk_use(self) -> DiskUse:
        return self.use

    async def remove_stored(self, item: Stored) -> None:
        self.requests.append(("remove", item))
        await _next(self.removals)

    async def generate(self, request: ChatRequest, *, batch: bool = False, internal: bool = False) -> RunningAnswer:
        self.requests.append(("generate", request))
        answer = ScriptedAnswer(self)

        def finish(text: Delta) -> FinishedAnswer:
            assert answer.end is not None, "the test gives no cost"
            return answer.end

        return RunningAnswer(answer, finish)

    async def embed(self, body: EmbeddingsBody) -> Vectors:
        raise NotImplementedError

    async def rerank(self, body: RerankBody) -> Ranking:
        self.requests.append(("rerank", (body.query, list(body.texts), body.top_n)))
        ranking: Ranking = await _next(self.rankings)
        return replace(ranking, query=body.query, documents=body.texts)


async def _next(values: asyncio.Queue[Any]) -> Any:
    value = await values.get()
    if isinstance(value, BaseException):
        raise value
    return value


def delta(text: str = "", *, tokens: int = 1, reasoning: str = "") -> Delta:
    return Delta(text=text, tokens=tokens, reasoning=reasoning)


def cost(reason: FinishReason = "stop", tokens: int = 2) -> FinishedAnswer:
    """The end of an answer at 31.5 tok/s."""
    usual = report(prompt=9, output=tokens, decode_s=tokens / 31.54, finish=reason)
    measured = replace(usual, prefill_s=0.1, ttft_s=0.12)
    return FinishedAnswer(
        text="",
        model="tiny",
        finish_reason=reason,
        usage=usage([[measured]]),
        timings=timings([[measured]]),
        ttft_s=measured.ttft_s,
    )


def record(model: str, **fields: Any) -> ModelRecord:
    plain = {"loaded": False, "vram_gb": None, "format": "mlx", "kind": "chat", "size_gb": 0.25}
    return ModelRecord(
        **{"id": model, "path": f"/{model}", "quantization": None, "context_length": 512, **plain, **fields}
    )


def server_sample(at: float, **fields: Any) -> Sample:
    """A sample of the server whose other fields are zero."""
    return Sample(at=at, **{**dict.fromkeys(FIELDS, 0), **fields})


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours in hexadecimal notation, as WCAG 2.2 defines it."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """The elements and the text of a page. Every element must be closed by its own end tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    @property
    def names(self) -> set[str]:
        """The names of all elements and of their attributes."""
        return {name for tag, attributes in self.elements for name in (tag, *attributes)}


@contextmanager
def panels_of(backend: Backend) -> Iterator[Workbench]:
    """Yield a workbench with short intervals, whose panels show this lab."""
    workbench = Workbench(backend, **QUICK)
    try:
        yield workbench
    finally:
        workbench.suspend()


class Refused(Exception):
    def __init__(self, code: str, message: str, param: str | None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.param = param


class Reader:
    """Sends requests to a panel as a view does, and waits for its state."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self._numbers = map(str, itertools.count())
        self._replies: dict[str, queue.SimpleQueue[Any]] = {}
        self._changed = threading.Condition()
        self.frames: list[tuple[str, Any]] = []
        """Every trait that was set, and its value."""
        panel.send = self._receive
        panel.observe(self._note)

    def ask(self, request: str, **fields: Any) -> Any:
        """Return the result of a request.

        Raises:
            Refused: the panel has refused the request.
        """
        reply = self.send(request, **fields).get(timeout=WAIT_S)
        if not reply["ok"]:
            raise Refused(**reply["error"])
        return reply["result"]

    def send(self, request: str, **fields: Any) -> queue.SimpleQueue[Any]:
        """Send a request without waiting; the queue receives its reply."""
        number = next(self._numbers)
        replies = self._replies[number] = queue.SimpleQueue()
        self.panel._handle_custom_msg({"id": number, "do": request, **fields}, [])
        return replies

    def until(self, condition: Callable[[Any], object]) -> None:
        """Wait until a condition is true of the panel. It is checked when a trait has changed, and regularly."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while not (met := condition(self.panel)) and time.monotonic() < deadline:
                self._changed.wait(0.1)
        state = {name: getattr(self.panel, name) for name in self.panel.trait_names(sync=True) if name[0] != "_"}
        assert met, f"the condition was never true; the panel has {state}"

    def give(self, values: asyncio.Queue[Any], *given: Any) -> None:
        """Put values into a queue of the scripted backend."""

        async def put() -> None:
            for value in given:
                await values.put(value)

        self.panel.workbench.submit(put()).result(WAIT_S)

    def _receive(self, content: Any, *_rest: Any) -> None:
        self._replies[content["id"]].put(content)

    def _note(self, change: Any) -> None:
        with self._changed:
            self.frames.append((change["name"], change["new"]))
            self._changed.notify_all()


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

    def _parsed(self, kind: str, data: Any, **fields: Any) -> Any:
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
