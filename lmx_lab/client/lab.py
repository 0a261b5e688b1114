"""Provide a typed client of the inference server, over HTTP, server-sent events and WebSockets."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Unpack
from urllib.parse import urlencode

import httpx2
import numpy as np
import numpy.typing as npt
from httpx2.websockets import HTTPXWSException
from pydantic import Discriminator, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

# BlockingStream: in the type hints of streams.
from lmx_lab.blocking import BlockingStream, twin, twin_stream  # noqa: F401
from lmx_lab.client.blocking import BlockingClient
from lmx_lab.client.chat_format import DONE, LAB_HEADER
from lmx_lab.client.connection import (
    CLOSE_S,
    CONNECT_S,
    LAB_SERVER,
    LONG_BYTES,
    QUICK_S,
    SHORT_BYTES,
    AsyncClientBase,
    HttpConnection,
    Remark,
    encode_body,
    parse_error,
    wrong_server_error,
)
from lmx_lab.errors import ConnectionLostError, LabError, UnreachableError, WrongServerError, counted
from lmx_lab.values.engine import PressureEvent
from lmx_lab.values.models import (
    OPTIONS_OF_STAY,
    LoadOptions,
    LoadReport,
    ModelEvent,
    TimeToLive,
)
from lmx_lab.values.outputs import FinishReason
from lmx_lab.values.plan import LoadPlan
from lmx_lab.values.timeline import ModelTimeline, RequestTimeline, ServerTimeline
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.admin import (
    PAGE_REQUESTS,
    CancelLoadAnswer,
    CancelLoadRequest,
    Heartbeat,
    KeepAnswer,
    KeepRequest,
    Memory,
    ModelRecords,
    NotReady,
    Ready,
    RequestEvent,
    RunningRequest,
    RunningRequests,
    Sample,
    StopRequest,
    StopRequestAnswer,
    Throughput,
    TimelinePage,
    TraceBody,
    UnloadAnswer,
    UnloadRequest,
    load_spec,
)
from lmx_lab.wire.chat import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChoiceDelta,
    ChoiceLogprobs,
    ChunkChoice,
    SocketDone,
    SocketError,
    SocketToken,
)
from lmx_lab.wire.completions import Completion, CompletionRequest
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody
from lmx_lab.wire.errors import Fields, validated
from lmx_lab.wire.generation import CompletionTokensDetails, PromptTokensDetails, Timings, Usage
from lmx_lab.wire.rerank import RerankBody, RerankResults
from lmx_lab.wire.tokens import TokenizeAnswer, TokenizeRequest

T = TypeVar("T")
Include = Literal["models", "requests", "samples", "pressure"]
"""Events that the server sends only on request: ``ModelEvent``, ``RequestEvent``, ``Sample``, ``PressureEvent``."""


@dataclass(frozen=True, kw_only=True)
class UnknownLabEvent:
    """An event that this version does not know: of another type, or with other fields."""

    text: str
    """The received data, usually JSON."""


KnownEvent = Throughput | Memory | Heartbeat | ModelEvent | RequestEvent | Sample | PressureEvent
LabEvent = KnownEvent | UnknownLabEvent
_KNOWN: TypeAdapter[KnownEvent] = TypeAdapter(Annotated[KnownEvent, Discriminator("type")])


def lab_event(text: str) -> LabEvent:
    """Parse the data of one event of the server."""
    try:
        return _KNOWN.validate_json(text)
    except ValidationError:
        return UnknownLabEvent(text=text)


def conversation_header(body: ChatRequest) -> dict[str, str]:
    """Return a header that is the same for all requests of a conversation.

    A proxy in front of several servers can send them to the same one, whose prefix cache contains their beginning. The
    value is a hash of the messages up to the first one of the user. Ray Serve expects the name of a session in this
    header, and other proxies can be configured to use it.
    """
    digest = hashlib.sha256()
    for message in body.messages:
        digest.update(encode_body(message))
        if message.role == "user":
            break
    return {"x-session-id": digest.hexdigest()[:16]}


# Maximum sizes of responses

MAX_COMPONENTS = 16_384
"""Maximum length of a vector: more than any known embedding model has."""
ITEM_BYTES = 200
"""Size of the JSON around one vector or score."""


def max_embeddings_bytes(body: EmbeddingsBody) -> int:
    """Return the maximum size of the response to an embeddings request."""
    texts = 1 if body.is_single else len(body.input)
    # Four bytes in base64, or a decimal number with its separator.
    component_bytes = 6 if body.encoding_format == "base64" else 26
    vector = (body.dimensions or MAX_COMPONENTS) * component_bytes
    return SHORT_BYTES + texts * (ITEM_BYTES + vector)


def max_rerank_bytes(documents: int, *, request_bytes: int) -> int:
    """Return the maximum size of the response to a rerank request, which may contain the documents of the request."""
    # JSON with escapes is at most three times as large as the same text in UTF-8.
    return SHORT_BYTES + documents * ITEM_BYTES + 3 * request_bytes


# Chats over a WebSocket


async def receive_messages(
    connection: HttpConnection, path: str, first: str, *, silence_s: float | None = None
) -> AsyncGenerator[str, None]:
    """Send a message, and yield the server's messages. Closing the generator closes the connection.

    Args:
        silence_s: Maximum time between two messages.

    Raises:
        ConnectionLostError: the connection was closed. Only the caller knows whether the answer was complete.
        LabError: the server's error, if it refuses the connection.
    """
    received: asyncio.Queue[str | Exception] = asyncio.Queue(1)

    async def read() -> None:
        """Put all messages into the queue, followed by the error that has ended the connection."""
        end: Exception | None = None
        try:
            async with connection.websocket(path) as socket:
                try:
                    await socket.send_text(first)
                    while True:
                        async with asyncio.timeout(silence_s):
                            message = await socket.receive_text()
                        await received.put(message)
                except Exception as exc:
                    end = exc
        except Exception as exc:
            # An error while closing must not replace the first error.
            end = end or exc
        while isinstance(end, ExceptionGroup):
            end = end.exceptions[0]
        url = connection.url
        if isinstance(end, TimeoutError):
            error: LabError = UnreachableError(
                f"{url} sent nothing within the time limit; try again, or raise timeout_s"
            )
        elif isinstance(end, LabError):
            await received.put(end)
            return
        elif isinstance(end, HTTPXWSException):
            error = ConnectionLostError(f"{url} closed the connection before the answer was complete; try again")
        else:
            # Invalid frames raise exceptions of another library, on which this one depends.
            error = ConnectionLostError(f"{url} broke the connection ({type(end).__name__}: {end!s:.200}); try again")
        error.__cause__ = end
        await received.put(error)

    # In a separate task: the library requires that the same task opens and closes a connection.
    task = asyncio.create_task(read(), name="read a WebSocket")
    try:
        while isinstance(message := await received.get(), str):
            yield message
        raise message
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=CLOSE_S)


SocketMessage = SocketToken | SocketDone | SocketError
SOCKET_MESSAGE: TypeAdapter[SocketMessage] = TypeAdapter(Annotated[SocketMessage, Field(union_mode="left_to_right")])


class SocketChunks:
    """Converts the messages of one WebSocket to chunks. Does no I/O.

    Fields that are not sent over a WebSocket are filled in: ``id`` is generated here, ``model`` is the requested name,
    ``system_fingerprint`` is empty. The prompt time in ``timings`` includes the time in the queue.
    """

    def __init__(self, body: ChatRequest) -> None:
        self.done = False
        """Whether the last message was read."""
        self._model = body.model
        self._with_usage = body.include_usage
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._has_begun = False

    def read(self, message: SocketToken | SocketDone) -> Iterator[ChatChunk]:
        """Yield the chunks of one message."""
        if not self._has_begun:
            self._has_begun = True
            yield self._chunk(ChoiceDelta(role="assistant", content=""))
        if isinstance(message, SocketToken):
            # A chunk each for thoughts, text and tool calls; the first one has the log-probabilities.
            thinking = message.reasoning_content
            deltas = [ChoiceDelta(reasoning_content=thinking)] if thinking else []
            if message.token:
                deltas.append(ChoiceDelta(content=message.token))
            deltas += [ChoiceDelta(tool_calls=[call]) for call in message.tool_calls or ()]
            logprobs = None if message.logprobs is None else ChoiceLogprobs(content=message.logprobs)
            # A token without text needs a chunk as well, for its log-probabilities.
            for delta in deltas or [ChoiceDelta(content="")]:
                yield self._chunk(delta, logprobs=logprobs)
                logprobs = None
            return
        self.done = True
        stats = message.stats
        computed, predicted = stats.prompt_tokens - stats.cached_tokens, stats.completion_tokens
        speed = stats.tokens_per_second
        predicted_ms = predicted / speed * 1e3 if speed > 0 else 0.0
        prompt_ms = max(0.0, stats.total_ms - predicted_ms)
        timings = Timings(
            cache_n=stats.cached_tokens,
            prompt_n=computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=prompt_ms / computed if computed else 0.0,
            prompt_per_second=computed / prompt_ms * 1e3 if prompt_ms > 0 else 0.0,
            predicted_n=predicted,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=predicted_ms / predicted if predicted else 0.0,
            predicted_per_second=speed,
            ttft_ms=stats.ttft_ms,
        )
        last = self._chunk(ChoiceDelta(), finish_reason=stats.finish_reason)
        yield last.model_copy(update={"timings": timings})
        if self._with_usage:
            usage = Usage(
                prompt_tokens=stats.prompt_tokens,
                completion_tokens=stats.completion_tokens,
                total_tokens=stats.prompt_tokens + stats.completion_tokens,
                prompt_tokens_details=PromptTokensDetails(cached_tokens=stats.cached_tokens),
                completion_tokens_details=CompletionTokensDetails(reasoning_tokens=stats.reasoning_tokens),
            )
            yield self._chunk_with([]).model_copy(update={"usage": usage, "timings": timings})

    def _chunk(
        self, delta: ChoiceDelta, *, logprobs: ChoiceLogprobs | None = None, finish_reason: FinishReason | None = None
    ) -> ChatChunk:
        return self._chunk_with([ChunkChoice(index=0, delta=delta, logprobs=logprobs, finish_reason=finish_reason)])

    def _chunk_with(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            system_fingerprint="",
            choices=choices,
        )


# Loading and unloading with progress

PROGRESS_STAGES = ("download", "verify", "convert", "store", "load", "unloading", "unloaded")
"""Stages that are reported as progress. The end is reported by the response to the load request."""


async def run_with_progress(
    work: Callable[[], Coroutine[Any, Any, T]],
    *,
    events: AsyncGenerator[LabEvent, None],
    progress: Callable[[ModelEvent], None],
    open_s: float = 2.0,
) -> T:
    """Load or unload a model, and call ``progress`` for each step. Without events, there is no progress.

    Cancellation, or an exception of ``progress``, stops the waiting but not the load or unload.

    Args:
        open_s: Maximum time to wait until the stream of events is open, which a proxy may delay.

    Raises:
        LabError: the load or unload has failed.
    """
    opened = asyncio.Event()

    async def report() -> None:
        try:
            async with aclosing(events) as received:
                while True:
                    try:
                        event = await anext(received, None)
                    except LabError:
                        # The load continues without progress, and reports its own errors.
                        return
                    if event is None:
                        return
                    opened.set()
                    if isinstance(event, ModelEvent) and event.stage in PROGRESS_STAGES:
                        progress(event)
        finally:
            opened.set()

    watching = asyncio.create_task(report(), name="report progress of a load or unload")
    tasks: list[asyncio.Task[Any]] = [watching]
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(opened.wait(), open_s)
        working = asyncio.create_task(work(), name="wait for a load or unload")
        tasks.append(working)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            # The events have ended, or ``progress`` has raised.
            watching.result()
        return await working
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Over = Literal["sse", "websocket"]
"""Transport of a stream: server-sent events or a WebSocket. Through jupyter-server-proxy, only closing a WebSocket ends
the answer on the server."""


class AsyncLabClient(AsyncClientBase[HttpConnection]):
    """A client of one inference server, on one event loop: ``async with AsyncLabClient("http://host:8400") as client``.

    The classes of requests and responses are in ``lmx_lab.wire``. A dictionary with the fields of a request is accepted
    in place of an object. Cancelling a call, or closing a stream, closes its
    connection, and the server stops its work. Every failure raises a ``LabError``: the class for the server's error
    code, or ``UnreachableError`` if no LMX Lab server answers.

    Args:
        base_url: The address, optionally with a proxy's prefix, a trailing slash or ``/v1``.
        api_key: The key of the server, or of a proxy in front of it. It is never displayed.
        transport: Replaces the network, for tests.
        timeout_s: Maximum time without data while the server computes or loads. None waits as long as the connection
            exists, because the server has its own time limits.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(HttpConnection(base_url, api_key=api_key, transport=transport, timeout_s=timeout_s))
        self._silence_s = timeout_s

    @property
    def api_key(self) -> str | None:
        """The key that the client sends; None if it sends none."""
        return self._connection.api_key

    # Chat

    async def chat(self, body: ChatRequest | Fields) -> ChatCompletion:
        """Return a complete answer."""
        body = validated(ChatRequest, body)
        return await self._connection.fetch(
            "POST",
            "/v1/chat/completions",
            ChatCompletion,
            content=body.model_copy(update={"stream": False}),
            limit=SHORT_BYTES + LONG_BYTES * (body.n or 1) * (1 + (body.top_logprobs or 0)),
            headers=conversation_header(body),
        )

    async def stream(self, body: ChatRequest | Fields, *, over: Over = "sse") -> AsyncGenerator[ChatChunk, None]:
        """Yield the chunks of an answer as they are generated.

        Args:
            over: The transport. Less is sent over a WebSocket: the chunks have the requested ``model``, a local ``id``,
                an empty ``system_fingerprint``, and ``timings`` whose prompt time includes the time in the queue.

        Raises:
            ConnectionLostError: the stream ended before the answer was complete.
            LabError: the server's error, before the first chunk or after any chunk.
        """
        body = validated(ChatRequest, body)
        source = self.stream_with_remarks(body) if over == "sse" else self._stream_over_socket(body)
        async with aclosing(source) as parts:
            async for part in parts:
                if isinstance(part, ChatChunk):
                    yield part

    async def stream_with_remarks(self, body: ChatRequest | Fields) -> AsyncGenerator[ChatChunk | Remark, None]:
        """Like ``stream``, with a remark about the request's state after every five seconds without a chunk."""
        body = validated(ChatRequest, body)
        content = encode_body(body.model_copy(update={"stream": True}))
        headers = conversation_header(body)
        source = self._connection.events("POST", "/v1/chat/completions", content=content, headers=headers)
        async with aclosing(source) as events:
            async for event in events:
                if event == DONE:
                    return
                if isinstance(event, Remark):
                    yield event
                    continue
                try:
                    chunk = ChatChunk.model_validate_json(event)
                except ValidationError as exc:
                    raise parse_error(event) or self._connection.invalid_event_error() from exc
                yield chunk
        raise ConnectionLostError(f"{self.url} ended the stream before the answer was complete; try again")

    async def _stream_over_socket(self, body: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        content = encode_body(body.model_copy(update={"stream": True})).decode()
        chunks = SocketChunks(body)
        source = receive_messages(self._connection, "/v1/chat/stream", content, silence_s=self._silence_s)
        async with aclosing(source) as texts:
            async for text in texts:
                try:
                    message = SOCKET_MESSAGE.validate_json(text)
                except ValidationError as exc:
                    raise WrongServerError(
                        f"{self.url} sent {text[:80]!r} over a WebSocket, unlike an LMX Lab server; {LAB_SERVER.check}"
                    ) from exc
                if isinstance(message, SocketError):
                    raise parse_error(text) or LabError(message.error.message)
                for chunk in chunks.read(message):
                    yield chunk
                if chunks.done:
                    return

    # Plain text and tokens

    async def complete(self, body: CompletionRequest | Fields) -> Completion:
        """Return the complete continuations of plain prompts; with ``echo`` and ``logprobs``, prompts are scored."""
        body = validated(CompletionRequest, body)
        content = body.model_copy(update={"stream": False})
        prompts = len(body.prompt) if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else 1
        limit = SHORT_BYTES + LONG_BYTES * prompts * (body.n or 1) * (1 + (body.logprobs or 0))
        return await self._connection.fetch("POST", "/v1/completions", Completion, content=content, limit=limit)

    async def tokenize(self, body: TokenizeRequest | Fields) -> TokenizeAnswer:
        """Return the token ids of a text, or of a chat as the model reads it."""
        content = validated(TokenizeRequest, body)
        return await self._connection.fetch("POST", "/tokenize", TokenizeAnswer, content=content, limit=LONG_BYTES)

    # Vectors and scores

    async def embed(self, body: EmbeddingsBody | Fields) -> EmbeddingList:
        """Return the vectors of texts. ``as_array`` converts them to an array.

        ``encoding_format="base64"`` is faster than the default.
        """
        body = validated(EmbeddingsBody, body)
        limit = max_embeddings_bytes(body)
        return await self._connection.fetch("POST", "/v1/embeddings", EmbeddingList, content=body, limit=limit)

    async def rerank(self, body: RerankBody | Fields) -> RerankResults:
        """Rank documents by relevance, the best first.

        Raises:
            UnreachableError: the response has an index without a document, or the same index twice.
        """
        body = validated(RerankBody, body)
        content, count = encode_body(body), len(body.documents)
        limit = max_rerank_bytes(count, request_bytes=len(content))
        answer = await self._connection.fetch("POST", "/v1/rerank", RerankResults, content=content, limit=limit)
        indices = [item.index for item in answer.results]
        if len(set(indices)) < len(indices) or not set(indices) <= set(range(count)):
            raise UnreachableError(
                f"{self.url} was given {counted(count, 'document')} to rank, but its response has the indices "
                f"{indices!s:.100}, unlike an LMX Lab server; {LAB_SERVER.check}"
            )
        return answer

    # The inside of the model

    async def trace(self, body: TraceBody | Fields) -> Trace:
        """Return internal values of the loaded model. Only programs on the server's machine may do this."""
        response, data = await self._connection.request(
            "POST",
            "/admin/trace",
            content=validated(TraceBody, body),
            # A trace may be as large as the server allows; by default its values have 1 GiB.
            limit=2**34,
            within_s=None,
        )
        if not response.is_success:
            raise self._connection.error_for(response, data)
        try:
            return Trace.decode(data)
        except ValueError as exc:
            raise WrongServerError(f"the trace of {self.url} cannot be read: {exc}; {LAB_SERVER.check}") from exc

    # Models

    async def models(self) -> ModelRecords:
        """List the models on the server's disk, and which of them are loaded."""
        return await self._connection.fetch("GET", "/admin/models", ModelRecords, limit=LONG_BYTES, within_s=QUICK_S)

    async def timeline(self, last_s: float = 60.0, *, most: int | None = None) -> ServerTimeline:
        """Return the timeline of the requests of all clients, and of loads, in the last ``last_s`` seconds.

        The oldest are first.

        Args:
            most: Maximum number of requests; the newest are returned. None sets no limit.
        """
        requests: list[RequestTimeline] = []
        models: list[ModelTimeline] = []
        before: int | None = None
        while most is None or len(requests) < most:
            left = PAGE_REQUESTS if most is None else min(PAGE_REQUESTS, most - len(requests))
            query = urlencode({"last_s": last_s, "limit": left, **({} if before is None else {"before": before})})
            page = await self._connection.fetch(
                "GET", f"/admin/timeline?{query}", TimelinePage, limit=LONG_BYTES, within_s=QUICK_S
            )
            requests += page.requests
            models += page.models
            # If ``before`` does not decrease, the server would repeat pages without end.
            if page.before is None or (before is not None and page.before >= before):
                break
            before = page.before
        return ServerTimeline(requests=tuple(reversed(requests)), models=tuple(models))

    async def clients(self) -> list[RunningRequest]:
        """Return the requests that wait or run, oldest first. A server on another machine returns only
        those of this machine."""
        return (await self._connection.fetch("GET", "/admin/requests", RunningRequests, within_s=QUICK_S)).requests

    async def stop_request(self, id_: str) -> str:
        """Stop a request that waits or runs, whose client gets an error, and return its id.

        Args:
            id_: The id in ``clients``, or a unique beginning of it.

        Raises:
            NotFoundError: no request that waits or runs, or several, have this id.
        """
        content = validated(StopRequest, {"id": id_})
        return (await self._connection.fetch("POST", "/admin/requests/stop", StopRequestAnswer, content=content)).id

    async def plan(self, model: str, **options: Unpack[LoadOptions]) -> LoadPlan:
        """Return what a load of a model would use in memory, and whether there is room for it. Nothing is loaded.

        Args:
            model: The model's id; callers on the server's machine may also give a path, or a model of the hub.
            options: ``LoadOptions``, as in ``load``; ``wait``, ``pin`` and ``ttl_s`` have no effect.
        """
        spec = load_spec(model, options)
        values = {name: value for name, value in spec.options.items() if name not in OPTIONS_OF_STAY}
        query = urlencode({"model": spec.model, **values})
        return await self._connection.fetch("GET", f"/admin/models/plan?{query}", LoadPlan)

    async def load(
        self,
        model: str,
        *,
        progress: Callable[[ModelEvent], None] | None = None,
        **options: Unpack[LoadOptions],
    ) -> LoadReport:
        """Load a model in place of the loaded one. Returns when the model is ready.

        Cancelling this stops the waiting, but not the load.

        Args:
            model: The model's id; callers on the server's machine may also give a path.
            progress: Called on this loop with each step of the load; most steps have byte counts.
            options: ``LoadOptions``, such as ``engine="mlx"``, the engine that must run the model.
        """
        spec = load_spec(model, options)
        content = to_json({"model": spec.model, **spec.options})

        async def load() -> LoadReport:
            return await self._connection.fetch("POST", "/admin/models/load", LoadReport, content=content)

        if progress is None:
            return await load()
        return await run_with_progress(load, events=self.events(["models"]), progress=progress)

    async def cancel_load(self, model: str, *, shared: bool = True) -> None:
        """Cancel the load of a model, and return without waiting for its end. The previous model is loaded again.

        Args:
            model: The model's id, or the name with which the load was requested.
            shared: Whether to cancel the load even if several callers wait for it.

        Raises:
            InvalidRequestError: the model is not being loaded. Nothing is unloaded.
            ModelBusyError: several callers wait for the load, which continues.
        """
        content = validated(CancelLoadRequest, {"model": model, "shared": shared})
        await self._connection.fetch("POST", "/admin/models/cancel", CancelLoadAnswer, content=content)

    async def unload(
        self,
        model: str | None = None,
        *,
        wait: bool | None = None,
        progress: Callable[[ModelEvent], None] | None = None,
    ) -> UnloadAnswer:
        """Unload the model. Does nothing if no model is loaded. If a model is being loaded, its load is cancelled
        instead, and the previous model is loaded again.

        Cancelling this call ends the wait, but not the unload. Another call joins an unload that is in progress.

        Args:
            model: The model to unload, or whose load is cancelled; None for the main model, or any load.
            wait: Whether running answers may finish: True without a time limit, False not at all, None within the limit
                of the server, 30 s by default.
            progress: Called on this loop when the unload has to wait, when a running answer has ended, and when the
                time limit has changed.
        """
        is_empty = model is None and wait is None
        body = b"" if is_empty else validated(UnloadRequest, {"model": model, "wait": wait})

        async def unload() -> UnloadAnswer:
            return await self._connection.fetch("POST", "/admin/models/unload", UnloadAnswer, content=body)

        if progress is None:
            return await unload()
        return await run_with_progress(unload, events=self.events(["models"]), progress=progress)

    async def keep(self, model: str, *, pin: bool | None = None, ttl_s: TimeToLive | None = None) -> KeepAnswer:
        """Change how long a model stays in memory. Arguments that are None change nothing.

        Args:
            pin: Whether it stays until it is unloaded by request. No other load replaces it then.
            ttl_s: Seconds without requests after which it is unloaded, or ``"never"``.

        Raises:
            InvalidRequestError: the model is not in memory.
        """
        content = validated(KeepRequest, {"model": model, "pin": pin, "ttl_s": ttl_s})
        return await self._connection.fetch("POST", "/admin/models/keep", KeepAnswer, content=content)

    # The server

    async def version(self) -> str:
        """Return the server's LMX Lab version. Needs no key.

        Raises:
            UnreachableError: no server answers, or another program does.
        """
        response, body = await self._connection.request("GET", "/healthz", within_s=QUICK_S)
        if LAB_HEADER not in response.headers:
            raise wrong_server_error(self._connection.describe_response(response, body))
        return response.headers[LAB_HEADER]

    async def ready(self) -> Ready:
        """Return whether a model is ready. If not, the result is a ``NotReady`` with the reason. Needs no key."""
        response, body = await self._connection.request("GET", "/readyz", within_s=QUICK_S)
        try:
            return (Ready if response.is_success else NotReady).model_validate_json(body)
        except ValidationError as exc:
            raise self._connection.error_for(response, body) from exc

    async def events(self, include: Sequence[Include] = ()) -> AsyncGenerator[LabEvent, None]:
        """Yield live measurements every second, and the events in ``include``, until the server stops.

        Raises:
            UnreachableError: no server answers, or it has sent nothing for 30 s.
        """
        params = {"include": ",".join(include)} if include else {}
        stream = self._connection.events(
            "GET", "/admin/events", params=params, timeout=httpx2.Timeout(QUICK_S, connect=CONNECT_S)
        )
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, str):
                    yield lab_event(event)


class LabClient(BlockingClient[AsyncLabClient]):
    """A blocking client of an inference server, for any thread: ``with LabClient("http://host:8400")``.

    It has the methods of ``AsyncLabClient``. Every method waits, and an interrupt (Ctrl-C) cancels the request.
    Streams are iterated with ``for``.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(AsyncLabClient(base_url, api_key=api_key, transport=transport, timeout_s=timeout_s))

    @property
    def api_key(self) -> str | None:
        """The key that the client sends; None if it sends none."""
        return self._async.api_key

    chat = twin(AsyncLabClient.chat)
    stream = twin_stream(AsyncLabClient.stream)
    stream_with_remarks = twin_stream(AsyncLabClient.stream_with_remarks)
    complete = twin(AsyncLabClient.complete)
    tokenize = twin(AsyncLabClient.tokenize)
    embed = twin(AsyncLabClient.embed)
    rerank = twin(AsyncLabClient.rerank)
    trace = twin(AsyncLabClient.trace)
    models = twin(AsyncLabClient.models)
    timeline = twin(AsyncLabClient.timeline)
    clients = twin(AsyncLabClient.clients)
    stop_request = twin(AsyncLabClient.stop_request)
    plan = twin(AsyncLabClient.plan)
    load = twin(AsyncLabClient.load)
    unload = twin(AsyncLabClient.unload)
    keep = twin(AsyncLabClient.keep)
    cancel_load = twin(AsyncLabClient.cancel_load)
    version = twin(AsyncLabClient.version)
    ready = twin(AsyncLabClient.ready)
    events = twin_stream(AsyncLabClient.events)


def as_array(answer: EmbeddingList) -> npt.NDArray[np.float32]:
    """Convert vectors, as numbers or in base64, to a float32 array of shape (inputs, dimensions).

    Raises:
        UnreachableError: the items are not vectors of the same length, which an LMX Lab server never sends.
    """
    rows: list[npt.NDArray[np.float32]] = []
    for item in sorted(answer.data, key=lambda item: item.index):
        if not isinstance(item.embedding, str):
            rows.append(np.asarray(item.embedding, dtype=np.float32))
            continue
        try:
            rows.append(np.frombuffer(base64.b64decode(item.embedding, validate=True), dtype="<f4").astype(np.float32))
        except ValueError as exc:
            raise UnreachableError(f"a vector in the server's response is not float32 in base64: {exc}") from exc
    try:
        return np.stack(rows)
    except ValueError as exc:
        raise UnreachableError(f"the {len(rows)} vectors in the server's response do not form an array: {exc}") from exc
