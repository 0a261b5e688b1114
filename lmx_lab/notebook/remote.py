"""Implement the ``Backend`` of a lab whose server runs in another process or on another machine, with an HTTP client.

All methods may be called on any event loop; the client's coroutines run on the loop of the connection.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any, Self
from urllib.parse import urlsplit

from lmx_lab.backend import AnswerCost, AnswerRecorder, AnswerStream, DocumentRanking, Progress, ServerState
from lmx_lab.client import AsyncLabClient, LabEvent, Remark, as_array
from lmx_lab.errors import InvalidRequestError, LabError, UnreachableError
from lmx_lab.notebook.arguments import Prompt
from lmx_lab.notebook.verbs import LoopPortal
from lmx_lab.values.encoding import Vectors
from lmx_lab.values.generation import Delta, TokenLogprob, ToolCallDelta, token_bytes
from lmx_lab.values.models import LoadReport, LoadSpec, Unloading
from lmx_lab.values.recording import Continuation, Record
from lmx_lab.values.steering import SteeringVector
from lmx_lab.values.timeline import ServerTimeline
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.admin import ModelEvent, ModelRecords, RequestEvent, Sample
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.chat import ChatChunk, ChatRequest, ChoiceDelta, ChunkChoice, TokenLogprobs, TopLogprob
from lmx_lab.wire.completions import CompletionRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.generation import StreamOptions, Timings
from lmx_lab.wire.rerank import RerankBody
from lmx_lab.wire.tokens import TokenizeRequest
from lmx_lab.wire.tracing import TraceBody

LATE_S = 3.0
"""Time without an event after which the server's state is ``lagging``. The server sends a sample every second."""

NEEDS_OWN_SERVER = "an attached lab cannot continue answers from their tokens; use a lab that launch() started"
CHAT_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")
"""Fields of a chat that determine the tokens of its prompt."""


class RemoteAnswer:
    """An ``AnswerStream`` over a streamed answer, which also measures the time to the first token.

    Closing or deleting it closes its connection, so that the server stops the generation. It can be deleted on any
    thread, because asyncio closes a generator without references on the generator's own loop.
    """

    def __init__(self, client: AsyncLabClient, request: ChatRequest, portal: LoopPortal) -> None:
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
        self._ahead = await self._portal.call(self._next_part())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        part, self._ahead = self._ahead, None
        while not isinstance(part, ChatChunk):
            if isinstance(part, Remark):
                self.status = part.text
            if (part := await self._portal.call(self._next_part())) is None:
                raise StopAsyncIteration
        return self._read(part)

    async def _next_part(self) -> ChatChunk | Remark | None:
        return await anext(self._parts, None) if self._parts is not None else None

    def _read(self, chunk: ChatChunk) -> Delta:
        self._last = chunk
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
        self._timings = chunk.timings or self._timings
        delta = _delta(chunk.choices[0]) if chunk.choices else Delta(text="", tokens=0)
        if self._first_at is None and delta.has_content:
            self._first_at = perf_counter()
        return delta

    def cost(self) -> AnswerCost:
        """Return the cost of the complete answer.

        Raises:
            UnreachableError: the answer has no ``usage`` and ``timings``, so it is not from an LMX Lab server.
        """
        last = self._last
        if last is None or last.usage is None or self._timings is None or self._finish_reason is None:
            raise UnreachableError(
                f"{self._url} did not report the cost of its answer, unlike an LMX Lab server; check the address"
            )
        return AnswerCost(
            model=last.model,
            finish_reason=self._finish_reason,
            usage=last.usage,
            timings=self._timings,
            ttft_s=(self._first_at or perf_counter()) - self._started_at,
        )

    def close(self) -> None:
        self._parts = None


def _delta(choice: ChunkChoice) -> Delta:
    """Convert a piece of an answer. Its number of tokens is 0, because servers do not send it."""
    delta = choice.delta
    return Delta(
        text=delta.content or "",
        tokens=0,
        logprobs=tuple(map(_logprob, choice.logprobs.content)) if choice.logprobs else (),
        reasoning=delta.reasoning_content or "",
        tool_calls=tuple(_calls(delta)),
    )


def _logprob(token: TopLogprob) -> TokenLogprob:
    top, named = (token.top_logprobs, token.logprob_tokens) if isinstance(token, TokenLogprobs) else ((), ())
    return TokenLogprob(
        token=None,
        text=token.token,
        bytes=bytes(token.bytes),
        logprob=token.logprob,
        top=tuple(map(_logprob, top)),
        named=tuple(map(_logprob, named or ())),
    )


def _calls(delta: ChoiceDelta) -> Iterator[ToolCallDelta]:
    for call in delta.tool_calls or ():
        function = call.function
        yield ToolCallDelta(index=call.index, id=call.id, name=function.name, arguments=function.arguments)


class RemoteBackend:
    """A ``Backend`` over a client.

    ``state`` and ``sample`` return what ``events`` has received. The workbench reads events while there are panels.

    Args:
        portal: Runs coroutines on the client's loop.
        is_open: Whether the connection is still in use.
    """

    def __init__(self, client: AsyncLabClient, portal: LoopPortal, *, is_open: Callable[[], bool]) -> None:
        self._client = client
        self._is_open = is_open
        self._portal = portal
        self._records: ModelRecords | None = None
        self._sample: Sample | None = None
        self._received_at: float | None = None
        self._unloading: tuple[Unloading | None, float] = (None, 0.0)
        """The last state of the model if it is being unloaded, and when it was received."""
        self._problem = ""
        """Why the last stream of events has ended; empty while events are received."""

    def state(self) -> ServerState:
        silent_s = 0.0 if self._received_at is None else time.monotonic() - self._received_at
        now: dict[str, Any] = {"state": "running"}
        if not self._is_open():
            now = {"state": "stopped", "note": "This connection was stopped; run the cell with attach() again."}
        elif self._problem:
            now = {"state": "unreachable", "note": f"{self._problem} The connection is being retried."}
        elif silent_s > LATE_S:
            note = f"The server has sent nothing for {silent_s:.0f} s: a cell there may block its event loop."
            now = {"state": "lagging", "note": note}
        loaded = [record for record in self._records.models if record.loaded] if self._records else []
        model = next((record.id for record in loaded if not record.pinned), None)
        return ServerState(
            place="another process or machine",
            url=self._client.url,
            disk=f"the disk of {urlsplit(self._client.url).netloc}",
            model=model,
            pinned=tuple(record.id for record in loaded if record.pinned),
            unloading=self._unloading_now() if model is not None else None,
            **now,
        )

    def _unloading_now(self) -> Unloading | None:
        state, received_at = self._unloading
        if state is None or state.seconds_left is None:
            return state
        return replace(state, seconds_left=max(0, state.seconds_left - int(time.monotonic() - received_at)))

    def sample(self) -> Sample | None:
        return self._sample if self.state().state == "running" else None

    async def events(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        # The inner generator need not be closed here: it ends if it is cancelled, and asyncio closes it on its own loop
        # when nothing refers to it.
        events = self._client.events(["models", "requests", "samples"])
        try:
            await self.models()
            while (event := await self._portal.call(_next_event(events))) is not None:
                await self._receive(event)
                if isinstance(event, ModelEvent | RequestEvent):
                    yield event
            self._problem = f"{self._client.url} has closed the connection; the server may be stopping."
        except LabError as exc:
            self._problem = f"{exc.message.rstrip('.')}."
            raise

    async def _receive(self, event: LabEvent) -> None:
        self._problem, self._received_at = "", time.monotonic()
        if isinstance(event, Sample):
            self._sample = event
        elif isinstance(event, ModelEvent) and event.stage == "unloading":
            self._unloading = event.unloading, self._received_at
        elif isinstance(event, ModelEvent) and event.stage in ("loaded", "unloaded", "failed"):
            await self.models()

    # Models

    async def models(self) -> ModelRecords:
        self._records = records = await self._portal.call(self._client.models())
        states = (record.unloading for record in records.models)
        self._unloading = next(filter(None, states), None), time.monotonic()
        return records

    async def load(self, spec: LoadSpec, *, progress: Progress | None = None) -> LoadReport:
        if spec.pin is not None:
            raise InvalidRequestError(
                "an attached lab cannot pin models; pass embedder or reranker where the server is started"
            )
        answer = await self._portal.call(self._client.load(spec.model, progress=progress, **spec.options))
        return LoadReport(
            model=answer.model,
            load_s=answer.load_time_ms / 1e3,
            memory_bytes=round(answer.vram_gb * 1e9),
            engine=answer.engine,
            engine_reason=answer.engine_reason,
            kv_cache_dtype=answer.kv_cache_dtype,
            draft=answer.draft,
            warning=answer.warning,
            slots=answer.slots,
            context_length=answer.context_length,
        )

    async def cancel_load(self, model: str) -> None:
        await self._portal.call(self._client.unload(model))

    async def unload(
        self, model: str | None = None, *, wait: bool | None = None, progress: Progress | None = None
    ) -> float:
        return (await self._portal.call(self._client.unload(model, wait=wait, progress=progress))).freed_vram_gb

    # Requests

    async def timeline(self, last_s: float, *, most: int | None = None) -> ServerTimeline:
        return await self._portal.call(self._client.timeline(last_s, most=most))

    async def generate(self, request: ChatRequest, *, batch: bool = False) -> RemoteAnswer:
        # Always streamed, because the time to the first token is measured.
        answer = RemoteAnswer(self._client, request, self._portal)
        await answer.start()
        return answer

    async def embed(self, body: EmbeddingsBody) -> Vectors:
        answer = await self._portal.call(self._client.embed(body.model_copy(update={"encoding_format": "base64"})))
        vectors = as_array(answer)
        return vectors[0] if body.is_single else vectors

    async def rerank(self, body: RerankBody) -> DocumentRanking:
        body = body.model_copy(update={"return_documents": False})
        answer = await self._portal.call(self._client.rerank(body))
        return DocumentRanking(
            order=tuple((item.index, item.relevance_score) for item in answer.results),
            model=answer.model,
            method=answer.method,
            tokens=answer.usage.prompt_tokens,
        )

    async def trace(self, body: TraceBody) -> Trace:
        return await self._portal.call(self._client.trace(body))

    # Recorded tokens

    def answer_recorder(self, prompt: Prompt, parameters: Mapping[str, Any]) -> AnswerRecorder:
        raise InvalidRequestError(NEEDS_OWN_SERVER)

    async def encode(self, prompt: str | ChatRequest, *, special: bool = True) -> Sequence[int]:
        if isinstance(prompt, ChatRequest):
            fields = prompt.model_dump(mode="json", exclude_unset=True)
            body = TokenizeRequest.model_validate({name: fields[name] for name in CHAT_FIELDS if name in fields})
        else:
            body = TokenizeRequest(prompt=prompt, add_special_tokens=special)
        answer = await self._portal.call(self._client.tokenize(body))
        return [token for token in answer.tokens if isinstance(token, int)]

    async def regenerate(self, record: Record) -> Record:
        raise InvalidRequestError(NEEDS_OWN_SERVER)

    async def last_record(self) -> Record | None:
        raise InvalidRequestError(NEEDS_OWN_SERVER)

    async def weights_of(self, model: str) -> str:
        return ""

    async def require_weights(self, model: str, weights: str) -> None:
        raise InvalidRequestError(
            f"an attached lab does not know whether its server has the files of {model} that generated the answer; use "
            "the lab that recorded the answer, or pass its token ids or its text"
        )

    async def continue_answer(self, continuation: Continuation, *, recorded: bool = True) -> AnswerStream:
        raise InvalidRequestError(NEEDS_OWN_SERVER)

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
        if distributions:
            raise InvalidRequestError("an attached lab has neither ranks nor entropies; color by probability")
        fields = {"model": model or ANY_MODEL, "prompt": list(tokens), "echo": True, "logprobs": top, "max_tokens": 0}
        vectors = [{**asdict(each), "weights": each.weights or None} for each in steer]
        body = CompletionRequest.model_validate({**fields, "temperature": 0, "steer": vectors or None})
        answer = await self._portal.call(self._client.complete(body))
        scores = answer.choices[0].logprobs
        if scores is None or len(scores.token_logprobs) != len(tokens):
            raise UnreachableError(
                f"{self._client.url} did not return the log-probabilities of a prompt, unlike an LMX Lab server; check "
                "the address"
            )
        tops = scores.top_logprobs
        return [
            TokenLogprob(
                token=tokens[at],
                text=scores.tokens[at],
                bytes=token_bytes(scores.tokens[at]),
                logprob=scores.token_logprobs[at],
                top=tuple(_alternatives(tops[at] or {})),
            )
            for at in range(start, len(tokens))
        ]


def _alternatives(top: Mapping[str, float]) -> Iterator[TokenLogprob]:
    for text, logprob in sorted(top.items(), key=lambda item: -item[1]):
        yield TokenLogprob(token=None, text=text, bytes=token_bytes(text), logprob=logprob)


async def _next_event(events: AsyncGenerator[LabEvent, None]) -> LabEvent | None:
    return await anext(events, None)
