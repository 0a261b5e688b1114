"""Provide the blocking client of the inference server, for scripts, threads and notebook cells."""

# Generated from lab.py by "make blocking"; do not edit.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Unpack

import httpx2

from lmx_lab.client.blocking.base import BlockingClient
from lmx_lab.client.blocking.stream import BlockingStream, run_with_callbacks
from lmx_lab.client.lab import AsyncLabClient, Include, LabEvent, Over
from lmx_lab.client.sse import Remark
from lmx_lab.values.models import LoadOptions
from lmx_lab.values.timeline import ServerTimeline
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.admin import LoadAnswer, ModelEvent, ModelRecords, Ready, UnloadAnswer
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from lmx_lab.wire.completions import Completion, CompletionRequest
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody, RerankResults
from lmx_lab.wire.tokens import TokenizeAnswer, TokenizeRequest
from lmx_lab.wire.tracing import TraceBody


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
        return self._client.api_key

    def chat(self, body: ChatRequest) -> ChatCompletion:
        """Return a complete answer."""
        return self._portal.run(self._client.chat(body))

    def stream(self, body: ChatRequest, *, over: Over = "sse") -> BlockingStream[ChatChunk]:
        """Yield the chunks of an answer as they are generated.

        Args:
            over: The transport. Less is sent over a WebSocket: the chunks have the requested ``model``, a local ``id``,
                an empty ``system_fingerprint``, and ``timings`` whose prompt time includes the time in the queue.

        Raises:
            ConnectionLostError: the stream ended before the answer was complete.
            LabError: the server's error, before the first chunk or after any chunk.
        """
        return BlockingStream(self._portal, lambda _: aclosing(self._client.stream(body, over=over)))

    def stream_with_remarks(self, body: ChatRequest) -> BlockingStream[ChatChunk | Remark]:
        """Like ``stream``, with a remark about the request's state after every five seconds without a chunk."""
        return BlockingStream(self._portal, lambda _: aclosing(self._client.stream_with_remarks(body)))

    def complete(self, body: CompletionRequest) -> Completion:
        """Return the complete continuations of plain prompts; with ``echo`` and ``logprobs``, prompts are scored."""
        return self._portal.run(self._client.complete(body))

    def tokenize(self, body: TokenizeRequest) -> TokenizeAnswer:
        """Return the token ids of a text, or of a chat as the model reads it."""
        return self._portal.run(self._client.tokenize(body))

    def embed(self, body: EmbeddingsBody) -> EmbeddingList:
        """Return the vectors of texts. ``as_array`` converts them to an array.

        ``encoding_format="base64"`` is faster than the default.
        """
        return self._portal.run(self._client.embed(body))

    def rerank(self, body: RerankBody) -> RerankResults:
        """Rank documents by relevance, the best first.

        Raises:
            UnreachableError: the response has an index without a document, or the same index twice.
        """
        return self._portal.run(self._client.rerank(body))

    def trace(self, body: TraceBody) -> Trace:
        """Return internal values of the loaded model. Only programs on the server's machine may do this."""
        return self._portal.run(self._client.trace(body))

    def models(self) -> ModelRecords:
        """List the models on the server's disk, and which of them are loaded."""
        return self._portal.run(self._client.models())

    def timeline(self, last_s: float = 60.0, *, most: int | None = None) -> ServerTimeline:
        """Return the timeline of the requests of all clients, and of loads, in the last ``last_s`` seconds.

        The oldest are first.

        Args:
            most: Maximum number of requests; the newest are returned. None sets no limit.
        """
        return self._portal.run(self._client.timeline(last_s, most=most))

    def load(
        self, model: str, *, progress: Callable[[ModelEvent], None] | None = None, **options: Unpack[LoadOptions]
    ) -> LoadAnswer:
        """Load a model in place of the loaded one. Returns when the model is ready.

        An interrupt (Ctrl-C) stops the waiting, but not the load.

        Args:
            model: The model's id; callers on the server's machine may also give a path.
            progress: Called in this thread with each step of the load; most steps have byte counts.
            options: ``LoadOptions``, such as ``engine="mlx"``, the engine that must run the model.
        """
        return run_with_callbacks(
            self._portal, lambda callbacks: self._client.load(model, progress=callbacks.notifier(progress), **options)
        )

    def cancel_load(self, model: str) -> None:
        """Cancel the load of a model, and return without waiting for its end. The previous model is loaded again.

        Args:
            model: The model's id, or the name with which the load was requested.

        Raises:
            InvalidRequestError: the model is not being loaded. Nothing is unloaded.
        """
        self._portal.run(self._client.cancel_load(model))

    def unload(
        self,
        model: str | None = None,
        *,
        wait: bool | None = None,
        progress: Callable[[ModelEvent], None] | None = None,
    ) -> UnloadAnswer:
        """Unload the model. Does nothing if no model is loaded. If a model is being loaded, its load is cancelled
        instead, and the previous model is loaded again.

        An interrupt (Ctrl-C) call ends the wait, but not the unload. Another call joins an unload that is in progress.

        Args:
            model: The model to unload, or whose load is cancelled; None for any.
            wait: Whether running answers may finish: True without a time limit, False not at all, None within the limit
                of the server, 30 s by default.
            progress: Called in this thread when the unload has to wait, when a running answer has ended, and when the
                time limit has changed.
        """
        return run_with_callbacks(
            self._portal, lambda callbacks: self._client.unload(model, wait=wait, progress=callbacks.notifier(progress))
        )

    def version(self) -> str:
        """Return the server's LMX Lab version. Needs no key.

        Raises:
            UnreachableError: no server answers, or another program does.
        """
        return self._portal.run(self._client.version())

    def ready(self) -> Ready:
        """Return whether a model is ready. If not, the result is a ``NotReady`` with the reason. Needs no key."""
        return self._portal.run(self._client.ready())

    def events(self, include: Sequence[Include] = ()) -> BlockingStream[LabEvent]:
        """Yield live measurements every second, and the events in ``include``, until the server stops.

        Raises:
            UnreachableError: no server answers, or it has sent nothing for 30 s.
        """
        return BlockingStream(self._portal, lambda _: aclosing(self._client.events(include)))
