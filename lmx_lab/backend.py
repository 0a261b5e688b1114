"""Define what a lab can do, wherever its server runs.

``notebook.local.LocalBackend`` implements the protocol in this process, ``notebook.remote.RemoteBackend`` over HTTP.
The lab's verbs and the panels use nothing else.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from lmx_lab.broadcast import Feed
from lmx_lab.values.encoding import EncodeReport, RerankMethod, Vectors
from lmx_lab.values.generation import Delta, GenerationReport
from lmx_lab.values.models import LoadReport, LoadSpec, Unloading
from lmx_lab.wire.admin import ModelEvent, ModelRecords, RequestEvent, Sample
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.generation import Timings, Usage
from lmx_lab.wire.rerank import RerankBody

Progress = Callable[[ModelEvent], None]
"""Called with each step of a load, on the event loop that awaits the load."""


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The state of a server at one moment."""

    state: Literal["running", "lagging", "stopped", "unreachable"]
    """``lagging``: its event loop has been blocked for more than a second."""
    place: str
    """Where the server runs, for display: ``the kernel's loop``."""
    url: str
    lan_url: str | None = None
    proxy_url: str | None = None
    proxy_path: str | None = None
    """Path under which the notebook's own Jupyter server forwards requests, for pages that it has served."""
    model: str | None = None
    """Id of the loaded model."""
    pinned: tuple[str, ...] = ()
    """Ids of the models that are kept in memory beside it."""
    unloading: Unloading | None = None
    """Set while ``model`` is unloaded as soon as its running answers have ended."""
    note: str = ""
    """A problem and what the user can do about it, such as how to avoid a blocked loop, or how to restart a server."""


@dataclass(frozen=True, kw_only=True)
class AnswerCost:
    """What a complete answer cost, and how it ended."""

    model: str
    finish_reason: str
    usage: Usage
    timings: Timings
    """The server's measurements."""
    ttft_s: float
    """Seconds from the request to the first token, measured by the caller. Includes the time of the network."""
    report: GenerationReport | None = None
    """The engine's report; None if the engine runs in another process."""


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

    def cost(self) -> AnswerCost:
        """Return the cost of the answer, after it was read to its end.

        Raises:
            LabError: the cost is not known.
        """

    def close(self) -> None:
        """Stop the generation if it still runs. Can be called from any thread. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class DocumentRanking:
    """Documents in order of relevance."""

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

    Coroutines can be awaited on any event loop. The other methods return at once and can be called from any thread.
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

    async def unload(self, model: str | None = None, *, wait: bool | None = None) -> float:
        """Unload the model, or cancel a load in progress; returns the freed memory in GB (10^9 bytes).

        Cancelling this stops waiting, not the unload. Another call joins an unload that is in progress.

        Args:
            model: The model to unload, or whose load is cancelled; None for any.
            wait: Whether running answers may end: True without a time limit, False not at all, None within
                ``drain_s``.
        """

    # Requests

    async def generate(self, request: ChatRequest) -> AnswerStream:
        """Start an answer; returns when the request was accepted."""

    async def embed(self, body: EmbeddingsBody) -> Vectors:
        """Return one row for each text."""

    async def rerank(self, body: RerankBody) -> DocumentRanking: ...


class RunningLoad:
    """A load and its steps, for a caller who shows the progress. Deleting it does not end the load."""

    def __init__(self, backend: Backend, spec: LoadSpec) -> None:
        self._backend, self._model = backend, spec.model
        self._loop = asyncio.get_running_loop()
        steps: Feed[ModelEvent] = Feed()
        self._steps = steps.subscribe()
        self._task = asyncio.create_task(backend.load(spec, progress=steps.publish), name=f"load {spec.model:.80}")
        self._task.add_done_callback(functools.partial(_end_steps, steps))

    async def step(self) -> ModelEvent | None:
        """Return the next step with a number of bytes; None at the end of the load."""
        async for step in self._steps:
            if step.done_bytes is not None:
                return step
        return None

    async def result(self) -> LoadReport:
        """Wait for the end of the load.

        Raises:
            LabError: the load has failed.
        """
        return await asyncio.shield(self._task)

    async def cancel(self) -> None:
        """Cancel the load, and wait until it has ended."""
        # Cancelling fails if the load has just ended, or if the server was stopped.
        await asyncio.gather(self._backend.cancel_load(self._model), return_exceptions=True)
        await asyncio.wait([self._task])

    def close(self) -> None:
        """Cancel the load after its caller was interrupted before it received this object. Thread-safe."""
        asyncio.run_coroutine_threadsafe(self.cancel(), self._loop)


async def start_load(backend: Backend, spec: LoadSpec) -> RunningLoad:
    """Start a load on the running event loop."""
    return RunningLoad(backend, spec)


def _end_steps(steps: Feed[ModelEvent], load: asyncio.Task[LoadReport]) -> None:
    steps.close()
    if not load.cancelled():
        load.exception()  # Retrieved, because the caller may have stopped waiting.
