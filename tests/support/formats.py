"""One adapter for each format of requests and answers: how it writes a request, and how its clients read an answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx2
import pytest
import websockets.sync.client
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Frame, Opcode

from lmx_lab.errors import ERROR_CLASSES, BodyTooLargeError, CallerError, LabError, UnavailableError
from tests.support.asking import events

HELLO = ({"role": "user", "content": "hello"},)
STOP = "two"
"""The stop string of all requests that have one."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A greedy request, in no format. None leaves a field out."""

    messages: Sequence[Mapping[str, Any]] = HELLO
    """In the form of the chat format."""
    model: str | None = "default"
    max_tokens: int = 64
    stop: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions: name, description and parameters."""
    choice: str | None = None
    """``auto``, ``required``, ``none`` or the name of a tool."""
    parallel: bool | None = None
    thinks: bool | None = None
    """Whether the model may reason."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the format itself."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an answer consists of, in every format."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    """Name and arguments of each tool call."""
    finish: str = "stop"
    """``stop``, ``length`` or ``tool_calls``."""
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An error."""

    code: str
    message: str
    kind: str | None
    """The class of the error that most formats have in addition to its code."""
    request_id: str | None
    retryable: bool | None = None
    """Whether the same request can succeed later; None if the format has no such member."""


class Format:
    """A format of requests and answers.

    The methods that read an answer also check what the format requires: names, order, numbers and ids.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    can: ClassVar[frozenset[str]]
    """What requests of the format can have. ``template``: a chat template; ``history``: messages, calls and their
    results; ``forced``: a choice among the tools; ``http``: a status, headers, and whole answers."""
    varying: ClassVar[frozenset[str]]
    """Names of members that differ between two answers to the same request: ids, times and costs."""
    kinds: ClassVar[Mapping[int, str]] = {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "server_error",
        504: "server_error",
    }
    """``Problem.kind`` of each HTTP status."""
    stream_codes: ClassVar[Mapping[str, str]] = {}
    """Codes of errors that have another code if they end a stream."""
    end: ClassVar[str]
    """Text at the end of a complete stream, and of no other."""

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        """Return the body of a request."""
        raise NotImplementedError

    def frames(self, text: str) -> list[Any]:
        """Return the JSON of the frames of a stream, without those that only keep its connection open."""
        raise NotImplementedError

    def keeps_alive(self, text: str) -> bool:
        """Return whether the beginning of a stream has something that only keeps its connection open."""
        raise NotImplementedError

    def assemble(self, frames: Sequence[Any]) -> Any:
        """Return the body of the whole answer, as a client puts it together from a stream."""
        raise NotImplementedError

    def partial_text(self, frames: Sequence[Any]) -> str:
        """Return the text in some frames of a stream."""
        raise NotImplementedError

    def answer(self, body: Any) -> Answer:
        """Read the body of a whole answer."""
        raise NotImplementedError

    def problem(self, body: Any) -> Problem:
        """Read the body of an error, or the frame that ends a stream with an error."""
        error = body["error"]
        return Problem(
            code=error["code"],
            message=error["message"],
            kind=error["type"],
            request_id=error["request_id"],
            retryable=error["retryable"],
        )

    def comparable(self, body: Any) -> Any:
        """Return the body with the type instead of the value of each member that varies."""
        if isinstance(body, list):
            return [self.comparable(item) for item in body]
        if not isinstance(body, dict):
            return body
        return {
            name: type(value).__name__ if name in self.varying and value != "" else self.comparable(value)
            for name, value in body.items()
        }

    def key_headers(self, key: str) -> dict[str, str]:
        """Return the headers with a key, as clients of the format send it."""
        return {"authorization": f"Bearer {key}"}

    # Requests over a connection

    def post(self, http: httpx2.Client, request: Request, **options: Any) -> httpx2.Response:
        """Request a whole answer."""
        return http.post(self.path, json=self.body(request, stream=False), **options)

    def refusal(self, http: httpx2.Client, request: Request) -> tuple[int | None, Problem]:
        """Return the status and the error of a request that fails before the first byte of its answer."""
        response = self.post(http, request)
        problem = self.problem(response.json())
        assert problem.request_id == response.headers["x-request-id"]
        return response.status_code, problem

    @contextmanager
    def stream(self, http: httpx2.Client, request: Request) -> Iterator[Iterator[str]]:
        """Request a stream, and disconnect at the end of the block."""
        with http.stream("POST", self.path, json=self.body(request, stream=True)) as response:
            assert response.status_code == 200, response.read()
            yield response.iter_text()

    def streamed(self, http: httpx2.Client, request: Request) -> str:
        """Return the text of a complete stream."""
        with self.stream(http, request) as pieces:
            return "".join(pieces)

    @contextmanager
    def unread(
        self, port: int, request: Request, *, stream: bool = True, buffer_bytes: int | None = None
    ) -> Iterator[socket.socket]:
        """Send a request, yield its connection, of which nothing is read, and close it at the end of the block.

        Args:
            buffer_bytes: Size of the buffer for received data.
        """
        with socket.socket() as connection:
            if buffer_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            connection.settimeout(60)
            connection.connect(("127.0.0.1", port))
            self._send(connection, json.dumps(self.body(request, stream=stream)).encode(), f"localhost:{port}")
            yield connection

    def _send(self, connection: socket.socket, content: bytes, host: str) -> None:
        head = f"POST {self.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def named_events(text: str) -> list[Any]:
    """Return the data of server-sent events, each of which has the name of its type."""
    assert text.endswith("\n\n")
    parts = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in parts]
    assert [name for name, _ in parts] == [f"event: {event['type']}" for event in data]
    return data


class Chat(Format):
    """Chat completions."""

    name, path, end = "chat", "/v1/chat/completions", "data: [DONE]\n\n"
    can = frozenset({"template", "history", "reasoning", "tools", "forced", "stop", "http"})
    varying = frozenset({"id", "created", "timings", "prompt_tokens_details"})

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": request.choice}}
        choice = request.choice if request.choice in (None, "auto", "required", "none") else named
        fields = given(
            model=request.model,
            stop=request.stop,
            tools=[{"type": "function", "function": tool} for tool in request.tools] or None,
            tool_choice=choice,
            parallel_tool_calls=request.parallel,
            reasoning_effort="none" if request.thinks is False else None,
            stream_options={"include_usage": True} if stream else None,
        )
        shared = {"messages": request.messages, "temperature": 0, "max_tokens": request.max_tokens, "stream": stream}
        return {**shared, **fields, **request.extra}

    def frames(self, text: str) -> list[Any]:
        data = events(text)
        frames = [json.loads(each) for each in data if each != "[DONE]"]
        assert data.index("[DONE]") == len(frames) if "error" not in frames[-1] else "[DONE]" not in data
        return frames

    def keeps_alive(self, text: str) -> bool:
        return any(line.startswith(": ") for line in text.split("\n"))

    def assemble(self, frames: Sequence[Any]) -> Any:
        *chunks, last = frames
        assert len({(frame["id"], frame["created"], frame["object"], frame["model"]) for frame in frames}) == 1
        assert last["object"] == "chat.completion.chunk"
        assert last["choices"] == []
        assert not any("usage" in chunk for chunk in chunks)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert {choice["index"] for choice in choices} == {0}
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        first, *deltas, end = [choice["delta"] for choice in choices]
        assert (first, end) == ({"role": "assistant", "content": ""}, {})
        message = first | {
            name: "".join(delta[name] for delta in deltas if name in delta)
            for name in ("content", "reasoning_content")
            if name == "content" or any(name in delta for delta in deltas)
        }
        if calls := self._calls(piece for delta in deltas for piece in delta.get("tool_calls", ())):
            message |= {"content": message["content"] or None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": choices[-1]["finish_reason"], "logprobs": None}
        timings = {"timings": chunks[-1]["timings"]}
        return last | timings | {"object": "chat.completion", "choices": [choice]}

    @staticmethod
    def _calls(pieces: Iterator[Any]) -> list[Any]:
        """Return the calls of a message. The first piece of each has its name, the others its arguments."""
        calls: list[Any] = []
        for piece in pieces:
            if "id" in piece:
                assert (piece["index"], piece["function"]["arguments"]) == (len(calls), "")
                calls.append({name: value for name, value in piece.items() if name != "index"})
            else:
                assert piece.keys() == {"index", "function"}
                assert piece["function"].keys() == {"arguments"}
                called = calls[piece["index"]]["function"]
                called["arguments"] += piece["function"]["arguments"]
        return calls

    def partial_text(self, frames: Sequence[Any]) -> str:
        choices = [choice for frame in frames for choice in frame["choices"]]
        return "".join(choice["delta"].get("content", "") for choice in choices)

    def answer(self, body: Any) -> Answer:
        [choice] = body["choices"]
        message, usage = choice["message"], body["usage"]
        assert (body["object"], choice["index"], message["role"]) == ("chat.completion", 0, "assistant")
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        calls = message.get("tool_calls", ())
        assert {call["type"] for call in calls} <= {"function"}
        return Answer(
            text=message["content"] or "",
            reasoning=message.get("reasoning_content", ""),
            calls=tuple((call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls),
            finish=choice["finish_reason"],
            prompt_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
        )


class Completions(Chat):
    """Plain completions: the last message is the prompt, without a chat template."""

    name, path = "completions", "/v1/completions"
    can = frozenset({"stop", "http"})

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        body = super().body(request, stream=stream)
        return {"prompt": body.pop("messages")[-1]["content"], **body}

    def assemble(self, frames: Sequence[Any]) -> Any:
        *chunks, last = frames
        assert len({(frame["id"], frame["created"], frame["object"], frame["model"]) for frame in frames}) == 1
        assert last["choices"] == []
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        timings = {"timings": chunks[-1]["timings"]}
        return last | timings | {"choices": [choices[-1] | {"text": self.partial_text(chunks)}]}

    def partial_text(self, frames: Sequence[Any]) -> str:
        return "".join(choice["text"] for frame in frames for choice in frame["choices"])

    def answer(self, body: Any) -> Answer:
        [choice] = body["choices"]
        assert (body["object"], choice["index"]) == ("text_completion", 0)
        return Answer(
            text=choice["text"],
            finish=choice["finish_reason"],
            prompt_tokens=body["usage"]["prompt_tokens"],
            output_tokens=body["usage"]["completion_tokens"],
        )


class LlamaCompletion(Format):
    """``/completion`` of llama.cpp's server: the last message is the prompt, without a chat template."""

    name, path, end = "llama.cpp completion", "/completion", '"stop":true'
    can = frozenset({"stop", "http"})
    varying = frozenset({"timings", "tokens_cached"})
    FINISH: ClassVar = {"eos": "stop", "word": "stop", "limit": "length"}

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        fields = given(model=request.model, stop=[request.stop] if request.stop else None, n_predict=request.max_tokens)
        prompt = request.messages[-1]["content"]
        fields |= {"return_tokens": True}
        return {"prompt": prompt, "temperature": 0, "stream": stream, **fields, **request.extra}

    def frames(self, text: str) -> list[Any]:
        return [json.loads(each) for each in events(text)]

    def keeps_alive(self, text: str) -> bool:
        return any(line.startswith(": ") for line in text.split("\n"))

    def assemble(self, frames: Sequence[Any]) -> Any:
        assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]
        assert {frame["tokens_evaluated"] for frame in frames} == {frames[-1]["tokens_evaluated"]}
        tokens = [token for frame in frames for token in frame["tokens"]]
        return frames[-1] | {"content": self.partial_text(frames), "tokens": tokens}

    def partial_text(self, frames: Sequence[Any]) -> str:
        return "".join(frame["content"] for frame in frames)

    def answer(self, body: Any) -> Answer:
        assert (body["index"], body["stop"], len(body["tokens"])) == (0, True, body["tokens_predicted"])
        assert body["stopping_word"] == (STOP if body["stop_type"] == "word" else "")
        return Answer(
            text=body["content"],
            finish=self.FINISH[body["stop_type"]],
            prompt_tokens=body["tokens_evaluated"],
            output_tokens=body["tokens_predicted"],
        )


class Messages(Format):
    """Anthropic's Messages format."""

    name, path, end = "messages", "/v1/messages", '{"type":"message_stop"}\n\n'
    can = Chat.can
    varying = frozenset({"id", "input_tokens", "cache_read_input_tokens"})
    kinds: ClassVar = {**Format.kinds, 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
    FINISH: ClassVar = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls", "stop_sequence": "stop"}
    PIECES: ClassVar = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
    """Name of the pieces of each type of block."""

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        kinds = {"auto": "auto", "required": "any", "none": "none"}
        choice = (
            {"type": kinds[request.choice]} if request.choice in kinds else {"type": "tool", "name": request.choice}
        )
        choice |= given(disable_parallel_tool_use=None if request.parallel is None else not request.parallel)
        tools = [
            given(name=tool["name"], description=tool.get("description"), input_schema=tool["parameters"])
            for tool in request.tools
        ]
        systems = [message["content"] for message in request.messages if message["role"] == "system"]
        fields = given(
            model=request.model,
            system=systems[0] if systems else None,
            stop_sequences=["zzz", request.stop] if request.stop else None,
            tools=tools or None,
            tool_choice=choice if request.choice else None,
            thinking={"type": "disabled"} if request.thinks is False else None,
        )
        messages = [self._message(message) for message in request.messages if message["role"] != "system"]
        shared = {"messages": messages, "temperature": 0, "max_tokens": request.max_tokens, "stream": stream}
        return {**shared, **fields, **request.extra}

    @staticmethod
    def _message(message: Mapping[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message["content"]
        if role == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            return {"role": "user", "content": [result]}
        if role == "user":
            return {"role": role, "content": content}
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        blocks = [
            {"type": "thinking", "thinking": message.get("reasoning_content", ""), "signature": ""},
            {"type": "text", "text": content},
            *({"type": "tool_use", "id": id_, **call, "input": json.loads(call["arguments"])} for id_, call in calls),
        ]
        return {"role": role, "content": blocks}

    def frames(self, text: str) -> list[Any]:
        return [event for at, event in enumerate(named_events(text)) if event["type"] != "ping" or at == 1]

    def keeps_alive(self, text: str) -> bool:
        return text.count("event: ping\n") > 1

    def assemble(self, frames: Sequence[Any]) -> Any:
        first, ping, *middle, end, stop = frames
        kinds = [event["type"] for event in (first, ping, end, stop)]
        assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
        message, blocks, is_open = first["message"], list[Any](), False
        assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
        for event in middle:
            if event["type"] == "content_block_start":
                assert (event["index"], is_open) == (len(blocks), False)
                blocks.append(event["content_block"])
                is_open, pieces = True, ""
                continue
            assert (event["index"], is_open) == (len(blocks) - 1, True)
            kind = blocks[-1]["type"]
            if event["type"] == "content_block_delta":
                name = self.PIECES[kind]
                assert event["delta"].keys() == {"type", name}
                assert event["delta"]["type"] == ("input_json_delta" if kind == "tool_use" else f"{kind}_delta")
                pieces += event["delta"][name]
            else:
                assert event["type"] == "content_block_stop"
                is_open = False
                name = "input" if kind == "tool_use" else kind
                assert not blocks[-1][name], "the content of a block is in its pieces"
                blocks[-1][name] = json.loads(pieces) if name == "input" else pieces
        assert not is_open
        usage = end["usage"]
        assert message["usage"]["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert message["usage"]["output_tokens"] == 0
        return message | end["delta"] | {"content": blocks, "usage": usage}

    def partial_text(self, frames: Sequence[Any]) -> str:
        return "".join(frame["delta"].get("text", "") for frame in frames if frame["type"] == "content_block_delta")

    def answer(self, body: Any) -> Answer:
        assert (body["type"], body["role"]) == ("message", "assistant")
        assert body["stop_sequence"] == (STOP if body["stop_reason"] == "stop_sequence" else None)
        blocks, usage = body["content"], body["usage"]
        return Answer(
            text="".join(block["text"] for block in blocks if block["type"] == "text"),
            reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            calls=tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"),
            finish=self.FINISH[body["stop_reason"]],
            prompt_tokens=usage["input_tokens"] + usage["cache_read_input_tokens"],
            output_tokens=usage["output_tokens"],
        )

    def problem(self, body: Any) -> Problem:
        assert body["type"] == "error"
        error = body["error"]
        return Problem(code=error["code"], message=error["message"], kind=error["type"], request_id=body["request_id"])

    def key_headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key}


class Cohere(Format):
    """Version 2 of Cohere's chat format."""

    name, path, end = "cohere", "/v2/chat", '"}}\n\n'
    can = Chat.can - {"forced"}
    varying = frozenset({"id", "cached_tokens"})
    FINISH: ClassVar = {"COMPLETE": "stop", "STOP_SEQUENCE": "stop", "MAX_TOKENS": "length", "TOOL_CALL": "tool_calls"}

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        fields = given(
            model=request.model,
            stop_sequences=["zzz", request.stop] if request.stop else None,
            tools=[{"type": "function", "function": tool} for tool in request.tools] or None,
            tool_choice={"required": "REQUIRED", "none": "NONE"}.get(request.choice or ""),
            thinking={"type": "disabled"} if request.thinks is False else None,
        )
        shared = {"messages": list(request.messages), "temperature": 0, "max_tokens": request.max_tokens}
        return {**shared, "stream": stream, **fields, **request.extra}

    def frames(self, text: str) -> list[Any]:
        return named_events("\n\n".join(part for part in text.split("\n\n") if not part.startswith(": ")))

    def keeps_alive(self, text: str) -> bool:
        return "\n: " in f"\n{text}"

    def assemble(self, frames: Sequence[Any]) -> Any:
        start, *middle, end = frames
        assert (start["type"], start["delta"]) == ("message-start", {"message": {"role": "assistant"}})
        assert (end["type"], end["id"]) == ("message-end", start["id"])
        content, calls, is_open = list[Any](), list[Any](), ""
        for event in middle:
            kind, _, step = event["type"].rpartition("-")
            found = calls if kind == "tool-call" else content
            part = event.get("delta", {"message": {}})["message"].get("tool_calls" if found is calls else kind)
            assert event["index"] == len(found) - (step != "start")
            if step == "start":
                assert not is_open
                found.append(part)
            else:
                assert is_open == kind
            is_open = "" if step == "end" else kind
            if step == "delta" and found is calls:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            elif step == "delta":
                name = content[-1]["type"]
                assert part.keys() == {name}
                content[-1][name] += part[name]
        assert not is_open
        message = {"role": "assistant", **given(content=content or None, tool_calls=calls or None)}
        return {"id": start["id"], "model": start["model"], "message": message, **end["delta"]}

    def partial_text(self, frames: Sequence[Any]) -> str:
        parts = [frame["delta"]["message"]["content"] for frame in frames if frame["type"] == "content-delta"]
        return "".join(part.get("text", "") for part in parts)

    def answer(self, body: Any) -> Answer:
        message, usage = body["message"], body["usage"]
        assert message["role"] == "assistant"
        assert usage["tokens"] == usage["billed_units"]
        content = message.get("content", [])
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return Answer(
            text="".join(part["text"] for part in content if part["type"] == "text"),
            reasoning="".join(part["thinking"] for part in content if part["type"] == "thinking"),
            calls=tuple((call["name"], json.loads(call["arguments"])) for call in calls),
            finish=self.FINISH[body["finish_reason"]],
            prompt_tokens=usage["tokens"]["input_tokens"],
            output_tokens=usage["tokens"]["output_tokens"],
        )


class Responses(Format):
    """OpenAI's Responses format."""

    name, path, end = "responses", "/v1/responses", "event: response.completed\n"
    can = Chat.can - {"stop"}
    varying = frozenset({"id", "call_id", "created_at", "completed_at", "input_tokens_details"})
    stream_codes = dict.fromkeys(
        ("internal-error", "lmx-timeout", "no-model-loaded", "request-stopped"), "server_error"
    )
    ENDS: ClassVar = {
        "message": ["output_text.done", "content_part.done"],
        "reasoning": ["reasoning_summary_text.done", "reasoning_summary_part.done"],
        "function_call": ["function_call_arguments.done"],
        "custom_tool_call": ["custom_tool_call_input.done"],
    }
    """The events at the end of each type of item."""

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        named = {"type": "function", "name": request.choice}
        fields = given(
            model=request.model,
            tools=[{"type": "function", **tool} for tool in request.tools] or None,
            tool_choice=request.choice if request.choice in (None, "auto", "required", "none") else named,
            parallel_tool_calls=request.parallel,
            reasoning={"effort": "none"} if request.thinks is False else None,
        )
        items = [item for message in request.messages for item in self._items(message)]
        shared = {"input": items, "temperature": 0, "max_output_tokens": request.max_tokens, "stream": stream}
        return {**shared, **fields, **request.extra}

    @staticmethod
    def _items(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if message["role"] == "tool":
            yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            return
        if "reasoning_content" in message:
            summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
            yield {"type": "reasoning", "id": "rs_1", "summary": summary}
        yield {"role": message["role"], "content": message["content"]}
        for call in message.get("tool_calls", ()):
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}

    def frames(self, text: str) -> list[Any]:
        found = named_events(text)
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        return [event for at, event in enumerate(found) if event["type"] != "response.in_progress" or at == 1]

    def keeps_alive(self, text: str) -> bool:
        return text.count("event: response.in_progress\n") > 1

    def assemble(self, frames: Sequence[Any]) -> Any:
        created, started, *middle, last = frames
        assert [event["type"] for event in (created, started)] == ["response.created", "response.in_progress"]
        whole = last["response"]
        assert last["type"] == f"response.{whole['status']}"
        for event in (created, started):
            empty: dict[str, Any] = {"output": [], **dict.fromkeys(("usage", "incomplete_details", "completed_at"))}
            assert event["response"] == whole | {"status": "in_progress", **empty}
        items: list[Any] = []
        pieces = ""
        for event in middle:
            kind = event["type"].removeprefix("response.")
            if kind == "output_item.added":
                assert event["output_index"] == len(items)
                item = event["item"]
                assert (item["status"], item.get("content", []), item.get("summary", [])) == ("in_progress", [], [])
                items.append(item)
                pieces, ends = "", list[str]()
            elif kind == "output_item.done":
                assert self._content(event["item"]) == pieces
                assert ends == self.ENDS[event["item"]["type"]]
                items[-1] = items[-1] | event["item"]
                assert items[-1] == event["item"]
            else:
                assert (event["output_index"], event["item_id"]) == (len(items) - 1, items[-1]["id"])
                pieces += event.get("delta", "")
                if kind.endswith(".done"):
                    ends.append(kind)
                    part = event.get("part", event)
                    assert [part[name] for name in ("text", "arguments", "input") if name in part] == [pieces]
                if kind == "function_call_arguments.done":
                    assert event["name"] == items[-1]["name"]
        assert whole["output"] == items
        return whole

    @staticmethod
    def _content(item: Any) -> str:
        """Return the text of an item, or the arguments of a call."""
        if (name := {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])) is not None:
            return str(item[name])
        return "".join(part["text"] for part in item["summary" if item["type"] == "reasoning" else "content"])

    def partial_text(self, frames: Sequence[Any]) -> str:
        return "".join(frame["delta"] for frame in frames if frame["type"] == "response.output_text.delta")

    def answer(self, body: Any) -> Answer:
        items, usage = body["output"], body["usage"]
        is_cut = body["status"] == "incomplete"
        assert (body["object"], body["id"][:5]) == ("response", "resp_")
        assert body["completed_at"] >= body["created_at"] > 0
        assert is_cut or body["status"] == "completed"
        assert body["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        texts = {
            kind: "".join(self._content(item) for item in items if item["type"] == kind)
            for kind in ("message", "reasoning")
        }
        calls = [item for item in items if item["type"] == "function_call"]
        return Answer(
            text=texts["message"],
            reasoning=texts["reasoning"],
            calls=tuple((call["name"], json.loads(call["arguments"])) for call in calls),
            finish="length" if is_cut else "tool_calls" if calls else "stop",
            prompt_tokens=usage["input_tokens"],
            output_tokens=usage["output_tokens"],
        )

    def problem(self, body: Any) -> Problem:
        if "response" not in body:
            return super().problem(body)
        assert (body["type"], body["response"]["status"]) == ("response.failed", "failed")
        error = body["response"]["error"]
        return Problem(code=error["code"], message=error["message"], kind=None, request_id=None)


class OllamaChat(Format):
    """``/api/chat`` of Ollama's API."""

    name, path, end = "ollama chat", "/api/chat", '"done":true'
    can = Chat.can - {"forced"}
    varying = frozenset(
        {"id", "created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
    )
    kinds: ClassVar = {}

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        options = given(temperature=0, num_predict=request.max_tokens, stop=request.stop)
        tools = [{"type": "function", "function": tool} for tool in request.tools]
        fields = given(model=request.model, tools=tools or None, think=request.thinks)
        messages = [self._message(message) for message in request.messages]
        return {"messages": messages, "stream": stream, "options": options, **fields, **request.extra}

    @staticmethod
    def _message(message: Mapping[str, Any]) -> dict[str, Any]:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [{"function": call | {"arguments": json.loads(call["arguments"])}} for call in functions]
        fields = given(thinking=message.get("reasoning_content"), tool_calls=calls or None)
        return {"role": message["role"], "content": message["content"], **fields}

    def frames(self, text: str) -> list[Any]:
        *lines, rest = text.split("\n")
        assert rest == ""
        return [json.loads(line) for line in lines]

    def keeps_alive(self, text: str) -> bool:
        return "\n" in text and self.partial_text(self.frames(text[: text.rindex("\n") + 1])) == ""

    def assemble(self, frames: Sequence[Any]) -> Any:
        assert [frame["done"] for frame in frames] == [False] * (len(frames) - 1) + [True]
        assert len({frame["model"] for frame in frames}) == 1
        messages = [self._message_of(frame) for frame in frames]
        assert messages[-1].keys() <= {"role", "content"}
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        thinking = "".join(message.get("thinking", "") for message in messages)
        message = messages[-1] | {"content": self.partial_text(frames)}
        return frames[-1] | self._with_message(message | given(thinking=thinking or None, tool_calls=calls or None))

    def partial_text(self, frames: Sequence[Any]) -> str:
        return "".join(self._message_of(frame)["content"] for frame in frames)

    @staticmethod
    def _message_of(frame: Any) -> Any:
        return frame["message"]

    @staticmethod
    def _with_message(message: Any) -> dict[str, Any]:
        return {"message": message}

    def answer(self, body: Any) -> Answer:
        message = self._message_of(body)
        assert message.get("role", "assistant") == "assistant"
        calls = message.get("tool_calls", ())
        assert [call["function"]["index"] for call in calls] == [*range(len(calls))]
        assert (body["done"], body["done_reason"] in ("stop", "length")) == (True, True)
        return Answer(
            text=message["content"],
            reasoning=message.get("thinking", ""),
            calls=tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls),
            finish="tool_calls" if calls else body["done_reason"],
            prompt_tokens=body["prompt_eval_count"],
            output_tokens=body["eval_count"],
        )

    def problem(self, body: Any) -> Problem:
        return Problem(code=body["code"], message=body["error"], kind=None, request_id=body["request_id"])


class OllamaGenerate(OllamaChat):
    """``/api/generate`` of Ollama's API: the last message is the prompt."""

    name, path = "ollama generate", "/api/generate"
    can = frozenset({"template", "reasoning", "stop", "http"})

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        body = super().body(request, stream=stream)
        return {"prompt": body.pop("messages")[-1]["content"], **body}

    @staticmethod
    def _message_of(frame: Any) -> Any:
        return {"content": frame["response"], **given(thinking=frame.get("thinking"))}

    @staticmethod
    def _with_message(message: Any) -> dict[str, Any]:
        return {"response": message["content"], **given(thinking=message.get("thinking"))}


class Socket(Chat):
    """The chat format over a WebSocket, whose frames are tokens and statistics. It has no whole answers."""

    name, path, end = "websocket", "/v1/chat/stream", '"done":true'
    can = Chat.can - {"http"}

    def body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        return super().body(request, stream=False)

    def post(self, http: httpx2.Client, request: Request, **options: Any) -> httpx2.Response:
        """Request the whole answer in the chat format."""
        return http.post(Chat.path, json=Chat().body(request, stream=False), **options)

    def refusal(self, http: httpx2.Client, request: Request) -> tuple[int | None, Problem]:
        [frame] = self.frames(self.streamed(http, request))
        problem = self.problem(frame)
        assert problem.request_id is not None
        return None, problem

    @contextmanager
    def stream(self, http: httpx2.Client, request: Request) -> Iterator[Iterator[str]]:
        with websockets.sync.client.connect(str(http.base_url).replace("http", "ws").rstrip("/") + self.path) as client:
            client.send(json.dumps(self.body(request, stream=True)))
            yield self._messages(client)

    @staticmethod
    def _messages(client: websockets.sync.client.ClientConnection) -> Iterator[str]:
        """Yield a line for each message, and check the code with which the server closes the connection."""
        last: dict[str, Any] = {}
        with suppress(ConnectionClosedError):
            for message in map(str, client):
                yield f"{message}\n"
                last = json.loads(message)
                if "done" in last:
                    client.close()
        if "done" in last:
            assert client.close_code == 1000
            return
        error = ERROR_CLASSES[last["error"]["code"]]
        codes = {BodyTooLargeError: 1009, CallerError: 1008, UnavailableError: 1013, LabError: 1011}
        assert client.close_code == next(code for kind, code in codes.items() if issubclass(error, kind))

    def _send(self, connection: socket.socket, content: bytes, host: str) -> None:
        upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        connection.sendall(f"GET {self.path} HTTP/1.1\r\nhost: {host}\r\n{upgrade}{key}\r\n".encode())
        while not connection.recv(1, socket.MSG_PEEK):
            pass
        connection.sendall(Frame(Opcode.TEXT, content).serialize(mask=True))

    def frames(self, text: str) -> list[Any]:
        return [json.loads(line) for line in text.removesuffix("\n").split("\n")]

    def assemble(self, frames: Sequence[Any]) -> Any:
        """Return the body that the whole answer has in the chat format."""
        *tokens, last = frames
        assert all(token.keys() <= {"token", "reasoning_content", "tool_calls"} for token in tokens)
        assert last["done"] is True
        stats = last["stats"]
        reasoning = "".join(token.get("reasoning_content", "") for token in tokens)
        calls = self._calls(piece for token in tokens for piece in token.get("tool_calls", ()))
        fields = given(reasoning_content=reasoning or None, tool_calls=calls or None)
        message = {"role": "assistant", "content": self.partial_text(tokens), **fields}
        choice = {"index": 0, "message": message, "finish_reason": stats["finish_reason"]}
        usage = stats | {"total_tokens": stats["prompt_tokens"] + stats["completion_tokens"]}
        return {"object": "chat.completion", "choices": [choice], "usage": usage}

    def partial_text(self, frames: Sequence[Any]) -> str:
        return "".join(frame["token"] for frame in frames)


FORMATS: tuple[Format, ...] = (
    Chat(),
    Completions(),
    LlamaCompletion(),
    Messages(),
    Cohere(),
    Responses(),
    OllamaChat(),
    OllamaGenerate(),
    Socket(),
)


def each_format(*abilities: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test with the argument ``form`` for each format that can have these things."""
    forms = [form for form in FORMATS if form.can.issuperset(abilities)]
    return pytest.mark.parametrize("form", forms, ids=[form.name for form in forms])


CLOCK = {
    "name": "clock",
    "description": "Tells the time.",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
}
