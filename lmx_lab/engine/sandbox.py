"""Run worker scripts in processes with limits, for work that may crash, run forever or exhaust the memory.

Chat templates, tokenizers and grammars are such work: they come with models and requests. ``sandbox_worker`` runs in
the processes, and describes what a worker script defines.

One rule keeps slow work from delaying other work. Work of one kind is computed one after the other. Work that takes
longer than its share keeps its process, and other work is computed in another one. There are at most two processes of a
kind: if both are in use by slow work and other work waits, the second is stopped for it, and its work is computed again
when the first has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmx_lab.blocking import Portal
from lmx_lab.errors import HostingError
from lmx_lab.portal import LoopThread
from lmx_lab.weights.files import in_thread

ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ")
"""The only variables that a process inherits; others may contain keys."""
MAX_REPLY_BYTES = 2**30


class SandboxError(Exception):
    """The work has no result."""


class SandboxStartError(SandboxError):
    """No process could be started."""


class SandboxTimeoutError(SandboxError):
    """The work took longer than its limit."""


class SandboxBusyError(SandboxError):
    """Other work was computed for too long."""


class SandboxDiedError(SandboxError):
    """The process ended: it crashed, or exceeded a limit of memory or CPU time. If it had done other work before, the
    work was also tried in a new process."""


@dataclass(eq=False, frozen=True)
class Setup:
    """The state that a process has before it does work, such as a vocabulary. Its processes end when it is deleted.

    Args:
        message: Returns the first message of each process; called on a thread. The reply is empty, or an error.
        keep: Whether a process is kept for later work. If not, it ends when it was idle for ``SandboxPool.idle_s``.
    """

    message: Callable[[], bytes] | None = None
    keep: bool = True


class SandboxPool:
    """Processes of worker scripts, on an event loop in a thread of its own that starts with the first work.

    Args:
        share_s: Time for which work may delay other work.
        wait_s: Time that work may wait for other work.
        idle_s: See ``Setup.keep``.
        start_s: Time that the start of a process and its setup may take each. Generous, because the machine may be
            busy.
    """

    def __init__(
        self, *, share_s: float = 0.25, wait_s: float = 10.0, idle_s: float = 20.0, start_s: float = 60.0
    ) -> None:
        self.share_s, self.wait_s, self.idle_s, self.start_s = share_s, wait_s, idle_s, start_s
        self.portal = Portal(self._started_thread)
        """Runs coroutines on the loop of the pool."""
        self.starts = 0
        """How often a process was started."""
        self._starting = threading.Lock()
        self._thread: LoopThread | None = None
        self._is_closed = False
        self._shared: dict[Path, Setup] = {}
        """The setup of the work without one, for each worker script."""
        self._kinds: weakref.WeakKeyDictionary[Setup, _Kind] = weakref.WeakKeyDictionary()
        self._processes: set[_Process] = set()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes; any thread may read it."""
        return [process.pid for process in list(self._processes)]

    async def run(
        self,
        worker: Path,
        message: bytes,
        *,
        limit_s: float,
        wait_s: float | None = None,
        setup: Setup | None = None,
    ) -> bytes:
        """Send a message to a process of a worker script, and return the reply. Cancelling the caller stops the work.

        May be awaited on any loop. Only work with the same script and setup is computed in the same process.

        Args:
            limit_s: Seconds for which the message may be computed.
            wait_s: Seconds, in addition to ``limit_s``, after which the work ends in any case. It may wait so long
                for other work; by default that of the pool.

        Raises:
            SandboxError: the work has no result; its class has the reason.
        """
        wait_s = self.wait_s if wait_s is None else wait_s
        try:
            return await self.portal.call(self._run(worker, message, limit_s, wait_s, setup))
        except HostingError as exc:
            raise SandboxStartError(exc.message) from exc

    def start(self, worker: Path) -> None:
        """Start a process for the first work without a setup, and return before it is ready. Any thread may call this.

        If there is no work for it, it ends after ``idle_s``.
        """
        with contextlib.suppress(HostingError):
            self.portal.thread.submit(self._start(worker))

    def close(self) -> None:
        """End all processes permanently. Running work fails, and so does later work."""
        with contextlib.suppress(HostingError):  # It is closed, or was inherited by a fork of this process.
            self.portal.run(self._stop_all())
            self.portal.thread.stop()

    def _started_thread(self) -> LoopThread:
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread("lmx-lab-sandbox")
                self._thread.start()
            return self._thread

    # On the pool's loop

    def _shared_setup(self, worker: Path) -> Setup:
        return self._shared.setdefault(worker, Setup())

    def _kind(self, setup: Setup) -> _Kind:
        if (kind := self._kinds.get(setup)) is None:
            kind = self._kinds[setup] = _Kind()
            stop, loop = kind.stop_idle, asyncio.get_running_loop()

            def end() -> None:
                with contextlib.suppress(RuntimeError):  # The loop is closed, and the processes have ended.
                    loop.call_soon_threadsafe(stop)

            weakref.finalize(setup, end).atexit = False
        return kind

    async def _stop_all(self) -> None:
        self._is_closed = True
        for process in list(self._processes):
            process.stop()

    async def _start(self, worker: Path) -> None:
        setup = self._shared_setup(worker)
        kind = self._kind(setup)
        if kind.idle is None and kind.usual.is_free:
            await kind.usual.enter(asyncio.get_running_loop().time())
            try:
                with contextlib.suppress(SandboxError):
                    kind.keep(await self._new_process(worker, setup), self.idle_s)
            finally:
                kind.usual.leave()

    async def _run(self, worker: Path, message: bytes, limit_s: float, wait_s: float, setup: Setup | None) -> bytes:
        setup = setup or self._shared_setup(worker)
        kind, until = self._kind(setup), asyncio.get_running_loop().time() + limit_s + wait_s
        compute = functools.partial(self._compute, kind, worker, setup, message, limit_s=limit_s, until=until)
        reply = await compute(kind.usual)
        while reply is None:
            reply = await compute(kind.slow)
        return reply

    async def _compute(
        self, kind: _Kind, worker: Path, setup: Setup, message: bytes, lane: _Lane, *, limit_s: float, until: float
    ) -> bytes | None:
        """Return the reply; None if the work was stopped for other work, and has to enter the slow lane.

        Args:
            until: Time of the loop at which the work ends in any case.
        """
        loop = asyncio.get_running_loop()
        await lane.enter(until)
        try:
            entered = loop.time()
            while True:
                idle = kind.take_idle()
                process = idle or await self._new_process(worker, setup)
                reply = asyncio.ensure_future(process.request(message))
                try:
                    began = loop.time()
                    # The time limits do not include the start of a process.
                    end = min(began + limit_s, until + began - entered)
                    while not (await asyncio.wait([reply], timeout=max(0.0, min(self.share_s, end - loop.time()))))[0]:
                        if loop.time() >= end:
                            raise SandboxTimeoutError if end - began >= limit_s / 2 else SandboxBusyError
                        if lane is kind.usual and kind.slow.is_free:
                            await kind.slow.enter(until)
                            lane.leave()
                            lane = kind.slow
                        elif lane is kind.usual and lane.waiting:
                            return None
                    return reply.result()
                except SandboxDiedError:
                    # The cause may not be this message: the system may have killed a kept process to free memory.
                    if idle is None or self._is_closed:
                        raise
                finally:
                    if not reply.done():
                        reply.cancel()
                        process.stop()
                    if kind.idle is not None or (lane is kind.slow and not kind.usual.is_free):
                        # Other work has started a process meanwhile, and one is enough.
                        process.stop()
                    if not process.is_stopped:
                        kind.keep(process, None if setup.keep else self.idle_s)
        finally:
            lane.leave()

    async def _new_process(self, worker: Path, setup: Setup) -> _Process:
        """Return a process that is ready for work."""
        try:
            process = _Process(worker, on_stop=self._processes.discard)
        except OSError as exc:
            raise SandboxStartError(str(exc)) from exc
        self.starts += 1
        self._processes.add(process)
        try:
            try:
                async with asyncio.timeout(self.start_s):
                    await process.connect()
            except TimeoutError:
                raise SandboxStartError(f"it was not ready within {self.start_s:g} s") from None
            except SandboxDiedError as exc:
                raise SandboxStartError("it ended immediately") from exc
            if setup.message is not None:
                async with asyncio.timeout(self.start_s):
                    error = await process.request(await in_thread(setup.message, name="lmx-lab-sandbox-setup"))
                if error:
                    raise SandboxDiedError(error.decode(errors="replace"))
        except TimeoutError:
            process.stop()
            raise SandboxDiedError(f"it was not set up within {self.start_s:g} s") from None
        except BaseException:
            process.stop()
            raise
        return process


class _Kind:
    """The processes with one script and setup, and the order of their work. Belongs to the pool's loop."""

    def __init__(self) -> None:
        self.usual = _Lane()
        self.slow = _Lane()
        """For work that has taken longer than its share."""
        self.idle: _Process | None = None
        self._end: asyncio.TimerHandle | None = None

    def keep(self, process: _Process, idle_s: float | None) -> None:
        """Keep a process for later work, at most for ``idle_s``."""
        self.idle = process
        if idle_s is not None:
            self._end = asyncio.get_running_loop().call_later(idle_s, self.stop_idle)

    def take_idle(self) -> _Process | None:
        """Return the kept process, if there is one that has not been killed."""
        if self._end is not None:
            self._end.cancel()
        process, self.idle = self.idle, None
        if process is None or process.is_running:
            return process
        process.stop()
        return None

    def stop_idle(self) -> None:
        if (process := self.take_idle()) is not None:
            process.stop()


class _Lane:
    """Computes work one after the other, in the order of arrival."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.waiting = 0

    @property
    def is_free(self) -> bool:
        return not self._lock.locked() and not self.waiting

    async def enter(self, until: float) -> None:
        """Wait for a turn; does not suspend the caller if the lane is free.

        Raises:
            SandboxBusyError: the turn has not come before this time of the loop.
        """
        self.waiting += 1
        try:
            async with asyncio.timeout_at(until):
                await self._lock.acquire()
        except TimeoutError:
            raise SandboxBusyError from None
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        self._lock.release()


class _Process:
    """A process and the connection to it. Every failure stops it.

    Raises:
        OSError: the system cannot start it.
    """

    def __init__(self, worker: Path, *, on_stop: Callable[[_Process], None]) -> None:
        self._on_stop = on_stop
        self._socket, theirs = socket.socketpair()
        child = str(Path(__file__).with_name("sandbox_worker.py"))
        with theirs:
            try:
                # -P keeps the folder of the script out of sys.path: its modules have names like those of others.
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", child, str(worker), str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment(),
                    start_new_session=True,
                )
            except OSError:
                self._socket.close()
                raise
        self.pid = self._popen.pid
        self.is_stopped = False
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def is_running(self) -> bool:
        return not self.is_stopped and self._popen.poll() is None

    async def connect(self) -> None:
        """Wait until it is ready."""
        self._streams = await asyncio.open_unix_connection(sock=self._socket, limit=2**20)
        await self._receive()

    async def request(self, message: bytes) -> bytes:
        """Send a message and return the reply.

        Raises:
            SandboxDiedError: it ended.
        """
        assert self._streams is not None
        writer = self._streams[1]
        try:
            writer.write(len(message).to_bytes(8, "big"))
            writer.write(message)
            await writer.drain()
        except OSError as exc:
            self.stop()
            raise SandboxDiedError("it ended") from exc
        return await self._receive()

    async def _receive(self) -> bytes:
        assert self._streams is not None
        reader = self._streams[0]
        try:
            size = int.from_bytes(await reader.readexactly(8), "big")
            if size > MAX_REPLY_BYTES:
                raise EOFError
            return await reader.readexactly(size)
        except (EOFError, OSError) as exc:
            self.stop()
            raise SandboxDiedError("it ended") from exc

    def stop(self) -> None:
        """Kill it. Idempotent."""
        if self.is_stopped:
            return
        self.is_stopped = True
        self._popen.kill()
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].transport.abort()
        self._on_stop(self)
        # On a thread, because the system may need a while to release its memory. At exit, no thread can be started.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._popen.wait, name="lmx-lab-sandbox-end", daemon=True).start()


def environment() -> dict[str, str]:
    """Return the environment of a process."""
    inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    # Tokenizers use a single thread, so that the other cores compute requests, and load no file from the hub.
    return inherited | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@functools.cache
def shared_pool() -> SandboxPool:
    """Return the pool that all models of this process share."""
    pool = SandboxPool()
    atexit.register(pool.close)
    return pool


os.register_at_fork(after_in_child=shared_pool.cache_clear)
