"""A typed client of the inference server, over HTTP, server-sent events and WebSockets."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Literal, Self

import httpx2
import numpy as np
import numpy.typing as npt
from pydantic import Discriminator, TypeAdapter, ValidationError

from lmx_lab.client.bodies import as_content, shaped
from lmx_lab.client.chat_socket import SOCKET_MESSAGE, SocketChunks, messages
from lmx_lab.client.connection import CONNECT_S, LONG_BYTES, QUICK_S, SHORT_BYTES, HttpConnection
from lmx_lab.client.errors import CHECK, error_in, wrong_server_error
from lmx_lab.client.sse import Remark
from lmx_lab.errors import ConnectionLostError, LabError, UnreachableError, WrongServerError
from lmx_lab.values.models import EngineChoice
from lmx_lab.wire.admin import (
    Heartbeat,
    LoadAnswer,
    LoadRequest,
    Memory,
    ModelEvent,
    ModelRecords,
    NotReady,
    Ready,
    RequestEvent,
    Sample,
    Throughput,
    UnloadAnswer,
)
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest, SocketDone, SocketError, SocketToken
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody, RerankResults

Include = Literal["models", "requests", "samples"]
"""Events that are sent only on request: ``ModelEvent``, ``RequestEvent``, ``Sample``."""


@dataclass(frozen=True, kw_only=True)
class UnknownLabEvent:
    """An event of a kind, or in a form, that this version does not know."""

    text: str
    """The event's data as it was received, usually JSON."""


KnownEvent = Throughput | Memory | Heartbeat | ModelEvent | RequestEvent | Sample
LabEvent = KnownEvent | UnknownLabEvent
_KNOWN: TypeAdapter[KnownEvent] = TypeAdapter(Annotated[KnownEvent, Discriminator("type")])


def lab_event(text: str) -> LabEvent:
    """Parse the data of one event."""
    try:
        return _KNOWN.validate_json(text)
    except ValidationError:
        return UnknownLabEvent(text=text)


COMPONENTS = 16_384
"""More than the length of any known embedding model's vectors."""
COMPONENT_BYTES = {"base64": 6, "float": 26}
"""Four bytes in base64; a float in decimal with its separator."""
ITEM_BYTES = 200
"""JSON around one vector or score."""
ESCAPED = 3
"""Ratio of JSON with escapes to UTF-8."""


def chat_bytes(body: ChatRequest) -> int:
    return SHORT_BYTES + LONG_BYTES * (body.n or 1) * (1 + (body.top_logprobs or 0))


def embeddings_bytes(body: EmbeddingsBody) -> int:
    texts = 1 if body.is_single else len(body.input)
    vector = (body.dimensions or COMPONENTS) * COMPONENT_BYTES[body.encoding_format or "float"]
    return SHORT_BYTES + texts * (ITEM_BYTES + vector)


def rerank_bytes(documents: int, *, sent: int) -> int:
    """
    Args:
        sent: Size of the request in bytes; the answer may repeat its documents.
    """
    return SHORT_BYTES + documents * ITEM_BYTES + ESCAPED * sent


WATCH_S = 2.0
"""Maximum time that a load waits for the stream of events to open, which a proxy may delay."""
STEPS = ("download", "verify", "convert", "store", "load")
"""Stages that are reported as progress; the answer of the load reports its end."""


async def watched(
    load: Callable[[], Coroutine[Any, Any, LoadAnswer]],
    *,
    events: AsyncGenerator[LabEvent, None],
    progress: Callable[[ModelEvent], None],
) -> LoadAnswer:
    """Load while reporting progress. Cancellation, or an exception of ``progress``, stops waiting, not the load.

    Raises:
        LabError: the load has failed. If the events are not available, the model is loaded without progress.
    """
    opened = asyncio.Event()
    watching = asyncio.create_task(_watch(events, progress, opened), name="watch a load")
    tasks: list[asyncio.Task[Any]] = [watching]
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(opened.wait(), WATCH_S)
        loading = asyncio.create_task(load(), name="wait for a load")
        tasks.append(loading)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            # The events have ended, or ``progress`` has raised.
            watching.result()
        return await loading
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(
    events: AsyncGenerator[LabEvent, None], progress: Callable[[ModelEvent], None], opened: asyncio.Event
) -> None:
    try:
        async with aclosing(events) as received:
            while (event := await _next(received)) is not None:
                opened.set()
                if isinstance(event, ModelEvent) and event.stage in STEPS:
                    progress(event)
    finally:
        opened.set()


async def _next(events: AsyncGenerator[LabEvent, None]) -> LabEvent | None:
    try:
        return await anext(events, None)
    except LabError:
        # The load continues without progress, and reports errors of its own.
        return None


NAME = "x-lmx-lab"
DONE = "[DONE]"
Over = Literal["sse", "websocket"]
"""Transport of a stream: server-sent events, or a WebSocket, whose end every proxy passes on."""


class AsyncLabClient:
    """A client of one inference server, on one event loop: ``async with AsyncLabClient("http://host:8400") as client``.

    Requests and answers are the shapes of ``lmx_lab.wire``. Cancelling a call, or closing a stream, closes its
    connection, and the server stops its work. Every failure is a ``LabError``: the server's own by its code,
    ``UnreachableError`` if no LMX Lab server answers.

    Args:
        base_url: The address, optionally with a proxy's prefix, a trailing slash or ``/v1``.
        api_key: The key of the server, or of a login in front of it. It is never displayed.
        transport: Replaces the network, for tests.
        timeout_s: Maximum time without data while the server computes or loads. None waits as long as the connection
            exists, since the server has its own limits.

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
        self._connection = HttpConnection(base_url, api_key=api_key, transport=transport, timeout_s=timeout_s)
        self._silence_s = timeout_s
        self.url = self._connection.url

    def __repr__(self) -> str:
        return f"<AsyncLabClient of {self.url}>"

    async def aclose(self) -> None:
        """Close all connections; the server stops its work for them. Idempotent."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # Chat

    async def chat(self, body: ChatRequest) -> ChatCompletion:
        """Return a complete answer."""
        content = as_content(body.model_copy(update={"stream": False}))
        return await self._connection.post("/v1/chat/completions", content, ChatCompletion, limit=chat_bytes(body))

    async def stream(self, body: ChatRequest, *, over: Over = "sse") -> AsyncGenerator[ChatChunk, None]:
        """Return an answer in chunks, as they are generated.

        Args:
            over: A WebSocket sends less: its chunks have the requested ``model``, a local ``id``, an empty
                ``system_fingerprint``, and ``timings`` whose prompt time includes the time in the queue.

        Raises:
            ConnectionLostError: the stream ended before the answer did.
            LabError: the server's own, before the first chunk or after any chunk.
        """
        source = self.stream_with_remarks(body) if over == "sse" else self._stream_over_socket(body)
        async with aclosing(source) as parts:
            async for part in parts:
                if isinstance(part, ChatChunk):
                    yield part

    async def stream_with_remarks(self, body: ChatRequest) -> AsyncGenerator[ChatChunk | Remark, None]:
        """``stream``, with a remark about the request's state after every five seconds without a chunk."""
        content = as_content(body.model_copy(update={"stream": True}))
        async with aclosing(self._connection.events("POST", "/v1/chat/completions", content=content)) as events:
            async for event in events:
                if event == DONE:
                    return
                yield event if isinstance(event, Remark) else self._chunk(event)
        raise ConnectionLostError(f"{self.url} ended the stream before the answer's end; ask again")

    async def _stream_over_socket(self, body: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        content = as_content(body.model_copy(update={"stream": True})).decode()
        chunks = SocketChunks(body)
        source = messages(self._connection, "/v1/chat/stream", content, silence_s=self._silence_s)
        async with aclosing(source) as texts:
            async for text in texts:
                for chunk in chunks.read(self._socket_message(text)):
                    yield chunk
                if chunks.done:
                    return

    def _socket_message(self, text: str) -> SocketToken | SocketDone:
        try:
            message = SOCKET_MESSAGE.validate_json(text)
        except ValidationError as exc:
            said = f"{self.url} sent {text[:80]!r} over a socket, unlike an LMX Lab server; {CHECK}"
            raise WrongServerError(said) from exc
        if isinstance(message, SocketError):
            raise error_in(text) or LabError(message.error.message)
        return message

    def _chunk(self, text: str) -> ChatChunk:
        try:
            return ChatChunk.model_validate_json(text)
        except ValidationError as exc:
            raise error_in(text) or self._connection.unreadable() from exc

    # Vectors and scores

    async def embed(self, body: EmbeddingsBody) -> EmbeddingList:
        """Return vectors; ``as_array`` converts them to an array. ``encoding_format="base64"`` is faster."""
        return await self._connection.post(
            "/v1/embeddings", as_content(body), EmbeddingList, limit=embeddings_bytes(body)
        )

    async def rerank(self, body: RerankBody) -> RerankResults:
        """Rank documents by relevance, the best first.

        Raises:
            UnreachableError: the answer names a document that was not given, or one document twice.
        """
        content, given = as_content(body), len(body.documents)
        limit = rerank_bytes(given, sent=len(content))
        answer = await self._connection.post("/v1/rerank", content, RerankResults, limit=limit)
        told = [item.index for item in answer.results]
        if len(set(told)) < len(told) or not set(told) <= set(range(given)):
            raise UnreachableError(
                f"{self.url} was given {given} documents to rank, and its answer has one twice or another "
                f"({told!s:.100}), unlike an LMX Lab server; {CHECK}"
            )
        return answer

    # Models

    async def models(self) -> ModelRecords:
        """List the models on the server's disk, and which of them are loaded."""
        response, text = await self._connection.get("/admin/models", limit=LONG_BYTES)
        return self._connection.whole(response, text, ModelRecords)

    async def load(
        self,
        model: str,
        *,
        engine: EngineChoice = "auto",
        progress: Callable[[ModelEvent], None] | None = None,
    ) -> LoadAnswer:
        """Load a model, which replaces the loaded one; returns when it is ready.

        Cancelling this stops waiting, not the load. Callers on the server's machine may give a path.

        Args:
            engine: Engine that must run the model; ``auto`` selects it by the model's format.
            progress: Called on this loop with each step of the load; most steps have byte counts.
        """
        # Without options that have their default value: an older server may not know them.
        options = {name: value for name, value in {"engine": engine}.items() if value != "auto"}
        content = as_content(shaped(LoadRequest, model=model, **options))

        async def load() -> LoadAnswer:
            return await self._connection.post("/admin/models/load", content, LoadAnswer)

        if progress is None:
            return await load()
        return await watched(load, events=self.events(["models"]), progress=progress)

    async def unload(self) -> UnloadAnswer:
        """Unload the model. Does nothing if none is loaded."""
        return await self._connection.post("/admin/models/unload", b"", UnloadAnswer)

    # The server

    async def version(self) -> str:
        """Return the server's LMX Lab version; needs no key.

        Raises:
            UnreachableError: no server answers, or another program does.
        """
        response, text = await self._connection.get("/healthz")
        if NAME not in response.headers:
            raise wrong_server_error(self._connection.unexpected(response, text))
        return response.headers[NAME]

    async def ready(self) -> Ready:
        """Return whether a model is ready; a ``NotReady`` has the reason if none is. Needs no key."""
        response, text = await self._connection.get("/readyz")
        return self._connection.read(response, text, Ready if response.is_success else NotReady)

    async def events(self, include: Sequence[Include] = ()) -> AsyncGenerator[LabEvent, None]:
        """Return live measurements every second, and the events in ``include``; ends when the server stops.

        Raises:
            UnreachableError: there is no server, or it has sent nothing for 30 s.
        """
        params = {"include": ",".join(include)} if include else {}
        stream = self._connection.events(
            "GET", "/admin/events", params=params, timeout=httpx2.Timeout(QUICK_S, connect=CONNECT_S)
        )
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, str):
                    yield lab_event(event)


def as_array(answer: EmbeddingList) -> npt.NDArray[np.float32]:
    """Convert vectors, as numbers or as base64, to a float32 array with one row per input.

    Raises:
        UnreachableError: the rows are not vectors of the same length, which a lab's server never returns.
    """
    rows = [_row(item.embedding) for item in sorted(answer.data, key=lambda item: item.index)]
    try:
        return np.stack(rows)
    except ValueError as exc:
        raise UnreachableError(f"the server answered with {len(rows)} vectors that make no table: {exc}") from exc


def _row(value: list[float] | str) -> npt.NDArray[np.float32]:
    if not isinstance(value, str):
        return np.asarray(value, dtype=np.float32)
    try:
        return np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4").astype(np.float32)
    except ValueError as exc:
        raise UnreachableError(f"the server answered with a vector that is no base64 of float32: {exc}") from exc
