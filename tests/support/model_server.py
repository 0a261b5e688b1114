"""A server of models whose answers a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import select
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal, Self

from lmx_lab.client.chat_format import ChatFormatClient, Piece, TokenUsage
from lmx_lab.values.outputs import ToolCallDelta, merge_tool_calls
from tests.support.waiting import WAIT_S


class Gate:
    """A point in a script where the server waits for the test."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def open(self) -> None:
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def arrive(self) -> None:
        """Note that a script, or a tool, waits at this gate."""
        self._reached.set()

    async def reached(self) -> None:
        """Wait until a script has reached this gate, so that everything before it was sent."""
        assert await asyncio.to_thread(self._reached.wait, WAIT_S), "no script has reached this gate"


@dataclass(frozen=True)
class Refusal:
    """A complete answer instead of a stream."""

    status: int
    body: bytes
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


STALL: Literal["stall"] = "stall"
DROP: Literal["drop"] = "drop"
Step = bytes | Gate | float | Literal["stall", "drop"]
Script = Sequence[Step] | Refusal
Made = Iterable[Step] | Refusal
"""The steps for one request, which are iterated once."""
Scripts = Script | Callable[[dict[str, Any]], Made]
DONE = b"data: [DONE]\n\n"


# --- the format


def event(document: Any) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def chunk(delta: Mapping[str, Any] | None = None, *, finish: str | None = None, **fields: Any) -> bytes:
    """Return one event; without a delta it has no choices."""
    choices = [] if delta is None else [{"index": 0, "delta": dict(delta), "finish_reason": finish}]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    return event({**head, "choices": choices, **fields})


def ending(finish: str = "stop", *, usage: tuple[int, int] | None = (5, 2)) -> list[Step]:
    tail = [] if usage is None else [chunk(usage={"prompt_tokens": usage[0], "completion_tokens": usage[1]})]
    return [chunk({}, finish=finish), *tail, DONE]


def token(text: str) -> bytes:
    return chunk({"content": text})


def thought(text: str) -> bytes:
    return chunk({"reasoning_content": text})


def says(*tokens: str, thinks: Sequence[str] = (), finish: str = "stop") -> list[Step]:
    """Return an answer of text."""
    steps: list[Step] = [chunk({"role": "assistant"}), *map(thought, thinks), *map(token, tokens)]
    return [*steps, *ending(finish, usage=(5, len(tokens) + len(thinks)))]


def counted(tokens: int, *, pause_s: float, every: int, gate: Gate | None = None) -> Iterator[Step]:
    """Return an answer ``w0 w1 …`` with a pause after every ``every`` tokens. It continues beyond ``tokens``, with a
    pause after each token, until the gate is open."""
    yield chunk({"role": "assistant"})
    for number in itertools.count():
        if number >= tokens and (gate is None or gate.is_open):
            yield from ending(usage=(5, number))
            return
        yield token(f"w{number} ")
        if number >= tokens or number % every == 0:
            yield pause_s


def call(name: str, arguments: Mapping[str, Any] | str, *, index: int = 0, id: str | None = None) -> list[Step]:
    """Return a call in deltas, as LMX Lab and OpenAI send it: its name, then its arguments in two halves."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    first = {"index": index, "id": id or f"call_{index}", "type": "function", "function": {"name": name}}
    halves = [text[: len(text) // 2], text[len(text) // 2 :]]
    first["function"] = {"name": name, "arguments": ""}
    rest = [{"index": index, "function": {"arguments": half}} for half in halves]
    return [chunk({"tool_calls": [delta]}) for delta in (first, *rest)]


def calls(
    *wanted: tuple[str, Mapping[str, Any] | str], text: Sequence[str] = (), ids: Sequence[str] = ()
) -> list[Step]:
    """Return an answer of some text and tool calls."""
    steps: list[Step] = [chunk({"role": "assistant"}), *map(token, text)]
    for index, (name, arguments) in enumerate(wanted):
        steps += call(name, arguments, index=index, id=ids[index] if ids else None)
    return [*steps, *ending("tool_calls")]


def refuses(status: int, code: str, message: str = "not now", **headers: str) -> Refusal:
    """Return an error in the format of LMX Lab's server."""
    return Refusal(
        status, json.dumps({"error": {"code": code, "message": message, "type": "t"}}).encode(), headers=headers
    )


def json_answer(document: Any, *, status: int = 200) -> Refusal:
    """Return a JSON document as an answer to any request."""
    return Refusal(status, json.dumps(document).encode())


# --- the server


class Scripted:
    """Answers chats by scripts, repeating the last one, and lists ``models``. Its attributes can be read at any time.

    Args:
        lab: Whether it identifies itself as a server of LMX Lab.
    """

    def __init__(self, *scripts: Scripts, models: Sequence[str] | Refusal = ("scripted",), lab: bool = False) -> None:
        self._scripts = list(scripts)
        self.models = models
        self.lab = lab
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the chat requests, in their order."""
        self.paths: list[str] = []
        """Paths of all requests."""
        self.headers: list[dict[str, str]] = []
        """Headers of the chat requests, with names in lower case."""
        self.connections = 0
        self.left = 0
        """Number of streams that the client closed before their end."""
        self._changed = threading.Condition()
        self._server = _Server(self)

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def then(self, *scripts: Scripts) -> None:
        """Append scripts."""
        with self._changed:
            self._scripts += scripts

    def play(self, *scripts: Scripts) -> None:
        """Answer with these scripts from now on, as if there were no requests before."""
        with self._changed:
            self._scripts = list(scripts)
            self.bodies.clear()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for a condition of this server's attributes."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(true, WAIT_S)

        assert await asyncio.to_thread(wait), f"{len(self.bodies)} chats, {self.left} left early"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop()

    def start(self) -> Self:
        return self.__enter__()

    def stop(self) -> None:
        """Stop the server and cut open connections."""
        self._server.stop()

    def _next(self, body: dict[str, Any], headers: dict[str, str]) -> Made:
        with self._changed:
            script = self._scripts[min(len(self.bodies), len(self._scripts) - 1)]
            self.bodies.append(body)
            self.headers.append(headers)
            self._changed.notify_all()
        return script(body) if callable(script) else script

    def _note(self, **counts: int) -> None:
        with self._changed:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)
            self._changed.notify_all()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, owner: Scripted) -> None:
        self.owner = owner
        self.stopping = threading.Event()
        self._sockets: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        for connection in list(self._sockets):
            _cut(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._sockets.add(request)
        self.owner._note(connections=1)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that have disconnected."""


def _cut(connection: socket.socket) -> None:
    # The connection may be cut already.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        owner = self.server.owner
        owner.paths.append(self.path)
        if isinstance(owner.models, Refusal):
            return self._whole(owner.models)
        listed = [{"id": name, "object": "model"} for name in owner.models]
        return self._whole(json_answer({"object": "list", "data": listed}))

    def do_POST(self) -> None:
        owner = self.server.owner
        owner.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        script = owner._next(body, {name.lower(): value for name, value in self.headers.items()})
        if isinstance(script, Refusal):
            return self._whole(script)
        self._head(200, "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            done = all(self._step(step) for step in script)
        except OSError:
            done = False
            owner._note(left=1)
        if done:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True
        return None

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        if self.server.owner.lab:
            self.send_header("x-lmx-lab", "0")

    def _whole(self, answer: Refusal) -> None:
        self._head(answer.status, answer.kind)
        for name, value in answer.headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def _step(self, step: Step) -> bool:
        """Perform a step. Returns whether the stream continues."""
        if isinstance(step, bytes):
            self._check_client(0)
            self.wfile.write(f"{len(step):x}\r\n".encode() + step + b"\r\n")
        elif isinstance(step, Gate):
            step.arrive()
            while not step.is_open and not self.server.stopping.is_set():
                self._check_client(0.002)
        elif isinstance(step, float):
            self._check_client(step)
        elif step == STALL:
            while not self.server.stopping.is_set():
                self._check_client(0.02)
        else:
            _cut(self.connection)
        return step != DROP and not self.server.stopping.is_set()

    def _check_client(self, wait_s: float) -> None:
        """Wait, and raise if the client disconnects."""
        readable, _, _ = select.select([self.connection], [], [], wait_s)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise BrokenPipeError


WORDS = says("one ", "two ", "three ", "four", finish="length")


def after_calibration(*scripts: Script) -> Callable[[dict[str, Any]], Script]:
    """Answer calibration requests with ``WORDS``, the others with the scripts in order, then always the last one."""
    left: Iterator[Script] = iter(scripts)

    def script(body: dict[str, Any]) -> Script:
        return WORDS if body["max_tokens"] == 1 else next(left, scripts[-1])

    return script


BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def pieces(url: str, **body: Any) -> list[Piece]:
    async with ChatFormatClient(url) as client:
        return [piece async for piece in client.stream({**BODY, **body})]


async def read_answer(script: Script) -> tuple[str, str, tuple[ToolCallDelta, ...], str | None, TokenUsage | None]:
    """Return text, thoughts, tool calls, finish reason and usage of an answer."""
    with Scripted(script) as upstream:
        found = await pieces(upstream.url)
    reasons = [piece.finish_reason for piece in found if piece.finish_reason]
    usages = [piece.usage for piece in found if piece.usage]
    return (
        "".join(piece.text for piece in found),
        "".join(piece.thinking for piece in found),
        merge_tool_calls(call for piece in found for call in piece.calls),
        reasons[-1] if reasons else None,
        usages[-1] if usages else None,
    )
