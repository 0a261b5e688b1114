"""The client of the inference server for callers that block: scripts, threads, cells."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import httpx2

from lmx_lab.client.blocking.portal import BlockingClient
from lmx_lab.client.blocking.stream import BlockingStream, CallbackQueue, run_with_callbacks
from lmx_lab.client.inference import AsyncLabClient, Include, LabEvent, Over
from lmx_lab.client.sse import Remark
from lmx_lab.wire.admin import LoadAnswer, ModelEvent, ModelRecords, Ready, UnloadAnswer
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody, RerankResults

Item = TypeVar("Item")


class LabClient(BlockingClient[AsyncLabClient]):
    """``AsyncLabClient`` without ``await``, for any thread: ``with LabClient("http://host:8400") as client``.

    Every verb waits, and an interrupt (Ctrl-C) cancels what it waits for. Streams are for ``for`` loops.

    Raises:
        InvalidRequestError: an address or a key that could never do.
        HostingError: from every verb, where the server runs on the very loop that would wait; it says what to do.
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

    # Chat

    def chat(self, body: ChatRequest) -> ChatCompletion:
        """A whole answer."""
        return self._portal.run(self._client.chat(body))

    def stream(self, body: ChatRequest, *, over: Over = "sse") -> BlockingStream[ChatChunk]:
        """The same in chunks, as they are generated; see ``AsyncLabClient.stream``."""
        return self._stream(partial(self._client.stream, body, over=over))

    def stream_with_remarks(self, body: ChatRequest) -> BlockingStream[ChatChunk | Remark]:
        """``stream``, and where the request stands whenever there was nothing to say for five seconds."""
        return self._stream(partial(self._client.stream_with_remarks, body))

    # Vectors and scores

    def embed(self, body: EmbeddingsBody) -> EmbeddingList:
        """Vectors; ``as_array`` makes numbers of them, and ``encoding_format="base64"`` is quicker."""
        return self._portal.run(self._client.embed(body))

    def rerank(self, body: RerankBody) -> RerankResults:
        """Documents by relevance, the best first."""
        return self._portal.run(self._client.rerank(body))

    # Models

    def models(self) -> ModelRecords:
        """What is on the server's disk, and which of it is loaded."""
        return self._portal.run(self._client.models())

    def load(self, model: str, *, progress: Callable[[ModelEvent], None] | None = None) -> LoadAnswer:
        """Load a model in the place of what is loaded; returns when it is. An interrupt ends the waiting, not the load.

        Args:
            progress: Called with each step, in this thread.
        """
        if progress is None:
            return self._portal.run(self._client.load(model))
        return run_with_callbacks(self._portal, partial(self._load, model, progress))

    async def _load(self, model: str, progress: Callable[[ModelEvent], None], callbacks: CallbackQueue) -> LoadAnswer:
        return await self._client.load(model, progress=lambda event: callbacks.tell(partial(progress, event)))

    def unload(self) -> UnloadAnswer:
        """Unload the model; with none loaded nothing happens."""
        return self._portal.run(self._client.unload())

    # The server

    def version(self) -> str:
        """The version of the LMX Lab that answers; needs no key."""
        return self._portal.run(self._client.version())

    def ready(self) -> Ready:
        """Whether a model answers; if none does, a ``NotReady`` with the reason. Needs no key."""
        return self._portal.run(self._client.ready())

    def events(self, include: Sequence[Include] = ()) -> BlockingStream[LabEvent]:
        """Live figures every second, and what ``include`` asks for; ends when the server stops."""
        return self._stream(partial(self._client.events, include))

    def _stream(self, source: Callable[[], AsyncGenerator[Item, None]]) -> BlockingStream[Item]:
        return BlockingStream(self._portal, lambda _: aclosing(source()))
