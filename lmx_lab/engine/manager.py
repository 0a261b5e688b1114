"""Own the models in memory: load and unload them, and pass each request to the model that answers it.

Everything runs on one event loop in a thread, except what reads the published state. ``residents`` decides what is in
memory, and ``swap`` in which order requests for models that do not fit together are served.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from lmx_lab.engine.engines import Engines, Factory, engine_for
from lmx_lab.engine.find import ModelFinder
from lmx_lab.engine.lookup import (
    CHAT,
    EMBEDDING,
    RERANK,
    Kinds,
    Model,
    is_idle_path,
    loaded_id,
    refusal,
    unknown_model,
    with_models_on_disk,
    wrong_kind,
)
from lmx_lab.engine.memory import Budget
from lmx_lab.engine.model import Counts, EngineHost
from lmx_lab.engine.plan import FitList, plan_load
from lmx_lab.engine.requests import (
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    Ranking,
    RerankRequest,
    TraceRequest,
)
from lmx_lab.engine.residents import Residents
from lmx_lab.engine.scheduler import LOAD_FIRST, Permit, Turns
from lmx_lab.engine.stream import Answer
from lmx_lab.errors import (
    EngineDeadError,
    GenerationTimeoutError,
    HostingError,
    InvalidRequestError,
    LabError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
)
from lmx_lab.portal import LoopThread, receive
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import EngineName, LoadSpec, ModelEntry, ModelEvent
from lmx_lab.values.plan import LoadPlan
from lmx_lab.values.tracing import Trace
from lmx_lab.weights.catalog import Catalog

T = TypeVar("T")
Request = GenerationRequest | EmbeddingRequest | RerankRequest | TraceRequest
P = ParamSpec("P")
TRIES = 3
"""Maximum number of attempts to submit a request in swap mode, in case other loads replace its model in the
meantime."""


def _of_residents(
    method: Callable[Concatenate[Residents, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ModelManager, P], Coroutine[Any, Any, T]]:
    """Return a method of the manager that calls one of ``Residents`` on the manager's loop."""

    @functools.wraps(method)
    async def call(manager: ModelManager, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await manager._run(lambda: method(manager._residents, *args, **kwargs))

    return call


class ModelManager:
    """Loads and unloads models, and passes requests to them.

    Use ``async with ModelManager(settings) as manager``, or call ``start()`` and ``stop()`` from any thread; both are
    idempotent. The first load also starts the manager. All public methods may be called from any thread and any event
    loop.

    Args:
        catalog: The models on this disk; by default those that the settings name.
        turns: When a client without a slot gets a slot of another client.
        engines: How to make an engine, by name; for those that are missing, as in ``ENGINES``.
        budget: The memory that models may use; by default that of the settings.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog | None = None,
        *,
        turns: Turns | None = None,
        engines: Mapping[EngineName, Factory] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.settings = settings
        self.catalog = catalog if catalog is not None else Catalog(settings)
        self.budget = budget or Budget(
            settings.memory_limit_bytes,
            weights=lambda: sum(model.memory_bytes for model in self.models),
            evict=lambda missing_bytes: self._post(self._residents.evict, missing_bytes),
        )
        host = EngineHost(
            budget=self.budget,
            idle=self._post_idle,
            lost=lambda model: self._post(self._residents.remove_lost, model),
            turns=turns or Turns(),
        )
        self.engines = Engines(settings, host, engines)
        self.fits = FitList(self.engines)
        """Which of the models on the disk fit."""
        self._observers: list[Callable[[ModelEvent], None]] = []
        self._finder = ModelFinder(settings, self.catalog, report=self._report)
        self._counts = Counts()
        self._residents = self._no_models()
        self._lifetime_lock = threading.Lock()
        self._stop_lock = threading.RLock()
        self._thread: LoopThread | None = None
        self._stopped = False
        self._created_at = time.monotonic()

    def _no_models(self) -> Residents:
        return Residents(
            self.settings,
            self._finder,
            self.engines,
            budget=self.budget,
            counts=self._counts,
            report=self._report,
        )

    # Lifetime

    def start(self) -> None:
        """Start, or start again after ``stop``. Each engine is imported with its first model."""
        # A stop that is in progress ends first.
        with self._stop_lock, self._lifetime_lock:
            if self._stopped:
                self._residents, self._stopped = self._no_models(), False
            self._register_exit()

    def _register_exit(self) -> None:
        """Register ``stop`` to be called when the interpreter exits."""
        atexit.unregister(self.stop)
        atexit.register(self.stop)

    def stop(self) -> None:
        """End all loads and requests and release all memory. Blocks until the current step of each engine is over."""
        with self._stop_lock:
            with self._lifetime_lock:
                self._stopped = True
                atexit.unregister(self.stop)
                thread, self._thread = self._thread, None
            if thread is not None:
                # Work that does not end in time is abandoned with the thread, and its processes end with it.
                with suppress(TimeoutError, HostingError):
                    self._measuring.cancel()
                    closing = thread.submit(self._residents.close(EngineDeadError("the engine was stopped")))
                    # Called by an observer, this runs on the manager's loop, which cannot wait for itself.
                    if asyncio._get_running_loop() is not thread.loop:
                        closing.result(15.0)
            self.engines.stop()
            if thread is not None:
                thread.stop()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work on the manager's loop, which is started first if necessary, and return its result. Cancelling the
        caller cancels the work, but no loads.

        Raises:
            EngineDeadError: this object was stopped.
        """
        try:
            with self._lifetime_lock:
                if self._stopped:
                    raise EngineDeadError("the engine was stopped")
                if self._thread is None:
                    thread = LoopThread("lmx-lab-models")
                    thread.start()
                    self._loop, self._measuring = thread.loop, thread.submit(self.budget.watch())
                    self._thread = thread
                    self._register_exit()
                thread = self._thread
            return await receive(thread.submit(work()))
        except HostingError as exc:
            raise EngineDeadError("the engine was stopped") from exc

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        """Call a function on the manager's loop. May be called from any thread."""
        with suppress(RuntimeError):  # The loop is closed, because the manager was stopped.
            self._loop.call_soon_threadsafe(callback, *args)

    def _post_idle(self) -> None:
        """React to a model that has no requests left. May be called from any thread."""
        # Skipped if nothing depends on it, since a client that sends one request at a time causes this call each time.
        residents = self._residents
        has_ttl = any(model.ttl_s is not None for model in residents.now.loaded)
        if has_ttl or self.settings.swap or residents.change is not None:
            self._post(residents.update)

    async def cancel_loads(self) -> None:
        """Cancel all loads because the server stops. Their callers get an error immediately."""

        async def cancel() -> None:
            self._residents.cancel_loads()

        if self._thread is not None:
            await self._run(cancel)

    async def quiesce(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for running requests to end. Remaining and queued requests end with an error."""
        if self._thread is not None:
            await self._run(lambda: self._residents.quiesce(timeout_s))

    # State

    @property
    def models(self) -> list[Model]:
        """The models in memory: pinned encoders, the main one, then the others, the newest first."""
        return self._residents.now.models

    @property
    def main(self) -> Model | None:
        """The main model, which was loaded last and answers requests that name no model."""
        return self._residents.now.present_main

    @property
    def main_id(self) -> str:
        """Id of the main model; empty without one. ``snapshot`` computes much more."""
        main = self._residents.now.present_main
        return main.entry.id if main is not None else ""

    @property
    def snapshot(self) -> EngineSnapshot:
        """The models in memory and the state of their engines. Never blocks."""
        return self._residents.snapshot

    @property
    def in_use(self) -> dict[Path, str]:
        """The id of the model that uses each file, by path; see ``Residents``."""
        return self._residents.in_use

    @property
    def alive(self) -> bool:
        """Whether the manager runs and the main model was not lost because its thread or process ended."""
        return not self._stopped and not isinstance(self._residents.now.lost, EngineDeadError)

    @property
    def fingerprint(self) -> str:
        """Name and version of the library that computes the main model; empty without one."""
        return self.main.fingerprint if self.main is not None else ""

    @property
    def uptime_s(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._created_at

    def add_observer(self, observer: Callable[[ModelEvent], None]) -> None:
        """Register a function that is called with each step of a load, and when a model leaves memory. It may be called
        on any thread.
        """
        self._observers.append(observer)

    def remove_observer(self, observer: Callable[[ModelEvent], None]) -> None:
        """Undo ``add_observer``."""
        self._observers.remove(observer)

    def _report(self, progress: ModelEvent) -> None:
        for observer in list(self._observers):
            observer(progress)

    def unpinned(self) -> Sequence[LoadSpec]:
        """Return the loads of the encoders that the settings name and that are not in memory."""
        pinned = [state.entry for state in self.snapshot.pinned]
        return [
            LoadSpec(model=name, pin=True)
            for name in (self.settings.embedder, self.settings.reranker)
            if name is not None and not any(entry.id == loaded_id(name, pinned, local=True) for entry in pinned)
        ]

    # Loads and unloads

    async def plan(self, spec: LoadSpec, *, local: bool = True) -> LoadPlan:
        """Return what a load would use in memory, and whether there is room for it; see ``plan_load``."""
        return await plan_load(spec, finder=self._finder, engines=self.engines, now=self.snapshot, local=local)

    load = _of_residents(Residents.load)
    cancel_load = _of_residents(Residents.cancel_load)
    unload = _of_residents(Residents.unload)
    keep = _of_residents(Residents.keep)
    check = _of_residents(Residents.check)
    make_room = _of_residents(Residents.make_room)
    take_back = _of_residents(Residents.take_back)

    # Requests

    async def submit(self, request: GenerationRequest) -> Answer:
        """Accept a generation request, and return its answer. See ``generate``."""
        (answer,) = await self.generate(request)
        return answer

    async def generate(self, request: GenerationRequest, choices: int = 1) -> list[Answer]:
        """Accept a generation request for several answers, all or none. The answers belong to the calling loop.

        Each answer has its own seed. In swap mode, the model that the request names is loaded first if it is on disk.

        Raises:
            NotLoadedError, ModelNotFoundError: the model that the request names is not loaded, or does not exist.
            OutOfMemoryError: the model was unloaded because memory ran out.
            ContextLengthError: the prompt leaves no room in the model's context.
            InvalidRequestError: the prompt cannot be tokenized, a token id is not in the vocabulary, or the
                engine of the model cannot do what is requested.
            QueueFullError: too many requests wait.
            GenerationTimeoutError: the model was not loaded within the time limit of the request.
            EngineDeadError: the engine has died.
        """
        limit, reader = self.settings.slots + self.settings.queue_limit, asyncio.get_running_loop()
        if choices > limit:
            raise InvalidRequestError(f"n is {choices}; this server takes {limit} (slots and queue_limit)", param="n")

        def use(model: Model, permits: Sequence[Permit]) -> Awaitable[list[Answer]]:
            return model.generate(request, permits, reader)

        return await self._run(partial(self._use, request, CHAT, use, count=choices))

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the vector of each input of a pinned or the main model. Cancelling the caller cancels the work.

        Raises:
            NotLoadedError, ModelNotFoundError: no embedding model is in memory, or not the one that the request names.
            InvalidRequestError: the model does not embed; an input is not valid text or has no tokens; ``dimensions``
                is too large.
            ContextLengthError: an input is longer than the model's context.
            QueueFullError: too many requests wait, or their texts together are too long.
            GenerationTimeoutError, EngineError: the vectors could not be computed.
        """
        _check_texts(request.inputs)
        return await self._result(request, EMBEDDING, lambda model, permits: model.embed(request, permits[0]))

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Return the relevance of each document to the query, from a reranker or, without one, from an embedding model.
        Raises the same as ``embed``.
        """
        _check_texts(request.documents)
        return await self._result(request, RERANK, lambda model, permits: model.rerank(request, permits[0]))

    async def trace(self, request: TraceRequest) -> Trace:
        """Return internal values of the main model. Cancelling the caller cancels the work.

        Raises:
            NotLoadedError, ModelNotFoundError: the model that the request names is not loaded, or does not exist.
            InvalidRequestError: the engine or the model cannot do what is requested, or the result is too large.
            ContextLengthError: the text is longer than the model's context.
            QueueFullError: too many requests wait.
            GenerationTimeoutError, EngineError: the trace could not be computed.
        """

        async def start(model: Model, permits: Sequence[Permit]) -> asyncio.Task[Trace]:
            try:
                return await model.trace(request, permits[0])
            except NotImplementedError:
                id_, engine = model.entry.id, engine_for(model.entry.format).title
                raise InvalidRequestError(
                    f"{id_} is loaded on {engine}, and only MLX returns internal values of a model; load it on MLX: "
                    f'lab.load("{id_}", engine="mlx")',
                    param="model",
                ) from None

        return await self._result(request, CHAT, start)

    async def encode(self, request: GenerationRequest) -> list[int]:
        """Return the token ids of a request's prompt, which may be longer than the model's context.

        Raises:
            NotLoadedError, ModelNotFoundError: the model that the request names is not loaded, or does not exist.
            ContextLengthError: the prompt is so long that it is not tokenized.
            InvalidRequestError: the prompt cannot be tokenized.
            QueueFullError: too many requests wait.
        """
        return await self.with_model(request, lambda model: model.encode(request))

    async def decode(self, answer: Answer, tokens: Sequence[int]) -> str:
        """Return the text of token ids as the tokenizer of the model that answers shows it, even if the model is being
        unloaded.

        Raises:
            NotLoadedError: the model was unloaded.
        """
        model = next((model for model in self.models if model.entry is answer.origin.entry), None)
        if model is None:
            raise NotLoadedError(f"{answer.model} has been unloaded; {LOAD_FIRST}")
        return await self._run(lambda: model.decode(tokens))

    async def with_model(self, request: GenerationRequest, work: Callable[[Model], Awaitable[T]]) -> T:
        """Call a function, on the manager's loop, with the chat model that a request names, and return its result. It
        counts as a request.
        """

        async def use(model: Model, permits: Sequence[Permit]) -> T:
            try:
                return await work(model)
            finally:
                permits[0].release()

        return await self._run(lambda: self._use(request, CHAT, use))

    def model_for(self, name: str | None, kinds: Kinds, *, local: bool = True) -> Model | None:
        """Return the model in memory that answers a request; None if there is none.

        Args:
            name: The model that the request names; None takes any.
            kinds: Kinds of models that can answer, the preferred ones first.
        """
        return self._residents.now.named(name, kinds, local=local)

    async def _result(
        self, request: Request, kinds: Kinds, use: Callable[[Model, Sequence[Permit]], Awaitable[asyncio.Task[T]]]
    ) -> T:
        """Accept a request, and wait for its result."""

        async def wait() -> T:
            # In swap mode, the turn of a request ends when it was accepted.
            return await (await self._use(request, kinds, use))

        return await self._run(wait)

    async def _use(
        self,
        request: Request,
        kinds: Kinds,
        use: Callable[[Model, Sequence[Permit]], Awaitable[T]],
        *,
        count: int = 1,
    ) -> T:
        """Pass a request to the model in memory that answers it, with a permit for each answer.

        In swap mode, the model may be loaded first. With ``Settings.any_model``, a request that names an unknown model
        is answered by the loaded one.

        Args:
            kinds: Kinds of models that can answer, the preferred ones first.
            use: Accepts the request. If it fails, the permits are released.
            count: Number of answers.

        Raises:
            LabError: see ``generate``.
        """
        settings, local, name = self.settings, request.caller.local, request.model
        name = settings.ids_by_alias.get(name, name) if name is not None else None

        async def admit(model: Model) -> T:
            if request.caller.patient:
                await model.admission.until_room(count)
            permits = model.admission.admit(count, slot_free_s=lambda: model.slot_free_s)
            try:
                return await use(model, permits)
            except BaseException:
                for permit in permits:
                    permit.release()
                raise

        while True:
            model = self._residents.now.named(name, kinds, local=local)
            # In swap mode, another model may be loaded in place of this one before the request is admitted. If only one
            # model is in memory, requests for it take turns with those for others.
            stays = not settings.swap or (model is not None and model.pinned)
            takes_turn = not stays and settings.resident == 1 and (self._residents.change or self._residents.swaps)
            try:
                if model is not None and not takes_turn:
                    try:
                        return await admit(model)
                    except NotLoadedError as exc:
                        if stays:
                            raise await self._extend_refusal(exc, name, kinds, local=local) from exc
                elif not settings.swap:
                    error = self._refusal(name, kinds, local=local)
                    raise await self._extend_refusal(error, name, kinds, local=local)
                return await self._use_in_turn(request, name, kinds, admit)
            except ModelNotFoundError:
                if name is None or not settings.any_model:
                    raise
                name = None

    async def _use_in_turn(
        self, request: Request, name: str | None, kinds: Kinds, admit: Callable[[Model], Awaitable[T]]
    ) -> T:
        """Wait for the turn of a request in swap mode, load its model if necessary, and pass the request to it.

        Args:
            admit: Admits the request to a model.
        """
        limit_s, caller, residents = (
            request.timeout_s or self.settings.request_timeout_s,
            request.caller,
            self._residents,
        )
        wanted = loaded_id(name, residents.now.entries, local=caller.local)
        try:
            async with asyncio.timeout(limit_s):
                ticket = residents.swaps.ticket(wanted, limited=not caller.patient)
                try:
                    # Checked before the wait, so that a request for a model that does not exist does not delay others.
                    if wanted is not None and wanted not in residents.ids:
                        await self._resolve(wanted, kinds, local=is_idle_path(wanted, self.snapshot))
                    await residents.swaps.wait(ticket)
                    attempt = 1
                    while True:
                        loaded = await self._load_for_request(wanted, kinds)
                        try:
                            if (model := self.model_for(loaded, kinds, local=False)) is None:
                                raise self._refusal(loaded, kinds, local=False)
                            return await admit(model)
                        except NotLoadedError:
                            # An administrator has unloaded or replaced the model.
                            if (attempt := attempt + 1) > TRIES:
                                raise
                finally:
                    residents.swaps.leave(ticket)
                    residents.set_idle_timer()
        except TimeoutError:
            message = f"the model was not loaded within the request's time limit of {limit_s:g} s; load it first"
            raise GenerationTimeoutError(message, param="model") from None
        except NotLoadedError as exc:
            if wanted is not None:
                raise
            raise await self._extend_refusal(exc, name, kinds, local=caller.local) from exc

    async def _load_for_request(self, name: str | None, kinds: Kinds) -> str | None:
        """Load the model that a request names, or the one that was unloaded because it was idle; return its id.

        A model that cannot answer the request is not loaded.
        """
        residents = self._residents
        await residents.until_unchanged()
        now = self.snapshot
        model = name or now.idle_model
        if model is None or any(model == state.entry.id for state in now.models):
            return model
        # Decided before the load, after which the snapshot no longer shows that this was the idle model.
        local, spec = is_idle_path(model, now), residents.idle_specs.get(model)
        try:
            entry = await self._resolve(model, kinds, local=local)
        except (ModelNotFoundError, InvalidRequestError):
            if name is None:
                return None
            raise
        spec = spec or LoadSpec(model=model if entry.has_alias(model) else entry.id)
        while True:
            started = time.perf_counter()
            try:
                report = await residents.load(spec, local=local, finish_queued=True, if_busy="wait")
            except ModelBusyError:
                # This request joined a load that does not wait for others.
                await residents.until_unchanged()
                continue
            residents.swaps.swap_s = time.perf_counter() - started
            return report.model

    async def _resolve(self, name: str, kinds: Kinds, *, local: bool) -> ModelEntry:
        try:
            entry = await self._finder.resolve(name, local=local)
        except ModelNotFoundError as exc:
            raise unknown_model(name, self.snapshot, kinds, await self._finder.on_disk()) from exc
        if not entry.answers(kinds):
            raise wrong_kind(entry, kinds)
        return entry

    def _refusal(self, name: str | None, kinds: Kinds, *, local: bool) -> LabError:
        """Return the error of a request that no model in memory can answer."""
        now, failure = self.snapshot, self._residents.now.lost
        if failure is not None and now.entry is None and now.state != "loading":
            return type(failure)(failure.message)
        return refusal(now, loaded_id(name, now.entries, local=local), kinds)

    async def _extend_refusal(self, error: LabError, name: str | None, kinds: Kinds, *, local: bool) -> LabError:
        """Return the error, extended by the next step that the models on disk allow."""
        if not isinstance(error, NotLoadedError) or (name is None and kinds == CHAT):
            return error
        name = loaded_id(name, self._residents.now.entries, local=local)
        return with_models_on_disk(error, name, await self._finder.on_disk(), self.snapshot, kinds)


def _check_texts(texts: Sequence[object]) -> None:
    if not texts:
        raise InvalidRequestError("there are no texts; send at least one")
