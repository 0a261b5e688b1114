"""Define what a lab can do, wherever its server runs.

``notebook.local.LocalBackend`` implements the protocol in this process, ``notebook.remote.RemoteBackend`` over HTTP.
The lab's methods and the panels use nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeVar

from lmx_lab.blocking import Portal
from lmx_lab.values.models import LoadReport, LoadSpec, ModelEvent, Unloading
from lmx_lab.values.outputs import (
    Delta,
    EncodeReport,
    GenerationReport,
    RerankMethod,
    TokenLogprob,
    Vectors,
    merge_deltas,
)
from lmx_lab.values.recording import Continuation, Record
from lmx_lab.values.steering import SteeringVector
from lmx_lab.values.timeline import ServerTimeline
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.admin import ModelRecords, RequestEvent, Sample, TraceBody
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.generation import Timings, Usage
from lmx_lab.wire.rerank import RerankBody

T = TypeVar("T")
Progress = Callable[[ModelEvent], None]
"""Called with each step of a load or unload, on the event loop that awaits it."""

AnswerRecorder = Callable[[], Coroutine[Any, Any, Record]]
"""Generates an answer, and returns its record, which is not stored."""


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The state of a server at one moment."""

    state: Literal["running", "lagging", "stopped", "unreachable"]
    """``lagging``: a server in another process is connected, but has sent nothing for some seconds."""
    place: str
    """Where the server runs, for display: ``the kernel's loop``."""
    url: str
    disk: str = "this disk"
    """Where the server's models are, for display."""
    lan_url: str | None = None
    phone_code: str = ""
    """QR code of the chat page at ``lan_url``, as a data URI of an image; empty if there is none."""
    proxy_url: str | None = None
    proxy_path: str | None = None
    """Path under which the notebook's own Jupyter server forwards requests, for pages that it has served."""
    model: str | None = None
    """Id of the loaded model."""
    pinned: tuple[str, ...] = ()
    """Ids of the models that are kept in memory in addition to it."""
    unloading: Unloading | None = None
    """Set while the unload of ``model`` waits for its running answers to end."""
    note: str = ""
    """A problem and what the user can do about it, such as how to restart a server."""


@dataclass(frozen=True, kw_only=True)
class AnswerCost:
    """The cost of a complete answer, and how it ended."""

    model: str
    finish_reason: str
    usage: Usage
    timings: Timings
    """The server's measurements."""
    ttft_s: float
    """Seconds from the request to the first token, measured by the caller. Includes the time of the network."""
    report: GenerationReport | None = None
    """The engine's report; None if the engine runs in another process."""
    prompt: tuple[int, ...] = ()
    """Token ids of the prompt; empty if the engine runs in another process."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """The request as in a ``Record``; empty if the engine runs in another process."""
    request_id: str | None = None
    """Id of the request of a batch, as in its ``Record``; None otherwise, or if the engine runs in another process."""


class AnswerStream(Protocol):
    """A running generation. Iterate it in one task; deleting it stops the generation."""

    @property
    def status(self) -> str:
        """The state of the request before its first token, such as ``queued`` or ``prompt 512/7000 tokens``."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delta:
        """Return the next piece of the answer.

        Raises:
            LabError: the generation has failed.
        """

    def close(self) -> None:
        """Stop the generation if it still runs. Can be called from any thread. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Documents in order of relevance to a query."""

    query: str
    documents: Sequence[str]
    """All given documents."""
    order: Sequence[tuple[int, float]]
    """Index among the given documents, and score; the most relevant first."""
    model: str
    method: RerankMethod
    tokens: int
    """Tokens that the model has read."""
    report: EncodeReport | None = None
    """The engine's report; None if the engine runs in another process."""


class Backend(Protocol):
    """A lab's server.

    Coroutines can be awaited on any event loop. The other methods return immediately and can be called from any thread.
    All failures are ``LabError``.
    """

    def state(self) -> ServerState: ...

    def sample(self) -> Sample | None:
        """Return the current measurements; None if there are none."""

    def events(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        """Return all loads, unloads and ends of requests from now on, of all clients. Ends when the server stops."""

    # Models

    async def models(self) -> ModelRecords: ...

    async def load(self, spec: LoadSpec, *, progress: Progress | None = None) -> LoadReport:
        """Load a model; returns when it can answer. Cancelling this stops waiting, not the load."""

    async def cancel_load(self, model: str) -> None:
        """Cancel the load of a model, by its id or the name that a caller used. The previous model is loaded again."""

    async def unload(
        self, model: str | None = None, *, wait: bool | None = None, progress: Progress | None = None
    ) -> float:
        """Unload the model, or cancel a load in progress; returns the freed memory in GB (10^9 bytes).

        Cancelling this call ends the wait, but not the unload. Another call joins an unload that is in progress.

        Args:
            model: The model to unload, or whose load is cancelled; None for any.
            wait: Whether running answers may finish: True without a time limit, False not at all, None within
                ``drain_s``.
        """

    # Requests

    async def timeline(self, last_s: float, *, most: int | None = None) -> ServerTimeline:
        """Return the timeline of the requests of all clients, and of loads, in the last ``last_s`` seconds.

        Args:
            most: Maximum number of requests; the newest are returned. None sets no limit.
        """

    async def generate(self, request: ChatRequest, *, batch: bool = False) -> AnswerStream:
        """Start an answer; returns when the request was accepted.

        Args:
            batch: See ``Record.batch``.
        """

    def cost(self, stream: AnswerStream) -> AnswerCost:
        """Return the cost of an answer of this backend, after it was read to its end.

        Raises:
            LabError: the cost is not known.
        """

    async def embed(self, body: EmbeddingsBody) -> Vectors:
        """Return one row for each text."""

    async def rerank(self, body: RerankBody) -> Ranking: ...

    async def trace(self, body: TraceBody) -> Trace:
        """Return internal values of the loaded model."""

    # Recorded tokens

    def answer_recorder(
        self, prompt: str | Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]
    ) -> AnswerRecorder:
        """Check a prompt with the parameters of ``Lab.chat``, and return a function that answers it.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid, or the server runs in another process.
        """

    async def encode(self, prompt: str | ChatRequest, *, special: bool = True) -> Sequence[int]:
        """Return the token ids of a text, or of a chat as the model reads it.

        Args:
            special: Whether to include special tokens that the tokenizer adds to each text.
        """

    async def regenerate(self, record: Record) -> Record:
        """Generate the answer of a record again, and return the record of the new answer, which is not stored."""

    async def last_record(self) -> Record | None:
        """Return the newest recorded request; None if there is none."""

    async def weights_of(self, model: str) -> str:
        """Return the SHA-256 of all files of a model in memory; empty if it has none, or the lab is attached."""

    async def require_weights(self, model: str, weights: str) -> None:
        """Check that a model is loaded, and that its files have this SHA-256, unless the hash is empty.

        Raises:
            NotLoadedError: it is not loaded.
            InvalidRequestError: its files have another hash.
        """

    async def continue_answer(self, continuation: Continuation, *, recorded: bool = True) -> AnswerStream:
        """Generate an answer again from a given position; the stream begins with the tokens before it.

        Args:
            recorded: Whether the answer is recorded like those of ``generate``.
        """

    async def score(
        self,
        tokens: Sequence[int],
        *,
        model: str | None,
        top: int,
        start: int = 0,
        distributions: bool = False,
        steer: Sequence[SteeringVector] = (),
    ) -> Sequence[TokenLogprob]:
        """Return the log-probability of each token after those before it, with ``top`` alternatives.

        Args:
            model: The model that must be loaded; None takes any.
            start: Position of the first token that is returned.
            distributions: Whether entropies and high ranks are needed, even if the engine takes long to compute them.
            steer: Vectors that are added to the residual stream.
        """


async def read_answer(backend: Backend, request: ChatRequest, *, batch: bool = False) -> tuple[Delta, AnswerCost]:
    """Generate a complete answer, and return it as one delta with its cost. Cancelling this stops the generation.

    Args:
        batch: See ``Record.batch``.
    """
    stream = await backend.generate(request, batch=batch)
    try:
        deltas = [delta async for delta in stream]
    finally:
        stream.close()
    return merge_deltas(deltas), backend.cost(stream)


async def next_or_none(items: AsyncIterator[T]) -> T | None:
    """Return the next item, or None at the end, as a coroutine, which a portal or a task can run."""
    return await anext(items, None)


@dataclass(frozen=True)
class LabAccess:
    """What results keep of their lab: its backend, and the loop that uses it.

    It keeps the connection of an attached lab open.
    """

    backend: Backend
    portal: Portal
    """Raises ``HostingError`` in each call if the lab was stopped."""


class HasBackend(Protocol):
    """A lab, for its methods."""

    @property
    def _backend(self) -> Backend: ...
    @property
    def _portal(self) -> Portal: ...
