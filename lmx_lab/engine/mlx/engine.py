"""Load models in MLX's format. Their weights are used on the engine's thread, to which the loaded models post requests.

Models are loaded on another thread, so that the models in memory continue to answer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Iterator, Sequence, Sized
from concurrent.futures import Future
from contextlib import suppress
from importlib.metadata import version
from typing import Any, TypeVar

import mlx.core as mx

from lmx_lab.engine.encoders.loading import LoadedEncoder, load_encoder
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.batch import MlxGeneration, MlxRow
from lmx_lab.engine.mlx.encoding import EncodeJob
from lmx_lab.engine.mlx.load import check_room, load_chat, plan_load
from lmx_lab.engine.mlx.loop import GenerationLoop
from lmx_lab.engine.mlx.steering import RequestSteering
from lmx_lab.engine.mlx.thread import LoadThread, MlxThread
from lmx_lab.engine.mlx.tokenizer import MlxTokenizer
from lmx_lab.engine.mlx.tracing import TraceJob
from lmx_lab.engine.mlx.weights import Cancellation, ChatWeights
from lmx_lab.engine.model import EngineHost, EngineMemory, LoadedModel, Prepare
from lmx_lab.engine.preparer import Tokenizer, encode_prompt, token_of
from lmx_lab.engine.requests import GenerationRequest, TraceRequest
from lmx_lab.engine.scheduler import Permit, deadline
from lmx_lab.engine.texts import TextJob, TextTokens
from lmx_lab.engine.tokenizing.encoder import SHORT_CHARACTERS
from lmx_lab.engine.tokenizing.loading import check_tokenizer_files, read_tokens
from lmx_lab.engine.tokenizing.templates import try_templates_of
from lmx_lab.engine.validation import (
    check_length,
    check_options,
    check_steered_weights,
    check_token_ids,
    check_tokens,
    check_vocabularies,
)
from lmx_lab.errors import (
    ContextLengthError,
    EngineDeadError,
    LabError,
    NotLoadedError,
    QueueFullError,
    UnusableModelError,
)
from lmx_lab.settings import Settings
from lmx_lab.values.engine import BlasReport, TokenTotals
from lmx_lab.values.models import LoadSpec, ModelEntry
from lmx_lab.values.outputs import InputType, Vectors
from lmx_lab.values.plan import LoadPlan
from lmx_lab.values.tracing import Trace
from lmx_lab.weights.files import check_files, in_thread
from lmx_lab.weights.fingerprint import known_content_digest, require_unchanged

log = logging.getLogger(__name__)
Item = TypeVar("Item", bound=Sized)
# On a GPU, the last bits of a result depend on the number of requests that are computed together.
FINGERPRINT = f"mlx-{version('mlx')}{'' if mx.default_device() == mx.cpu else '-batch-dependent'}"
CHECKED_BYTES = 2**24
"""Size of the weights after whose load the free memory is measured again, which takes 0.5 ms."""
SLICE = 256
"""Number of texts that are tokenized together, so that a request of one text need not wait for ten thousand others.
They have at most ``SHORT_CHARACTERS`` characters, unless a single text has more."""


class MlxModel(LoadedModel[MlxRow]):
    """A model whose weights are used on the engine's thread. Does not refer to them after ``close``."""

    def __init__(
        self,
        entry: ModelEntry,
        spec: LoadSpec,
        settings: Settings,
        host: EngineHost,
        *,
        thread: MlxThread,
        memory_bytes: int,
        **parts: Any,
    ) -> None:
        super().__init__(entry, spec, settings, host, fingerprint=FINGERPRINT, **parts)
        self._thread = thread
        self._memory_bytes = memory_bytes

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes if self.lost is None else 0

    @property
    def progress_at(self) -> float:
        return max(self.worked_at, self._thread.progress_at)

    async def _close(self, error: LabError) -> int:
        await self._jobs.end(error)
        try:
            return await self._thread.call(lambda thread: thread.unload(self, error))
        except EngineDeadError:
            return 0  # the thread has released all memory


class MlxChat(MlxModel):
    """A chat model in memory."""

    def __init__(
        self,
        entry: ModelEntry,
        spec: LoadSpec,
        settings: Settings,
        host: EngineHost,
        *,
        thread: MlxThread,
        weights: ChatWeights,
        tokenizer: MlxTokenizer,
    ) -> None:
        self.generating = GenerationLoop(
            weights,
            settings,
            prompt_lookup=spec.prompt_lookup is not False,
            turns=host.turns,
            post=lambda work: thread.post(lambda _: work()),
            room=thread.room,
        )
        self._weights = weakref.ref(weights)
        super().__init__(
            entry,
            spec,
            settings,
            host,
            thread=thread,
            memory_bytes=weights.traits.footprint.weights_bytes,
            tokenizer=tokenizer,
            answers=self.generating.answers,
            context_length=tokenizer.context_length,
            slots=settings.slots,
        )

    @property
    def prefix_cache_bytes(self) -> int:
        return self.generating.prefix_cache_bytes

    @property
    def totals(self) -> TokenTotals:
        totals = super().totals
        totals.prefix_disk_written_bytes = self.generating.written_bytes
        return totals

    async def _end_answers(self, error: LabError, *, queued_only: bool) -> None:
        def end(_: MlxThread) -> None:
            try:
                self.generating.answers.end_all(error, queued_only=queued_only)
            finally:
                self.generating.answers.deliver()

        # A request that is being added meanwhile is refused by its permit.
        if self.generating.answers.scheduler.idle:
            return
        try:
            await self._thread.call(end)
        except EngineDeadError:
            return  # the thread has ended all requests

    async def _prepare(
        self,
        prepare: Prepare[MlxRow],
        tokenizer: Tokenizer[MlxRow],
        request: GenerationRequest,
        permits: Sequence[Permit],
    ) -> list[MlxGeneration]:
        if any(each.weights for each in request.steer):
            digest = await in_thread(lambda: known_content_digest(self.entry))
            check_steered_weights(request.steer, self.entry, digest)
        generations = await prepare(tokenizer)
        if request.prediction:
            # A prediction that is too long is ignored, because the request can be answered without it.
            with suppress(ContextLengthError, QueueFullError):
                predicted = await tokenizer.encode(request, request.prediction, special=False, param="prediction")
                for generation in generations:
                    generation.row.predicted = predicted
        return generations

    async def _add(self, generations: Sequence[MlxGeneration]) -> None:
        """See ``LoadedModel``.

        Raises:
            NotLoadedError: the model has been unloaded, or is about to be.
            InvalidRequestError: the request has vectors that do not fit the model.
        """

        def add(thread: MlxThread) -> None:
            first, weights = generations[0], self.generating.weights
            first.permit.check()
            thread.require(self)
            if first.request.steer and weights is not None:
                steering = RequestSteering.of(first.request.steer, weights.hook_points)
                for generation in generations:
                    generation.row.steering = steering
            self.generating.add(generations)

        await self._thread.call(add)

    async def trace(self, request: TraceRequest, permit: Permit) -> asyncio.Task[Trace]:
        tokenizer, _ = self._chat()
        async with self._accepting(permit, request.timeout_s) as (arrived_at, timeout_s):
            texts: list[list[int]] = [[], []]
            for at, prompt in enumerate((request.prompt, request.clean)):
                if prompt is not None:
                    part = GenerationRequest(prompt=prompt, max_tokens=0)
                    check_tokens(part, self.entry, tokenizer.vocabulary_size)
                    texts[at], _ = await encode_prompt(tokenizer, part)
                    check_length(part, texts[at], self.entry, tokenizer.context_length)
            tokens, clean = texts
            chosen = []
            for param in ("token", "answer", "other"):
                if (named := getattr(request.work, param, None)) is not None:
                    token = await token_of(tokenizer, named, param)
                    check_token_ids([token], param, self.entry, tokenizer.vocabulary_size)
                    chosen.append(token)
        job = TraceJob(work=request.work, tokens=tokens, clean=clean, chosen=chosen, model=self, weights=self._weights)

        async def work() -> Trace:
            async with deadline(arrived_at, timeout_s, "trace a shorter text, or fewer positions"):
                return await self._thread.compute(self._thread.tracing, job)

        return self._jobs.start(work(), permit, is_started=lambda: job.started_at > 0)


class MlxEncoder(MlxModel):
    """An embedder or a reranker in memory."""

    def __init__(
        self,
        entry: ModelEntry,
        spec: LoadSpec,
        settings: Settings,
        host: EngineHost,
        *,
        thread: MlxThread,
        encoder: LoadedEncoder,
    ) -> None:
        super().__init__(
            entry,
            spec,
            settings,
            host,
            thread=thread,
            memory_bytes=encoder.memory_bytes,
            dimensions=encoder.dimensions,
            context_length=encoder.context_length,
        )
        self.pair_method = encoder.method
        self._texts = encoder.texts
        self._encoder = weakref.ref(encoder)

    async def _read_texts(
        self, texts: Sequence[str | Sequence[int]], *, input_type: InputType | None, truncate: bool, param: str
    ) -> list[TextTokens]:
        read: list[TextTokens] = []
        for at, part in _slices(texts):
            first = None if param == "query" else at
            read += await self._texts.texts(part, input_type=input_type, truncate=truncate, param=param, first=first)
        return read

    async def _read_pairs(self, query: str, documents: Sequence[str], *, truncate: bool) -> list[TextTokens]:
        read: list[TextTokens] = []
        for first, part in _slices(documents, beside=len(query)):
            read += await self._texts.pairs(query, part, truncate=truncate, first=first)
        return read

    async def _beginnings(self, documents: Sequence[str], tokens: int) -> list[str]:
        return [text for _, part in _slices(documents) for text in await self._texts.beginnings(part, tokens)]

    def _job(self, texts: Sequence[TextTokens], arrived_at: float, *, raw: bool = False) -> EncodeJob:
        return EncodeJob(texts=texts, arrived_at=arrived_at, raw=raw, model=self, encoder=self._encoder)

    async def _compute(self, job: TextJob) -> Vectors:
        assert isinstance(job, EncodeJob)
        return await self._thread.compute(self._thread.encoding, job)


def _slices(items: Sequence[Item], *, beside: int = 0) -> Iterator[tuple[int, list[Item]]]:
    """Yield the index of the first item, and items that are tokenized together.

    Args:
        beside: Number of characters that are tokenized together with each item.
    """
    first, part, characters = 0, list[Item](), 0
    for at, item in enumerate(items):
        if part and (len(part) == SLICE or characters + len(item) + beside > SHORT_CHARACTERS):
            yield first, part
            first, part, characters = at, [], 0
        part.append(item)
        characters += len(item) + beside
    if part:
        yield first, part


class MlxEngine:
    """``Engine`` for models in MLX's format. Its thread starts with the first load, and again after it has died."""

    def __init__(self, settings: Settings, host: EngineHost) -> None:
        self._settings = settings
        self._host = host
        self.cancel_s = 5.0
        """Time for a cancelled load to end. It is exceeded only if a disk does not respond."""
        self._thread: MlxThread | None = None
        # A GPU with memory of its own has its own limit.
        self._device_bytes = memory.limit_bytes(settings.memory_limit_bytes) if memory.is_of_device() else None
        self._total_bytes = memory.total_bytes()
        self._loader: LoadThread | None = None
        """None before the first load, and after one that was abandoned."""
        self._planners: list[LoadThread] = []
        """Threads on which models were opened for a plan, and that have nothing to do."""
        self._peak_bytes = 0
        """The largest value of threads that have ended."""
        if self._device_bytes is None:
            host.budget.add(memory.used_bytes, release=self._free)

    @property
    def memory(self) -> EngineMemory:
        thread, used = self._thread, memory.used_bytes()
        return EngineMemory(
            total=self._total_bytes,
            limit=self._host.budget.limit_bytes if self._device_bytes is None else self._device_bytes,
            used=used,
            peak=max(self._peak_bytes, used, thread.peak_bytes if thread is not None else 0),
            is_of_device=self._device_bytes is not None,
        )

    @property
    def blas(self) -> BlasReport | None:
        return self._thread.blas if self._thread is not None else None

    async def plan(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> LoadPlan:
        check_options(entry, spec)
        if spec.deterministic:
            raise UnusableModelError(
                f"{entry.id} runs on MLX, whose results may differ in the last bits while other requests run; for a "
                "deterministic load use a GGUF file of the model, such as smollm2-135m-gguf",
                param="deterministic",
            )
        if spec.kv_cache_dtype is not None:
            raise UnusableModelError(
                f"{entry.id} runs on MLX, whose batches of requests do not support a quantized KV cache; leave out "
                "kv_cache_dtype, or load a GGUF file of the model, such as smollm2-135m-gguf",
                param="kv_cache_dtype",
            )

        def plan() -> LoadPlan:
            # Files that would block a load, or never end, are refused while other models still answer.
            for each in filter(None, (entry, entry.draft)):
                check_files(each.path)
            return plan_load(
                entry, limit_bytes=room_bytes, dtype=self._settings.dtype, context_length=spec.context_length
            )

        # Not on the thread of loads, which may be reading a model for minutes. MLX never ends the thread that it starts
        # for each thread that uses it, so plans share theirs; one that hangs is not used again.
        planner = self._planners.pop() if self._planners else LoadThread()
        planning = planner.submit(plan)
        planning.add_done_callback(lambda _: self._planners.append(planner))
        result = asyncio.wrap_future(planning)
        result.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, if no caller waits
        return await asyncio.shield(result)

    async def check(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> None:
        check_room(entry, await self.plan(entry, spec, room_bytes=room_bytes), room_bytes, spec.context_length)
        try:
            await check_tokenizer_files(entry.path)
        except UnusableModelError as exc:
            raise UnusableModelError(
                f"{entry.id} at {entry.path} cannot be loaded: {exc.message}", param="model"
            ) from exc
        if entry.kind == "chat":
            await try_templates_of(entry.path)
        if (draft := entry.draft) is not None:

            def check_draft() -> None:
                check_vocabularies(entry, draft, *(read_tokens(it.path) for it in (entry, draft)))

            await in_thread(check_draft, name="lmx-lab-check")

    async def load(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> MlxModel:
        """See ``Engine``. A cancelled load ends before it reads the next tensor."""
        if self._thread is None or self._thread.ended is not None:
            self._peak_bytes = self.memory.peak or 0
            self._thread = MlxThread(self._settings, self._host, device_bytes=self._device_bytes)
        cancellation = Cancellation()
        load = functools.partial(self._load, entry, spec, room_bytes, self._thread, cancellation)
        loader = self._loader = self._loader or LoadThread()
        loading = loader.submit(load)
        try:
            loaded = await asyncio.shield(asyncio.wrap_future(loading))
        except asyncio.CancelledError:
            cancellation.cancel()
            await asyncio.shield(asyncio.create_task(self._end_load(entry, loader, loading)))
            raise
        if isinstance(loaded, LabError):
            raise loaded
        return loaded

    async def _end_load(self, entry: ModelEntry, loader: LoadThread, loading: Future[MlxModel | LabError]) -> None:
        """Wait until a cancelled load has ended, and unload its model if it was just ready."""
        done = asyncio.wrap_future(loading)
        if not (await asyncio.wait([done], timeout=self.cancel_s))[0]:
            # The model is dropped on its thread when the disk responds.
            log.error("the load of %s does not respond; its thread is abandoned", entry.id)
            loader.end()
            self._loader = None if self._loader is loader else self._loader
        elif isinstance(loaded := done.result(), MlxModel):
            await loaded.close(NotLoadedError("the load was cancelled"))

    def _load(
        self, entry: ModelEntry, spec: LoadSpec, room_bytes: int, thread: MlxThread, cancellation: Cancellation
    ) -> MlxModel | LabError:
        """Load a model and return it, or return the error. A raised exception would refer to frames, and so keep the
        weights in memory. Runs on the thread of loads.
        """
        loaded: MlxModel | LabError
        try:
            with cancellation.applied():
                # The BLAS is chosen there first.
                thread.started.result()
                check_files(entry.path)
                loaded = self._read(entry, spec, room_bytes, thread, cancellation)
        except LabError as exc:
            loaded = type(exc)(exc.message, param=exc.param)
        except Exception as exc:
            log.exception("%s could not be loaded", entry.id)
            what = f"{type(exc).__name__}: {exc}"
            loaded = UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {what}", param="model")
        thread.room.loading_bytes = 0
        memory.release()
        return loaded

    def _read(
        self, entry: ModelEntry, spec: LoadSpec, room_bytes: int, thread: MlxThread, cancellation: Cancellation
    ) -> MlxModel:
        """Read a model, and pass its weights to the engine's thread."""
        settings, host, dtype = self._settings, self._host, self._settings.dtype

        room_before = host.budget.unlowered_bytes
        checked: tuple[str, int] = ("", 0)
        """The model and the number of bytes that were checked last."""

        def require_free(left_bytes: int, name: str) -> None:
            nonlocal checked
            if checked[0] != name:
                thread.room.loading_bytes += left_bytes
            if self._device_bytes is None and (checked[0] != name or left_bytes <= checked[1] - CHECKED_BYTES):
                host.budget.require_free(left_bytes, name)
                checked = name, left_bytes

        def room_now() -> int:
            # Libraries and the tokenizer also take memory during a load.
            grown_bytes = max(0, room_before - host.budget.unlowered_bytes) if self._device_bytes is None else 0
            return room_bytes - grown_bytes

        model: MlxModel
        loaded: GenerationLoop | LoadedEncoder
        if entry.kind == "chat":
            weights, tokenizer = load_chat(
                entry,
                limit_bytes=room_bytes,
                dtype=dtype,
                context_length=spec.context_length,
                require_free=require_free,
                room_now=room_now,
            )
            model = chat = MlxChat(entry, spec, settings, host, thread=thread, weights=weights, tokenizer=tokenizer)
            loaded = chat.generating
        else:
            require_free(entry.load_bytes, entry.id)
            loaded = load_encoder(entry, limit_bytes=room_bytes, dtype=dtype)
            model = MlxEncoder(entry, spec, settings, host, thread=thread, encoder=loaded)
        require_unchanged(entry)
        thread.post(lambda thread: thread.add(model, loaded, cancellation)).result()
        return model

    def _free(self, excess_bytes: int) -> None:
        """Drop caches of ended requests soon. Called on any thread."""
        if self._thread is not None:
            self._thread.post(lambda thread: thread.room.free(excess_bytes))

    def stop(self) -> None:
        """See ``Engine``. Blocks until the current step is over."""
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.end()
        planners, self._planners = self._planners, []
        for planner in planners:
            planner.end()
        if self._thread is not None:
            self._thread.stop()
