"""Provide the llama.cpp engine: ``LlamaCppEngine`` for other threads and loops, and its state ``LlamaCppCore``.

The models are computed in other processes. Queue, slots, deadlines and ends of requests are implemented here, because
llama.cpp's own server lacks them: it cannot cancel a waiting request, and a full cache ends all requests (both
measured).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from lmx_lab.engine.admission import LOAD_FIRST, AdmissionControl, Permit
from lmx_lab.engine.interface import Capabilities, EngineHost
from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.memory_plan import plan_context
from lmx_lab.engine.llama_cpp.model import HostedModel, host_model, read_draft
from lmx_lab.engine.llama_cpp.prepare import LlamaTokenizer
from lmx_lab.engine.llama_cpp.process import PACKAGE, is_installed, require_installed
from lmx_lab.engine.llama_cpp.slots import LlamaSlots
from lmx_lab.engine.loop_engine import LoopEngine, TextTasks, deadline
from lmx_lab.engine.memory import limit_bytes, total_bytes
from lmx_lab.engine.preparer import encode_prompt, prepare
from lmx_lab.engine.requests import ChatPrompt, EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.stream import Answer, Pending
from lmx_lab.engine.tokenizing.templates import try_template
from lmx_lab.engine.validation import check_options, check_token_ids
from lmx_lab.errors import EngineError, LabError, NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, EngineState, PinnedModel, TokenTotals
from lmx_lab.values.models import Kind, LoadReport, LoadSpec, ModelEntry
from lmx_lab.weights.facts import read_gguf
from lmx_lab.weights.files import in_thread

if TYPE_CHECKING:
    from lmx_lab.engine.llama_cpp.texts import LlamaTexts

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class LlamaResident:
    """A model in its process, and the requests for it."""

    hosted: HostedModel
    answering: LlamaSlots
    texts: TextTasks = field(default_factory=TextTasks)
    watch: asyncio.Task[None] | None = None
    """Waits for an unexpected end of the process."""

    @property
    def entry(self) -> ModelEntry:
        return self.hosted.entry

    @property
    def slots(self) -> int | None:
        """Number of requests that are decoded in parallel; None for encoders."""
        return self.hosted.plan.slots if self.entry.kind == "chat" else None


class LlamaCppCore:
    """The state of the engine: one *main* model of any kind, and pinned encoders. See ``EngineCore``."""

    def __init__(self, settings: Settings, host: EngineHost) -> None:
        self._settings = settings
        self._host = host
        self._main: LlamaResident | None = None
        self._pinned: dict[Kind, LlamaResident] = {}
        self._rendering: set[asyncio.Task[dict[str, Any]]] = set()
        self._totals = TokenTotals()
        self._starting: set[asyncio.Task[HostedModel]] = set()
        self._dropping: set[asyncio.Task[None]] = set()
        self._closed: LabError | None = None
        self.failure: LabError | None = None
        self.snapshot = EngineSnapshot(memory_total_bytes=total_bytes())
        self._refreshing = asyncio.create_task(self._refresh(), name="lmx-lab llama.cpp engine")

    # Models

    async def load(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """See ``InferenceEngine``."""
        started = time.perf_counter()
        self._main = await self._start(entry, spec)
        self.failure = None
        self._publish()
        return self.snapshot.load_report(time.perf_counter() - started)

    async def unload(self) -> int:
        """See ``InferenceEngine``."""
        main, self._main, self.failure = self._main, None, None
        freed = 0
        if main is not None:
            freed = main.hosted.process.memory_bytes
            await self._drop(main, NotLoadedError(f"{main.entry.id} was unloaded before this request ended"))
        self._publish()
        return freed

    async def pin(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """See ``InferenceEngine``."""
        started, before = time.perf_counter(), self._pinned.get(entry.kind)
        pinned = self._pinned[entry.kind] = await self._start(entry, spec, replaced=before)
        if before is not None:
            await self._drop(before, NotLoadedError(f"{entry.id} was pinned in place of {before.entry.id}"))
        self._publish()
        load_time_ms = (time.perf_counter() - started) * 1e3
        return LoadReport(model=entry.id, load_time_ms=load_time_ms, vram_gb=pinned.hosted.memory_bytes / 1e9)

    async def unpin(self, kind: Kind) -> None:
        """See ``InferenceEngine``."""
        if (pinned := self._pinned.pop(kind, None)) is not None:
            await self._drop(pinned, NotLoadedError(f"{pinned.entry.id} was unloaded before this request ended"))

    async def close(self, error: LabError) -> None:
        """See ``EngineCore``."""
        self._closed = error
        self._refreshing.cancel()
        for rendering in self._rendering:
            rendering.cancel()
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        residents, self._main, self._pinned = self._residents(), None, {}
        for resident in residents:
            await self._drop(resident, error)
        # An unload or a pin may be in progress, whose process would otherwise outlive the loop.
        while self._dropping:
            await asyncio.wait(list(self._dropping))
        self._publish()

    async def _start(
        self, entry: ModelEntry, spec: LoadSpec, *, replaced: LlamaResident | None = None
    ) -> LlamaResident:
        """Start a process with this model, and return the model.

        Args:
            replaced: A model that is dropped afterwards, whose memory is therefore available.
        """
        others = [resident for resident in self._residents() if resident is not replaced]
        used = self._host.used_by_others() + sum(resident.hosted.memory_bytes for resident in others)
        limit = limit_bytes(self._settings.memory_limit_bytes) - used
        if (error := self._closed) is not None:
            raise type(error)(error.message)
        task = asyncio.create_task(host_model(entry, spec, self._settings, limit_bytes=limit))
        self._starting.add(task)
        try:
            hosted = await task
        except asyncio.CancelledError:
            if not task.cancelled() and task.exception() is None:
                # The model became ready at the moment of the cancellation.
                await task.result().process.stop()
            if (error := self._closed) is not None:
                raise type(error)(error.message) from None
            raise
        finally:
            self._starting.discard(task)
        resident = LlamaResident(
            hosted=hosted,
            answering=LlamaSlots(hosted, self._totals, turns=self._host.turns, on_change=self._publish),
        )
        resident.watch = asyncio.create_task(self._watch(resident), name=f"lmx-lab watches {entry.id}")
        return resident

    async def _drop(self, resident: LlamaResident, error: LabError) -> None:
        """End the remaining requests of a model, and its process. This continues if the caller is cancelled."""
        if resident.watch is not None:
            resident.watch.cancel()
            # The frame of the cancelled task refers to the model.
            resident.watch = None
        task = asyncio.create_task(self._end_resident(resident, error), name=f"lmx-lab drop of {resident.entry.id}")
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)
        await asyncio.shield(task)
        self._publish()

    async def _end_resident(self, resident: LlamaResident, error: LabError) -> None:
        await resident.answering.close(error)
        await resident.texts.end_all(error)
        if resident.hosted.slot_files is not None:
            await resident.hosted.slot_files.stop()
        await resident.hosted.process.stop()
        # Ends their process, too, which would otherwise live until the next garbage collection.
        resident.hosted.grammars = None

    async def _watch(self, resident: LlamaResident) -> None:
        """Handle an unexpected end of the process."""
        await resident.hosted.process.died.wait()
        error = resident.hosted.death_error()
        log.error("%s", error.message)
        resident.watch, resident.hosted.memory_bytes = None, 0
        if resident is self._main:
            self._main, self.failure = None, error
        self._pinned = {kind: pinned for kind, pinned in self._pinned.items() if pinned is not resident}
        self._publish()
        await self._drop(resident, error)
        self._host.lost_model(resident.hosted.process.ended_by_request)

    # Requests

    async def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool) -> None:
        """See ``InferenceEngine``."""
        for resident in self._residents():
            resident.answering.answers.end_requests(admission, error, queued_only=queued_only)
            resident.answering.answers.deliver()
            if not queued_only:
                await resident.texts.end(admission, error)

    async def accept(
        self,
        entry: ModelEntry,
        request: GenerationRequest,
        permits: Sequence[Permit],
        reader: asyncio.AbstractEventLoop,
    ) -> list[Answer]:
        """See ``EngineCore``. The prompt is computed separately for each answer.

        If the caller was cancelled in the meantime, the streams are dropped, which cancels the generations.
        """
        arrived_at, resident = time.perf_counter(), self._resident_of(entry)
        timeout_s = request.timeout_s or self._settings.request_timeout_s
        preparing = prepare(
            self._tokenizer(resident), request, permits, reader=reader, arrived_at=arrived_at, timeout_s=timeout_s
        )
        generations = await self._prepare(preparing, resident, permits[0], arrived_at, timeout_s)
        for generation in generations:
            generation.peak_memory_bytes = resident.hosted.memory_bytes
        resident.answering.answers.add(generations)
        resident.answering.update()
        return resident.answering.answers.open(generations)

    async def accept_embedding(
        self, entry: ModelEntry, request: EmbeddingRequest, permit: Permit
    ) -> Pending[Embeddings]:
        """See ``EngineCore``."""
        resident, texts = self._texts_of(entry, request)
        reading = texts.read_inputs(request)
        await self._prepare(reading, resident, permit, texts.arrived_at, texts.timeout_s)
        return self._compute(resident, texts, texts.embeddings(request.dimensions), permit)

    async def accept_rerank(self, entry: ModelEntry, request: RerankRequest, permit: Permit) -> Pending[Ranking]:
        """See ``EngineCore``."""
        resident, texts = self._texts_of(entry, request)
        if entry.kind == "rerank":
            pairs = texts.read_pairs(request)
            documents = await self._prepare(pairs, resident, permit, texts.arrived_at, texts.timeout_s)
            work = texts.head_ranking(request.query, documents, raw=request.raw_scores)
            return self._compute(resident, texts, work, permit)
        reading = texts.read_documents(request)
        await self._prepare(reading, resident, permit, texts.arrived_at, texts.timeout_s)
        return self._compute(resident, texts, texts.cosine_ranking(), permit)

    async def encode(self, entry: ModelEntry, request: GenerationRequest) -> list[int]:
        """See ``InferenceEngine``."""
        return (await encode_prompt(self._tokenizer(self._resident_of(entry)), request))[0]

    async def decode(self, entry: ModelEntry, tokens: Sequence[int]) -> str:
        """See ``InferenceEngine``."""
        hosted = self._hosted_with(entry, tokens)
        return str((await hosted.connection.post("/detokenize", {"tokens": list(tokens)}))["content"])

    async def render(self, entry: ModelEntry, request: GenerationRequest) -> str:
        """See ``InferenceEngine``."""
        assert isinstance(request.prompt, ChatPrompt)
        return await self._tokenizer(self._resident_of(entry)).render(request, request.prompt)

    async def token_bytes(self, entry: ModelEntry, tokens: Sequence[int]) -> list[bytes]:
        """See ``InferenceEngine``."""
        known = (await self._hosted_with(entry, tokens).load_token_table()).tokens
        return [known[token] for token in tokens]

    def _hosted_with(self, entry: ModelEntry, tokens: Sequence[int]) -> HostedModel:
        """Return a model in memory, whose vocabulary contains these tokens.

        Raises:
            NotLoadedError, InvalidRequestError: see ``InferenceEngine.decode``.
        """
        hosted = self._resident_of(entry).hosted
        check_token_ids(tokens, "tokens", entry, hosted.vocabulary_size)
        return hosted

    def _tokenizer(self, resident: LlamaResident) -> LlamaTokenizer:
        return LlamaTokenizer(hosted=resident.hosted, rendering=self._rendering)

    def _resident_of(self, entry: ModelEntry) -> LlamaResident:
        """Return the model in memory that was loaded or pinned with this entry object.

        Raises:
            NotLoadedError, EngineDeadError: the model is no longer in memory.
        """
        for resident in self._residents():
            if resident.entry is entry:
                return resident
        if (failure := self.failure) is not None:
            raise type(failure)(failure.message)
        raise NotLoadedError(f"{entry.id} has been unloaded; {LOAD_FIRST}")

    def _texts_of(
        self, entry: ModelEntry, request: EmbeddingRequest | RerankRequest
    ) -> tuple[LlamaResident, LlamaTexts]:
        # Imported here, because a model is loaded later if numpy is imported first, and only encoders need it.
        from lmx_lab.engine.llama_cpp.texts import LlamaTexts

        resident = self._resident_of(entry)
        timeout_s = request.timeout_s or self._settings.request_timeout_s
        return resident, LlamaTexts(resident.hosted, timeout_s, time.perf_counter())

    async def _prepare(
        self, work: Coroutine[Any, Any, T], resident: LlamaResident, permit: Permit, arrived_at: float, timeout_s: float
    ) -> T:
        """Wait for the preparation of a request, and return its result. The model may be unloaded in the meantime.

        Raises:
            NotLoadedError: the model was unloaded, or is about to be.
            GenerationTimeoutError: the preparation exceeds the time limit of the request.
        """
        hosted = resident.hosted
        hosted.progress_at = time.perf_counter()
        try:
            async with deadline(arrived_at, timeout_s):
                result = await work
        except RefusedError as exc:
            raise EngineError(f"llama.cpp could not prepare this request: {exc.message}") from exc
        except EngineError:
            # If the model was unloaded, or its process died, that is the reason, and these calls raise its error.
            permit.check()
            self._resident_of(resident.entry)
            raise
        except LabError:
            raise
        except Exception as exc:
            log.exception("a request for %s could not be started", resident.entry.id)
            raise EngineError(f"the request could not be started: {type(exc).__name__}: {exc}") from exc
        permit.check()
        self._resident_of(resident.entry)
        return result

    def _compute(
        self, resident: LlamaResident, texts: LlamaTexts, work: Coroutine[Any, Any, T], permit: Permit
    ) -> Pending[T]:
        def count() -> None:
            resident.hosted.progress_at = time.perf_counter()
            self._totals.encoded_tokens += texts.computed_tokens
            self._publish()

        pending = resident.texts.start(work, permit, count)
        self._publish()
        return pending

    # Results and the snapshot

    def _residents(self) -> list[LlamaResident]:
        return [*self._pinned.values(), *([self._main] if self._main is not None else [])]

    def _publish(self) -> None:
        """Replace the snapshot."""
        main, residents = self._main, self._residents()
        state: EngineState = "ready" if main is not None else "dead" if self.failure is not None else "empty"
        totals = replace(self._totals)
        for resident in residents:
            resident.answering.answers.count(totals)
        texts = sum(len(resident.texts) for resident in residents)
        used_bytes = sum(resident.hosted.memory_bytes for resident in residents)
        self.snapshot = replace(
            self.snapshot,
            state=state,
            entry=main.entry if main is not None else None,
            model_memory_bytes=main.hosted.memory_bytes if main is not None else 0,
            context_length=main.hosted.context_length if main is not None else None,
            slots=main.slots if main is not None else None,
            batch_invariant=main is None or main.hosted.batch_invariant,
            pinned=tuple(
                PinnedModel(entry=pinned.entry, memory_bytes=pinned.hosted.memory_bytes)
                for pinned in self._pinned.values()
            ),
            active_requests=sum(len(resident.answering.answers.scheduler.running) for resident in residents) + texts,
            queued_requests=sum(len(resident.answering.answers.scheduler.queued) for resident in residents),
            encode_requests=texts,
            slot_free_s=main.answering.answers.slot_free_s if main is not None else 1.0,
            memory_used_bytes=used_bytes,
            memory_peak_bytes=max(self.snapshot.memory_peak_bytes, used_bytes),
            progress_at=max((resident.hosted.progress_at for resident in residents), default=self.snapshot.progress_at),
            totals=totals,
        )

    async def _refresh(self) -> None:
        """Replace the snapshot and measure memory at regular intervals."""
        measured_at = 0.0
        while True:
            # Tokens reach their readers without using this loop.
            await asyncio.sleep(0.1)
            now = time.perf_counter()
            if now - measured_at >= 0.5:
                measured_at = now
                self._measure()
            if self._residents():
                self._publish()

    def _measure(self) -> None:
        # This is not part of ``_refresh``, because its variables would keep a model in memory after the unload.
        for resident in self._residents():
            resident.hosted.measure()


class LlamaCppEngine(LoopEngine[LlamaCppCore]):
    """``InferenceEngine`` for ``.gguf`` files."""

    capabilities = Capabilities(
        thinking_budget=False,
        logprobs_with_own_tools=False,
        input_types=False,
        steering=False,
    )
    thread_name = "lmx-lab-gguf"

    async def _make_core(self) -> LlamaCppCore:
        return LlamaCppCore(self._settings, self._host)

    @functools.cached_property
    def _version(self) -> str:
        return f"llama.cpp-{version(PACKAGE)}" if is_installed() else "llama.cpp"

    @property
    def fingerprint(self) -> str:
        """See ``InferenceEngine``. The last suffix warns that other requests may change the bits of an answer."""
        now = self.snapshot
        copy = now.entry.copy if now.entry is not None else None
        version = self._version if copy is None else f"{self._version}-{copy.type.lower()}-copy"
        return version if now.batch_invariant else f"{version}-batch-dependent"

    async def check(self, entry: ModelEntry, spec: LoadSpec, *, other_bytes: int = 0) -> None:
        """See ``InferenceEngine``."""

        def check() -> str | None:
            require_installed(entry.path)
            check_options(entry, spec)
            limit = limit_bytes(self._settings.memory_limit_bytes) - other_bytes
            header = read_gguf(entry.path)
            draft = read_draft(entry)
            plan_context(entry, header, slots=self._settings.slots, limit_bytes=limit, spec=spec, draft=draft)
            return header.text("tokenizer.chat_template")

        template = await in_thread(check, name="lmx-lab-check")
        if template is not None and entry.kind == "chat":
            await try_template(template, entry.path)
