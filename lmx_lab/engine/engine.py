"""The engine as the rest of the program sees it: an async face over one thread.

Requests go in as commands on a queue; tokens come back through ``TokenStream``. Any number of event loops may use one
engine at the same time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import mlx.core as mx

from lmx_lab.engine import memory
from lmx_lab.engine.core import EngineCore
from lmx_lab.engine.generation import Generation
from lmx_lab.engine.loaded import LoadedModel, PromptTokenizer, check_fits
from lmx_lab.engine.requests import ChatPrompt, EngineSnapshot, GenerationRequest, LoadReport, TokenPrompt
from lmx_lab.engine.stream import Mailbox, TokenStream
from lmx_lab.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
    OtherModelLoadedError,
    OutOfMemoryError,
    QueueFullError,
)
from lmx_lab.settings import Settings
from lmx_lab.weights import ModelEntry

log = logging.getLogger(__name__)
T = TypeVar("T")
Command = tuple[Callable[[EngineCore], Any], "Future[Any]"]
LOAD_FIRST = "load one first: POST /admin/models/load, lab.load(...) or lmx-lab serve --model"


class Engine:
    """``async with Engine(settings) as engine``; or ``start()`` and ``stop()`` from anywhere, both idempotent."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._prompts: ThreadPoolExecutor | None = None
        # Reentrant: a stream that is collected while this thread holds it cancels itself through it.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._core: EngineCore | None = None
        self._dead: BaseException | None = None
        self._made_at = time.monotonic()
        self._encoding = 0

    # Lifetime

    def start(self) -> None:
        """Start the engine thread, or a new one after the old one died."""
        if self._dead is not None and self._thread is not None:
            self._thread.join()  # on its way out
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._dead, self._commands = None, queue.SimpleQueue()
            self._prompts = self._prompts or ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-prompts")
            born: Future[EngineCore] = Future()
            # A daemon, since a thread that Python waits for would be waited for before atexit can stop it.
            self._thread = threading.Thread(target=self._run, args=(born,), name="lmx-lab-engine", daemon=True)
            self._thread.start()
            atexit.register(self.stop)
            self._core = born.result()

    def stop(self) -> None:
        """End every request, free the memory, join the thread. Blocks until the current step is over."""
        with self._lock:
            thread, self._thread = self._thread, None
            prompts, self._prompts = self._prompts, None
        if thread is not None and thread.is_alive():
            self._commands.put(None)
            thread.join()
        if prompts is not None:
            prompts.shutdown(wait=False, cancel_futures=True)
        atexit.unregister(self.stop)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    # Verbs

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last step. Never blocks."""
        return self._core.snapshot if self._core else EngineSnapshot()

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._made_at

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check_fits(self, entry: ModelEntry) -> None:
        """Refuse what cannot be loaded, before anything is unloaded for it.

        Raises:
            UnusableModelError: this engine cannot run such a model.
            OutOfMemoryError: it is larger than what may be used.
        """
        check_fits(entry, limit_bytes=memory.limit_bytes(self.settings.memory_limit_bytes))

    async def load(self, entry: ModelEntry, *, finish_queued: bool = False) -> LoadReport:
        """Load ``entry`` in the place of what is loaded, after running requests have ended (``drain_s`` at most).

        Requests in the queue end with an error; with ``finish_queued`` they are served first, within the same time.

        Raises:
            UnusableModelError, OutOfMemoryError: see the message for what is loaded now.
        """
        self.check_fits(entry)
        if not self.alive or self._dead is not None:
            await asyncio.to_thread(self.start)
        why, drain_s = f"{entry.id} is loaded in the model's place", self.settings.drain_s

        def begin(core: EngineCore) -> Future[LoadReport]:
            if (already := core.already(entry)) is not None:
                return _done(already)
            return core.swap(lambda: core.load(entry), why=why, timeout_s=drain_s, finish_queued=finish_queued)

        return await asyncio.wrap_future(await self._call(begin))

    async def unload(self) -> int:
        """Unload the model after running requests have ended; returns the bytes freed, 0 when there was none."""
        if not self.alive:
            return 0
        return await self._swap(EngineCore.unload, "the model is unloaded")

    async def quiesce(self, timeout_s: float) -> None:
        """Let running requests end, for at most ``timeout_s``; the rest, and those that wait, end with an error."""
        if self.alive:
            await self._swap(lambda core: None, "the server is stopped", timeout_s)

    async def submit(self, request: GenerationRequest) -> TokenStream:
        """Accept a request. What is wrong with it is raised here, before its first token.

        Raises:
            NotLoadedError: no model, or not the one that ``request.model`` names.
            OutOfMemoryError: the model had to be unloaded for lack of memory.
            ContextLengthError: the prompt leaves no room in the model's context.
            InvalidRequestError: the prompt cannot be made into tokens, or a token id is not in the vocabulary.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine thread is gone.
        """
        (stream,) = await self.submit_all(request, choices=1)
        return stream

    async def submit_all(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        """Accept a request for several answers, all or none. Its prompt is computed once; seeds differ by choice.

        Raises: as ``submit``.
        """
        most = self.settings.slots + self.settings.queue_limit
        if choices > most:
            raise InvalidRequestError(f"n is {choices}; this server takes {most} (slots and queue_limit)", param="n")
        arrived_at = time.perf_counter()
        loop = asyncio.get_running_loop()
        prompts = self._wanted(request.model).prompts
        with self._place_in_queue():
            prompt = await loop.run_in_executor(self._prompts, prompts.encode, request.prompt)
        generations = self._generations(request, prompt, prompts, arrived_at=arrived_at, choices=choices)
        streams = [self._stream(generation) for generation in generations]
        try:
            await self._call(lambda core: core.submit(generations))
        except LabError as exc:
            for generation in generations:
                generation.mailbox.deliver(exc)
            raise
        # Leaving here by any other way, cancellation included, drops the streams, which cancels the generations.
        return streams

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids as the loaded model's tokenizer shows it.

        Raises:
            NotLoadedError: no model is loaded.
        """
        prompts = self._wanted(None).prompts
        return await asyncio.get_running_loop().run_in_executor(self._prompts, prompts.decode, tokens)

    def _generations(
        self,
        request: GenerationRequest,
        prompt: list[int],
        prompts: PromptTokenizer,
        *,
        arrived_at: float,
        choices: int,
    ) -> list[Generation]:
        # Looked up again: nobody may hold the model while something else is awaited, or it could not be unloaded.
        model = self._wanted(request.model)
        if model.prompts is not prompts:
            raise NotLoadedError(f"the model was exchanged for {model.entry.id} before this request began; ask again")
        _check_length(request, prompt, model)
        _check_tokens(request, prompt, model)
        return [
            Generation(
                request=request,
                prompt=prompt,
                mailbox=Mailbox(asyncio.get_running_loop()),
                model=weakref.ref(model),
                arrived_at=arrived_at,
                timeout_s=request.timeout_s or self.settings.request_timeout_s,
                choice=choice,
            )
            for choice in range(choices)
        ]

    def _stream(self, generation: Generation) -> TokenStream:
        # Weakly: a stream that somebody keeps must not keep the model in memory.
        cancel = functools.partial(_cancel, weakref.ref(generation))
        return TokenStream(generation.mailbox, lambda: self._post(cancel), tuple(generation.prompt))

    @contextlib.contextmanager
    def _place_in_queue(self) -> Iterator[None]:
        """Prompts on their way to tokens count as waiting, or a flood of long ones would wait without a limit."""
        now, settings = self.snapshot, self.settings
        if now.active_requests + now.queued_requests + self._encoding >= settings.slots + settings.queue_limit:
            raise QueueFullError(
                f"{settings.slots + settings.queue_limit} requests run or wait, as many as slots and queue_limit "
                f"allow; try again in {now.place_free_s:.0f} s",
                retry_after_s=now.place_free_s,
            )
        with self._lock:
            self._encoding += 1
        try:
            yield
        finally:
            with self._lock:
                self._encoding -= 1

    def _wanted(self, name: str | None) -> LoadedModel:
        if self._dead is not None:
            raise EngineDeadError(f"the engine has died ({self._dead!r}); load a model to start it again")
        model = self._core.model if self._core else None
        if model is None:
            if self.snapshot.state == "loading":
                raise NotLoadedError("a model is being loaded; ask again when GET /readyz says 200", retry_after_s=1)
            if self.snapshot.unload_cause == "memory":
                unloaded = self.snapshot.unloaded_model
                raise OutOfMemoryError(f"{unloaded} was unloaded for lack of memory; load it again, or a smaller one")
            if self.snapshot.unload_cause == "idle":
                unloaded = self.snapshot.unloaded_model
                raise NotLoadedError(f"{unloaded} was unloaded after a time without use; {LOAD_FIRST}")
            raise NotLoadedError(f"no model is loaded; {LOAD_FIRST}")
        if name is not None and name != model.entry.id:
            raise OtherModelLoadedError(f"{name[:200]} is not loaded, {model.entry.id} is; {LOAD_FIRST}", param="model")
        return model

    # The way to the thread

    async def _swap(self, perform: Callable[[EngineCore], T], why: str, timeout_s: float | None = None) -> T:
        drain_s = self.settings.drain_s if timeout_s is None else timeout_s
        done = await self._call(lambda core: core.swap(lambda: perform(core), why=why, timeout_s=drain_s))
        return await asyncio.wrap_future(done)

    async def _call(self, command: Callable[[EngineCore], T]) -> T:
        return await asyncio.wrap_future(self._post(command))

    def _post(self, command: Callable[[EngineCore], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._dead is not None or not self.alive:
                future.set_exception(EngineDeadError(f"the engine is not running ({self._dead or 'stopped'})"))
            else:
                self._commands.put((command, future))
        return future

    def _run(self, born: Future[EngineCore]) -> None:
        try:
            core = EngineCore(self.settings)
        except BaseException as exc:
            born.set_exception(exc)
            return
        born.set_result(core)
        error: LabError = EngineDeadError("the engine was stopped")
        try:
            while self._obey(core):
                core.step()
        except BaseException as exc:
            log.exception("the engine thread died")
            # Its frames hold the batch, and with it the weights.
            self._dead = exc.with_traceback(None)
            error = EngineDeadError(f"the engine thread died: {exc!r}; load a model to start it again")
        finally:
            try:
                core.close(error)
            finally:
                self._refuse_rest(error)
                # Without these two the process aborts at exit (rc 134).
                mx.synchronize()
                mx.clear_streams()

    def _obey(self, core: EngineCore) -> bool:
        """Perform the commands that wait; sleeps only while there is nothing to do. False to stop."""
        block = core.idle
        while True:
            try:
                command = self._commands.get(block=block, timeout=core.idle_left_s if block else None)
            except queue.Empty:
                if not self._encoding:
                    core.unload_if_idle()
                return True
            if command is None:
                return False
            _perform(core, *command)
            block = False

    def _refuse_rest(self, error: LabError) -> None:
        with self._lock:
            while not self._commands.empty():
                command = self._commands.get_nowait()
                # Whoever has left meanwhile has cancelled theirs.
                if command is not None and command[1].set_running_or_notify_cancel():
                    command[1].set_exception(error)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _perform(core: EngineCore, command: Callable[[EngineCore], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command(core))
    except Exception as exc:
        future.set_exception(exc)


def _cancel(ended: weakref.ref[Generation], core: EngineCore) -> None:
    if (generation := ended()) is not None:
        core.cancel(generation)


def _check_length(request: GenerationRequest, prompt: list[int], model: LoadedModel) -> None:
    limit, own = model.context_length, model.entry.context_length
    if limit is not None and len(prompt) + min(1, request.max_tokens) > limit:
        why = f" (of its {own}: memory holds no more)" if own is not None and limit < own else ""
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and {model.entry.id} holds {limit} in all{why}, "
            "the answer included; shorten the prompt",
            param="messages" if isinstance(request.prompt, ChatPrompt) else "prompt",
        )


def _check_tokens(request: GenerationRequest, prompt: list[int], model: LoadedModel) -> None:
    """Token ids that the caller wrote must be tokens of this model."""
    size, bias = model.traits.vocabulary_size, [token for token, _ in request.sampling.logit_bias]
    given = prompt if isinstance(request.prompt, TokenPrompt) else []
    for param, tokens in (("logit_bias", bias), ("prompt", given)):
        unknown = next((token for token in tokens if not 0 <= token < size), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"{param} has the token id {unknown}; {model.entry.id} knows 0 to {size - 1}", param=param
            )
