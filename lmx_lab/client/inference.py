"""A typed client of the inference server, over HTTP and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from lmx_lab.client.address import bearer, is_loopback, server_address
from lmx_lab.client.events import Include, LabEvent, lab_event
from lmx_lab.client.failures import CHECK, Answer, error_in, in_plain_words, not_ours, refusal
from lmx_lab.client.limits import LONG_BYTES, SHORT_BYTES, chat_bytes, embeddings_bytes, rerank_bytes
from lmx_lab.client.sse import EVENT_STREAM, EventDecoder, Remark
from lmx_lab.errors import ConnectionLostError, InvalidRequestError, UnreachableError
from lmx_lab.wire.admin import LoadAnswer, LoadRequest, ModelRecords, NotReady, Ready, UnloadAnswer
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody, RerankResults

Shape = TypeVar("Shape", bound=BaseModel)
CONNECT_S = 5.0
QUICK_S = 30.0
"""For the whole of what computes nothing, and between two events, of which there is one a second."""
# The server keeps an idle connection for 30 s: it must not close one that is just being used again.
IDLE_S = 10.0
CONNECTIONS = 256
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
        self.url = server_address(base_url)
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=bearer(api_key),
            transport=transport,
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_S),
            # A proxy for the web cannot reach this machine's own server.
            trust_env=not is_loopback(self.url),
        )
        self._quick = httpx2.Timeout(QUICK_S, connect=CONNECT_S)

    def __repr__(self) -> str:
        return f"<AsyncLabClient of {self.url}>"

    async def aclose(self) -> None:
        """Close all connections, which ends what the server computes for them. Idempotent."""
        await self._http.aclose()

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
        return await self._post("/v1/chat/completions", content, ChatCompletion, limit=chat_bytes(body))

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
        async with aclosing(self._events("POST", "/v1/chat/completions", content=content)) as events:
            async for event in events:
                if event == DONE:
                    return
                yield event if isinstance(event, Remark) else self._chunk(event)
        raise ConnectionLostError(f"{self.url} ended the stream before the answer's end; ask again")

    def _chunk(self, text: str) -> ChatChunk:
        try:
            return ChatChunk.model_validate_json(text)
        except ValidationError as exc:
            raise error_in(text) or self._unreadable() from exc

    # Vectors and scores

    async def embed(self, body: EmbeddingsBody) -> EmbeddingList:
        """Vectors; ``as_array`` makes numbers of them, and ``encoding_format="base64"`` is quicker."""
        return await self._post("/v1/embeddings", _json(body), EmbeddingList, limit=embeddings_bytes(body))

    async def rerank(self, body: RerankBody) -> RerankResults:
        """Documents by relevance, the best first.

        Raises:
            UnreachableError: the answer is about documents that were not given, or names one twice.
        """
        content, given = _json(body), len(body.documents)
        limit = rerank_bytes(given, sent=len(content))
        answer = await self._post("/v1/rerank", content, RerankResults, limit=limit)
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
        response, text = await self._get("/admin/models", limit=LONG_BYTES)
        return self._whole(response, text, ModelRecords)

    async def load(self, model: str) -> LoadAnswer:
        """Load a model in the place of what is loaded; returns when it is. Cancelling ends the waiting, not the load.

        Local callers may name a path.
        """
        try:
            body = LoadRequest(model=model)
        except ValidationError as exc:
            said = f"model is {model!r:.80}; give an id such as 'smollm2-135m', or a path on the server"
            raise InvalidRequestError(said, param="model") from exc
        return await self._post("/admin/models/load", _json(body), LoadAnswer)

    async def unload(self) -> UnloadAnswer:
        """Unload the model; with none loaded nothing happens."""
        return await self._post("/admin/models/unload", b"", UnloadAnswer)

    # The server

    async def version(self) -> str:
        """The version of the LMX Lab that answers; needs no key.

        Raises:
            UnreachableError: nobody answers, or another program does.
        """
        response, text = await self._get("/healthz")
        if NAME not in response.headers:
            raise not_ours(self._answer(response, text))
        return response.headers[NAME]

    async def ready(self) -> Ready:
        """Whether a model answers; if none does, a ``NotReady`` with the reason. Needs no key."""
        response, text = await self._get("/readyz")
        return self._read(response, text, Ready if response.is_success else NotReady)

    async def events(self, include: Sequence[Include] = ()) -> AsyncGenerator[LabEvent, None]:
        """Live figures every second, and what ``include`` asks for; ends when the server stops.

        Raises:
            UnreachableError: there is no server, or nothing came from it for 30 s.
        """
        params = {"include": ",".join(include)} if include else {}
        stream = self._events("GET", "/admin/events", params=params, timeout=self._quick)
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, str):
                    yield lab_event(event)

    # Requests

    async def _get(self, path: str, *, limit: int = SHORT_BYTES) -> tuple[httpx2.Response, bytes]:
        request = self._http.build_request("GET", path, timeout=self._quick)
        try:
            # Also of all bytes together: one that says a little all the time is never silent.
            async with asyncio.timeout(QUICK_S):
                return await self._fetch(request, limit)
        except TimeoutError as exc:
            raise UnreachableError(f"{self.url} has not answered whole within {QUICK_S:g} s; {CHECK}") from exc

    async def _post(self, path: str, content: bytes, shape: type[Shape], *, limit: int = SHORT_BYTES) -> Shape:
        headers = {"content-type": "application/json"}
        response, text = await self._fetch(
            self._http.build_request("POST", path, content=content, headers=headers), limit
        )
        return self._whole(response, text, shape)

    async def _fetch(self, request: httpx2.Request, limit: int) -> tuple[httpx2.Response, bytes]:
        """An answer and its body, of which no more is read than a server of ours may send."""
        with in_plain_words(self.url):
            response = await self._http.send(request, stream=True)
        try:
            text = await self._start(response, limit if response.is_success else SHORT_BYTES)
        finally:
            await response.aclose()
        if response.is_success and len(text) > limit:
            raise UnreachableError(
                f"{self.url} answered with more than {limit} bytes, which no answer to this request can have; {CHECK}"
            )
        return response, text

    async def _start(self, response: httpx2.Response, limit: int) -> bytes:
        """The body, or of a longer one a little more than the limit."""
        body = bytearray()
        with in_plain_words(self.url, begun=True):
            async with aclosing(response.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    body += chunk
                    if len(body) > limit:
                        break
        return bytes(body)

    def _whole(self, response: httpx2.Response, text: bytes, shape: type[Shape]) -> Shape:
        if not response.is_success:
            raise refusal(self._answer(response, text))
        return self._read(response, text, shape)

    def _read(self, response: httpx2.Response, text: bytes, shape: type[Shape]) -> Shape:
        try:
            return shape.model_validate_json(text)
        except ValidationError as exc:
            raise refusal(self._answer(response, text)) from exc

    async def _events(
        self, method: str, path: str, *, content: bytes = b"", **options: Any
    ) -> AsyncGenerator[str | Remark, None]:
        """The events of a stream and its comments; closing this closes the connection."""
        headers = {"accept": EVENT_STREAM, **({"content-type": "application/json"} if content else {})}
        request = self._http.build_request(method, path, content=content, headers=headers, **options)
        with in_plain_words(self.url):
            response = await self._http.send(request, stream=True)
        decoder = EventDecoder()
        try:
            await self._check_stream(response)
            with in_plain_words(self.url, begun=True):
                async for chunk in response.aiter_bytes():
                    for event in self._fed(decoder, chunk):
                        yield event
        finally:
            await response.aclose()

    async def _check_stream(self, response: httpx2.Response) -> None:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.is_success and kind == EVENT_STREAM:
            return
        raise refusal(self._answer(response, await self._start(response, SHORT_BYTES)))

    def _fed(self, decoder: EventDecoder, chunk: bytes) -> list[str | Remark]:
        try:
            return decoder.feed(chunk)
        except ValueError as exc:
            raise self._unreadable() from exc

    def _answer(self, response: httpx2.Response, body: bytes) -> Answer:
        headers: Mapping[str, str] = response.headers
        return Answer(
            url=self.url,
            status=response.status_code,
            kind=headers.get("content-type", ""),
            retry_after=headers.get("retry-after"),
            body=body,
        )

    def _unreadable(self) -> UnreachableError:
        return not_ours(Answer(url=self.url, status=200, kind=EVENT_STREAM, retry_after=None, body=b""))


def _json(body: BaseModel) -> bytes:
    """What was set and nothing else: a server of another version may not know what is new."""
    try:
        # It warns of unions that know their members by the JSON that comes in, and writes them all the same.
        return body.model_dump_json(by_alias=True, exclude_unset=True, warnings="none").encode()
    except PydanticSerializationError as exc:
        raise InvalidRequestError(f"the request cannot be written as JSON: {exc!s:.200}; give plain values") from exc
