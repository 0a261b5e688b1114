"""A typed client of the inference server, over HTTP and server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

import httpx2
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from lmx_lab.client.connection import CONNECT_S, QUICK_S, Connection
from lmx_lab.client.events import Include, LabEvent, lab_event
from lmx_lab.client.failures import CHECK, error_in, not_ours
from lmx_lab.client.limits import LONG_BYTES, chat_bytes, embeddings_bytes, rerank_bytes
from lmx_lab.client.sse import Remark
from lmx_lab.errors import ConnectionLostError, InvalidRequestError, UnreachableError
from lmx_lab.wire.admin import LoadAnswer, LoadRequest, ModelRecords, NotReady, Ready, UnloadAnswer
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody, RerankResults

NAME = "x-lmx-lab"
DONE = "[DONE]"


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
        self._connection = Connection(base_url, api_key=api_key, transport=transport, timeout_s=timeout_s)
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
        content = _json(body.model_copy(update={"stream": False}))
        return await self._connection.post("/v1/chat/completions", content, ChatCompletion, limit=chat_bytes(body))

    async def stream(self, body: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        """The same in chunks, as they are generated.

        Raises:
            ConnectionLostError: it broke off before its end.
            LabError: the server's own, before the first chunk or after any.
        """
        async with aclosing(self.stream_with_remarks(body)) as parts:
            async for part in parts:
                if isinstance(part, ChatChunk):
                    yield part

    async def stream_with_remarks(self, body: ChatRequest) -> AsyncGenerator[ChatChunk | Remark, None]:
        """``stream``, and where the request stands whenever there was nothing to say for five seconds."""
        content = _json(body.model_copy(update={"stream": True}))
        async with aclosing(self._connection.events("POST", "/v1/chat/completions", content=content)) as events:
            async for event in events:
                if event == DONE:
                    return
                yield event if isinstance(event, Remark) else self._chunk(event)
        raise ConnectionLostError(f"{self.url} ended the stream before the answer's end; ask again")

    def _chunk(self, text: str) -> ChatChunk:
        try:
            return ChatChunk.model_validate_json(text)
        except ValidationError as exc:
            raise error_in(text) or self._connection.unreadable() from exc

    # Vectors and scores

    async def embed(self, body: EmbeddingsBody) -> EmbeddingList:
        """Vectors; ``as_array`` makes numbers of them, and ``encoding_format="base64"`` is quicker."""
        return await self._connection.post("/v1/embeddings", _json(body), EmbeddingList, limit=embeddings_bytes(body))

    async def rerank(self, body: RerankBody) -> RerankResults:
        """Documents by relevance, the best first.

        Raises:
            UnreachableError: the answer is about documents that were not given, or names one twice.
        """
        content, given = _json(body), len(body.documents)
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

    async def load(self, model: str) -> LoadAnswer:
        """Load a model in the place of what is loaded; returns when it is. Cancelling ends the waiting, not the load.

        Local callers may name a path.
        """
        try:
            body = LoadRequest(model=model)
        except ValidationError as exc:
            said = f"model is {model!r:.80}; give an id such as 'smollm2-135m', or a path on the server"
            raise InvalidRequestError(said, param="model") from exc
        return await self._connection.post("/admin/models/load", _json(body), LoadAnswer)

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
            raise not_ours(self._connection.answer(response, text))
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


def _json(body: BaseModel) -> bytes:
    """What was set and nothing else: a server of another version may not know what is new."""
    try:
        # It warns of unions that know their members by the JSON that comes in, and writes them all the same.
        return body.model_dump_json(by_alias=True, exclude_unset=True, warnings="none").encode()
    except PydanticSerializationError as exc:
        raise InvalidRequestError(f"the request cannot be written as JSON: {exc!s:.200}; give plain values") from exc
