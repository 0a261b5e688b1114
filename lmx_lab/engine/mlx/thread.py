"""Run the thread of the MLX engine, the only one that computes with weights after their load.

MLX streams are thread-local, so MLX arrays are used on this thread only. Results are ints, floats, strings and numpy
arrays. Commands reach the thread through a queue, and each sets the result of a future.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import mlx.core as mx

from lmx_lab.engine.cpu_blas import ThreadChoice, configure_blas
from lmx_lab.engine.encoders.loading import LoadedEncoder
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.encoding import EncodingLoop
from lmx_lab.engine.mlx.jobs import Job, JobQueue
from lmx_lab.engine.mlx.loop import GenerationLoop, Room
from lmx_lab.engine.mlx.prefill import PREFILL_STEP_S
from lmx_lab.engine.mlx.sampling import Samplers
from lmx_lab.engine.mlx.tracing import TraceLoop
from lmx_lab.engine.mlx.weights import Cancellation
from lmx_lab.engine.model import EngineHost, LoadedModel
from lmx_lab.engine.scheduler import LOAD_FIRST
from lmx_lab.errors import EngineDeadError, EngineError, LabError, NotLoadedError, OutOfMemoryError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import BlasReport

log = logging.getLogger(__name__)
T = TypeVar("T")
J = TypeVar("J", bound=Job[Any])


class MlxThread:
    """The models in memory and their requests, on a thread that sleeps while there is no work.

    ``post``, ``call``, ``compute``, ``stop`` and the attributes ``blas``, ``ended``, ``progress_at`` and ``peak_bytes``
    are used by other threads, everything else by this one.

    Args:
        device_bytes: See ``Room``.
    """

    encode_s = 0.1
    """Time for which a step computes texts while no answer is generated. Commands wait for the end of the step."""

    def __init__(self, settings: Settings, host: EngineHost, *, device_bytes: int | None) -> None:
        self._settings = settings
        self._lost = host.lost
        self._device_bytes = device_bytes
        self.models: dict[LoadedModel[Any], GenerationLoop | LoadedEncoder] = {}
        self.room = Room(host.budget, device_bytes, self.models)
        self.blas: BlasReport | None = None
        """The BLAS; None until ``started``."""
        self.started: Future[None] = Future()
        self.ended: LabError | None = None
        """Why the thread no longer accepts commands; None while it does."""
        self.progress_at = time.perf_counter()
        """When the thread last performed a step or a command."""
        self.peak_bytes = 0
        """Largest memory in use after a step."""
        self._least_s = 0.0
        """The least ``GenerationLoop.used_s`` of the models with work, which it never exceeds in a model that gets work
        again: otherwise this model would have all turns for a while."""
        self._mean_s = 0.0
        self._commands: queue.SimpleQueue[tuple[Callable[[MlxThread], Any], Future[Any]] | None] = queue.SimpleQueue()
        # Reentrant: a stream that is garbage-collected while this thread holds the lock posts its cancellation.
        self._lock = threading.RLock()
        # A daemon thread, because Python joins other threads at the exit before it stops the manager.
        self._thread = threading.Thread(target=self._run, name="lmx-lab-engine", daemon=True)
        self._thread.start()

    # Other threads

    def stop(self) -> None:
        """End every request, release the memory, and join the thread. Blocks until the current step is over."""
        with self._lock:
            if self.ended is None:
                self._commands.put(None)
        self._thread.join()

    def post(self, command: Callable[[MlxThread], T]) -> Future[T]:
        """Submit a command to the thread, and return the future of its result without waiting.

        The future raises ``EngineDeadError`` if the thread has ended. Errors have no traceback, whose frames could
        refer to weights.
        """
        future: Future[T] = Future()
        with self._lock:
            if self.ended is not None:
                future.set_exception(type(self.ended)(self.ended.message))
            else:
                self._commands.put((command, future))
        return future

    async def call(self, command: Callable[[MlxThread], T]) -> T:
        """Perform a command on the thread and return its result. Raises as the future of ``post``."""
        return await asyncio.wrap_future(self.post(command))

    async def compute(self, jobs: JobQueue[J, T], job: J) -> T:
        """Compute a job, and return its result. Cancelling the caller cancels the job.

        Raises:
            LabError: the job cannot be computed, or its model was unloaded or lost.
        """

        def add(thread: MlxThread) -> None:
            thread.require(job.model)
            jobs.add(job)

        try:
            await self.call(add)
            result: T = await asyncio.wrap_future(job.done)
        except asyncio.CancelledError:
            self.post(lambda _: jobs.cancel(job))
            raise
        return result

    # Commands

    def add(self, model: LoadedModel[Any], loaded: GenerationLoop | LoadedEncoder, cancellation: Cancellation) -> None:
        """Add a model that was loaded.

        Raises:
            NotLoadedError: the load was cancelled.
        """
        cancellation.check()
        if isinstance(loaded, GenerationLoop):
            assert self.blas is not None
            loaded.start(self._threads, self._samplers, self.blas)
        self.models[model] = loaded

    def require(self, model: LoadedModel[Any]) -> None:
        """Check that a model is in memory.

        Raises:
            NotLoadedError, OutOfMemoryError: it was unloaded or lost.
        """
        if model not in self.models:
            model.check()
            raise NotLoadedError(f"{model.entry.id} has been unloaded; {LOAD_FIRST}")

    def unload(self, model: LoadedModel[Any], error: LabError) -> int:
        """End what is left of a model's requests, drop it, and return the measured number of bytes released."""
        before = memory.used_bytes()
        self._drop(model, error)
        return max(0, before - memory.used_bytes())

    def _drop(self, model: LoadedModel[Any], error: LabError) -> None:
        loaded = self.models.pop(model, None)
        self.encoding.end_all([job for job in self.encoding.jobs if job.model is model], error)
        self.tracing.end_all([job for job in self.tracing.jobs if job.model is model], error)
        answers = None
        if isinstance(loaded, GenerationLoop):
            answers = loaded.answers
            loaded.close(error)
        del loaded
        memory.release()
        # Last, so that the memory is free when a reader receives the error.
        if answers is not None:
            answers.deliver()

    # Thread

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute until the next command."""
        is_answered = all(loop.idle and not loop.is_saving for loop in self.room.loops)
        return self.encoding.idle and self.tracing.idle and is_answered

    def _run(self) -> None:
        error: LabError = EngineDeadError("the engine was stopped")
        has_died = False
        try:
            if self._device_bytes is not None:
                memory.limit_kept_bytes(self._device_bytes)
            self.blas = configure_blas(self._settings.blas, self._settings.threads)
            if mx.default_device() == mx.cpu:
                # ``mx.compile`` runs g++ there: the first pass of SmolLM2-135M takes 1.7 to 4.8 s instead of 0.6 s, and
                # later ones are not faster. The compiled libraries are in ``mlx`` in the folder for temporary files:
                # another user could put libraries there, and if another user has created it, every pass fails.
                mx.disable_compile()
            self._threads, self._samplers = ThreadChoice(self.blas), Samplers()
            self.encoding = EncodingLoop(self._threads, self.room)
            self.tracing = TraceLoop(self._threads, self.room, trace_bytes=self._settings.trace_bytes)
            self.started.set_result(None)
            while self._perform_commands():
                self.step()
        except BaseException as exc:
            log.exception("the engine thread died")
            has_died = True
            error = EngineDeadError(f"the engine thread died: {exc!r}; load a model to start it again")
        with self._lock:
            self.ended = error
        if not self.started.done():
            self.started.set_exception(error)
            return
        models = list(self.models)
        for model in models:
            model.lost = error
            try:
                self._drop(model, error)
            except Exception:
                log.exception("%s was not released completely", model.entry.id)
        while not self._commands.empty():
            command = self._commands.get_nowait()
            # A caller that no longer waits has cancelled its future.
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(error)
        memory.end_thread()
        if has_died:
            for model in models:
                self._lost(model)

    def _perform_commands(self) -> bool:
        """Perform the commands in the queue, and wait for one if there is nothing to compute. Return False to stop."""
        block = self.idle
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            block = False
            self._perform(*command)
            # It may refer to a model, and this method may wait for the next one for a long time.
            del command
            self.progress_at = time.perf_counter()

    def _perform(self, command: Callable[[MlxThread], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(command(self))
        except LabError as exc:
            exc.__context__ = exc.__cause__ = None
            future.set_exception(exc.with_traceback(None))
        except Exception as exc:
            log.exception("a command of the engine thread failed")
            future.set_exception(EngineError(f"the request could not be started: {type(exc).__name__}: {exc}"))
        except BaseException as exc:
            future.set_exception(EngineDeadError(f"the engine thread died: {exc!r}; load a model to start it again"))
            raise

    def step(self) -> None:
        """Perform one step of the answers, work on texts and traces for about the time of their tokens, and deliver the
        results to the loop of each reader.
        """
        started = time.perf_counter()
        chats = [(model, each) for model, each in self.models.items() if isinstance(each, GenerationLoop)]
        busy = [loop for _, loop in chats if not loop.idle]
        running = [loop for loop in busy if loop.answers.scheduler.running]
        chosen = min(running or busy, key=lambda loop: loop.used_s, default=None)
        if chosen is not None:
            self._least_s = max(self._least_s, chosen.used_s)
        lost = []
        for model, loop in chats:
            if loop.idle:
                # When it gets work again, it has no advantage over the others.
                loop.used_s = max(loop.used_s, self._least_s)
                if not loop.is_saving:
                    continue
            try:
                loop.step(computes=loop is chosen or not running, idle=not running)
            except OutOfMemoryError as exc:
                why = f"{model.entry.id} was unloaded because memory ran out; load it again, or a smaller one"
                model.lost = OutOfMemoryError(why)
                self._drop(model, exc)
                lost.append(model)
        traces = not self.tracing.idle
        if traces and busy:
            # The step only starts the computation of the next tokens. Its time is known when the computation has ended.
            self._threads.wait()
        limit_s = time.perf_counter() - started
        if traces and busy:
            # The step may have been slow because other programs used the processors, so the mean limits its time.
            self._mean_s += 0.2 * (limit_s - self._mean_s) if self._mean_s else limit_s
            limit_s = min(limit_s, self._mean_s)
        if not self.encoding.idle:
            limit_s /= 2 if traces else 1
            # Beside a part of a prompt, texts do not get the time of this part as well.
            encode_s = min(limit_s, (chosen.decode_s if chosen is not None else 0) or limit_s)
            self.encoding.step(max(encode_s, 0.01) if busy else self.encode_s, busy=bool(busy))
        if traces:
            self.tracing.step(limit_s if busy else PREFILL_STEP_S, busy=bool(busy))
        for _, loop in chats:
            loop.answers.deliver()
        self.progress_at = time.perf_counter()
        self.peak_bytes = max(self.peak_bytes, memory.used_bytes())
        for model in lost:
            self._lost(model)


class LoadThread:
    """Reads models one after the other, so that the engine's thread continues to compute. MLX never ends the thread
    that it starts for the first computation on a thread, so all loads share this one.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._busy = False
        # A daemon thread, because a disk that does not respond must not delay the exit.
        self._thread = threading.Thread(target=self._run, name="lmx-lab-load", daemon=True)
        self._thread.start()

    def submit(self, load: Callable[[], T]) -> Future[T]:
        """Run a function on the thread after those that were submitted before, and return the future of its result."""
        future: Future[T] = Future()
        self._busy = True
        self._work.put((load, future))
        return future

    def end(self) -> None:
        """End the thread after the current load. Waits for its end, unless a load is in progress, which may hang."""
        busy = self._busy
        self._work.put(None)
        if not busy:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self._perform(*item)
            # The load and its result refer to weights.
            del item
        memory.end_thread()

    def _perform(self, load: Callable[[], T], future: Future[T]) -> None:
        try:
            result = load()
        except BaseException as exc:
            self._busy = False
            future.set_exception(exc.with_traceback(None))
        else:
            self._busy = False
            future.set_result(result)
