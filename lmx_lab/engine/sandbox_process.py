"""Run a worker script in a separate process with limits, for work that may crash, run forever or exhaust the memory.

``SandboxProcess`` starts the process and sends it requests. The process runs this same file, which loads the worker
script and calls it for each request. A worker script defines:

- ``MEMORY_BYTES``: the largest address space of the process; macOS does not enforce it;
- ``CPU_S``: the CPU seconds that one request may take;
- ``handle(request: bytes) -> bytes``.

This file and ``heap.py``, which the process also loads, import only the standard library, and worker scripts import no
module of this package. The process therefore starts quickly, and code that breaks out of a sandbox finds no other part
of the package in its process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

POLL_S = 0.05
HEAP = str(Path(__file__).parent.parent / "heap.py")
LONG_REQUEST_S = 0.25
"""CPU time of a request after which freed memory is returned."""


class SandboxStartError(Exception):
    """The process could not be started."""


class SandboxTimeoutError(Exception):
    """A request took longer than its limit."""


class SandboxDiedError(Exception):
    """The process ended during a request, or was stopped: it crashed, or exceeded a limit of memory or CPU time."""


class SandboxSendError(SandboxDiedError):
    """The process had ended before the request was sent."""


class SandboxProcess:
    """A process that starts at the first request, and again at the first request after it was stopped.

    Every failed request stops it. Only one thread at a time may call ``request``; any thread may call ``stop`` and
    ``close``.

    Args:
        script: The worker script.
        environ: Returns the environment of the process; called at each start.
        start_s: Seconds that a start may take.
    """

    def __init__(self, script: Path, environ: Callable[[], Mapping[str, str]], *, start_s: float = 30.0) -> None:
        self._script = script
        self._environ = environ
        self._start_s = start_s
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.starts = 0
        """How often the process was started."""

    @property
    def is_running(self) -> bool:
        """Whether the process was started and not stopped; it may have crashed."""
        return self._connection is not None

    def start(self) -> Connection:
        """Start the process unless it is running, and return the connection to it.

        Raises:
            SandboxStartError: the system could not start it, or it was not ready in time.
            SandboxDiedError: ``close`` was called.
        """
        with self._lock:
            if self._closed:
                raise SandboxDiedError("it was closed")
            if self._connection is not None:
                return self._connection
            try:
                connection, theirs = Pipe()
                with theirs:
                    # -P keeps the folder of this file out of sys.path: its modules have names like those of other
                    # packages.
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", __file__, str(self._script), str(theirs.fileno()), str(os.getpid())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=self._environ(),
                        start_new_session=True,
                    )
            except OSError as exc:
                raise SandboxStartError(str(exc)) from exc
            self._connection = connection
            self.starts += 1
        try:
            if not connection.poll(self._start_s):
                raise SandboxStartError(f"it was not ready within {self._start_s:g} s")
            connection.recv_bytes()
        except BaseException as exc:
            # Also after an interrupt: the next request would take the ready message for its reply.
            self.stop()
            if isinstance(exc, EOFError | OSError):
                raise SandboxStartError("it ended immediately") from exc
            raise
        return connection

    def request(self, message: bytes, limit_s: float, *, while_waiting: Callable[[float], None] | None = None) -> bytes:
        """Send a message and return the reply.

        Args:
            while_waiting: Called about every 50 ms with the seconds waited so far. An exception from it ends the
                request.

        Raises:
            SandboxStartError: the process could not be started.
            SandboxTimeoutError: there was no reply within ``limit_s``.
            SandboxDiedError: the process ended before it replied.
        """
        connection = self.start()
        try:
            try:
                connection.send_bytes(message)
            except OSError as exc:
                raise SandboxSendError(str(exc)) from exc
            started_at = time.monotonic()
            while not connection.poll(POLL_S):
                waited_s = time.monotonic() - started_at
                if waited_s > limit_s:
                    raise SandboxTimeoutError(f"it takes longer than {limit_s:g} s")
                if while_waiting is not None:
                    while_waiting(waited_s)
            return connection.recv_bytes()
        except (EOFError, OSError) as exc:
            self.stop()
            raise SandboxDiedError("it ended") from exc
        except BaseException:
            # Also after an interrupt: the next request would get the reply to this one.
            self.stop()
            raise

    def stop(self) -> None:
        """End the process. The next request starts it again."""
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """End the process permanently. A running request fails with ``SandboxDiedError``, and so do later ones."""
        with self._lock:
            self._closed = True
        self.stop()


# In the process


def _serve(script: str, connection: Connection, parent: int) -> None:
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    worker, heap = _load("sandbox_worker", script), _load("heap", HEAP)
    _limit(resource.RLIMIT_AS, worker.MEMORY_BYTES, worker.MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0, 0)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        # The parent may have died, and then no other process stops this one.
        started_s = time.process_time()
        _limit(resource.RLIMIT_CPU, int(started_s) + worker.CPU_S, resource.RLIM_INFINITY)
        connection.send_bytes(worker.handle(message))
        if time.process_time() - started_s > LONG_REQUEST_S:
            heap.return_freed_memory()


def _load(name: str, script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _limit(kind: int, soft: int, hard: int) -> None:
    # Not every system supports every limit, and a container may have set lower ones.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (soft, hard))


def _exit_with_parent(parent: int) -> None:
    """End this process when its parent has ended, even while a request is being handled."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    _serve(sys.argv[1], Connection(int(sys.argv[2])), parent=int(sys.argv[3]))
