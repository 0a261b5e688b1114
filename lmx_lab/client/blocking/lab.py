"""The client of the inference server for callers that block: scripts, threads, notebook cells."""

# Generated from inference.py by "make blocking"; do not edit.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

import httpx2

from lmx_lab.client.blocking.portal import BlockingClient
from lmx_lab.client.blocking.stream import BlockingStream, run_with_callbacks
from lmx_lab.client.inference import AsyncLabClient, Include, LabEvent, Over
from lmx_lab.client.sse import Remark
from lmx_lab.values.models import EngineChoice
from lmx_lab.wire.admin import LoadAnswer, ModelEvent, ModelRecords, Ready, UnloadAnswer
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody, RerankResults


class LabClient(BlockingClient[AsyncLabClient]):
    """``AsyncLabClient`` without ``await``, for any thread: ``with LabClient("http://host:8400") as client``.

    Every method waits, and an interrupt (Ctrl-C) cancels the request. Streams are for ``for`` loops.

    Raises:
        InvalidRequestError: the address or the key is not valid.
        HostingError: from every method, if the server runs on the caller's own event loop, which would wait for itself.
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

    def chat(self, body: ChatRequest) -> ChatCompletion:
        """Return a complete answer."""
        return self._portal.run(self._client.chat(body))

    def stream(self, body: ChatRequest, *, over: Over = "sse") -> BlockingStream[ChatChunk]:
        """Return an answer in chunks, as they are generated.

        Args:
            over: A WebSocket sends less: its chunks have the requested ``model``, a local ``id``, an empty
                ``system_fingerprint``, and ``timings`` whose prompt time includes the time in the queue.

        Raises:
            ConnectionLostError: the stream ended before the answer did.
            LabError: the server's own, before the first chunk or after any chunk.
        """
        return BlockingStream(self._portal, lambda _: aclosing(self._client.stream(body, over=over)))

    def stream_with_remarks(self, body: ChatRequest) -> BlockingStream[ChatChunk | Remark]:
        """``stream``, with a remark about the request's state after every five seconds without a chunk."""
        return BlockingStream(self._portal, lambda _: aclosing(self._client.stream_with_remarks(body)))

    def embed(self, body: EmbeddingsBody) -> EmbeddingList:
        """Return vectors; ``as_array`` converts them to an array. ``encoding_format="base64"`` is faster."""
        return self._portal.run(self._client.embed(body))

    def rerank(self, body: RerankBody) -> RerankResults:
        """Rank documents by relevance, the best first.

        Raises:
            UnreachableError: the answer names a document that was not given, or one document twice.
        """
        return self._portal.run(self._client.rerank(body))

    def models(self) -> ModelRecords:
        """List the models on the server's disk, and which of them are loaded."""
        return self._portal.run(self._client.models())

    def load(
        self, model: str, *, engine: EngineChoice = "auto", progress: Callable[[ModelEvent], None] | None = None
    ) -> LoadAnswer:
        """Load a model, which replaces the loaded one; returns when it is ready.

        An interrupt (Ctrl-C) stops waiting, not the load. Callers on the server's machine may give a path.

        Args:
            engine: Engine that must run the model; ``auto`` selects it by the model's format.
            progress: Called in this thread with each step of the load; most steps have byte counts.
        """
        return run_with_callbacks(
            self._portal,
            lambda callbacks: self._client.load(model, engine=engine, progress=callbacks.notifier(progress)),
        )

    def unload(self) -> UnloadAnswer:
        """Unload the model. Does nothing if none is loaded."""
        return self._portal.run(self._client.unload())

    def version(self) -> str:
        """Return the server's LMX Lab version; needs no key.

        Raises:
            UnreachableError: no server answers, or another program does.
        """
        return self._portal.run(self._client.version())

    def ready(self) -> Ready:
        """Return whether a model is ready; a ``NotReady`` has the reason if none is. Needs no key."""
        return self._portal.run(self._client.ready())

    def events(self, include: Sequence[Include] = ()) -> BlockingStream[LabEvent]:
        """Return live measurements every second, and the events in ``include``; ends when the server stops.

        Raises:
            UnreachableError: there is no server, or it has sent nothing for 30 s.
        """
        return BlockingStream(self._portal, lambda _: aclosing(self._client.events(include)))
