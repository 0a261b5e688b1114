"""The owner of the models in memory, for all threads and event loops.

``ModelManager`` has one control loop in a thread of its own, on which ``ModelControl`` decides what is loaded. A
request whose model is loaded does not pass that loop: it reads the published ``Residents`` and goes straight to its
engine.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from lmx_lab.engine.admission import LOAD_FIRST, Permit
from lmx_lab.engine.interface import EngineHost, InferenceEngine
from lmx_lab.engine.load_operation import IfBusy
from lmx_lab.engine.machine_memory import total_bytes
from lmx_lab.engine.model_control import ModelControl
from lmx_lab.engine.model_finder import ModelFinder
from lmx_lab.engine.model_lookup import (
    CHAT,
    EMBEDDING,
    RERANK,
    Kinds,
    find_model,
    loaded_id,
    refusal,
    with_models_on_disk,
)
from lmx_lab.engine.registry import ENGINES
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.residents import Resident, Residents
from lmx_lab.engine.stream import Pending, TokenStream
from lmx_lab.errors import (
    EngineDeadError,
    GenerationTimeoutError,
    HostingError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
)
from lmx_lab.portal import LoopThread, receive
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, EngineState, merged
from lmx_lab.values.models import EngineName, LoadProgress, LoadReport, LoadSpec, ModelEntry
from lmx_lab.weights import Catalog

T = TypeVar("T")
Enter = Callable[[Resident, Sequence[Permit]], Awaitable[T]]
TRIES = 3
"""How often a request in swap mode loads its model, if other loads replace it before the request is submitted."""
STOP_S = 5.0
"""Time that ``stop`` waits for loads to end after the engines have stopped."""


class ModelManager:
    """Loads and unloads models, and submits requests to them.

    ``async with ModelManager(settings) as manager``; or ``start()`` and ``stop()`` from any thread, both idempotent. It
    also starts with its first load. All methods may be called from any thread and any event loop.

    Args:
        catalog: The models on this disk; by default those that the settings name.
    """

    def __init__(self, settings: Settings, catalog: Catalog | None = None) -> None:
        self.settings = settings
        self._observers: list[Callable[[LoadProgress], None]] = []
        self._finder = ModelFinder(
            catalog if catalog is not None else Catalog(settings), downloads=settings.downloads, report=self._report
        )
        self._engines: dict[EngineName, InferenceEngine] = {}
        """Engines that a model was loaded on."""
        self._making = threading.Lock()
        self._lifetime = threading.Lock()
        self._thread: LoopThread | None = None
        self._control: ModelControl | None = None
        self._stopped = False
        self._machine_bytes = total_bytes()
        self._made_at = time.monotonic()

    # Lifetime

    def start(self) -> None:
        """Start, or start again after ``stop``. Each engine starts with its first model."""
        with self._lifetime:
            self._stopped = False
            self._register_exit()

    def _register_exit(self) -> None:
        """Have ``stop`` called at the exit of the interpreter."""
        atexit.unregister(self.stop)
        atexit.register(self.stop)

    def stop(self) -> None:
        """End all loads and requests and release all memory. Blocks until the current step of each engine is over."""
        with self._lifetime:
            self._stopped = True
            atexit.unregister(self.stop)
            thread, control = self._thread, self._control
            self._thread = self._control = None
        error = EngineDeadError("the engine was stopped")
        if thread is not None and control is not None:
            thread.loop.call_soon_threadsafe(control.cancel_all, error)
        for engine in reversed(list(self._engines.values())):
            engine.stop()
        if thread is not None and control is not None:
            with suppress(TimeoutError):
                thread.submit(control.settled()).result(STOP_S)
            thread.stop()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    async def cancel_loads(self) -> None:
        """Cancel all loads, because the server stops. Their callers get an error at once."""
        if self._control is not None:
            await self._run(lambda control: _call(control.cancel_all))

    async def quiesce(self, timeout_s: float) -> None:
        """Let running requests end for at most ``timeout_s``; the rest, and queued requests, end with an error."""
        if self._control is not None:
            await self._run(lambda control: control.quiesce(timeout_s))

    # State

    @property
    def residents(self) -> Residents:
        """The models in memory."""
        control = self._control
        return control.residents if control is not None else Residents()

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state of all engines as of their last step. Never blocks."""
        now = self.residents
        engine = now.engine or next(iter(self._engines.values()), None)
        others = [other.snapshot for other in list(self._engines.values()) if other is not engine]
        first = engine.snapshot if engine is not None else EngineSnapshot(memory_total_bytes=self._machine_bytes)
        snapshot = merged([first, *others])
        main = now.main
        is_loaded = main is not None and snapshot.entry is main.entry
        state: EngineState = "ready" if is_loaded else "dead" if first.state == "dead" else "empty"
        if not is_loaded:
            snapshot = replace(snapshot, entry=None, model_memory_bytes=0, context_length=None)
            if now.change is not None and now.change.stage == "loading":
                state = "loading"
        if now.unloaded is not None and snapshot.entry is None and snapshot.unload_cause is None:
            snapshot = replace(snapshot, unloaded_model=now.unloaded[0], unload_cause=now.unloaded[1])
        change = now.change
        if change is not None and main is not None:
            change = replace(change, requests_left=main.admission.active)
        return replace(snapshot, state=state, change=change)

    @property
    def alive(self) -> bool:
        """Whether the engine of the main model is running; true before the first model."""
        engine = self.residents.engine
        return not self._stopped and (engine is None or engine.alive)

    @property
    def fingerprint(self) -> str:
        """Name and version of the library that computes the main model; empty before the first model."""
        engine = self.residents.engine
        return engine.fingerprint if engine is not None else ""

    @property
    def uptime_s(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._made_at

    def add_observer(self, observer: Callable[[LoadProgress], None]) -> None:
        """Call a function with each step of a load, and when a model leaves memory. It may be called on any thread."""
        self._observers.append(observer)

    def _report(self, progress: LoadProgress) -> None:
        for observer in self._observers:
            observer(progress)

    def engine(self, name: EngineName) -> InferenceEngine:
        """Return an engine, importing and creating it first if necessary. Blocks."""
        with self._making:
            if name not in self._engines:
                host = EngineHost(
                    used_by_others=functools.partial(self._used_bytes, but=name),
                    lost_model=functools.partial(self._post_lost, name),
                )
                self._engines[name] = ENGINES[name].make(self.settings, host)
            return self._engines[name]

    def _used_bytes(self, *, but: EngineName) -> int:
        """Return the memory that the other engines use."""
        return sum(engine.snapshot.memory_used_bytes for name, engine in list(self._engines.items()) if name != but)

    def _post_lost(self, name: EngineName) -> None:
        if (control := self._control) is not None:
            control.post_lost(self._engines[name])

    # Models

    async def load(
        self,
        spec: LoadSpec,
        *,
        local: bool = True,
        finish_queued: bool = False,
        if_busy: IfBusy = "refuse",
    ) -> LoadReport:
        """Load a model in place of the main one, or with ``spec.pin`` beside it.

        Running requests of the main model may end first (``drain_s``); if the load fails, it is loaded again. A caller
        that is cancelled does not cancel the load. A load of the same spec that is under way is joined.

        Args:
            local: Whether the caller is on this machine, and may name paths and models to download.
            finish_queued: Answer the queued requests of the main model, too, within the same time.
            if_busy: What to do while another load or unload is under way.

        Raises:
            ModelNotFoundError: the model is not on disk, and cannot be downloaded.
            UnusableModelError, StorageFullError, OutOfMemoryError: the message says what is loaded now.
            ModelBusyError: another load or unload is under way.
            NotLoadedError: the load was cancelled.
        """
        return await self._run(
            lambda control: control.load(spec, None, local=local, finish_queued=finish_queued, if_busy=if_busy)
        )

    async def load_entry(
        self,
        entry: ModelEntry,
        spec: LoadSpec | None = None,
        *,
        finish_queued: bool = False,
        if_busy: IfBusy = "refuse",
    ) -> LoadReport:
        """Load a model whose files were found already. Otherwise the same as ``load``."""
        spec = spec or LoadSpec(model=entry.id)
        return await self._run(
            lambda control: control.load(spec, entry, local=True, finish_queued=finish_queued, if_busy=if_busy)
        )

    async def cancel_load(self, model: str) -> None:
        """Cancel the loads of a model that have not reached an engine; their callers get an error. A download
        continues.

        Raises:
            ModelBusyError: the engine loads the model already.
            InvalidRequestError: the model is not being loaded.
        """
        await self._run(lambda control: control.cancel(model))

    async def unload(self, *, if_busy: IfBusy = "refuse") -> int:
        """Unload the main model after its running requests have ended; return the bytes that this released.

        A load that is under way is cancelled if its engine can do that, even if it hangs. Pinned models stay.

        Raises:
            ModelBusyError: another load or unload is under way.
        """
        return await self._run(lambda control: control.unload(if_busy=if_busy))

    async def end_drain(self) -> None:
        """End the requests that a load or unload waits for, instead of waiting until they have ended."""
        await self._run(lambda control: _call(control.end_drain))

    # Requests

    async def submit(self, request: GenerationRequest) -> TokenStream:
        """Accept a generation request. See ``submit_all``."""
        (stream,) = await self.submit_all(request)
        return stream

    async def submit_all(
        self, request: GenerationRequest, choices: int = 1, *, local: bool = True, patient: bool = False
    ) -> list[TokenStream]:
        """Accept a generation request for several answers, all or none; seeds differ by answer.

        In swap mode the model that the request names is loaded first if it is on disk.

        Args:
            local: Whether the caller is on this machine, and may name the loaded model by its path.
            patient: Wait if the queue is full.

        Raises:
            NotLoadedError, ModelNotFoundError: the model that the request names is not loaded, or does not exist.
            OutOfMemoryError: the model was unloaded because memory ran out.
            ContextLengthError: the prompt leaves no room in the model's context.
            InvalidRequestError: the prompt cannot be made into tokens, a token id is not in the vocabulary, or the
                engine of the model cannot do what is requested.
            QueueFullError: too many requests wait.
            GenerationTimeoutError: the model was not loaded within the time limit of the request.
            EngineDeadError: the engine has died.
        """
        limit = self.settings.slots + self.settings.queue_limit
        if choices > limit:
            raise InvalidRequestError(f"n is {choices}; this server takes {limit} (slots and queue_limit)", param="n")

        async def enter(resident: Resident, permits: Sequence[Permit]) -> list[TokenStream]:
            return await resident.engine.submit_all(resident.entry, request, permits)

        return await self._submit(request, CHAT, enter, count=choices, local=local, patient=patient)

    async def embed(self, request: EmbeddingRequest, *, local: bool = True) -> Embeddings:
        """Return the vector of each input. Cancelling the wait cancels the work. Raises the same as
        ``submit_embedding``, and GenerationTimeoutError or EngineError if the vectors could not be computed.
        """
        return await (await self.submit_embedding(request, local=local)).result()

    async def submit_embedding(self, request: EmbeddingRequest, *, local: bool = True) -> Pending[Embeddings]:
        """Accept inputs to be embedded by a pinned or the main model.

        Raises:
            NotLoadedError, ModelNotFoundError: no embedding model is in memory, or not the one that the request names.
            InvalidRequestError: the named model does not embed; an input is not valid text; too many dimensions.
            ContextLengthError: an input is longer than the model's context.
            QueueFullError: too many requests wait.
        """
        _check_texts(request.inputs)

        async def enter(resident: Resident, permits: Sequence[Permit]) -> Pending[Embeddings]:
            return await resident.engine.submit_embedding(resident.entry, request, permits[0])

        return await self._submit(request, EMBEDDING, enter, local=local)

    async def rerank(self, request: RerankRequest, *, local: bool = True) -> Ranking:
        """Return the relevance of each document to the query. Raises the same as ``embed``."""
        return await (await self.submit_rerank(request, local=local)).result()

    async def submit_rerank(self, request: RerankRequest, *, local: bool = True) -> Pending[Ranking]:
        """Accept documents to be ranked by a reranker or, without one, by an embedding model. Raises the same as
        ``submit_embedding``.
        """
        _check_texts(request.documents)

        async def enter(resident: Resident, permits: Sequence[Permit]) -> Pending[Ranking]:
            return await resident.engine.submit_rerank(resident.entry, request, permits[0])

        return await self._submit(request, RERANK, enter, local=local)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids as the main model's tokenizer shows it.

        Raises:
            NotLoadedError: no model is loaded.
        """
        main = self.residents.main
        if main is None:
            raise NotLoadedError(f"no model is loaded; {LOAD_FIRST}")
        return await main.engine.decode(tokens)

    def model_for(self, name: str | None, kinds: Kinds, *, local: bool = True) -> Resident | None:
        """Return the model in memory that answers a request; None if there is none.

        Args:
            name: The model that the request names; None takes any.
            kinds: Kinds of models that can answer, the preferred ones first.
        """
        return _resident_for(self.residents, name, kinds, local=local)

    async def _submit(
        self,
        request: GenerationRequest | EmbeddingRequest | RerankRequest,
        kinds: Kinds,
        enter: Enter[T],
        *,
        count: int = 1,
        local: bool,
        patient: bool = False,
    ) -> T:
        """Find the model of a request, accept the request, and submit it to the engine of the model."""
        now, swap = self.residents, self.settings.swap
        resident = _resident_for(now, request.model, kinds, local=local)
        if resident is not None and (now.stable or not swap or resident in now.pinned):
            try:
                return await _enter(resident, enter, count, patient=patient)
            except NotLoadedError as exc:
                # In swap mode a load may have begun since.
                if not swap or resident in now.pinned:
                    raise await self._explained(exc, request.model, kinds, local=local) from exc
        elif not swap:
            error = self._refusal(request.model, kinds, local=local)
            raise await self._explained(error, request.model, kinds, local=local)
        return await self._submit_in_turn(request, kinds, enter, count=count, local=local, patient=patient)

    async def _submit_in_turn(
        self,
        request: GenerationRequest | EmbeddingRequest | RerankRequest,
        kinds: Kinds,
        enter: Enter[T],
        *,
        count: int,
        local: bool,
        patient: bool,
    ) -> T:
        """Submit a request in swap mode: wait for its turn, and load its model."""
        limit_s = request.timeout_s or self.settings.request_timeout_s
        name = loaded_id(request.model, [it.entry for it in self.residents], local=local)
        try:
            async with asyncio.timeout(limit_s):
                turn = await self._run(lambda control: control.take_turn(name, kinds, limited=not patient))
                try:
                    return await self._enter_turn(turn.model, name, kinds, enter, count=count, patient=patient)
                finally:
                    turn.close()
        except TimeoutError:
            message = f"the model was not loaded within {limit_s:g} s, the request's limit"
            raise GenerationTimeoutError(message, param="model") from None
        except NotLoadedError as exc:
            if name is not None:
                raise
            raise await self._explained(exc, name, kinds, local=local) from exc

    async def _enter_turn(
        self, model: str | None, name: str | None, kinds: Kinds, enter: Enter[T], *, count: int, patient: bool
    ) -> T:
        for attempt in range(TRIES):
            resident = _resident_for(self.residents, model, kinds, local=False)
            error = self._refusal(model, kinds, local=False) if resident is None else None
            if resident is not None:
                try:
                    return await _enter(resident, enter, count, patient=patient)
                except NotLoadedError as exc:
                    error = exc
            assert error is not None
            if attempt == TRIES - 1 or not isinstance(error, NotLoadedError):
                raise error
            # An administrator has unloaded or replaced the model.
            model = await self._run(lambda control: control.bring(name, kinds))
        raise AssertionError("unreachable")

    def _refusal(self, name: str | None, kinds: Kinds, *, local: bool) -> LabError:
        """Return the error of a request that no model in memory can answer."""
        now = self.residents
        failure = now.engine.failure if now.engine is not None else None
        snapshot = self.snapshot
        if failure is not None and snapshot.entry is None and snapshot.state != "loading":
            return type(failure)(failure.message)
        return refusal(snapshot, loaded_id(name, [it.entry for it in now], local=local), kinds)

    async def _explained(self, error: LabError, name: str | None, kinds: Kinds, *, local: bool) -> LabError:
        """Return the error with what the models on disk add to it."""
        if not isinstance(error, NotLoadedError) or (name is None and kinds == CHAT):
            return error
        name = loaded_id(name, [it.entry for it in self.residents], local=local)
        return with_models_on_disk(error, name, await self._finder.on_disk(), self.snapshot, kinds)

    # The way to the control loop

    async def _run(self, work: Callable[[ModelControl], Coroutine[Any, Any, T]]) -> T:
        """Run work on the control loop. Cancelling the caller cancels the work, which does not cancel loads.

        Raises:
            EngineDeadError: this object was stopped.
        """
        try:
            thread, control = self._running()
            return await receive(thread.submit(work(control)))
        except HostingError as exc:
            raise EngineDeadError("the engine was stopped") from exc

    def _running(self) -> tuple[LoopThread, ModelControl]:
        """Return the thread of the control loop, which is started first if necessary."""
        with self._lifetime:
            if self._stopped:
                raise EngineDeadError("the engine was stopped")
            if self._thread is None or self._control is None:
                thread = LoopThread("lmx-lab-models")
                thread.start()
                self._control = thread.submit(self._make_control()).result()
                self._thread = thread
                self._register_exit()
            return self._thread, self._control

    async def _make_control(self) -> ModelControl:
        return ModelControl(
            self.settings,
            self._finder,
            engine_of=self.engine,
            report=self._report,
            snapshot=lambda: self.snapshot,
        )


def _resident_for(now: Residents, name: str | None, kinds: Kinds, *, local: bool) -> Resident | None:
    residents = list(now)
    entries = [resident.entry for resident in residents]
    entry = find_model(entries, loaded_id(name, entries, local=local), kinds)
    return next((resident for resident in residents if resident.entry is entry), None)


async def _enter(resident: Resident, enter: Enter[T], count: int, *, patient: bool) -> T:
    """Accept a request and submit it; if that fails, its permits are released.

    Raises:
        QueueFullError: too many requests wait.
        NotLoadedError: the model is being unloaded.
    """
    admission = resident.admission
    if patient:
        await admission.until_room(count)
    permits = admission.admit(count, retry_after_s=resident.engine.snapshot.slot_free_s)
    try:
        return await enter(resident, permits)
    except BaseException:
        for permit in permits:
            permit.release()
        raise


def _check_texts(texts: Sequence[object]) -> None:
    if not texts:
        raise InvalidRequestError("there are no texts; send at least one")


async def _call(function: Callable[[], object]) -> None:
    function()
