"""Chat with any chat-format server: strict in what is sent, lenient in what is read.

The client, the daemon's model client and the benchmark share ``ChunkReader``, which accepts what servers of other
projects send. Answers of LMX Lab's own server have the stricter shapes of ``lmx_lab.wire.chat``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import pydantic_core

from lmx_lab.client.connection import (
    KEEPALIVE_S,
    LONG_BYTES,
    QUICK_S,
    AsyncClientBase,
    HttpConnection,
    Remark,
    ServerDescription,
    UnexpectedResponse,
    is_loopback,
    normalize_address,
    parse_error,
    read_retry_after,
    wrong_server_error,
)
from lmx_lab.client.plain_http import PlainTransport
from lmx_lab.errors import (
    ERROR_CLASSES,
    BodyTooLargeError,
    ConnectionLostError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    LabError,
    ModelBusyError,
    ModelNotFoundError,
    QueueFullError,
    UnauthorizedError,
    UnreachableError,
    WrongServerError,
)
from lmx_lab.values.outputs import ToolCallDelta

T = TypeVar("T")
CHAT_SERVER = ServerDescription(kind="a chat-format server")
DONE = "[DONE]"
"""The last event of a stream."""
LAB_HEADER = "x-lmx-lab"
"""Response header of LMX Lab servers."""
MAX_OPEN_S = 2.0
"""Default time for which a stream may stay open after the finish reason; then the answer counts as complete."""
MAX_CALLS = 128
"""Maximum number of tool calls in one answer."""
MAX_ARGUMENT_CHARACTERS = 1_000_000
"""Maximum length of the arguments of all tool calls in one answer."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is not a character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUsage:
    """Token counts as reported by the server; None if it does not report them."""

    prompt: int | None
    completion: int | None
    cached: int | None = None
    """Prompt tokens that the server found in its cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The content of one chunk of an answer. Most chunks have only one kind of content."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None
    """``stop``, ``length``, ``tool_calls``, ``function_call``, ``content_filter``, or another word of the server."""
    usage: TokenUsage | None = None
    """Token counts of the answer so far. Those of the last chunk are final."""
    model: str | None = None
    """Name of the model, as reported by the server."""
    remark: str | None = None
    """State of a request that has no output yet."""
    timings: Mapping[str, Any] | None = None
    """Measurements in the format of llama.cpp and LMX Lab."""

    @property
    def has_output(self) -> bool:
        """Whether the chunk contains text, thoughts or a tool call."""
        return bool(self.text or self.thinking or self.calls)


class ChunkReader:
    """Reads the chunks of one answer.

    Args:
        url: The server's address, for error messages.
    """

    def __init__(self, url: str) -> None:
        self.finished = False
        """Whether the end of the answer was read."""
        self._url = url
        self._text, self._thinking = _SurrogateJoiner(), _SurrogateJoiner()
        self._call_ids: list[str | None] = []
        """The ids of the tool calls so far, in the order in which the calls started."""
        self._by_sent_index: dict[int, int] = {}
        """The position in this order of each call that the server has sent with an index."""
        self._argument_characters = 0

    def read(self, data: str) -> Piece | None:
        """Read the data of one server-sent event, or a complete answer that is not streamed.

        Returns:
            None if the data is blank.

        Raises:
            EngineError: the answer has too many tool calls, or too long arguments.
            LabError: the data contains an error, or is not a chunk.
        """
        try:
            chunk = pydantic_core.from_json(data)
        except ValueError:
            try:
                # Unlike pydantic, this parser accepts halves of surrogate pairs.
                chunk = json.loads(data)
            except (ValueError, RecursionError):
                chunk = None
        if not isinstance(chunk, dict):
            if not data.strip():
                return None
            raise parse_chat_error(data, self._url) or WrongServerError(
                f"{self._url} sent {data[:80]!r} in a stream, unlike {CHAT_SERVER.kind}; {CHAT_SERVER.check}"
            )
        choices = chunk.get("choices")
        # Some servers have "error": null in every chunk.
        if (chunk.get("error") or not choices) and (error := parse_chat_error(data, self._url)) is not None:
            raise error
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if choice.get("index") not in (None, 0):
            choice = {}  # If the server sends several answers, only the first one is read.
        message = choice.get("message")
        is_complete = isinstance(message, dict)
        reason = _name(choice.get("finish_reason"))
        self.finished = self.finished or reason is not None or is_complete
        delta = message if is_complete else choice.get("delta")
        text = thinking = ""
        calls: list[ToolCallDelta] = []
        if isinstance(delta, dict):
            text, inner = _content(delta.get("content"))
            text = self._text.join(text or _string(delta.get("refusal")))
            thinking = _string(delta.get("reasoning_content")) or _string(delta.get("reasoning")) or inner
            thinking = self._thinking.join(thinking)
            if isinstance(given := delta.get("tool_calls"), list):
                calls = [self._read_call(item) for item in given if isinstance(item, dict)]
            if isinstance(older := delta.get("function_call"), dict):
                calls.append(self._read_call({"index": 0, "function": older}))
        timings, given_usage, usage = chunk.get("timings"), chunk.get("usage"), None
        if isinstance(given_usage, dict):
            details = given_usage.get("prompt_tokens_details")
            usage = TokenUsage(
                prompt=count(given_usage.get("prompt_tokens")),
                completion=count(given_usage.get("completion_tokens")),
                cached=count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            )
        return Piece(
            text=text,
            thinking=thinking,
            calls=tuple(calls),
            finish_reason=reason,
            usage=usage,
            model=_name(chunk.get("model")),
            timings=timings if isinstance(timings, dict) else None,
        )

    def _read_call(self, item: dict[str, Any]) -> ToolCallDelta:
        """Read a part of a tool call, and determine which call it belongs to.

        Raises:
            EngineError: the answer has too many tool calls, or too long arguments.
        """
        function = item.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments, identifier = _name(function.get("name")), function.get("arguments"), item.get("id")
        if not isinstance(arguments, str):
            arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
        call_id = str(identifier) if isinstance(identifier, str | int) and identifier != "" else None
        sent_index = item.get("index")
        if isinstance(sent_index, int) and not isinstance(sent_index, bool):
            index = self._by_sent_index.get(sent_index)
            known_id = None if index is None else self._call_ids[index]
            if name and call_id and known_id and call_id != known_id:
                index = None  # Some versions of Ollama send every call with the index 0.
        else:
            # Without an index, a part with a name or a new id starts another call.
            sent_index = None
            index = self._call_ids.index(call_id) if call_id and call_id in self._call_ids else None
            if index is None and self._call_ids and not name and not call_id:
                index = len(self._call_ids) - 1
        if index is None:
            if len(self._call_ids) == MAX_CALLS:
                raise EngineError(
                    f"the model requested more than {MAX_CALLS} tool calls at once, the limit for one answer; change "
                    "the prompt so that the model calls fewer tools at once"
                )
            index = len(self._call_ids)
            self._call_ids.append(None)
            if sent_index is not None:
                self._by_sent_index[sent_index] = index
        self._call_ids[index] = self._call_ids[index] or call_id
        self._argument_characters += len(arguments)
        if self._argument_characters > MAX_ARGUMENT_CHARACTERS:
            raise EngineError(
                f"the arguments of the model's tool calls have more than {MAX_ARGUMENT_CHARACTERS:,} characters, the "
                "limit for one answer; change the prompt so that the model writes less at once"
            )
        return ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments)


def count(value: Any) -> int | None:
    """Return a count that a server reports; None if it is not a plausible count."""
    plausible = number(value)
    return None if plausible is None else int(plausible)


def number(value: Any) -> float | None:
    """Return a measurement that a server reports; None if it is not a plausible number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= 2**53 else None


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _name(value: Any) -> str | None:
    """Return a string that is never split between chunks; halves of surrogate pairs in it are replaced."""
    return SURROGATE.sub("\ufffd", value) if isinstance(value, str) and value else None


def _content(value: Any) -> tuple[str, str]:
    """Return text and thoughts of a message's content, which Mistral sends as a list of parts."""
    if not isinstance(value, list):
        return _string(value), ""
    parts = [part for part in value if isinstance(part, dict)]
    text = "".join(_string(part.get("text")) for part in parts)
    return text, "".join(_content(part.get("thinking"))[0] for part in parts)


class _SurrogateJoiner:
    """Joins surrogate pairs that a server has split between two chunks, as servers written in JavaScript do."""

    def __init__(self) -> None:
        self._half = ""

    def join(self, text: str) -> str:
        if not text or not (self._half or SURROGATE.search(text)):
            return text
        text, self._half = self._half + text, ""
        if "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# Errors

# Messages of llama.cpp, vLLM, OpenAI and LM Studio, sent with status 400 or 500.
CONTEXT_TOO_LONG = re.compile(r"context.{0,20}(length|size|window)|exceed_context_size|too many tokens", re.IGNORECASE)
CLASS_BY_STATUS: dict[int, type[LabError]] = {
    400: InvalidRequestError,
    401: UnauthorizedError,
    403: UnauthorizedError,
    413: BodyTooLargeError,
    422: InvalidRequestError,
    429: QueueFullError,
}


def chat_server_error(response: UnexpectedResponse) -> LabError:
    """Return the error for an unexpected response of any chat-format server.

    Known formats: ``{"error": {"message", "type", "code", "param"}}`` with a word or a status as its code (OpenAI,
    llama.cpp, vLLM, Ollama), ``{"error": "…"}`` (mlx_lm.server, LM Studio), ``{"object": "error", "message": …}``
    (older vLLM), ``{"detail": …}`` (FastAPI).
    """
    return _chat_error(response.body, response) or wrong_server_error(response)


def parse_chat_error(text: str, url: str) -> LabError | None:
    """Parse an error event of a stream, or an error document instead of a stream. Returns None if it is neither."""
    return _chat_error(text, UnexpectedResponse(url=url, status=500, content_type="", retry_after=None, body=b""))


def _chat_error(text: str | bytes, response: UnexpectedResponse) -> LabError | None:
    try:
        document = pydantic_core.from_json(text)
    except ValueError:
        return None
    if not isinstance(document, Mapping):
        return None
    error = document.get("error")
    if isinstance(error, Mapping):
        message = str(error.get("message") or error.get("code") or "an error without a message")
        detail = {**error, "message": message}
    elif isinstance(error, str) and error:
        detail = {"message": error}
    elif document.get("object") == "error":
        detail = {**document, "message": str(document.get("message"))}
    elif "detail" in document:
        detail = {"message": str(document["detail"])}
    else:
        return None
    code, message = detail.get("code"), detail["message"]
    if isinstance(code, str) and code in ERROR_CLASSES:
        # A code of LMX Lab, whose message is complete.
        return parse_error(text, retry_after=response.retry_after)
    # llama.cpp may send an error with the status 200.
    status = code if isinstance(code, int) and code in range(400, 600) else response.status
    kind: type[LabError] = CLASS_BY_STATUS.get(status, EngineError)
    if CONTEXT_TOO_LONG.search(f"{message} {code} {detail.get('type')}"):
        kind = ContextLengthError
    elif code == "model_not_found" or (status == 404 and re.search("model|repo", message, re.IGNORECASE)):
        kind = ModelNotFoundError
    elif status == 503 and "loading" in message.lower():
        kind = ModelBusyError
    message = f"error of {response.url}: {message:.500}"
    return kind(message, retry_after_s=read_retry_after(response.retry_after))


# The client


def write_stream_request(body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a request for a streamed answer with its usage.

    Raises:
        InvalidRequestError: a value cannot be written as JSON.
    """
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        return json.dumps(sent, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(
            f"the request cannot be written as JSON: {exc!s:.200}; give plain Python values"
        ) from None


class ChatFormatClient(AsyncClientBase[HttpConnection]):
    """Streams chats from one server, on one event loop. Closing or cancelling a call closes its connection.

    Args:
        base_url: The address, optionally with ``/v1``.
        api_key: It is never displayed.
        headers: Additional headers of each request.
        transport: Replaces the network, for tests.
        max_open_s: Time for which a stream may stay open after the finish reason; then the answer counts as complete.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        *,
        max_open_s: float = MAX_OPEN_S,
    ) -> None:
        self._max_open_s = max_open_s
        address = normalize_address(base_url)
        if transport is None and address.startswith("http:") and is_loopback(address):
            # Faster than the transport of httpx2, for servers on this machine.
            transport = PlainTransport(keepalive_s=KEEPALIVE_S)
        super().__init__(
            HttpConnection(
                base_url,
                api_key=api_key,
                headers=headers,
                transport=transport,
                server=CHAT_SERVER,
                read_error=chat_server_error,
            )
        )
        self.is_lab: bool | None = None
        """Whether the server is an LMX Lab server; None before it has answered ``models``."""

    async def models(self) -> list[str]:
        """List the ids of the server's models, in its order.

        Raises:
            LabError: no server answers, or the response is not a list of models.
        """
        response, body = await self._connection.request("GET", "/v1/models", limit=LONG_BYTES, within_s=QUICK_S)
        self.is_lab = LAB_HEADER in response.headers
        if not response.is_success:
            raise self._connection.error_for(response, body)
        try:
            document = pydantic_core.from_json(body)
            # Ollama's list is null if it has no models.
            entries = (document["data"] if isinstance(document, Mapping) else document) or []
            ids = [str(entry["id"]) for entry in entries[:1000]]
        except (ValueError, TypeError, KeyError) as exc:
            raise self._connection.error_for(response, body) from exc
        return ids

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Request a streamed chat with usage, and yield its pieces as they arrive.

        Raises:
            ConnectionLostError: the stream ended before the answer was complete.
            LabError: the server's error, before the first piece or after any piece.
        """
        content = write_stream_request(body)
        reader = ChunkReader(self.url)
        source = self._connection.events("POST", "/v1/chat/completions", content=content, document_bytes=LONG_BYTES)
        loop, until_s = asyncio.get_running_loop(), None
        async with aclosing(source) as events:
            while (event := await next_until(events, until_s)) is not None:
                if isinstance(event, Remark):
                    yield Piece(remark=event.text)
                elif event.strip() == DONE:
                    # The connection can be used again only if the response was read to its end.
                    await next_until(events, loop.time() + 0.05)
                    return
                elif (piece := reader.read(event)) is not None:
                    if reader.finished and until_s is None:
                        until_s = loop.time() + self._max_open_s
                    yield piece
        if not reader.finished:
            raise ConnectionLostError(f"{self.url} ended the stream before the answer was complete; try again")


async def next_until(items: AsyncGenerator[T, None], until_s: float | None) -> T | None:
    """Return the next item of a stream.

    Args:
        until_s: Deadline on the loop's clock, if the answer is complete; None while it is not, because a timer for each
            token would be too slow.

    Returns:
        None after the last item, and if the stream of a complete answer is not closed before the deadline.
    """
    if until_s is None:
        return await anext(items, None)
    try:
        async with asyncio.timeout_at(until_s):
            return await anext(items, None)
    except (TimeoutError, UnreachableError):
        return None
