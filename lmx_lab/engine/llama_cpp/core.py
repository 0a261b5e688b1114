"""The state of the engine on llama.cpp. Everything here happens on its loop; only ``snapshot`` is read elsewhere.

The processes compute; here are the queue, the slots, the deadlines and the ends of requests, which llama.cpp's own
server leaves open: there a waiting request cannot be cancelled, and a full cache ends all requests (both measured).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from lmx_lab.engine.interface import NOTHING_LOADED
from lmx_lab.engine.llama_cpp.model import Hosted, host
from lmx_lab.engine.llama_cpp.prepare import Intake
from lmx_lab.engine.llama_cpp.queue import Job, Jobs, Totals
from lmx_lab.engine.llama_cpp.state import Place
from lmx_lab.engine.llama_cpp.texts import TextJob
from lmx_lab.engine.loads import Load, Loads
from lmx_lab.engine.machine_memory import limit_bytes, total_bytes
from lmx_lab.engine.model_lookup import EMBEDDERS, RERANKERS, fitting, refusal
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.stream import Item, Mailbox, Outbox, TokenStream
from lmx_lab.errors import EngineDeadError, EngineError, InvalidRequestError, LabError, NotLoadedError, QueueFullError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, EngineState, PinnedModel, UnloadCause
from lmx_lab.values.models import Kind, LoadReport, ModelEntry
from lmx_lab.weights.fingerprint import is_loaded

log = logging.getLogger(__name__)
T = TypeVar("T")
LOOK_S = 0.1
"""How often the snapshot is renewed while requests run."""
MEASURE_S = 0.5
"""How often memory is measured."""


class GgufCore:
    """The models in their processes: one *main* model of any kind, and pinned encoders beside it."""

    def __init__(self, settings: Settings, *, beside_bytes: Callable[[], int]) -> None:
        self._settings = settings
        self._beside_bytes = beside_bytes
        self._main: Place | None = None
        self._pinned: dict[Kind, Place] = {}
        self._intake = Intake()
        self._outbox = Outbox()
        self._sending = False
        self._totals = Totals()
        self._encoded_tokens = 0
        self._changing = asyncio.Lock()
        # One process starts at a time: what the others take is known. Taken after the others, never before.
        self._starting = asyncio.Lock()
        self.loads = Loads()
        self._state: EngineState = "empty"
        self._dead: EngineDeadError | None = None
        self.snapshot = EngineSnapshot(memory_total_bytes=total_bytes())
        self._tending = asyncio.create_task(self._tend(), name="lmx-lab gguf engine")

    # Models

    def limit_bytes(self, *, without: Place | None = None) -> int:
        """What one more model may take, when ``without`` has gone."""
        others = [place for place in self._places() if place is not without]
        taken = self._beside_bytes() + sum(place.hosted.memory_bytes for place in others)
        return limit_bytes(self._settings.memory_limit_bytes) - taken

    async def load(self, entry: ModelEntry, *, finish_queued: bool, part_of: Load | None) -> LoadReport:
        """See ``InferenceEngine.load``; raises NotLoadedError, too: something else was asked for meanwhile."""
        with self.loads.begun(entry, part_of) as load:
            async with self._changing:
                load.check()
                return await self._load(load, finish_queued=finish_queued)

    async def _load(self, load: Load, *, finish_queued: bool) -> LoadReport:
        main, entry = self._main, load.entry
        if main is not None and is_loaded(main.entry, entry):
            return LoadReport(model=entry.id, load_s=0.0, memory_bytes=main.hosted.memory_bytes)
        await load.wait(self._revive_pinned())
        await self._empty(f"{entry.id} is loaded in the model's place", finish_queued=finish_queued)
        started = time.perf_counter()
        failure = await self._bring_up(entry, load)
        # Whoever wanted something else wants no model of before either.
        load.check()
        if failure is not None:
            restored = await self._restored(main.entry if main is not None else None, load)
            raise type(failure)(f"{failure.message}{restored}", param=failure.param)
        assert self._main is not None
        memory = self._main.hosted.memory_bytes
        return LoadReport(model=entry.id, load_s=time.perf_counter() - started, memory_bytes=memory)

    async def pin(self, entry: ModelEntry) -> LoadReport:
        """See ``InferenceEngine.pin``."""
        async with self._starting:
            started, before = time.perf_counter(), self._pinned.get(entry.kind)
            if before is None or not is_loaded(before.entry, entry) or before.hosted.process.died.is_set():
                room = self.limit_bytes(without=before)
                place = self._place(await host(entry, self._settings, limit_bytes=room))
                self._pinned[entry.kind] = place
                if before is not None:
                    await self._drop(before, NotLoadedError(f"{entry.id} was pinned in its place"))
            memory = self._pinned[entry.kind].hosted.memory_bytes
            self._publish()
            return LoadReport(model=entry.id, load_s=time.perf_counter() - started, memory_bytes=memory)

    async def unpin(self, kind: Kind) -> None:
        """See ``InferenceEngine.unpin``."""
        async with self._starting:
            if (pinned := self._pinned.pop(kind, None)) is not None:
                await self._drop(pinned, NotLoadedError(f"{pinned.entry.id} was unloaded before this request ended"))

    async def unload(self, *, why: str, finish_queued: bool, cause: UnloadCause = "asked") -> int:
        """See ``InferenceEngine.unload``."""
        async with self._changing:
            main = self._main
            freed = main.hosted.process.memory_bytes if main is not None else 0
            await self._empty(why, finish_queued=finish_queued)
            unloaded = main.entry.id if main is not None else self.snapshot.unloaded_model
            self.snapshot = replace(self.snapshot, unloaded_model=unloaded, unload_cause=cause if unloaded else None)
            self._publish("empty")
            return freed

    async def quiesce(self, timeout_s: float) -> None:
        """See ``InferenceEngine.quiesce``."""
        # Without waiting for a load, which may take long: whoever stops the engine next ends it.
        for place in self._places():
            await place.drain("the server is stopped", timeout_s, finish_queued=False)
            place.hosted.leaving = None

    async def close(self, error: LabError) -> None:
        """Every request gets its end, the system its memory."""
        self._tending.cancel()
        self._intake.stop()
        await self.loads.end(error.message)
        places, self._main, self._pinned = self._places(), None, {}
        for place in places:
            await self._drop(place, error)
        self._publish("empty")
        self._send()

    async def _bring_up(self, entry: ModelEntry, load: Load) -> LabError | None:
        """Load, or return why not."""
        self._publish("loading")
        try:
            await load.wait(self._start(entry))
        except LabError as exc:
            return exc
        finally:
            # Whatever went wrong, nobody shall wait for a model that does not come.
            self._publish("ready" if self._main is not None else "empty")
        self._dead = None
        self.snapshot = replace(self.snapshot, unloaded_model=None, unload_cause=None)
        self._publish("ready")
        return None

    async def _start(self, entry: ModelEntry) -> None:
        async with self._starting:
            self._main = self._place(await host(entry, self._settings, limit_bytes=self.limit_bytes()))

    async def _restored(self, previous: ModelEntry | None, load: Load) -> str:
        if previous is None:
            return NOTHING_LOADED
        failure = await self._bring_up(previous, load)
        if failure is not None:
            return f"; the previous model {previous.id} could not be loaded again either: {failure.message}"
        return f"; the previous model {previous.id} is loaded again"

    def _place(self, hosted: Hosted) -> Place:
        jobs = Jobs(hosted, self._totals, self._post, queue_limit=self._settings.queue_limit)
        place = Place(hosted=hosted, jobs=jobs)
        place.watch = asyncio.create_task(self._watch(place), name=f"lmx-lab watches {hosted.entry.id}")
        return place

    async def _empty(self, why: str, *, finish_queued: bool) -> None:
        """Let the main model go."""
        if (main := self._main) is not None:
            await main.drain(why, self._settings.drain_s, finish_queued=finish_queued)
            self._main = None
            await self._drop(main, NotLoadedError(f"{why} before this request ended"))

    async def _drop(self, place: Place, error: LabError) -> None:
        """End what still runs, and the process."""
        place.hosted.leaving = place.hosted.leaving or error.message
        if place.watch is not None:
            place.watch.cancel()
        await place.end_all(error)
        await place.hosted.process.stop()
        self._publish()

    async def _watch(self, place: Place) -> None:
        """What happens when the process ends by itself."""
        await place.hosted.process.died.wait()
        error = place.hosted.death()
        log.error("%s", error.message)
        place.watch, place.hosted.memory_bytes = None, 0
        if place is self._main:
            self._main, self._dead = None, error
            self._publish("dead")
        await self._drop(place, error)

    async def _revive_pinned(self) -> None:
        """Start again those that have died."""
        async with self._starting:
            for kind, place in self._pinned.items():
                if place.hosted.process.died.is_set():
                    try:
                        room = self.limit_bytes(without=place)
                        self._pinned[kind] = self._place(await host(place.entry, self._settings, limit_bytes=room))
                    except LabError as exc:
                        log.warning("%s, which was pinned, could not be loaded again: %s", place.entry.id, exc.message)

    # Requests

    async def accept(
        self, request: GenerationRequest, choices: int, reader: asyncio.AbstractEventLoop
    ) -> list[TokenStream]:
        """So many answers, in the queue; raises as ``Engine.submit``.

        Should the caller have left meanwhile, the streams are dropped, which cancels them.
        """
        arrived_at, settings = time.perf_counter(), self._settings
        most = settings.slots + settings.queue_limit
        if choices > most:
            raise InvalidRequestError(f"n is {choices}; this server takes {most} (slots and queue_limit)", param="n")
        place = self._found(request.model, ("chat",))
        if place.busy >= most:
            raise QueueFullError(
                f"{most} requests run or wait, as many as slots and queue_limit allow; try again in "
                f"{place.jobs.place_free_s:.0f} s",
                retry_after_s=place.jobs.place_free_s,
            )
        timeout_s = request.timeout_s or settings.request_timeout_s
        prepared = await place.read(self._intake.prepared(request, place.hosted), timeout_s)
        jobs = [
            Job(
                prepared=prepared,
                choice=choice,
                answer=prepared.answer(place.hosted, arrived_at),
                mailbox=Mailbox(reader),
                arrived_at=arrived_at,
                timeout_s=timeout_s,
            )
            for choice in range(choices)
        ]
        place.jobs.add(jobs)
        self._publish()
        return [TokenStream(job.mailbox, job.leave, tuple(prepared.tokens)) for job in jobs]

    async def accept_embedding(self, request: EmbeddingRequest) -> Pending[Embeddings]:
        """The vectors to come; raises as ``Engine.submit_embedding``."""
        place, job = self._text_job(request, EMBEDDERS)
        await place.read(job.read_inputs(request), job.timeout_s)
        return self._begun(place, job, job.embeddings(request.dimensions))

    async def accept_rerank(self, request: RerankRequest) -> Pending[Ranking]:
        """The scores to come; raises as ``Engine.submit_rerank``."""
        place, job = self._text_job(request, RERANKERS)
        if place.entry.kind == "rerank":
            documents = await place.read(job.read_pairs(request), job.timeout_s)
            return self._begun(place, job, job.head_ranking(request.query, documents, raw=request.raw_scores))
        await place.read(job.read_documents(request), job.timeout_s)
        return self._begun(place, job, job.cosine_ranking())

    async def decode(self, tokens: list[int]) -> str:
        """See ``InferenceEngine.decode``."""
        place = self._found(None, ("chat",))
        return str((await place.hosted.connection.ask("/detokenize", {"tokens": tokens}))["content"])

    def _found(self, name: str | None, kinds: tuple[Kind, ...]) -> Place:
        entry = fitting(self.snapshot, name, kinds)
        for place in self._places():
            if entry is not None and place.entry is entry:
                place.check_stays()
                return place
        if self._dead is not None and self._main is None:
            raise EngineDeadError(self._dead.message)
        raise refusal(self.snapshot, name, kinds)

    def _text_job(self, request: EmbeddingRequest | RerankRequest, kinds: tuple[Kind, ...]) -> tuple[Place, TextJob]:
        arrived_at, settings = time.perf_counter(), self._settings
        texts = request.inputs if isinstance(request, EmbeddingRequest) else request.documents
        if not texts:
            raise InvalidRequestError("there are no texts; send at least one")
        place = self._found(request.model, kinds)
        most = settings.slots + settings.queue_limit
        if place.busy >= most:
            raise QueueFullError(
                f"{place.busy} requests for embeddings or scores run or wait; {most} may (slots and queue_limit); try "
                "again in 1 s",
                retry_after_s=1,
            )
        return place, TextJob(place.hosted, request.timeout_s or settings.request_timeout_s, arrived_at)

    def _begun(self, place: Place, job: TextJob, work: Coroutine[Any, Any, T]) -> Pending[T]:
        def ended() -> None:
            self._encoded_tokens += job.computed
            self._publish()

        future = place.compute(work, ended)
        self._publish()
        return Pending(future, _as_it_is, future.cancel)

    # What others see

    def _places(self) -> list[Place]:
        return [*self._pinned.values(), *([self._main] if self._main is not None else [])]

    def _post(self, mailbox: Mailbox, item: Item) -> None:
        """For a reader; all that one round of the loop has goes at once."""
        self._outbox.post(mailbox, item)
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._sending = False
        self._publish()
        for closed in self._outbox.send():
            for place in self._places():
                gone = [job for job in place.jobs.queued + place.jobs.running if job.mailbox.loop is closed]
                place.jobs.end_all(gone, EngineError("nobody is left to read this answer"))

    def _publish(self, state: EngineState | None = None) -> None:
        main, places = self._main, self._places()
        self._state = state or ("empty" if main is None and self._state == "ready" else self._state)
        texts = sum(len(place.texts) for place in places)
        totals = replace(self._totals)
        for place in places:
            for job in place.jobs.running:
                totals.add(job.answer)
        self.snapshot = replace(
            self.snapshot,
            state="ready" if main is not None and self._state != "loading" else self._state,
            entry=main.entry if main is not None else None,
            model_memory_bytes=main.hosted.memory_bytes if main is not None else 0,
            context_length=main.hosted.context_length if main is not None else None,
            pinned=tuple(
                PinnedModel(entry=place.entry, memory_bytes=place.hosted.memory_bytes)
                for place in self._pinned.values()
                if not place.hosted.process.died.is_set()
            ),
            active_requests=sum(len(place.jobs.running) for place in places) + texts,
            queued_requests=sum(len(place.jobs.queued) for place in places),
            encode_requests=texts,
            place_free_s=main.jobs.place_free_s if main is not None else 1.0,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            output_tokens=totals.output_tokens,
            encoded_tokens=self._encoded_tokens,
            memory_used_bytes=sum(place.hosted.memory_bytes for place in places),
            memory_peak_bytes=max(self.snapshot.memory_peak_bytes, sum(it.hosted.memory_bytes for it in places)),
            progress_at=max((place.hosted.progress_at for place in places), default=self.snapshot.progress_at),
        )

    async def _tend(self) -> None:
        """Renew the snapshot, measure memory; unload a model that nobody has used for the time set."""
        measured_at = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.perf_counter()
            if now - measured_at >= MEASURE_S:
                measured_at = now
                for place in self._places():
                    place.hosted.look()
            if self._places():
                self._publish()
            main, idle_s = self._main, self._settings.idle_unload_s
            if idle_s is None or main is None or main.busy or self._changing.locked():
                continue
            if now - main.hosted.progress_at >= idle_s:
                log.info("%s was not used for %g s", main.entry.id, idle_s)
                await self.unload(why="the model is unloaded", finish_queued=False, cause="idle")


def _as_it_is(result: T) -> T:
    return result
