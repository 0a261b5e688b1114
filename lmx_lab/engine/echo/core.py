"""The state of the echo engine. Everything here happens on its loop; only ``snapshot`` is read elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lmx_lab.engine.echo.model import EchoModel
from lmx_lab.engine.echo.prepare import Intake
from lmx_lab.engine.echo.queue import Job, Jobs, Totals
from lmx_lab.engine.echo.script import Script, read_script
from lmx_lab.engine.echo.texts import DIMENSIONS, Text, Texts
from lmx_lab.engine.interface import NOTHING_LOADED
from lmx_lab.engine.machine_memory import total_bytes
from lmx_lab.engine.model_lookup import EMBEDDERS, RERANKERS, fitting, refusal
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.stream import Mailbox, TokenStream
from lmx_lab.engine.vectors import cosines, cut
from lmx_lab.errors import (
    InvalidRequestError,
    LabError,
    NotLoadedError,
    QueueFullError,
    UnusableModelError,
)
from lmx_lab.settings import Settings
from lmx_lab.values.encoding import EncodeReport, Vectors
from lmx_lab.values.engine import EngineSnapshot, UnloadCause
from lmx_lab.values.models import Kind, LoadReport, ModelEntry
from lmx_lab.weights.fingerprint import is_loaded

log = logging.getLogger(__name__)
T = TypeVar("T")


def check(entry: ModelEntry, settings: Settings) -> Script:
    """The script to load with the entry.

    Raises:
        UnusableModelError: the script is wrong, or the entry is that of a model with files.
    """
    if entry.format != "echo":
        raise UnusableModelError(f"{entry.id} is a model; the echo engine runs none", param="model")
    return read_script(settings.echo_script) if settings.echo_script is not None else Script()


@dataclass(kw_only=True, eq=False)
class Loaded:
    """What is loaded, and all that is asked of it."""

    entry: ModelEntry
    model: EchoModel
    intake: Intake
    jobs: Jobs
    script: Script
    texts: set[asyncio.Task[Any]]
    reading: int = 0
    """Requests on their way into the queue."""
    leaving: str | None = None
    """Why it takes no more requests."""


class EchoCore:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._main: Loaded | None = None
        self._changing = asyncio.Lock()
        self._totals = Totals()
        self._encoded_tokens = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self.snapshot = EngineSnapshot(memory_total_bytes=total_bytes())
        self._publish()

    # Models

    async def load(self, entry: ModelEntry, *, finish_queued: bool) -> LoadReport:
        """See ``InferenceEngine.load``."""
        async with self._changing:
            started, main = time.perf_counter(), self._main
            if main is not None and is_loaded(main.entry, entry):
                return LoadReport(model=entry.id, load_s=0.0, memory_bytes=main.model.memory_bytes)
            try:
                model, script = await asyncio.to_thread(lambda: (EchoModel(), check(entry, self._settings)))
            except LabError as exc:
                stays = f"; {main.entry.id} stays loaded" if main is not None else NOTHING_LOADED
                raise type(exc)(exc.message + stays, param=exc.param) from exc
            await self._empty(f"{entry.id} is loaded in the model's place", finish_queued=finish_queued)
            jobs = Jobs(
                self._totals,
                slots=self._settings.slots,
                queue_limit=self._settings.queue_limit,
                memory_bytes=model.memory_bytes,
                changed=self._publish,
            )
            intake = Intake(model, entry, tokens_per_s=self._settings.echo_tokens_per_s)
            self._main = Loaded(entry=entry, model=model, intake=intake, jobs=jobs, script=script, texts=set())
            self.snapshot = replace(self.snapshot, unloaded_model=None, unload_cause=None)
            self._publish()
            self._wait_for_idle()
            return LoadReport(model=entry.id, load_s=time.perf_counter() - started, memory_bytes=model.memory_bytes)

    async def unload(self, *, why: str, finish_queued: bool, cause: UnloadCause = "asked") -> int:
        """See ``InferenceEngine.unload``."""
        async with self._changing:
            if (main := self._main) is None:
                return 0
            await self._empty(why, finish_queued=finish_queued)
            self.snapshot = replace(self.snapshot, unloaded_model=main.entry.id, unload_cause=cause)
            self._publish()
            return main.model.memory_bytes

    async def quiesce(self, timeout_s: float) -> None:
        """See ``InferenceEngine.quiesce``."""
        if (main := self._main) is not None:
            await self._drain(main, "the server is stopped", timeout_s, finish_queued=False)
            main.leaving = None

    async def close(self, error: LabError) -> None:
        """Every request gets its end."""
        if (main := self._main) is not None:
            main.leaving = error.message
            await self._end_all(main, error)
            self._drop(main)

    async def _empty(self, why: str, *, finish_queued: bool) -> None:
        if (main := self._main) is not None:
            await self._drain(main, why, self._settings.drain_s, finish_queued=finish_queued)
            self._drop(main)

    async def _drain(self, main: Loaded, why: str, timeout_s: float, *, finish_queued: bool) -> None:
        """Accept nothing more; return when what runs has ended, by itself or after the time."""
        main.leaving = why
        until = time.perf_counter() + timeout_s
        if not finish_queued:
            main.jobs.end_all(
                NotLoadedError(f"{why} before this request began; ask again when a model is loaded"), queued_only=True
            )
        await main.jobs.idle(timeout_s)
        if main.texts:
            await asyncio.wait(list(main.texts), timeout=max(0.0, until - time.perf_counter()))
        await self._end_all(main, NotLoadedError(f"{why} before this request ended"))

    async def _end_all(self, main: Loaded, error: LabError) -> None:
        main.jobs.end_all(error)
        for text in main.texts:
            text.cancel(error)
        if main.texts:
            await asyncio.wait(list(main.texts))

    def _drop(self, main: Loaded) -> None:
        self._main = None
        main.intake.stop()
        self._publish()

    # Requests

    async def accept(
        self, request: GenerationRequest, choices: int, reader: asyncio.AbstractEventLoop
    ) -> list[TokenStream]:
        """So many answers, in the queue; raises as ``Engine.submit``."""
        arrived_at, settings = time.perf_counter(), self._settings
        most = settings.slots + settings.queue_limit
        if choices > most:
            raise InvalidRequestError(f"n is {choices}; this server takes {most} (slots and queue_limit)", param="n")
        main = self._found(request.model, ("chat",))
        if main.jobs.running + main.jobs.queued + main.reading >= most:
            raise QueueFullError(
                f"{most} requests run or wait, as many as slots and queue_limit allow; try again in "
                f"{main.jobs.place_free_s:.0f} s",
                retry_after_s=main.jobs.place_free_s,
            )
        answer = main.script.take()
        if answer is not None and answer.fails_at_once:
            await asyncio.sleep(answer.delay_s)
            raise answer.failure()
        main.reading += 1
        try:
            prepared, constraints = await main.intake.prepared(
                request, choices, answer, timeout_s=request.timeout_s or settings.request_timeout_s
            )
            _check_stays(main)
            jobs = [
                Job(
                    prepared=prepared,
                    model=main.model,
                    model_id=main.entry.id,
                    constraint=constraint,
                    mailbox=Mailbox(reader),
                    arrived_at=arrived_at,
                    choice=choice,
                )
                for choice, constraint in enumerate(constraints)
            ]
            main.jobs.add(jobs)
        except BaseException:
            main.script.give_back(answer)
            raise
        finally:
            main.reading -= 1
        self._publish()
        prompt, loop = tuple(prepared.prompt), asyncio.get_running_loop()
        return [TokenStream(job.mailbox, _leaver(loop, main.jobs, job), prompt) for job in jobs]

    async def accept_embedding(self, request: EmbeddingRequest) -> Pending[Embeddings]:
        """The vectors to come; raises as ``Engine.submit_embedding``."""
        main, texts = self._text_place(request.model, EMBEDDERS, request.inputs)
        if request.dimensions is not None and request.dimensions > DIMENSIONS:
            raise InvalidRequestError(
                f"dimensions is {request.dimensions}; vectors of {main.entry.id} have {DIMENSIONS}", param="dimensions"
            )
        for at, text in enumerate(request.inputs):
            texts.read(text, f"input.{at}", truncate=request.truncate)

        def finish(rows: Vectors, report: EncodeReport) -> Embeddings:
            return Embeddings(vectors=cut(rows, request.dimensions), report=report)

        return self._begun(main, texts, request.timeout_s, finish)

    async def accept_rerank(self, request: RerankRequest) -> Pending[Ranking]:
        """The scores to come; raises as ``Engine.submit_rerank``."""
        main, texts = self._text_place(request.model, RERANKERS, request.documents)
        texts.read(request.query, "query", truncate=False)
        for at, text in enumerate(request.documents):
            texts.read(text, f"documents.{at}", truncate=request.truncate)

        def finish(rows: Vectors, report: EncodeReport) -> Ranking:
            return Ranking(scores=cosines(rows), method="cosine", report=report)

        return self._begun(main, texts, request.timeout_s, finish)

    async def decode(self, tokens: Sequence[int]) -> str:
        """See ``InferenceEngine.decode``."""
        return self._found(None, ("chat",)).model.vocabulary.show(tokens)

    def _found(self, name: str | None, kinds: tuple[Kind, ...]) -> Loaded:
        if (main := self._main) is None or fitting(self.snapshot, name, kinds) is None:
            raise refusal(self.snapshot, name, kinds)
        _check_stays(main)
        return main

    def _text_place(self, name: str | None, kinds: tuple[Kind, ...], texts: Sequence[Text]) -> tuple[Loaded, Texts]:
        if not texts:
            raise InvalidRequestError("there are no texts; send at least one")
        main = self._found(name, kinds)
        most = self._settings.slots + self._settings.queue_limit
        if len(main.texts) >= most:
            raise QueueFullError(
                f"{len(main.texts)} requests for embeddings or scores run; {most} may (slots and queue_limit); try "
                "again in 1 s",
                retry_after_s=1,
            )
        return main, Texts(main.model, main.entry, tokens_per_s=self._settings.echo_tokens_per_s)

    def _begun(
        self, main: Loaded, texts: Texts, timeout_s: float | None, finish: Callable[[Vectors, EncodeReport], T]
    ) -> Pending[T]:
        def ended() -> None:
            main.jobs.progress_at = time.perf_counter()
            self._encoded_tokens += texts.computed
            self._publish()

        pending = texts.begin(main.texts, timeout_s or self._settings.request_timeout_s, finish, ended)
        self._publish()
        return pending

    # What others see

    def _publish(self) -> None:
        main = self._main
        memory = main.model.memory_bytes if main is not None else 0
        texts = len(main.texts) if main is not None else 0
        self.snapshot = replace(
            self.snapshot,
            state="ready" if main is not None else "empty",
            entry=main.entry if main is not None else None,
            model_memory_bytes=memory,
            context_length=main.entry.context_length if main is not None else None,
            active_requests=(main.jobs.running if main is not None else 0) + texts,
            queued_requests=main.jobs.queued if main is not None else 0,
            encode_requests=texts,
            encoded_tokens=self._encoded_tokens,
            place_free_s=main.jobs.place_free_s if main is not None else 1.0,
            memory_used_bytes=memory,
            memory_peak_bytes=max(memory, self.snapshot.memory_peak_bytes),
            progress_at=main.jobs.progress_at if main is not None else self.snapshot.progress_at,
            prompt_tokens=self._totals.prompt_tokens,
            cached_tokens=self._totals.cached_tokens,
            output_tokens=self._totals.output_tokens,
        )

    def _wait_for_idle(self) -> None:
        """Unload a model that was not used for the time set."""
        idle_s, main = self._settings.idle_unload_s, self._main
        if idle_s is None or main is None:
            return
        left_s = main.jobs.progress_at + idle_s - time.perf_counter()
        if left_s <= 0 and not (main.jobs.running or main.jobs.queued or main.texts or self._changing.locked()):
            log.info("%s was not used for %g s", main.entry.id, idle_s)
            self._idling = asyncio.create_task(
                self.unload(why="the model is unloaded", finish_queued=False, cause="idle")
            )
            return
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = asyncio.get_running_loop().call_later(left_s if left_s > 0 else idle_s, self._wait_for_idle)


def _check_stays(main: Loaded) -> None:
    if main.leaving is not None:
        raise NotLoadedError(f"{main.entry.id} is being unloaded; load a model first: POST /admin/models/load")


def _leaver(loop: asyncio.AbstractEventLoop, jobs: Jobs, job: Job) -> Callable[[], None]:
    def leave() -> None:
        # From any thread; where the loop is closed, all jobs have ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(jobs.cancel, job)

    return leave
