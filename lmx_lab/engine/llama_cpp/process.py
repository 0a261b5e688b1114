"""Start, monitor and end the process in which llama.cpp runs a model."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from lmx_lab.engine.memory import HEADROOM_BYTES, free_bytes, usable_cores
from lmx_lab.errors import EngineDeadError, EngineError, OutOfMemoryError, UnusableModelError
from lmx_lab.extras import install_command
from lmx_lab.settings import without_secrets

SCRIPT = Path(__file__).with_name("worker.py")
PACKAGE = "xllamacpp"
LIBRARIES = ("libgomp.so.1",) if sys.platform == "linux" else ()
"""System libraries that the package needs, and that small container images do not have."""
LOAD_MEASURE_S, MEASURE_S = 0.2, 1.0
"""Intervals at which the memory of the process is compared with its limit: while it loads a model, and later."""
STACK_BYTES = 2**30
"""Part of the hard limit that allows for the stacks of threads, which are reserved but mostly unused."""
END_S = 5.0
"""Time to wait for the end of a killed process."""
MAX_FOLDER_LENGTH = 70
"""Maximum length of the path of a folder for sockets, in characters."""
MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**24)}
"""Settings of glibc with which the process returns the memory of long texts."""
MAX_ANSWER_BYTES = 2**26
"""Maximum length of a line of standard output."""
READY = b'{"ready"'
MAX_LINES, MAX_LINE_BYTES = 200, 2000
"""Number of lines of standard error that are kept, and their maximum length."""
REASONS = (
    # The last line often only names the file, and an earlier line has the reason.
    re.compile(r"error loading model:\s*(?!failed to load model from)(.+)"),
    re.compile(r"(?:^|\s)E\s+(.*(?:invalid|fail|illegal|unknown).*)"),
    re.compile(r"(.*\berror\b.*)", re.IGNORECASE),
)
SIGNAL_CAUSES: Mapping[int, str] = {
    signal.SIGKILL: ", probably because memory ran out",
    signal.SIGBUS: ": its file was changed or cut short while it was loaded, or can no longer be read",
}
"""The most likely cause of a signal from the system, as part of an error message."""
OUT_OF_MEMORY = re.compile(
    r"failed to allocate|out of memory|cannot allocate|bad_alloc|memory ran out|it used more than .* of memory",
    re.IGNORECASE,
)


def missing_part(libraries: Sequence[str] = LIBRARIES) -> str | None:
    """Return what llama.cpp lacks in this environment and how to install it; None if it lacks nothing.

    The text is a predicate that follows the name of llama.cpp in a sentence.

    Args:
        libraries: The system libraries that it needs.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return f"is not installed: {install_command(PACKAGE)}"
    for library in libraries:
        # With OMP_PROC_BIND, libgomp binds the thread that loads it to one core, and later threads inherit that.
        cores = os.sched_getaffinity(0) if sys.platform == "linux" else set()
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"lacks the system library {library}; on Debian or Ubuntu: apt-get install libgomp1"
        finally:
            # A sandbox may refuse to change this, even to the same cores.
            if sys.platform == "linux" and os.sched_getaffinity(0) != cores:
                os.sched_setaffinity(0, cores)
    return None


def require_installed(path: Path) -> None:
    """Check that llama.cpp and the system libraries that it needs are installed.

    Args:
        path: The file to load, for the message.

    Raises:
        UnusableModelError: one of them is not installed; the message has the command that installs it.
    """
    if (missing := missing_part()) is not None:
        raise UnusableModelError(
            f"{path.name} runs on llama.cpp, which {missing}; or convert the file for MLX: lmx-lab pull {path} --mlx",
            param="model",
        )


def llama_environ(environ: Mapping[str, str], threads: int | None = None) -> dict[str, str]:
    """Return ``MALLOC``, and how llama.cpp's threads share the cores, unless the user has set it.

    If there are as many threads as cores, each is bound to a core of its own. Without this, Linux runs two threads on
    the same core while another program is busy, and each waits there for the other: of 150 tokens/s on two cores, 16
    remained, and 104 to 151 with it (measured). Threads also wait actively for a shorter time than by default.

    Args:
        threads: Number of llama.cpp's threads; None if other threads of the process also compute. All of them would be
            bound to the core of the thread that loads llama.cpp.
    """
    found = {name: value for name, value in MALLOC.items() if name not in environ}
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environ):
        found["GOMP_SPINCOUNT"] = "30000"
    if threads == usable_cores() and not {"GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"} & set(environ):
        found |= {"OMP_PLACES": "cores", "OMP_PROC_BIND": "true"}
    return found


class LlamaProcess:
    """A process with one model; created by ``start``."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        folder: Path,
        api_key: str,
        *,
        max_bytes: int,
        free_bytes: Callable[[], int],
    ) -> None:
        self._process = process
        self.folder = folder
        """The private folder of the process, in which it saves slots."""
        self._usage: psutil.Process | None = None
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._reading = asyncio.create_task(self._read_errors(), name="lmx-lab llama.cpp stderr")
        self._stopping = False
        self.api_key = api_key
        self.died = asyncio.Event()
        """Set when the process has ended without ``stop``."""
        self._kill_reason: str | None = None
        """Why this object ended the process; None if it did not."""
        self._watching = asyncio.create_task(self._watch(), name="lmx-lab llama.cpp process")
        self._max_bytes = max_bytes
        self._free_bytes = free_bytes
        self._is_ready = False
        """Whether the model is loaded."""
        self._limiting = asyncio.create_task(self._limit_memory(), name="lmx-lab llama.cpp memory")

    @property
    def socket(self) -> str:
        """Path of the UNIX socket of the process. llama.cpp recognizes it by its suffix."""
        return str(self.folder / "llama.sock")

    @classmethod
    async def start(
        cls,
        path: Path,
        fields: Mapping[str, Any],
        *,
        environ: Mapping[str, str],
        max_bytes: int,
        free_bytes: Callable[[], int] = free_bytes,
        program: Sequence[str] = (),
    ) -> LlamaProcess:
        """Start a process and load a model in it; return the process when it answers requests.

        Args:
            program: ``-m`` and the name of a module; by default the script of a server.
            fields: Fields of ``CommonParams``, by name.
            environ: Variables to add to the environment.
            free_bytes: Returns how much memory the machine still has. A load is ended if other programs take it.
            max_bytes: Limit of the memory that is not mapped from files. A process that exceeds it is ended. On systems
                that enforce memory limits of processes, it cannot allocate much more.

        Raises:
            UnusableModelError: llama.cpp cannot load the model, crashed, or exceeded ``max_bytes``.
            OutOfMemoryError: there is too little memory for the model.
        """
        require_installed(path)
        # The path of a socket has at most 104 bytes on macOS, 108 on Linux; TMPDIR may be long.
        parent = tempfile.gettempdir()
        parent = parent if len(parent) <= MAX_FOLDER_LENGTH else "/tmp"
        try:
            folder = Path(tempfile.mkdtemp(prefix="lmx-", dir=parent))
        except OSError as exc:
            raise UnusableModelError(
                f"llama.cpp needs a temporary folder, and {exc.filename or parent} cannot be created: {exc.strerror}; "
                "free space there, or set TMPDIR to another folder"
            ) from exc
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", *(program or [str(SCRIPT)]), str(folder), str(os.getpid()),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=without_secrets(os.environ) | dict(environ),
                # Ctrl-C in a terminal must not reach the new process, which ends when its input is closed.
                start_new_session=True, limit=MAX_ANSWER_BYTES,
            )  # fmt: skip
        except BaseException as exc:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(exc, OSError):
                raise UnusableModelError(f"no process could be started for {path}: {exc}; try again") from exc
            raise
        started = cls(process, folder, secrets.token_urlsafe(24), max_bytes=max_bytes, free_bytes=free_bytes)
        try:
            await started._load(path, fields)
        except BaseException:
            await started.stop()
            raise
        return started

    async def _load(self, path: Path, fields: Mapping[str, Any]) -> None:
        assert self._process.stdout is not None
        parameters = {
            "fields": {"model.path": str(path), **fields},
            "api_key": self.api_key,
            "socket": self.socket,
            "data_bytes": self._max_bytes + STACK_BYTES,
        }
        # There is no timeout here, because the caller cancels a load that takes too long.
        ready = False
        await self.send(parameters)
        while not ready and (line := await self._process.stdout.readline()):
            ready = line.startswith(READY)
        # A short load may end between two measurements of its memory.
        if ready and self.own_bytes > self._max_bytes:
            await self._end_for_memory()
            ready = False
        self._is_ready = ready
        if not ready:
            await self._process.wait()
            await self._reading
            reason = self.reason()
            if OUT_OF_MEMORY.search(reason):
                raise OutOfMemoryError(
                    f"{path} does not fit in memory: {reason}; choose a smaller or more quantized model, or fewer slots"
                )
            raise UnusableModelError(
                f"{path} cannot be loaded by llama.cpp: {reason}; fetch it again, or use another model", param="model"
            )

    async def send(self, message: Mapping[str, Any]) -> None:
        """Write a line to the standard input of the process, unless the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()

    async def receive(self) -> Any:
        """Return the next line of the standard output of the process; None if the process has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    async def _limit_memory(self) -> None:
        """End the process when it exceeds its memory limit."""
        while self.own_bytes <= self._max_bytes:
            if not self._is_ready and (free := self._free_bytes()) < HEADROOM_BYTES:
                await self.kill_with_reason(
                    f"out of memory: {free / 1e9:.2f} GB were free on this machine or in this container when it used "
                    f"{self.own_bytes / 1e9:.2f} GB; end other programs"
                )
                return
            # Later, the memory grows with the requests, and the system enforces a similar limit.
            await asyncio.sleep(MEASURE_S if self._is_ready else LOAD_MEASURE_S)
        await self._end_for_memory()

    async def _end_for_memory(self) -> None:
        await self.kill_with_reason(f"it used more than {self._max_bytes / 1e9:.1f} GB of memory")

    def reason(self) -> str:
        """Return why the process has ended, by its messages or its exit status."""
        if self._kill_reason is not None:
            return self._kill_reason
        code = self._process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            cause = SIGNAL_CAUSES.get(-code, ", a crash in its native code")
            detail = next((f": {line.strip()}" for line in reversed(self._lines) if "GGML_ASSERT" in line), "")
            return f"its process was ended by {name}{cause}{detail}"
        for pattern in REASONS:
            # The newest line first. Messages of the grammar compiler quote the request, and are not the reason.
            for line in [line for line in reversed(self._lines) if "llg" not in line]:
                if match := pattern.search(line):
                    return match[1].strip()
        last = self._lines[-1].strip() if self._lines else "it printed no reason"
        return f"its process ended with status {code}: {last}"

    @property
    def memory_bytes(self) -> int:
        """Resident memory, including the mapped weights that have been read; 0 after the end of the process."""
        known = self._memory_info()
        return 0 if known is None else int(known.rss)

    @property
    def own_bytes(self) -> int:
        """Resident memory without mapped files, where the system distinguishes them; 0 after the end of the process."""
        known = self._memory_info()
        return 0 if known is None else int(known.rss - getattr(known, "shared", 0))

    def _memory_info(self) -> Any:
        try:
            # It is kept, because creating it takes several times as long as reading.
            self._usage = self._usage or psutil.Process(self._process.pid)
            return self._usage.memory_info()
        except psutil.Error:
            return None

    async def kill_with_reason(self, reason: str) -> None:
        """End the process because it exceeds a limit. The errors of its requests contain the reason."""
        self._kill_reason = self._kill_reason or reason
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.died.wait(), END_S)

    def kill_for_overwritten_file(self) -> None:
        """End the process with the signal that the system sends when a page of a mapped file is missing."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGBUS)

    async def stop(self) -> None:
        """End the process and remove its folder. Idempotent."""
        self._stopping = True
        # Killed immediately, because it has nothing to save.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        cancelled, loop = None, asyncio.get_running_loop()
        # A read that hangs in the system delays even the end of a killed process.
        until = loop.time() + END_S
        while self._process.returncode is None and loop.time() < until:
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), until - loop.time())
            except asyncio.CancelledError as exc:
                # A cancelled load ends its process, and may be cancelled again when the loop is closed.
                cancelled = exc
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._process.returncode is None:
            self._reading.cancel()
            self._watching.cancel()
        self._limiting.cancel()
        await asyncio.gather(self._reading, self._watching, self._limiting, return_exceptions=True)
        if cancelled is not None:
            raise cancelled

    async def _watch(self) -> None:
        await self._process.wait()
        if not self._stopping:
            self.died.set()

    async def _read_errors(self) -> None:
        """Read standard error, so that the process never blocks on it, and keep the last lines."""
        assert self._process.stderr is not None
        rest = b""
        while data := await self._process.stderr.read(2**16):
            *lines, rest = (rest + data).split(b"\n")
            self._lines.extend(line[:MAX_LINE_BYTES].decode(errors="replace") for line in lines)
            rest = rest[-MAX_LINE_BYTES:]
        if rest:
            self._lines.append(rest.decode(errors="replace"))


def death_error(process: LlamaProcess, model: str) -> EngineDeadError:
    """Return the error for requests to a model whose process has died."""
    return EngineDeadError(f"the process of llama.cpp with {model} has died: {process.reason()}; load a model again")


@contextlib.asynccontextmanager
async def explained_end(process: LlamaProcess, model: str) -> AsyncIterator[None]:
    """Replace an ``EngineError`` of the block by ``death_error`` if the process has died.

    The end of a connection is detected before the end of the process, which may be the cause.
    """
    try:
        yield
    except EngineError:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.died.wait(), 1.0)
            raise death_error(process, model) from None
        raise
