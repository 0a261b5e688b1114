"""Provide the echo engine: ``EchoEngine`` for other threads and loops, and its state ``EchoCore`` on its own loop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

from lmx_lab.engine.admission import LOAD_FIRST, AdmissionControl, Permit
from lmx_lab.engine.echo.model import DIMENSIONS, EchoModel, EchoTexts, EchoVocabulary
from lmx_lab.engine.echo.prepare import EchoPreparer
from lmx_lab.engine.echo.queue import EchoGeneration, EchoQueue
from lmx_lab.engine.echo.script import Script, read_script
from lmx_lab.engine.interface import Capabilities
from lmx_lab.engine.loop_engine import LoopEngine, TextTasks, deadline
from lmx_lab.engine.memory import total_bytes
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.stream import Answer, Mailbox, Pending
from lmx_lab.engine.validation import check_dimensions, check_options, check_token_ids
from lmx_lab.engine.vectors import cosines, shorten
from lmx_lab.errors import LabError, NotLoadedError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, TokenTotals
from lmx_lab.values.models import Kind, LoadReport, LoadSpec, ModelEntry
from lmx_lab.weights.files import in_thread

T = TypeVar("T")


def read_model(entry: ModelEntry, settings: Settings) -> tuple[EchoModel, Script]:
    """Create the model, and read the script that is loaded with it.

    Raises:
        UnusableModelError: the script is invalid, or the entry has another format.
    """
    if entry.format != "echo":
        raise UnusableModelError(f"{entry.id} is a model with files; the echo engine runs none", param="model")
    return EchoModel(), read_script(settings.echo_script) if settings.echo_script is not None else Script()


@dataclass(kw_only=True, eq=False)
class EchoMain:
    """The loaded model and its requests."""

    entry: ModelEntry
    context_length: int
    model: EchoModel
    preparer: EchoPreparer
    queue: EchoQueue
    script: Script


class EchoCore:
    """The state of the engine; see ``EngineCore``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._main: EchoMain | None = None
        self._totals = TokenTotals()
        self._texts = TextTasks()
        self._encoded_tokens = 0
        self.failure: LabError | None = None
        self.snapshot = EngineSnapshot(memory_total_bytes=total_bytes())
        self._publish()

    # Models

    async def load(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """See ``InferenceEngine``."""
        started = time.perf_counter()
        model, script = await in_thread(functools.partial(read_model, entry, self._settings))
        context_length = spec.context_length or entry.context_length
        assert context_length is not None
        self._main = EchoMain(
            entry=entry,
            context_length=context_length,
            model=model,
            preparer=EchoPreparer(model, entry, context_length, tokens_per_s=self._settings.echo_tokens_per_s),
            queue=EchoQueue(
                self._totals,
                slots=self._settings.slots,
                memory_bytes=model.memory_bytes,
                on_change=self._publish,
            ),
            script=script,
        )
        self._publish()
        return self.snapshot.load_report(time.perf_counter() - started)

    async def unload(self) -> int:
        """See ``InferenceEngine``."""
        main, self._main = self._main, None
        if main is None:
            return 0
        self._publish()
        return main.model.memory_bytes

    async def pin(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """Refuse to pin a model.

        Raises:
            UnusableModelError: always, since this engine has no models to keep in addition to the main one.
        """
        raise UnusableModelError(f"{entry.id} runs on the echo engine, which has no pinned models", param="model")

    async def unpin(self, kind: Kind) -> None:
        """See ``InferenceEngine``. This engine has no pinned models."""

    # Requests

    async def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool) -> None:
        """See ``InferenceEngine``."""
        if self._main is not None:
            self._main.queue.end(admission, error, queued_only=queued_only)
        if not queued_only:
            await self._texts.end(admission, error)

    async def close(self, error: LabError) -> None:
        """See ``EngineCore``."""
        if (main := self._main) is not None:
            main.queue.end_all(error)
        await self._texts.end_all(error)
        await self.unload()

    async def accept(
        self,
        entry: ModelEntry,
        request: GenerationRequest,
        permits: Sequence[Permit],
        reader: asyncio.AbstractEventLoop,
    ) -> list[Answer]:
        """See ``EngineCore``."""
        arrived_at, main = time.perf_counter(), self._main_of(entry)
        timeout_s = request.timeout_s or self._settings.request_timeout_s
        answer = main.script.take()
        if answer is not None and answer.error is not None and not answer.as_model_text:
            async with deadline(arrived_at, timeout_s):
                await asyncio.sleep(answer.delay_s)
            raise answer.failure()
        try:
            async with deadline(arrived_at, timeout_s):
                prepared, constraints = await main.preparer.prepare(request, len(permits), answer, timeout_s=timeout_s)
            permits[0].check()
            self._main_of(entry)
        except BaseException:
            main.script.give_back(answer)
            raise
        generations = [
            EchoGeneration(
                prepared=prepared,
                model=main.model,
                model_id=entry.id,
                constraint=constraint,
                mailbox=Mailbox(reader, arrived_at),
                permit=permit,
                arrived_at=arrived_at,
                choice=choice,
            )
            for choice, (constraint, permit) in enumerate(zip(constraints, permits, strict=True))
        ]
        main.queue.add(generations)
        self._publish()
        prompt = tuple(prepared.prompt[: len(prepared.prompt) - len(prepared.start)])
        return [
            Answer(
                generation.mailbox,
                functools.partial(main.queue.cancel, generation),
                request=request,
                model=entry.id,
                prompt=prompt,
            )
            for generation in generations
        ]

    async def accept_embedding(
        self, entry: ModelEntry, request: EmbeddingRequest, permit: Permit
    ) -> Pending[Embeddings]:
        """See ``EngineCore``."""
        check_dimensions(request.dimensions, DIMENSIONS, entry)
        texts = self._texts_of(entry)
        for at, text in enumerate(request.inputs):
            texts.read(text, f"input.{at}", truncate=request.truncate)

        async def compute() -> Embeddings:
            rows, report = await texts.compute(request.timeout_s or self._settings.request_timeout_s)
            return Embeddings(vectors=shorten(rows, request.dimensions), report=report)

        return self._start(texts, compute(), permit)

    async def accept_rerank(self, entry: ModelEntry, request: RerankRequest, permit: Permit) -> Pending[Ranking]:
        """See ``EngineCore``."""
        texts = self._texts_of(entry)
        texts.read(request.query, "query", truncate=False)
        for at, text in enumerate(request.documents):
            texts.read(text, f"documents.{at}", truncate=request.truncate)

        async def compute() -> Ranking:
            rows, report = await texts.compute(request.timeout_s or self._settings.request_timeout_s)
            return Ranking(scores=cosines(rows), method="cosine", report=report)

        return self._start(texts, compute(), permit)

    async def encode(self, entry: ModelEntry, request: GenerationRequest) -> list[int]:
        """See ``InferenceEngine``."""
        return self._main_of(entry).preparer.encode(request)

    async def decode(self, tokens: Sequence[int]) -> str:
        """See ``InferenceEngine``."""
        return self._vocabulary(tokens).show(tokens)

    async def render(self, entry: ModelEntry, request: GenerationRequest) -> str:
        """See ``InferenceEngine``."""
        main = self._main_of(entry)
        return main.model.vocabulary.show(main.preparer.encode(request))

    async def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """See ``InferenceEngine``."""
        known = self._vocabulary(tokens).bytes
        return [known[token] for token in tokens]

    def _vocabulary(self, tokens: Sequence[int]) -> EchoVocabulary:
        """Return the vocabulary, which contains these tokens.

        Raises:
            NotLoadedError, InvalidRequestError: see ``InferenceEngine.decode``.
        """
        if self._main is None:
            raise NotLoadedError(f"no model is loaded; {LOAD_FIRST}")
        vocabulary = self._main.model.vocabulary
        check_token_ids(tokens, "tokens", self._main.entry, vocabulary.size)
        return vocabulary

    def _main_of(self, entry: ModelEntry) -> EchoMain:
        """Return the loaded model.

        Raises:
            NotLoadedError: the model with this entry is no longer loaded.
        """
        main = self._main
        if main is None or main.entry is not entry:
            raise NotLoadedError(f"{entry.id} has been unloaded; {LOAD_FIRST}")
        return main

    def _texts_of(self, entry: ModelEntry) -> EchoTexts:
        main = self._main_of(entry)
        return EchoTexts(main.model, main.entry, tokens_per_s=self._settings.echo_tokens_per_s)

    def _start(self, texts: EchoTexts, work: Coroutine[Any, Any, T], permit: Permit) -> Pending[T]:
        def count() -> None:
            self._encoded_tokens += texts.computed_tokens
            self._publish()

        pending = self._texts.start(work, permit, count)
        self._publish()
        return pending

    def _publish(self) -> None:
        """Replace the snapshot."""
        main, texts = self._main, len(self._texts)
        memory_bytes = main.model.memory_bytes if main is not None else 0
        self.snapshot = replace(
            self.snapshot,
            state="ready" if main is not None else "empty",
            entry=main.entry if main is not None else None,
            model_memory_bytes=memory_bytes,
            context_length=main.context_length if main is not None else None,
            slots=self._settings.slots if main is not None and main.entry.kind == "chat" else None,
            active_requests=(main.queue.running if main is not None else 0) + texts,
            queued_requests=main.queue.queued if main is not None else 0,
            encode_requests=texts,
            encoded_tokens=self._encoded_tokens,
            slot_free_s=main.queue.slot_free_s if main is not None else 1.0,
            memory_used_bytes=memory_bytes,
            memory_peak_bytes=max(memory_bytes, self.snapshot.memory_peak_bytes),
            progress_at=time.perf_counter() if main is not None else self.snapshot.progress_at,
            **asdict(self._totals),
        )


class EchoEngine(LoopEngine[EchoCore]):
    """``InferenceEngine`` for the built-in entry ``echo``."""

    capabilities = Capabilities(
        thinking_budget=True,
        logprobs_with_own_tools=True,
        input_types=True,
        steering=False,
    )
    thread_name = "lmx-lab-echo"

    async def _make_core(self) -> EchoCore:
        return EchoCore(self._settings)

    @functools.cached_property
    def fingerprint(self) -> str:
        """See ``InferenceEngine``."""
        return f"echo-{version('lmx-lab')}"

    async def check(self, entry: ModelEntry, spec: LoadSpec, *, other_bytes: int = 0) -> None:
        """See ``InferenceEngine``."""
        # Coding agents send prompts that are longer than the default context.
        check_options(replace(entry, context_length=2**20), spec)
        await in_thread(functools.partial(read_model, entry, self._settings), name="lmx-lab-check")
