"""Define what a lab can do, wherever its server runs.

``notebook.local.LocalBackend`` implements the protocol in this process, ``notebook.remote.RemoteBackend`` over HTTP.
The lab's methods and the panels use nothing else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from lmx_lab.blocking import Portal
from lmx_lab.values.models import (
    DiskUse,
    LoadReport,
    LoadSpec,
    ModelEvent,
    Stored,
    TimeToLive,
    Unloading,
)
from lmx_lab.values.outputs import (
    Delta,
    EncodeReport,
    GenerationReport,
    RerankMethod,
    TokenLogprob,
    Vectors,
    merge_deltas,
    merge_tool_calls,
)
from lmx_lab.values.plan import LoadPlan
from lmx_lab.values.recording import NO_HASH, Continuation, Record
from lmx_lab.values.steering import SteeringVector
from lmx_lab.values.timeline import ServerTimeline
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.admin import (
    KeepAnswer,
    ModelRecords,
    RequestEvent,
    RunningRequest,
    Sample,
    TraceBody,
)
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.completions import CompletionRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.generation import Timings, Usage
from lmx_lab.wire.rerank import RerankBody

Progress = Callable[[ModelEvent], None]
"""Called with each step of a load or unload, on the event loop that awaits it."""


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The state of a server at one moment."""

    state: Literal["running", "lagging", "stopped", "unreachable"]
    """``lagging``: a server in another process is connected, but has sent nothing for some seconds."""
    place: str
    """Where the server runs, for display: ``in this kernel``."""
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
    others: tuple[str, ...] = ()
    """Ids of the other models in memory."""
    kept: tuple[tuple[bool, float | None], ...] = ()
    """For each model in memory, whether it is pinned, and its time to live in seconds; empty if the server runs in
    another process."""
    unloading: Unloading | None = None
    """Set while the unload of ``model`` waits for its running answers to end."""
    note: str = ""
    """A problem and what the user can do about it, such as how to restart a server."""


@dataclass(frozen=True, kw_only=True, repr=False)
class AnswerToolCall:
    """A function call that the model requests."""

    id: str
    name: str
    arguments: str
    """A JSON object, as the model wrote it."""

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments; None if their text is not a JSON object, for example because the answer was cut off."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"

    def __repr__(self) -> str:
        return f"<call {self}, id {self.id}>"


@dataclass(frozen=True, kw_only=True)
class TokenAnswer:
    """A complete answer with its tokens, and the data that are needed to score and to continue it."""

    text: str
    reasoning: str = ""
    """The model's thoughts, if its chat template separates them from the answer."""
    tool_calls: tuple[AnswerToolCall, ...] = ()
    """The calls that the model requests; answer each with a message of the role ``tool``."""
    model: str
    finish_reason: str
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    """Token ids of the rendered prompt; empty if the engine runs in another process."""
    ids: tuple[int, ...] = field(default=(), repr=False)
    """Token ids of the answer; empty if the engine runs in another process, or did not report all of them."""
    tokens: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    """The tokens with their log-probabilities; empty if they were not requested."""
    weights: str = field(default=NO_HASH, repr=False)
    """SHA-256 of the files of the model; empty if it is not known, or any files are allowed."""
    format: str = field(default="", repr=False)
    """Format of these files, which determines the engine; empty if the engine runs in another process."""
    request: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The request as in a ``Record``; empty if the engine runs in another process."""

    @classmethod
    def of_record(cls, record: Record) -> TokenAnswer:
        """Return the answer of a record."""
        return TokenAnswer(
            text=record.text,
            reasoning=record.reasoning,
            tool_calls=tuple(
                AnswerToolCall(id="", name=call["name"], arguments=call["arguments"]) for call in record.tool_calls
            ),
            model=record.provenance.model,
            finish_reason=record.outcome,
            prompt_ids=record.prompt,
            ids=record.answer or (),
            tokens=record.logprobs,
            weights=record.provenance.weights,
            format=record.provenance.format,
            request=record.request,
        )

    @property
    def has_logprobs(self) -> bool:
        """Whether the log-probabilities of the whole answer are known. A recorded branch has only those of the tokens
        after its beginning.
        """
        return bool(self.tokens) and len(self.tokens) >= len(self.ids)

    @property
    def is_scored(self) -> bool:
        """Whether the log-probability of each token is known."""
        return bool(self.ids) and tuple(token.token for token in self.tokens) == self.ids


@dataclass(frozen=True, kw_only=True)
class FinishedAnswer(TokenAnswer):
    """A complete answer, and its cost."""

    usage: Usage
    timings: Timings
    """The server's measurements."""
    ttft_s: float
    """Seconds from the call to the first token, measured by the caller. Includes the time of the network."""
    report: GenerationReport | None = None
    """The engine's report; None if the engine runs in another process."""
    request_id: str | None = field(default=None, repr=False)
    """Id of the request of a batch, as in its ``Record``; None otherwise, or if the engine runs in another process."""

    @classmethod
    def of(cls, answer: Delta, **cost: Any) -> FinishedAnswer:
        """Return the answer with the contents of a delta. The other fields are given as arguments."""
        return FinishedAnswer(
            text=answer.text,
            reasoning=answer.reasoning,
            tool_calls=tuple(
                AnswerToolCall(id=call.id or "", name=call.name or "", arguments=call.arguments)
                for call in merge_tool_calls(answer.tool_calls)
            ),
            ids=answer.ids if len(answer.ids) == answer.tokens else (),
            tokens=answer.logprobs,
            **cost,
        )


class AnswerStream(Protocol):
    """The deltas of a running generation. Iterate it in one task; deleting it stops the generation."""

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


class RunningAnswer:
    """A running generation, and the part of it that was received. Deleting it stops the generation.

    Args:
        finish: Returns the complete answer, given all its deltas as one.
    """

    def __init__(self, stream: AnswerStream, finish: Callable[[Delta], FinishedAnswer]) -> None:
        self._stream = stream
        self._finish = finish
        self._deltas: list[Delta] = []
        self.has_ended = False
        """Whether the generation has ended, or was stopped."""
        self.finished: FinishedAnswer | None = None
        """The complete answer, after its end; stays None if the generation was stopped."""

    @property
    def status(self) -> str:
        """The state of the request before its first token, such as ``queued`` or ``prompt 512/7000 tokens``."""
        return self._stream.status

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join([delta.text for delta in self._deltas])

    @property
    def reasoning(self) -> str:
        """The thoughts so far; they precede the text."""
        return "".join([delta.reasoning for delta in self._deltas])

    async def next(self) -> Delta | None:
        """Return the next piece of the answer; None at its end, when ``finished`` is set. Call it in one task.

        Raises:
            LabError: the generation has failed, or the cost of the answer is not known.
        """
        delta = None if self.has_ended else await anext(self._stream, None)
        if delta is not None:
            self._deltas.append(delta)
        elif not self.has_ended:
            self.finished = self._finish(merge_deltas(self._deltas))
            self.has_ended = True
        return delta

    async def read(self) -> FinishedAnswer:
        """Return the complete answer. Cancelling this stops the generation.

        Raises:
            LabError: see ``next``.
        """
        try:
            while await self.next() is not None:
                pass
        finally:
            # Deleting the stream is not enough, because the traceback of an interrupted cell refers to it.
            self.close()
        assert self.finished is not None
        return self.finished

    def close(self) -> None:
        """Stop the generation if it still runs. Can be called from any thread. Idempotent."""
        self.has_ended = True
        self._stream.close()


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

    job: str
    """Displayed progress of a job that uses the server, such as a measurement; empty if there is none."""

    @property
    def portal(self) -> Portal:
        """The loop on which the methods of a lab call this backend. Its calls raise ``HostingError`` if the lab was
        stopped. While an attached lab or one of its results exists, it keeps the connection open."""

    @property
    def url(self) -> str:
        """The server's address for programs on this machine."""

    @property
    def api_key(self) -> str | None: ...

    @property
    def home(self) -> Path:
        """The folder of stored runs and experiments. If the server runs in another process, it is the default home of
        this machine."""

    def state(self) -> ServerState: ...

    def sample(self) -> Sample | None:
        """Return the current measurements; None if there are none."""

    def events(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        """Return all loads, unloads and ends of requests from now on, of all clients. Ends when the server stops."""

    # Models

    async def models(self) -> ModelRecords: ...

    async def plan(self, spec: LoadSpec) -> LoadPlan:
        """Return what a load would use in memory, and whether there is room for it. Nothing is loaded or downloaded."""

    async def load(self, spec: LoadSpec, *, progress: Progress | None = None) -> LoadReport:
        """Load a model; returns when it can answer. Cancelling this stops waiting, not the load."""

    async def cancel_load(self, model: str, *, shared: bool = True) -> None:
        """Cancel the load of a model, by its id or the name that a caller used. The previous model is loaded again.

        Args:
            shared: See ``CancelLoadRequest``.
        """

    async def unload(
        self, model: str | None = None, *, wait: bool | None = None, progress: Progress | None = None
    ) -> float:
        """Unload the model, or cancel a load in progress; returns the freed memory in GB (10^9 bytes).

        Cancelling this call ends the wait, but not the unload. Another call joins an unload that is in progress.

        Args:
            model: The model to unload, or whose load is cancelled; None for the main model, or any load.
            wait: Whether running answers may finish: True without a time limit, False not at all, None within
                ``drain_s``.
        """

    async def disk_use(self) -> DiskUse:
        """Return the disk space that models and results use.

        Raises:
            InvalidRequestError: the server runs in another process.
        """

    async def remove_stored(self, item: Stored) -> None:
        """Delete an item of ``disk_use``.

        Raises:
            InvalidRequestError: it has changed since, or is not removed by this package; or the server runs in another
                process.
        """

    async def keep(self, model: str, *, pin: bool | None = None, ttl_s: TimeToLive | None = None) -> KeepAnswer:
        """Change how long a model stays in memory; see ``ModelManager.keep``."""

    # Requests

    async def timeline(self, last_s: float, *, most: int | None = None) -> ServerTimeline:
        """Return the timeline of the requests of all clients, and of loads, in the last ``last_s`` seconds.

        Args:
            most: Maximum number of requests; the newest are returned. None sets no limit.
        """

    async def clients(self) -> Sequence[RunningRequest]:
        """Return the requests of all clients that wait or run, oldest first."""

    async def stop_request(self, id_: str) -> str:
        """Stop a request that waits or runs, given its id or a unique beginning of it, and return the id.

        Raises:
            NotFoundError: no such request, or several, have this id.
        """

    async def generate(self, request: ChatRequest, *, batch: bool = False, internal: bool = False) -> RunningAnswer:
        """Start an answer; returns when the request was accepted.

        Args:
            batch: See ``Record.batch``.
            internal: Whether it is a step of other work. It is then neither recorded nor shown as a request of the
                notebook.
        """

    async def complete(self, request: CompletionRequest) -> FinishedAnswer:
        """Continue one plain text, without a chat template, and return the complete answer."""

    async def embed(self, body: EmbeddingsBody) -> Vectors:
        """Return one row for each text."""

    async def rerank(self, body: RerankBody) -> Ranking: ...

    async def trace(self, body: TraceBody) -> Trace:
        """Return internal values of the loaded model."""

    # Recorded tokens

    def check_request(self, request: ChatRequest) -> None:
        """Check a request before ``answer`` is called with it.

        Raises:
            InvalidRequestError: the request is invalid, or the server runs in another process.
        """

    async def answer(self, request: ChatRequest | Record) -> Record:
        """Answer a request, or repeat that of a record. Return the record of the answer, which is not stored."""

    async def record(self, which: int | str = -1) -> Record | None:
        """Return a recorded request, by its position or its ``request_id``; None if there is none.

        Raises:
            InvalidRequestError: the server runs in another process, or does not record requests.
        """

    async def encode(self, prompt: str | ChatRequest, *, special: bool = True) -> Sequence[int]:
        """Return the token ids of a text, or of a chat as the model reads it.

        Args:
            special: Whether to include special tokens that the tokenizer adds to each text.
        """

    async def weights_of(self, model: str) -> str:
        """Return the SHA-256 of all files of a model in memory; empty if it has none, or the lab is attached."""

    async def require_weights(self, model: str, weights: str, engine: str = "") -> None:
        """Check that a model is loaded on an engine, and that its files have this SHA-256, unless they are empty.

        Args:
            engine: Name of the engine, or the format of the files that it loads.

        Raises:
            NotLoadedError: it is not loaded, or on another engine.
            InvalidRequestError: its files have another hash.
        """

    async def continue_answer(self, continuation: Continuation, *, recorded: bool = True) -> RunningAnswer:
        """Generate an answer again from a given position; the answer begins with the tokens before it.

        Args:
            recorded: Whether the answer is recorded like those of ``generate``; otherwise it is internal.
        """

    async def score(
        self,
        tokens: Sequence[int],
        *,
        model: str | None,
        top: int,
        start: int = 0,
        steer: Sequence[SteeringVector] = (),
    ) -> Sequence[TokenLogprob]:
        """Return the log-probability of each token after those before it, with ``top`` alternatives.

        Args:
            model: The model that must be loaded; None takes any.
            start: Position of the first token that is returned.
            steer: Vectors that are added to the residual stream.
        """


async def load_or_cancel(backend: Backend, spec: LoadSpec, *, progress: Progress | None = None) -> LoadReport:
    """Load a model.

    Cancelling this call cancels the load, unless other callers wait for it, and waits until the previous model is
    loaded again.
    """
    loading = asyncio.ensure_future(backend.load(spec, progress=progress))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        # This fails also if the load has just ended, or if the server was stopped.
        (failure,) = await asyncio.gather(backend.cancel_load(spec.model, shared=False), return_exceptions=True)
        if failure is not None:
            loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        raise


@runtime_checkable
class HasBackend(Protocol):
    """A lab, for methods that use other labs."""

    @property
    def backend(self) -> Backend: ...
