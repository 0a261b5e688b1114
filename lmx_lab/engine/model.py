"""Describe what an engine is, and hold one model in memory: ``LoadedModel`` accepts its requests until ``close``.

An engine checks and loads models. It does not know which of them is the main model, or why one is loaded or unloaded:
``engine.manager`` decides that. The tests in ``tests/contract/engines`` check every engine; the table in
``docs/server.md`` describes where engines differ.

A ``LoadedModel`` is a handle that belongs to the loop of the manager. It refers to weights only if the engine keeps
them on that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from lmx_lab.engine.memory import Budget
from lmx_lab.engine.requests import (
    ChatPrompt,
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    Ranking,
    RerankRequest,
    TraceRequest,
)
from lmx_lab.engine.scheduler import LOAD_FIRST, AdmissionControl, Permit, Turns, deadline
from lmx_lab.engine.stream import Answer, Origin
from lmx_lab.engine.texts import Jobs, TextJob, TextTokens, cosines, shorten
from lmx_lab.engine.validation import check_characters, check_dimensions, check_messages, check_token_ids
from lmx_lab.errors import EngineError, LabError, NotLoadedError, QueueFullError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import COUNTERS, BlasReport, ModelState, TokenTotals
from lmx_lab.values.models import LoadSpec, ModelEntry, TimeToLive, Unloading
from lmx_lab.values.outputs import InputType, RerankMethod, Vectors
from lmx_lab.values.plan import LoadPlan
from lmx_lab.values.tracing import Trace

if TYPE_CHECKING:
    from lmx_lab.engine.answers import Answers, Generation
    from lmx_lab.engine.preparer import Tokenizer

log = logging.getLogger(__name__)
Row = TypeVar("Row")
Prepare: TypeAlias = "Callable[[Tokenizer[Row]], Awaitable[list[Generation[Row]]]]"


@dataclass(frozen=True, kw_only=True)
class EngineHost:
    """What the manager passes to each engine. The functions may be called from any thread."""

    budget: Budget = field(default_factory=lambda: Budget(None))
    """The memory that all engines share."""
    idle: Callable[[], None] = lambda: None
    """Called when a model has no requests left."""
    lost: Callable[[LoadedModel[Any]], None] = lambda _: None
    """Called with a model that left memory without ``close``: it ran out of memory, or its process or thread ended.
    ``LoadedModel.lost`` is set by then."""
    turns: Turns = field(default_factory=Turns)
    """When a client without a slot gets a slot of another client."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """The memory of an engine in bytes. The limit and the total are shared by all engines, unless a GPU has its own."""

    total: int
    limit: int
    """How much models and caches may use together."""
    used: int | None = None
    """What all models and requests of the engine use now; None if that is the sum of its models."""
    peak: int | None = None
    """The largest value of ``used`` so far."""
    is_of_device: bool = False
    """Whether it is the memory of a GPU, which engines on the CPU do not use."""


class Engine(Protocol):
    """An engine. Belongs to the loop of the manager; ``memory``, ``blas`` and ``stop`` may be used from any thread.

    Errors are ``LabError`` values. Cancelling ``check`` or ``load`` ends it, and releases its memory and its processes;
    a thread that waits for a disk is abandoned.
    """

    @property
    def memory(self) -> EngineMemory:
        """Never blocks."""

    @property
    def blas(self) -> BlasReport | None:
        """The BLAS that computes its models; None if it uses none."""

    async def plan(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> LoadPlan:
        """Return what a load of a model would use in memory, by the headers of its files. A model that is too large
        does not raise an error. ``check`` compares the same numbers with ``room_bytes``.

        Args:
            room_bytes: Memory that the model and its requests may use.

        Raises:
            UnusableModelError: the engine cannot run this model.
        """

    async def check(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> None:
        """Check that a model can be loaded, before another one is unloaded for it.

        Reads files on threads, and tries the model's tokenizer and chat template in processes with limits.

        Args:
            room_bytes: Memory that the model and its requests may use.

        Raises:
            UnusableModelError: the engine cannot run this model, or not with these options.
            OutOfMemoryError: the model is larger than ``room_bytes``.
        """

    async def load(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> LoadedModel[Any]:
        """Load a model after ``check``.

        Raises:
            UnusableModelError, OutOfMemoryError: the model is not in memory.
        """

    def stop(self) -> None:
        """Release everything after all models were closed. Idempotent; blocks."""


class LoadedModel(ABC, Generic[Row]):
    """A model in memory.

    Every accepted request ends exactly once, with a result or an error, even if the model is unloaded or its engine
    dies, and releases its permit then. ``state``, ``lost`` and ``admission`` may be read on any thread.

    Args:
        fingerprint: Name and version of the library that computes the model, such as ``mlx-0.32.4``.
        tokenizer: Converts the prompts of a chat model; None for encoders.
        answers: The accepted generations of a chat model; None for encoders.
        dimensions: Number of components of a vector; None if the model computes no vectors.
    """

    max_characters = 64 * 2**20
    """Maximum number of characters of all texts that are being tokenized. A single request may have more."""
    pair_method: RerankMethod = "cross-encoder"
    """How a reranker scores pairs."""

    def __init__(
        self,
        entry: ModelEntry,
        spec: LoadSpec,
        settings: Settings,
        host: EngineHost,
        *,
        fingerprint: str,
        tokenizer: Tokenizer[Row] | None = None,
        answers: Answers[Row] | None = None,
        dimensions: int | None = None,
        context_length: int | None = None,
        slots: int | None = None,
    ) -> None:
        warnings = [entry.warning, tokenizer.chat_format.warning if tokenizer is not None else ""]
        self.entry = replace(entry, warning="; ".join(filter(None, warnings)))
        self.spec = spec
        self.fingerprint = fingerprint
        self.admission = AdmissionControl(entry.id, limit=settings.slots + settings.queue_limit, on_idle=host.idle)
        self.pinned = bool(spec.pin)
        """Whether it stays in memory until it is unloaded by request. Only the manager reads this and ``ttl_s``."""
        self.ttl_s = settings.idle_unload_s
        """Time without requests after which it is unloaded; None if it stays."""
        self.keep(ttl_s=spec.ttl_s)
        self.lost: LabError | None = None
        """Why the model left memory without ``close``; None if it did not."""
        self.encoded_tokens = 0
        """Number of tokens of texts that were computed."""
        self.context_length = context_length
        self.slots = slots
        self._settings = settings
        self._tokenizer = tokenizer
        self._answers = answers
        self._dimensions = dimensions
        self._jobs = Jobs()
        self.worked_at = time.perf_counter()
        """When a request last arrived, or something was computed for it outside of ``answers``."""
        self._closing: asyncio.Task[int] | None = None
        self._characters = 0
        """Number of characters of the texts that are being tokenized."""

    # State

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory of the model; 0 if it was lost."""

    @property
    def prefix_cache_bytes(self) -> int:
        """Memory of the caches of ended requests, if it is known."""
        return 0

    @property
    def progress_at(self) -> float:
        """See ``ModelState``."""
        return max(self.worked_at, self._answers.progress_at if self._answers is not None else 0.0)

    @property
    def totals(self) -> TokenTotals:
        """Counts since the load."""
        totals = self._answers.totals if self._answers is not None else TokenTotals()
        totals.encoded_tokens += self.encoded_tokens
        return totals

    def keep(self, *, pin: bool | None = None, ttl_s: TimeToLive | None = None) -> None:
        """Change how long the model stays in memory; see ``ModelManager.keep``."""
        self.pinned = self.pinned if pin is None else pin
        if ttl_s is not None:
            self.ttl_s = None if ttl_s == "never" else ttl_s

    @property
    def spec_now(self) -> LoadSpec:
        """How to load it again so that it stays in memory as long as now."""
        return replace(self.spec, pin=self.pinned or None, ttl_s="never" if self.ttl_s is None else self.ttl_s)

    def keep_as(self, before: LoadedModel[Any], spec: LoadSpec) -> None:
        """Let the model stay in memory as long as one that it replaces, unless the load sets its own values."""
        if spec.pin is None:
            self.pinned = before.pinned
        if spec.ttl_s is None:
            self.ttl_s = before.ttl_s

    def state(self, *, unloading: Unloading | None = None) -> ModelState:
        """Return the present state. Never blocks."""
        jobs, started, scheduler = len(self._jobs), self._jobs.running, None
        if self._answers is not None:
            scheduler = self._answers.scheduler
        return ModelState(
            entry=self.entry,
            memory_bytes=self.memory_bytes,
            pinned=self.pinned,
            ttl_s=self.ttl_s,
            idle_since=None if self.admission.active else self.admission.used_at,
            unloading=unloading,
            context_length=self.context_length,
            slots=self.slots,
            active_requests=started + (len(scheduler.running) if scheduler is not None else 0),
            queued_requests=jobs - started + (len(scheduler.queued) if scheduler is not None else 0),
            prefix_cache_bytes=self.prefix_cache_bytes,
            progress_at=self.progress_at,
            totals=self.totals,
        )

    @property
    def slot_free_s(self) -> float:
        """Estimated seconds until a running answer ends; at least 1."""
        return self._answers.slot_free_s if self._answers is not None else 1.0

    # End

    async def end(self, error: LabError, *, queued_only: bool = False) -> None:
        """End the requests with an error; with ``queued_only``, only those that have not started."""
        await self._end_answers(error, queued_only=queued_only)
        await self._jobs.end(error, queued_only=queued_only)

    async def _end_answers(self, error: LabError, *, queued_only: bool) -> None:
        if self._answers is not None:
            self._answers.end_all(error, queued_only=queued_only)
            self._answers.deliver()

    async def close(self, error: LabError) -> int:
        """End the remaining requests with an error, and release the memory.

        Returns the number of bytes released; 0 if the model was lost before.

        This continues if the caller is cancelled. Idempotent.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(error), name=f"lmx-lab unload of {self.entry.id}")
        freed = await asyncio.shield(self._closing)
        return freed if self.lost is None else 0

    @abstractmethod
    async def _close(self, error: LabError) -> int:
        """Do what ``close`` promises. Called once."""

    def check(self) -> None:
        """Check that the model is in memory.

        Raises:
            NotLoadedError: it was unloaded.
            LabError: it was lost, for example because memory ran out.
        """
        if (lost := self.lost) is not None:
            raise type(lost)(lost.message)
        if self._closing is not None:
            raise NotLoadedError(f"{self.entry.id} has been unloaded; {LOAD_FIRST}")

    # Requests

    async def generate(
        self, request: GenerationRequest, permits: Sequence[Permit], reader: asyncio.AbstractEventLoop
    ) -> list[Answer]:
        """Accept a request for one answer for each permit, all or none. Each answer has its own seed.

        Closing an answer cancels its generation in any phase: while it is queued, computes its prompt, or decodes.

        Args:
            reader: The event loop on which the answers are read.

        Raises:
            LabError: as ``ModelManager.generate``.
        """
        tokenizer, answers = self._chat()
        # Imported here, because llguidance is slow to import, and encoders do not need it.
        from lmx_lab.engine.preparer import prepare

        async with self._accepting(permits[0], request.timeout_s) as (arrived_at, timeout_s):
            prepared = partial(
                prepare, request=request, permits=permits, reader=reader, arrived_at=arrived_at, timeout_s=timeout_s
            )
            generations = await self._prepare(prepared, tokenizer, request, permits)
        # Opened first: if the caller is cancelled from now on, the answers are dropped, which cancels the generations.
        opened = answers.open(generations)
        origin = Origin(entry=self.entry, spec=self.spec, fingerprint=self.fingerprint_of(generations[0]))
        for answer in opened:
            answer.origin = origin
        await self._add(generations)
        return opened

    def fingerprint_of(self, generation: Generation[Row]) -> str:
        """Return the fingerprint for one answer, which may depend less on other requests than those to others."""
        return self.fingerprint

    async def _prepare(
        self,
        prepare: Prepare[Row],
        tokenizer: Tokenizer[Row],
        request: GenerationRequest,
        permits: Sequence[Permit],
    ) -> list[Generation[Row]]:
        """Return a generation for each permit, which ``prepare`` makes with a tokenizer; see ``preparer.prepare``."""
        return await prepare(tokenizer)

    async def _add(self, generations: Sequence[Generation[Row]]) -> None:
        """Queue the answers to one request."""
        raise NotImplementedError

    async def embed(self, request: EmbeddingRequest, permit: Permit) -> asyncio.Task[Embeddings]:
        """Accept texts to be embedded, and return the task that computes them. Cancelling it cancels the work.

        Raises:
            LabError: as ``ModelManager.embed``.
        """
        check_dimensions(request.dimensions, self._dimensions, self.entry)
        with self._tokenizing(request.inputs):
            async with self._accepting(permit, request.timeout_s) as (arrived_at, timeout_s):
                texts = await self._read_texts(
                    request.inputs, input_type=request.input_type, truncate=request.truncate, param="input"
                )
        job = self._job(texts, arrived_at)

        async def work() -> Embeddings:
            rows = await self._rows(job, timeout_s)
            return Embeddings(vectors=shorten(rows, request.dimensions), report=job.report(self.entry.id))

        return self._jobs.start(work(), permit, is_started=lambda: job.started_at > 0)

    async def rerank(self, request: RerankRequest, permit: Permit) -> asyncio.Task[Ranking]:
        """Accept documents to be ranked, and return the task that computes their scores. Raises the same as ``embed``.

        A reranker scores pairs of the query and a document; an embedding model compares their vectors.
        """
        by_pairs = self.entry.kind == "rerank"
        documents: Sequence[str] = request.documents
        truncate = request.truncate or request.max_document_tokens is not None
        with self._tokenizing(request.documents):
            async with self._accepting(permit, request.timeout_s) as (arrived_at, timeout_s):
                if request.max_document_tokens is not None:
                    for at, document in enumerate(documents):
                        check_characters(document, f"documents.{at}")
                    documents = await self._beginnings(documents, request.max_document_tokens)
                if by_pairs:
                    texts = await self._read_pairs(request.query, documents, truncate=truncate)
                else:
                    texts = [
                        *await self._read_texts([request.query], input_type="query", truncate=False, param="query"),
                        *await self._read_texts(documents, input_type="document", truncate=truncate, param="documents"),
                    ]
        job = self._job(texts, arrived_at, raw=request.raw_scores)

        async def work() -> Ranking:
            rows = await self._rows(job, timeout_s)
            return Ranking(
                scores=rows if by_pairs else cosines(rows),
                method=self.pair_method if by_pairs else "cosine",
                report=job.report(self.entry.id),
            )

        return self._jobs.start(work(), permit, is_started=lambda: job.started_at > 0)

    async def _rows(self, job: TextJob, timeout_s: float) -> Vectors:
        async with deadline(job.arrived_at, timeout_s, "send fewer texts"):
            return await self._compute(job)

    def _job(self, texts: Sequence[TextTokens], arrived_at: float, *, raw: bool = False) -> TextJob:
        return TextJob(texts=texts, arrived_at=arrived_at, raw=raw)

    async def _read_texts(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        input_type: InputType | None,
        truncate: bool,
        param: str,
    ) -> list[TextTokens]:
        """Check and tokenize texts.

        Args:
            param: Name of the field for errors; those of several texts contain the index, except for ``query``.
        """
        raise NotImplementedError

    async def _read_pairs(self, query: str, documents: Sequence[str], *, truncate: bool) -> list[TextTokens]:
        """Check and tokenize the pairs of a query and each document, for a reranker."""
        raise NotImplementedError

    async def _beginnings(self, documents: Sequence[str], tokens: int) -> list[str]:
        """Return the beginnings of documents, up to a number of tokens, without special ones."""
        raise NotImplementedError

    async def _compute(self, job: TextJob) -> Vectors:
        """Return a vector or a score for each text. Cancelling the caller cancels the work."""
        raise NotImplementedError

    async def trace(self, request: TraceRequest, permit: Permit) -> asyncio.Task[Trace]:
        """Accept a trace, and return the task that computes it. Cancelling it cancels the work.

        Raises:
            LabError: as ``ModelManager.trace``.
            NotImplementedError: the engine does not compute traces.
        """
        raise NotImplementedError

    async def encode(self, request: GenerationRequest) -> list[int]:
        """Return the token ids of a request's prompt, which may be longer than the model's context.

        Raises:
            LabError: as ``ModelManager.encode``.
        """
        from lmx_lab.engine.preparer import encode_prompt

        async with self._converting() as tokenizer:
            return (await encode_prompt(tokenizer, replace(request, is_counted=True)))[0]

    async def render(self, request: GenerationRequest) -> str:
        """Return the text that the chat template makes of a chat prompt.

        Raises:
            NotLoadedError: the model was unloaded.
            InvalidRequestError: there is no template, or it refuses the messages or exceeds a limit.
        """
        assert isinstance(request.prompt, ChatPrompt)
        async with self._converting() as tokenizer:
            check_messages(request.prompt.messages)
            return await tokenizer.render(replace(request, is_counted=True), request.prompt)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids as the model's tokenizer shows it.

        Raises:
            NotLoadedError: the model was unloaded.
            InvalidRequestError: a token is not in the vocabulary.
        """
        async with self._converting() as tokenizer:
            check_token_ids(tokens, "tokens", self.entry, tokenizer.vocabulary_size)
            return await tokenizer.decoded(tokens)

    async def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token adds to a text; those of a special token are its name.

        Raises:
            NotLoadedError, InvalidRequestError: as ``decode``.
        """
        async with self._converting() as tokenizer:
            check_token_ids(tokens, "tokens", self.entry, tokenizer.vocabulary_size)
            return await tokenizer.token_bytes(tokens)

    # Parts of requests

    def _chat(self) -> tuple[Tokenizer[Row], Answers[Row]]:
        if self._tokenizer is None or self._answers is None:
            raise NotLoadedError(f"{self.entry.id} is not a chat model; {LOAD_FIRST}")
        return self._tokenizer, self._answers

    @contextlib.asynccontextmanager
    async def _accepting(self, permit: Permit, timeout_s: float | None) -> AsyncIterator[tuple[float, float]]:
        """Prepare a request in the block, and check afterwards that the model still accepts it. Provides the time of
        its arrival and its time limit.

        Args:
            timeout_s: The limit that the request sets; None for that of the settings.

        Raises:
            NotLoadedError: the model was unloaded, or is about to be.
            GenerationTimeoutError: the block did not end within the time limit of the request.
            EngineError: the block failed.
        """
        self.check()
        arrived_at = self.worked_at = time.perf_counter()
        timeout_s = timeout_s or self._settings.request_timeout_s
        with self._explaining("could not be started", permit):
            async with deadline(arrived_at, timeout_s):
                yield arrived_at, timeout_s
        permit.check()
        self.check()
        self.worked_at = time.perf_counter()

    @contextlib.asynccontextmanager
    async def _converting(self) -> AsyncIterator[Tokenizer[Row]]:
        """Provide the tokenizer in the block. Raises ``EngineError`` if the block fails."""
        self.check()
        tokenizer, _ = self._chat()
        with self._explaining("failed"):
            yield tokenizer

    @contextlib.contextmanager
    def _explaining(self, failure: str, permit: Permit | None = None) -> Iterator[None]:
        """Raise ``EngineError`` with the name of the failure for an unknown error in the block."""
        try:
            yield
        except EngineError:
            # If the model was unloaded or lost in the meantime, that is the reason.
            if permit is not None:
                permit.check()
            self.check()
            raise
        except LabError:
            raise
        except Exception as exc:
            log.exception("a request for %s %s", self.entry.id, failure)
            raise EngineError(f"the request {failure}: {type(exc).__name__}: {exc}") from exc

    @contextlib.contextmanager
    def _tokenizing(self, texts: Sequence[str | Sequence[int]]) -> Iterator[None]:
        """Count the characters of texts that are being tokenized in the block.

        Raises:
            QueueFullError: all requests together would have too many characters.
        """
        characters = sum(map(len, texts))
        if self._characters and self._characters + characters > self.max_characters:
            raise QueueFullError(
                f"texts of {self._characters} characters are being tokenized, and these have {characters}; "
                f"the limit is {self.max_characters} in all; try again in 1 s",
                retry_after_s=1,
            )
        self._characters += characters
        try:
            yield
        finally:
            self._characters -= characters


class Counts:
    """Counts of tokens of all models since the start, those that have left memory included. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: list[LoadedModel[Any]] = []
        """Models whose counts are not in ``_ended``."""
        self._ended = TokenTotals()
        self._last = TokenTotals()

    def begin(self, model: LoadedModel[Any]) -> None:
        """Count a model that was loaded."""
        with self._lock:
            self._models.append(model)

    def end(self, model: LoadedModel[Any]) -> None:
        """Add the final counts of a model that has left memory. Idempotent."""
        with self._lock:
            if model in self._models:
                self._models.remove(model)
                self._ended.add(model.totals)

    def read(self) -> TokenTotals:
        """Return the counts. They never decrease, although a generation is missing for a moment when it ends."""
        with self._lock:
            totals = replace(self._ended)
            for model in self._models:
                totals.add(model.totals)
            for name in COUNTERS:
                setattr(totals, name, max(getattr(totals, name), getattr(self._last, name)))
            self._last = totals
            return replace(totals)
