"""The engine thread and the way to it: commands go in on a queue, each is answered through a future."""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import mlx.core as mx

from lmx_lab.engine.mlx.state import EngineCore
from lmx_lab.errors import EngineDeadError, LabError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot

log = logging.getLogger(__name__)
T = TypeVar("T")
Command = tuple[Callable[[EngineCore], Any], "Future[Any]"]


class EngineThread:
    """Runs an ``EngineCore``: obeys commands, steps while there is work, sleeps while there is none.

    Args:
        awaited: Whether requests are on their way: a model is not idle then.
        beside_bytes: What other engines take of the memory limit.
    """

    def __init__(
        self, settings: Settings, *, awaited: Callable[[], bool], beside_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self._settings = settings
        self._awaited = awaited
        self._beside_bytes = beside_bytes
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        # Reentrant: a stream that is collected while this thread holds it cancels itself through it.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._core: EngineCore | None = None
        self._dead: BaseException | None = None

    def start(self) -> None:
        """Start the engine thread, or a new one after the old one died."""
        if self._dead is not None and self._thread is not None:
            self._thread.join()  # on its way out
        with self._lock:
            if self.alive:
                return
            self._dead, self._commands = None, queue.SimpleQueue()
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
        if thread is not None and thread.is_alive():
            self._commands.put(None)
            thread.join()
        atexit.unregister(self.stop)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def dead(self) -> BaseException | None:
        """What the thread died of."""
        return self._dead

    @property
    def core(self) -> EngineCore | None:
        """Of which other threads may read ``snapshot``, and which models are in memory."""
        return self._core

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last step. Never blocks."""
        return self._core.snapshot if self._core else EngineSnapshot()

    async def call(self, command: Callable[[EngineCore], T]) -> T:
        """Perform a command on the thread and return its result.

        Raises:
            EngineDeadError: the thread is gone.
        """
        return await asyncio.wrap_future(self.post(command))

    def post(self, command: Callable[[EngineCore], T]) -> Future[T]:
        """As ``call``, without waiting."""
        future: Future[T] = Future()
        with self._lock:
            if self._dead is not None or not self.alive:
                future.set_exception(EngineDeadError(f"the engine is not running ({self._dead or 'stopped'})"))
            else:
                self._commands.put((command, future))
        return future

    def _run(self, born: Future[EngineCore]) -> None:
        try:
            core = EngineCore(self._settings, beside_bytes=self._beside_bytes)
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
                if not self._awaited():
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


def _perform(core: EngineCore, command: Callable[[EngineCore], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command(core))
    except Exception as exc:
        future.set_exception(exc)
    except BaseException as exc:
        future.set_exception(EngineDeadError(f"the engine thread died: {exc!r}; load a model to start it again"))
        raise
