"""Run the thread of the MLX engine. Commands reach it through a queue, and each sets the result of a future."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import mlx.core as mx

from lmx_lab.engine.cancellation import Cancellation
from lmx_lab.engine.interface import EngineHost
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.state import MlxCore
from lmx_lab.errors import EngineDeadError, LabError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot

log = logging.getLogger(__name__)
T = TypeVar("T")
Command = tuple[Callable[[MlxCore], Any], "Future[Any]"]


class EngineThread:
    """Runs an ``MlxCore`` on its own thread, which performs commands and steps, and sleeps while there is no work."""

    def __init__(self, settings: Settings, host: EngineHost) -> None:
        self._settings = settings
        self._host = host
        self.cancel_s = 5.0
        """Time for a cancelled load to end. It is exceeded only if a disk does not respond."""
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        # Reentrant: a stream that is garbage-collected while this thread holds the lock posts its cancellation.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self.core: MlxCore | None = None
        """The state; other threads may read ``snapshot``, ``failure`` and ``model_of``."""
        self.dead: BaseException | None = None
        """The exception that ended the thread; None if the thread is running or was stopped."""
        self._empty_snapshot = EngineSnapshot(memory_is_of_device=memory.is_of_device())

    def start(self) -> None:
        """Start the engine thread, or a new one after the old one died."""
        if self.dead is not None and self._thread is not None:
            self._thread.join()  # this does not block for long: the thread was not abandoned, so it is about to end
        with self._lock:
            if self.alive:
                return
            self.dead, self._commands = None, queue.SimpleQueue()
            started: Future[MlxCore] = Future()
            # A daemon thread, because Python joins other threads at the exit before it stops the manager.
            self._thread = threading.Thread(
                target=self._run, args=(started, self._commands), name="lmx-lab-engine", daemon=True
            )
            self._thread.start()
            self.core = started.result()

    def stop(self) -> None:
        """End every request, release the memory, and join the thread. Blocks until the current step is over."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._commands.put(None)
            thread.join()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last step. Never blocks."""
        return self.core.snapshot if self.core else self._empty_snapshot

    async def call(self, command: Callable[[MlxCore], T]) -> T:
        """Perform a command on the thread and return its result.

        Raises:
            EngineDeadError: the thread is not running.
        """
        return await asyncio.wrap_future(self.post(command))

    async def call_cancellable(self, command: Callable[[MlxCore], T]) -> T:
        """Perform a command that reads a model on the thread, and return its result.

        If the caller is cancelled, the command ends before it reads the next tensor, and this method waits for that. If
        it has not ended after ``cancel_s``, for example because a disk does not respond, the thread is abandoned, and
        the next load starts another one.

        Raises:
            EngineDeadError: the thread is not running.
        """
        cancellation = Cancellation()

        def run(core: MlxCore) -> T:
            with cancellation.applied():
                return command(core)

        done = asyncio.wrap_future(self.post(run))
        # Retrieve the exception, because nothing else reads the outcome of a cancelled command.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            cancellation.cancel()
            if (await asyncio.wait([done], timeout=self.cancel_s))[0]:
                raise
            log.error("the engine thread does not respond while it reads a model; the next load starts another thread")
            with self._lock:
                thread, self._thread, commands = self._thread, None, self._commands
                self.dead = self.dead or EngineDeadError("the engine thread did not respond while it read a model")
            if thread is not None:
                # When its command has ended, its core ends all requests and releases the memory.
                commands.put(None)
                self._host.lost_model(False)
            raise

    def post(self, command: Callable[[MlxCore], T]) -> Future[T]:
        """Submit a command to the thread, and return the future of its result without waiting."""
        future: Future[T] = Future()
        with self._lock:
            if self.dead is not None or not self.alive:
                future.set_exception(EngineDeadError(f"the engine is not running ({self.dead or 'stopped'})"))
            else:
                self._commands.put((command, future))
        return future

    def _run(self, started: Future[MlxCore], commands: queue.SimpleQueue[Command | None]) -> None:
        try:
            core = MlxCore(self._settings, self._host, lambda work: self.post(lambda _: work()))
        except BaseException as exc:
            started.set_exception(exc)
            return
        started.set_result(core)
        error: LabError = EngineDeadError("the engine was stopped")
        try:
            while _perform_commands(core, commands):
                core.step()
        except BaseException as exc:
            log.exception("the engine thread died")
            if threading.current_thread() is self._thread:
                # The frames of its traceback refer to the batch, and therefore to the weights.
                self.dead = exc.with_traceback(None)
            error = EngineDeadError(f"the engine thread died: {exc!r}; load a model to start it again")
        finally:
            try:
                core.close(error)
            finally:
                with self._lock:
                    while not commands.empty():
                        command = commands.get_nowait()
                        # A caller that no longer waits has cancelled its future.
                        if command is not None and command[1].set_running_or_notify_cancel():
                            command[1].set_exception(error)
                # Without these two calls the process aborts at exit (status 134).
                mx.synchronize()
                mx.clear_streams()
            if self.dead is not None:
                self._host.lost_model(False)


def _perform_commands(core: MlxCore, commands: queue.SimpleQueue[Command | None]) -> bool:
    """Perform the commands in the queue, and wait for one if there is nothing to compute. Return False to stop."""
    block = core.idle
    while True:
        try:
            command = commands.get(block=block)
        except queue.Empty:
            return True
        if command is None:
            return False
        perform, future = command
        block = False
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(perform(core))
        except Exception as exc:
            future.set_exception(exc)
        except BaseException as exc:
            future.set_exception(EngineDeadError(f"the engine thread died: {exc!r}; load a model to start it again"))
            raise
