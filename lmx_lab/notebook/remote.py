"""Connect to a lab's server in another kernel or process, or on another machine, and implement the ``Backend`` of the
attached lab with an HTTP client.

All methods of the backend may be called on any event loop; the client's coroutines run on the loop of the connection.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

from lmx_lab.backend import FinishedAnswer, Progress, Ranking, RunningAnswer, ServerState
from lmx_lab.blocking import Portal, in_thread, on_loop
from lmx_lab.client import AsyncLabClient, Remark, as_array
from lmx_lab.errors import HostingError, InvalidRequestError, LabError, UnreachableError, format_bytes
from lmx_lab.portal import LoopThread
from lmx_lab.settings import Settings
from lmx_lab.values.models import (
    DiskUse,
    LoadReport,
    LoadSpec,
    ModelEvent,
    Stored,
    TimeToLive,
    Unloading,
)
from lmx_lab.values.outputs import Delta, TokenLogprob, ToolCallDelta, Vectors, token_bytes
from lmx_lab.values.plan import LoadPlan
from lmx_lab.values.steering import SteeringVector
from lmx_lab.values.timeline import ServerTimeline
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.admin import (
    KeepAnswer,
    ModelRecords,
    NotReady,
    RequestEvent,
    RunningRequest,
    Sample,
    TraceBody,
)
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.chat import ChatChunk, ChatRequest, TokenLogprobs, TokenProbs, TopLogprob, TopProb
from lmx_lab.wire.completions import CompletionLogprobs, CompletionRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.generation import StreamOptions, Timings
from lmx_lab.wire.rerank import RerankBody
from lmx_lab.wire.tokens import TokenizeRequest

T = TypeVar("T")
NEEDS_OWN_SERVER = "an attached lab cannot continue answers from their tokens; use a lab that launch() started"
STORAGE_OF_SERVER = "an attached lab does not show what its server stores; run lmx-lab storage where the server runs"
NO_COST = "{url} did not report the cost of its answer, unlike an LMX Lab server; check the address"
CLOSE_S = 2.0
"""Maximum time to close a connection."""
_PANEL_CONNECTIONS: dict[str, RemoteServer] = {}
"""The last connection with panels, of the last 8 addresses. Without it, nothing would refer to the connection of
``attach(url).panel()``."""


class RemoteAnswer:
    """An ``AnswerStream`` over a streamed answer, which also measures the time to the first token.

    Closing or deleting it closes its connection, so that the server stops the generation. It can be deleted on any
    thread, because asyncio closes a generator without references on the generator's own loop.
    """

    def __init__(self, client: AsyncLabClient, request: ChatRequest, portal: Portal) -> None:
        options = {"stream_options": StreamOptions(include_usage=True)}
        self._url = client.url
        self._portal = portal
        self.status = "sent"
        """Before the first token: the state of the request, as the server reports it."""
        self._parts: AsyncGenerator[ChatChunk | Remark, None] | None = client.stream_with_remarks(
            request.model_copy(update=options)
        )
        self._ahead: ChatChunk | Remark | None = None
        self._last: ChatChunk | None = None
        self._finish_reason: str | None = None
        self._timings: Timings | None = None
        self._started_at = perf_counter()
        self._first_at: float | None = None

    async def start(self) -> None:
        """Send the request; returns when the server has accepted it.

        Raises:
            LabError: the server has refused the request.
        """
        if self._parts is not None:
            self._ahead = await self._portal.call(_next_or_none(self._parts))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        part, self._ahead = self._ahead, None
        while not isinstance(part, ChatChunk):
            if isinstance(part, Remark):
                self.status = part.text
            if self._parts is None or (part := await self._portal.call(_next_or_none(self._parts))) is None:
                raise StopAsyncIteration
        self._last = part
        for choice in part.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
        self._timings = part.timings or self._timings
        # The number of tokens is 0, because servers do not send it.
        delta = Delta(text="", tokens=0)
        if part.choices:
            piece, logprobs = part.choices[0].delta, part.choices[0].logprobs
            calls = [
                ToolCallDelta(index=each.index, id=each.id, name=each.function.name, arguments=each.function.arguments)
                for each in piece.tool_calls or ()
            ]
            delta = Delta(
                text=piece.content or "",
                tokens=0,
                logprobs=tuple(map(_logprob, logprobs.content)) if logprobs else (),
                reasoning=piece.reasoning_content or "",
                tool_calls=tuple(calls),
            )
        if self._first_at is None and delta.has_content:
            self._first_at = perf_counter()
        return delta

    def finish(self, text: Delta) -> FinishedAnswer:
        """Return the complete answer.

        Args:
            text: All its deltas.

        Raises:
            UnreachableError: the answer has no ``usage`` and ``timings``, so it is not from an LMX Lab server.
        """
        last = self._last
        if last is None or last.usage is None or self._timings is None or self._finish_reason is None:
            raise UnreachableError(NO_COST.format(url=self._url))
        return FinishedAnswer.of(
            text,
            model=last.model,
            finish_reason=self._finish_reason,
            usage=last.usage,
            timings=self._timings,
            ttft_s=(self._first_at or perf_counter()) - self._started_at,
        )

    def close(self) -> None:
        self._parts = None


async def _next_or_none(items: AsyncIterator[T]) -> T | None:
    """Return the next item, or None at the end, as a coroutine, which a portal can run."""
    return await anext(items, None)


def _logprob(token: TopLogprob | TopProb) -> TokenLogprob:
    top: Sequence[TopLogprob | TopProb] = ()
    named: Sequence[TopLogprob] = ()
    match token:
        case TokenLogprobs():
            top, named = token.top_logprobs, token.logprob_tokens or ()
        case TokenProbs():
            top = token.top_probs
    logprob = token.logprob if isinstance(token, TopLogprob) else math.log(token.prob) if token.prob else -math.inf
    return TokenLogprob(
        token=None,
        text=token.token,
        bytes=bytes(token.bytes),
        logprob=logprob,
        top=tuple(map(_logprob, top)),
        named=tuple(map(_logprob, named)),
    )


class Received:
    """What the backends of one connection have received from its server."""

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.job = ""
        self.records: ModelRecords | None = None
        self.sample: Sample | None = None
        self.at: float | None = None
        self.unloading: tuple[Unloading | None, float] = (None, 0.0)
        """The last state of the model if it is being unloaded, and when it was received."""
        self.problem = ""
        """Why the last stream of events has ended; empty while events are received."""


class RemoteBackend:
    """A ``Backend`` over a client.

    ``state`` and ``sample`` return what ``events`` has received. The workbench reads events while there are panels.

    Args:
        portal: Runs coroutines on the client's loop. That of panels does not keep the connection open.
        is_open: Whether the connection is still in use.
    """

    def __init__(
        self, client: AsyncLabClient, portal: Portal, received: Received, *, is_open: Callable[[], bool]
    ) -> None:
        self.portal = portal
        self._client = client
        self._is_open = is_open
        self._received = received

    @property
    def job(self) -> str:
        return self._received.job

    @job.setter
    def job(self, text: str) -> None:
        self._received.job = text

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def api_key(self) -> str | None:
        return self._client.api_key

    @property
    def home(self) -> Path:
        return Settings.read().home

    def state(self) -> ServerState:
        received = self._received
        silent_s = 0.0 if received.at is None else time.monotonic() - received.at
        now: dict[str, Any] = {"state": "running"}
        if not self._is_open():
            now = {"state": "stopped", "note": "This connection was stopped; run the cell with attach() again."}
        elif received.problem:
            now = {"state": "unreachable", "note": f"{received.problem} The connection is being retried."}
        elif silent_s > received.late_s:
            note = f"The server has sent nothing for {silent_s:.0f} s: a cell there may block its event loop."
            now = {"state": "lagging", "note": note}
        loaded = [record for record in received.records.models if record.loaded] if received.records else []
        main = next((it for it in loaded if it.main), None)
        model = main.id if main is not None else None
        unloading, received_at = received.unloading
        if unloading is not None and unloading.seconds_left is not None:
            left_s = unloading.seconds_left - int(time.monotonic() - received_at)
            unloading = replace(unloading, seconds_left=max(0, left_s))
        return ServerState(
            place="in another process or on another machine",
            url=self._client.url,
            disk=f"the disk of {urlsplit(self._client.url).netloc}",
            model=model,
            others=tuple(record.id for record in loaded if record is not main),
            unloading=unloading if model is not None else None,
            **now,
        )

    def sample(self) -> Sample | None:
        return self._received.sample if self.state().state == "running" else None

    async def events(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        # The inner generator need not be closed here: it ends if it is cancelled, and asyncio closes it on its own loop
        # when nothing refers to it.
        events, received = self._client.events(["models", "requests", "samples"]), self._received
        try:
            await self.models()
            while (event := await self.portal.call(_next_or_none(events))) is not None:
                received.problem, received.at = "", time.monotonic()
                if isinstance(event, Sample):
                    received.sample = event
                elif isinstance(event, ModelEvent) and event.stage == "unloading":
                    received.unloading = event.unloading, received.at
                elif isinstance(event, ModelEvent) and event.stage in ("loaded", "unloaded", "failed"):
                    await self.models()
                if isinstance(event, ModelEvent | RequestEvent):
                    yield event
            received.problem = f"{self._client.url} has closed the connection; the server may be stopping."
        except LabError as exc:
            received.problem = f"{exc.message.rstrip('.')}."
            raise

    # Models

    async def models(self) -> ModelRecords:
        self._received.records = records = await self.portal.call(self._client.models())
        states = (record.unloading for record in sorted(records.models, key=lambda record: not record.main))
        self._received.unloading = next(filter(None, states), None), time.monotonic()
        return records

    async def plan(self, spec: LoadSpec) -> LoadPlan:
        return await self.portal.call(self._client.plan(spec.model, **spec.options))

    async def load(self, spec: LoadSpec, *, progress: Progress | None = None) -> LoadReport:
        return await self.portal.call(self._client.load(spec.model, progress=progress, **spec.options))

    async def cancel_load(self, model: str, *, shared: bool = True) -> None:
        await self.portal.call(self._client.cancel_load(model, shared=shared))

    async def unload(
        self, model: str | None = None, *, wait: bool | None = None, progress: Progress | None = None
    ) -> float:
        return (await self.portal.call(self._client.unload(model, wait=wait, progress=progress))).freed_vram_gb

    async def disk_use(self) -> DiskUse:
        raise InvalidRequestError(STORAGE_OF_SERVER)

    async def remove_stored(self, item: Stored) -> None:
        raise InvalidRequestError(STORAGE_OF_SERVER)

    async def keep(self, model: str, *, pin: bool | None = None, ttl_s: TimeToLive | None = None) -> KeepAnswer:
        return await self.portal.call(self._client.keep(model, pin=pin, ttl_s=ttl_s))

    # Requests

    async def timeline(self, last_s: float, *, most: int | None = None) -> ServerTimeline:
        return await self.portal.call(self._client.timeline(last_s, most=most))

    async def clients(self) -> Sequence[RunningRequest]:
        return await self.portal.call(self._client.clients())

    async def stop_request(self, id_: str) -> str:
        return await self.portal.call(self._client.stop_request(id_))

    async def generate(self, request: ChatRequest, *, batch: bool = False, internal: bool = False) -> RunningAnswer:
        # Always streamed, because the time to the first token is measured.
        answer = RemoteAnswer(self._client, request, self.portal)
        await answer.start()
        return RunningAnswer(answer, answer.finish)

    async def complete(self, request: CompletionRequest) -> FinishedAnswer:
        completion = await self.portal.call(self._client.complete(request))
        (choice,), usage, timings = completion.choices, completion.usage, completion.timings
        if usage is None or timings is None or choice.finish_reason is None:
            raise UnreachableError(NO_COST.format(url=self._client.url))
        return FinishedAnswer.of(
            Delta(text=choice.text, tokens=0, logprobs=_token_logprobs(choice.logprobs) if choice.logprobs else ()),
            model=completion.model,
            finish_reason=choice.finish_reason,
            usage=usage,
            timings=timings,
            ttft_s=timings.prompt_ms / 1000,
        )

    async def embed(self, body: EmbeddingsBody) -> Vectors:
        answer = await self.portal.call(self._client.embed(body.model_copy(update={"encoding_format": "base64"})))
        vectors = as_array(answer)
        return vectors[0] if body.is_single else vectors

    async def rerank(self, body: RerankBody) -> Ranking:
        body = body.model_copy(update={"return_documents": False})
        answer = await self.portal.call(self._client.rerank(body))
        return Ranking(
            query=body.query,
            documents=body.texts,
            order=tuple((item.index, item.relevance_score) for item in answer.results),
            model=answer.model,
            method=answer.method,
            tokens=answer.usage.prompt_tokens,
        )

    async def trace(self, body: TraceBody) -> Trace:
        return await self.portal.call(self._client.trace(body))

    # Recorded tokens

    def check_request(self, request: ChatRequest) -> None:
        raise InvalidRequestError(NEEDS_OWN_SERVER)

    async def _refuse(self, *_: Any, **_options: Any) -> NoReturn:
        raise InvalidRequestError(NEEDS_OWN_SERVER)

    answer = record = continue_answer = _refuse

    async def encode(self, prompt: str | ChatRequest, *, special: bool = True) -> Sequence[int]:
        if isinstance(prompt, ChatRequest):
            fields = prompt.model_dump(mode="json", exclude_unset=True)
            # The fields that determine the tokens of the prompt.
            named = ("model", "messages", "tools", "chat_template_kwargs")
            body = TokenizeRequest.model_validate({name: fields[name] for name in named if name in fields})
        else:
            body = TokenizeRequest(prompt=prompt, add_special_tokens=special)
        answer = await self.portal.call(self._client.tokenize(body))
        return [token for token in answer.tokens if isinstance(token, int)]

    async def weights_of(self, model: str) -> str:
        return ""

    async def require_weights(self, model: str, weights: str, engine: str = "") -> None:
        raise InvalidRequestError(
            f"an attached lab does not know whether its server has the files of {model} that generated the answer; use "
            "the lab that recorded the answer, or pass its token ids or its text"
        )

    async def score(
        self,
        tokens: Sequence[int],
        *,
        model: str | None,
        top: int,
        start: int = 0,
        steer: Sequence[SteeringVector] = (),
    ) -> Sequence[TokenLogprob]:
        fields = {"model": model or ANY_MODEL, "prompt": list(tokens), "echo": True, "logprobs": top, "max_tokens": 0}
        vectors = [{**asdict(each), "weights": each.weights or None} for each in steer]
        body = CompletionRequest.model_validate({**fields, "temperature": 0, "steer": vectors or None})
        answer = await self.portal.call(self._client.complete(body))
        scores = answer.choices[0].logprobs
        if scores is None or len(scores.token_logprobs) != len(tokens):
            raise UnreachableError(
                f"{self._client.url} did not return the log-probabilities of a prompt, unlike an LMX Lab server; check "
                "the address"
            )
        return [replace(score, token=tokens[at]) for at, score in enumerate(_token_logprobs(scores)) if at >= start]


def _token_logprobs(scores: CompletionLogprobs) -> tuple[TokenLogprob, ...]:
    def read(text: str, logprob: float | None) -> TokenLogprob:
        return TokenLogprob(token=None, text=text, bytes=token_bytes(text), logprob=logprob)

    tops = [sorted((top or {}).items(), key=lambda item: -item[1]) for top in scores.top_logprobs]
    return tuple(
        replace(read(text, logprob), top=tuple(read(*item) for item in top))
        for text, logprob, top in zip(scores.tokens, scores.token_logprobs, tops, strict=True)
    )


class RemoteServer:
    """The connection to a server.

    Deleting it closes the connection, so the panels must not refer to it.

    Args:
        repr_s: Maximum time that the lab's ``repr`` waits for the server.
        late_s: Time without an event after which the server's state is ``lagging``. The server sends a sample every
            second.
    """

    def __init__(self, url: str, *, api_key: str | None = None, repr_s: float = 2.0, late_s: float = 3.0) -> None:
        self._client = AsyncLabClient(url, api_key=api_key)
        self._repr_s = repr_s
        self._received = Received(late_s)
        self._thread = LoopThread("lmx-lab-attached")
        self._version = ""
        self._callbacks: list[Callable[[], None]] = []
        # Called by ``close``, when this object is deleted, and at exit.
        self._end = weakref.finalize(self, _end, self._thread, self._client)
        # Called before ``_end`` when this object is deleted, but not at exit, when the kernel may no longer send
        # messages.
        self._on_delete = weakref.finalize(self, _close_later, self._end, self._callbacks)
        self._on_delete.atexit = False

    def backend(self, *, keeps: bool) -> RemoteBackend:
        """Return a backend over this connection.

        Args:
            keeps: Whether the backend keeps this object, and so the connection, as the results of the lab do. Panels
                must not keep it.
        """
        end, portal = self._end, self.portal
        if not keeps:
            portal = Portal(functools.partial(_open_thread, self._thread, end))
        return RemoteBackend(self._client, portal, self._received, is_open=lambda: end.alive)

    @property
    def portal(self) -> Portal:
        """The loop of the connection. It keeps this object, and so the connection."""
        return Portal(lambda: _open_thread(self._thread, self._end))

    # Lifetime

    async def start(self) -> None:
        """Connect, and check that a lab's server answers and accepts the key. Does nothing if this was done before.

        Raises:
            HostingError: the connection was stopped.
            LabError: as ``attach()``.
        """
        thread = _open_thread(self._thread, self._end)
        if not self._version:
            thread.start()
            version = await on_loop(self.portal, self._client.version())
            await on_loop(self.portal, self._client.models())
            self._version = version

    async def stop(self) -> None:
        """Close the connection, which ends this lab's requests. Idempotent."""
        await in_thread(self.close)

    def close(self) -> None:
        """Close the connection. This takes up to ``CLOSE_S``."""
        self._on_delete.detach()
        self._end()
        if _PANEL_CONNECTIONS.get(self.url) is self:
            del _PANEL_CONNECTIONS[self.url]
        for callback in self._callbacks:
            callback()

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Register a function to call when the connection is closed. It must not refer to this object."""
        self._callbacks.append(callback)

    @property
    def running(self) -> bool:
        """Whether the connection is open. The server may have stopped."""
        return self._end.alive

    def panels_shown(self) -> None:
        """Keep this connection until panels of another one to the same address are shown."""
        if self.running:
            _PANEL_CONNECTIONS.pop(self.url, None)
            _PANEL_CONNECTIONS[self.url] = self
            while len(_PANEL_CONNECTIONS) > 8:
                del _PANEL_CONNECTIONS[next(iter(_PANEL_CONNECTIONS))]

    # Description

    @property
    def url(self) -> str:
        """The server's address."""
        return self._client.url

    def facts(self) -> dict[str, str]:
        """Return the name and the value of each line that describes the lab."""
        if not self.running:
            state = "connection stopped"
        else:
            try:
                now = self.portal.run(asyncio.wait_for(self._client.ready(), self._repr_s))
            except (LabError, TimeoutError) as exc:
                state = f"in another process, which does not answer: {exc}"
            else:
                model = (
                    "no model ready"
                    if isinstance(now, NotReady)
                    else f"{now.model} ({format_bytes(now.vram_gb * 1e9)})"
                )
                unloading = f", {now.unloading}" if now.unloading is not None else ""
                state = f"running in another process, version {self._version}, {model}{unloading}"
        return {"LMX Lab": state, "address": self.url}


def _open_thread(thread: LoopThread, end: weakref.finalize[Any, Any]) -> LoopThread:
    if not end.alive:
        raise HostingError("this connection was stopped; attach() opens a new one")
    return thread


def _end(thread: LoopThread, client: AsyncLabClient) -> None:
    try:
        with suppress(LabError, TimeoutError):
            thread.run(client.aclose(), CLOSE_S)
    finally:
        thread.stop()


def _close_later(end: Callable[[], object], callbacks: list[Callable[[], None]]) -> None:
    """Close the connection of a deleted object, and update its panels a last time, to show that it is stopped."""

    def close() -> None:
        end()
        for callback in callbacks:
            callback()

    if callbacks:
        # In a thread: the last reference may have been on the panels' own loop, which must not wait for its own end.
        threading.Thread(target=close, name="lmx-lab-close", daemon=True).start()
