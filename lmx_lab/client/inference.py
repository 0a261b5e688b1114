"""A typed client of the inference server, over HTTP, server-sent events and WebSockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Literal, Self

import httpx2
from pydantic import ValidationError

from lmx_lab.client.bodies import as_content, shaped
from lmx_lab.client.chat_socket import SOCKET_MESSAGE, SocketChunks
from lmx_lab.client.connection import CONNECT_S, QUICK_S, HttpConnection
from lmx_lab.client.errors import CHECK, error_in, wrong_server_error
from lmx_lab.client.events import Include, LabEvent, lab_event
from lmx_lab.client.limits import LONG_BYTES, chat_bytes, embeddings_bytes, rerank_bytes
from lmx_lab.client.loads import watched
from lmx_lab.client.sockets import messages
from lmx_lab.client.sse import Remark
from lmx_lab.errors import ConnectionLostError, LabError, UnreachableError, WrongServerError
from lmx_lab.wire.admin import LoadAnswer, LoadRequest, ModelEvent, ModelRecords, NotReady, Ready, UnloadAnswer
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest, SocketDone, SocketError, SocketToken
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody, RerankResults

NAME = "x-lmx-lab"
DONE = "[DONE]"
Over = Literal["sse", "websocket"]
"""How a stream comes: as server-sent events, or over a WebSocket, whose end a proxy in between always passes on."""


class AsyncLabClient:
    """The verbs of one inference server, on one loop: ``async with AsyncLabClient("http://host:8400") as client``.

    Requests and answers are the shapes of ``lmx_lab.wire``. A verb that is cancelled, and a stream that is closed,
    closes its connection, and the server ends the work. Every failure is a ``LabError``: the server's own by their
    codes, ``UnreachableError`` where none answers in the lab's words.

    Args:
        base_url: With or without a proxy's prefix, a slash or ``/v1`` at its end.
        api_key: The server's, or of a login in front of it. It is shown nowhere.
        transport: In the place of the network.
        timeout_s: The longest silence while the server computes or loads; None waits as long as the connection is
            there, since the server has limits of its own.

    Raises:
        InvalidRequestError: an address or a key that could never do.
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
        """Close all connections, which ends what the server computes for them. Idempotent."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # Chat

    async def chat(self, body: ChatRequest) -> ChatCompletion:
        """A whole answer."""
        content = as_content(body.model_copy(update={"stream": False}))
        return await self._connection.post("/v1/chat/completions", content, ChatCompletion, limit=chat_bytes(body))

    async def stream(self, body: ChatRequest, *, over: Over = "sse") -> AsyncGenerator[ChatChunk, None]:
        """The same in chunks, as they are generated.

        Args:
            over: A WebSocket tells less: its chunks have the ``model`` that was asked for, an ``id`` of their own, an
                empty ``system_fingerprint``, and ``timings`` whose prompt includes the time in the queue.

        Raises:
            ConnectionLostError: it broke off before its end.
            LabError: the server's own, before the first chunk or after any.
        """
        source = self.stream_with_remarks(body) if over == "sse" else self._stream_over_socket(body)
        async with aclosing(source) as parts:
            async for part in parts:
                if isinstance(part, ChatChunk):
                    yield part

    async def stream_with_remarks(self, body: ChatRequest) -> AsyncGenerator[ChatChunk | Remark, None]:
        """``stream``, and where the request stands whenever there was nothing to say for five seconds."""
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
        """Vectors; ``as_array`` makes numbers of them, and ``encoding_format="base64"`` is quicker."""
        return await self._connection.post(
            "/v1/embeddings", as_content(body), EmbeddingList, limit=embeddings_bytes(body)
        )

    async def rerank(self, body: RerankBody) -> RerankResults:
        """Documents by relevance, the best first.

        Raises:
            UnreachableError: the answer is about documents that were not given, or names one twice.
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
        """What is on the server's disk, and which of it is loaded."""
        response, text = await self._connection.get("/admin/models", limit=LONG_BYTES)
        return self._connection.whole(response, text, ModelRecords)

    async def load(self, model: str, *, progress: Callable[[ModelEvent], None] | None = None) -> LoadAnswer:
        """Load a model in the place of what is loaded; returns when it is. Cancelling ends the waiting, not the load.

        Local callers may name a path.

        Args:
            progress: Called with each step that the server tells of before it is done, on this loop; most have bytes.
        """
        content = as_content(shaped(LoadRequest, model=model))

        async def load() -> LoadAnswer:
            return await self._connection.post("/admin/models/load", content, LoadAnswer)

        if progress is None:
            return await load()
        return await watched(load, events=self.events(["models"]), progress=progress)

    async def unload(self) -> UnloadAnswer:
        """Unload the model; with none loaded nothing happens."""
        return await self._connection.post("/admin/models/unload", b"", UnloadAnswer)

    # The server

    async def version(self) -> str:
        """The version of the LMX Lab that answers; needs no key.

        Raises:
            UnreachableError: nobody answers, or another program does.
        """
        response, text = await self._connection.get("/healthz")
        if NAME not in response.headers:
            raise wrong_server_error(self._connection.answer(response, text))
        return response.headers[NAME]

    async def ready(self) -> Ready:
        """Whether a model answers; if none does, a ``NotReady`` with the reason. Needs no key."""
        response, text = await self._connection.get("/readyz")
        return self._connection.read(response, text, Ready if response.is_success else NotReady)

    async def events(self, include: Sequence[Include] = ()) -> AsyncGenerator[LabEvent, None]:
        """Live figures every second, and what ``include`` asks for; ends when the server stops.

        Raises:
            UnreachableError: there is no server, or nothing came from it for 30 s.
        """
        params = {"include": ",".join(include)} if include else {}
        stream = self._connection.events(
            "GET", "/admin/events", params=params, timeout=httpx2.Timeout(QUICK_S, connect=CONNECT_S)
        )
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, str):
                    yield lab_event(event)
