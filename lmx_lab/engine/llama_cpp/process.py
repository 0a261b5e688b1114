"""Start, watch and end the process that holds a model."""

from __future__ import annotations

import asyncio
import contextlib
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from lmx_lab.errors import LabError, OutOfMemoryError, UnusableModelError
from lmx_lab.settings import without_secrets

SCRIPT = Path(__file__).with_name("worker.py")
PACKAGE = "xllamacpp"
INSTALL = "pip install 'lmx-lab[gguf]'"
WEIGH_S = 0.2
LOAD_S = 1800.0
"""A model of 100 GB from a slow disk takes as long."""
END_S = 5.0
"""How long the end of a killed process is waited for."""
LONGEST_FOLDER = 70
READY = b'{"ready"'
LINES, LINE_BYTES = 200, 2000
"""Of the process's standard error that are kept."""
REASONS = (
    # Its last line often only names the file, for which the reason was said before.
    re.compile(r"error loading model:\s*(?!failed to load model from)(.+)"),
    re.compile(r"(?:^|\s)E\s+(.*(?:invalid|fail|illegal|unknown).*)"),
    re.compile(r"(.*\berror\b.*)", re.IGNORECASE),
)
LIKELY: Mapping[int, str] = {
    signal.SIGKILL: ", probably for lack of memory",
    signal.SIGBUS: ": its file was changed or cut short while it was loaded, or cannot be read any more",
}
NO_MEMORY = re.compile(r"failed to allocate|out of memory|cannot allocate", re.IGNORECASE)


def installed() -> bool:
    """Whether llama.cpp can be started in this environment."""
    return importlib.util.find_spec(PACKAGE) is not None


def require_installed(path: Path) -> None:
    """
    Raises:
        UnusableModelError: it cannot, with what to do.
    """
    if not installed():
        raise UnusableModelError(
            f"{path.name} runs on llama.cpp, which is not installed: {INSTALL}; or convert the file for MLX: "
            f"lmx-lab pull {path} --mlx",
            param="model",
        )


class LlamaProcess:
    """One model in a process of its own; ``start`` makes it."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, api_key: str, *, most_bytes: int) -> None:
        self._process = process
        self._folder = folder
        self._lines: deque[str] = deque(maxlen=LINES)
        self._reading = asyncio.create_task(self._read_errors(), name="lmx-lab llama.cpp stderr")
        self._stopping = False
        self.api_key = api_key
        self.died = asyncio.Event()
        """It has ended without being asked to."""
        self._why: str | None = None
        self._watching = asyncio.create_task(self._watch(), name="lmx-lab llama.cpp process")
        self._most_bytes = most_bytes
        self._weighing = asyncio.create_task(self._weigh(), name="lmx-lab llama.cpp memory")

    @property
    def socket(self) -> str:
        """Its path; the name is how llama.cpp tells a UNIX socket from a host."""
        return str(self._folder / "llama.sock")

    @classmethod
    async def start(
        cls, path: Path, fields: Mapping[str, Any], *, environ: Mapping[str, str], most_bytes: int
    ) -> LlamaProcess:
        """Load a model; returns when it answers.

        Args:
            fields: Of ``CommonParams``, by name.
            environ: What is added to the environment.
            most_bytes: Of memory of its own; one that takes more is ended.

        Raises:
            UnusableModelError: llama.cpp cannot load it, with its reason, or has crashed of it, or takes too much.
            OutOfMemoryError: there is too little memory for it.
        """
        require_installed(path)
        folder = _private_folder()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", str(SCRIPT), str(folder), str(os.getpid()),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=without_secrets(os.environ) | dict(environ),
                # Ctrl-C in a terminal is for us; the process ends when we let go of its input.
                start_new_session=True,
            )  # fmt: skip
        except BaseException as exc:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(exc, OSError):
                raise UnusableModelError(f"no process could be started for {path}: {exc}; try again") from exc
            raise
        started = cls(process, folder, secrets.token_urlsafe(24), most_bytes=most_bytes)
        try:
            await started._load(path, fields)
        except BaseException:
            await started.stop()
            raise
        return started

    async def _load(self, path: Path, fields: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {
            "fields": {"model.path": str(path), **fields},
            "api_key": self.api_key,
            "socket": self.socket,
        }
        with contextlib.suppress(ConnectionError):  # it has ended already; its end says why
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            await self._process.stdin.drain()
        try:
            ready = await asyncio.wait_for(_is_ready(self._process.stdout), LOAD_S)
        except TimeoutError as exc:
            raise UnusableModelError(f"{path} was not loaded by llama.cpp within {LOAD_S:g} s", param="model") from exc
        # A short load may end between two looks at its memory.
        if ready and self.own_bytes > self._most_bytes:
            await self._end_for_memory()
            ready = False
        if not ready:
            await self._process.wait()
            await self._reading
            raise self._failure(path)

    async def _weigh(self) -> None:
        """A file's chat template is a program, which llama.cpp runs while it loads and for each answer."""
        while self.own_bytes <= self._most_bytes:  # noqa: ASYNC110 - the system sends no notification
            await asyncio.sleep(WEIGH_S)
        await self._end_for_memory()

    async def _end_for_memory(self) -> None:
        await self.end_for(f"it took more than {self._most_bytes / 1e9:.1f} GB of memory")

    def _failure(self, path: Path) -> LabError:
        reason = self.reason()
        if NO_MEMORY.search(reason):
            return OutOfMemoryError(
                f"{path} does not fit in memory: {reason}; choose a smaller or more quantized model, or fewer slots"
            )
        return UnusableModelError(f"{path} cannot be loaded by llama.cpp: {reason}", param="model")

    def reason(self) -> str:
        """Why it has ended: what it said of it, or how."""
        if self._why is not None:
            return self._why
        code = self._process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            likely = LIKELY.get(-code, ", a crash in its native code")
            said = next((f": {line.strip()}" for line in reversed(self._lines) if "GGML_ASSERT" in line), "")
            return f"its process was ended by {name}{likely}{said}"
        for pattern in REASONS:
            # Newest first. What a grammar's compiler says quotes its caller, and is no reason to end.
            for line in [line for line in reversed(self._lines) if "llg" not in line]:
                if found := pattern.search(line):
                    return found[1].strip()
        last = self._lines[-1].strip() if self._lines else "it says nothing"
        return f"its process ended with {code}: {last}"

    @property
    def memory_bytes(self) -> int:
        """Resident memory, the mapped weights that were touched included; 0 once it has ended."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    @property
    def own_bytes(self) -> int:
        """Resident memory without what is mapped from files, where the system tells them apart; 0 once it has ended."""
        try:
            known = psutil.Process(self._process.pid).memory_info()
        except psutil.Error:
            return 0
        return int(known.rss - getattr(known, "shared", 0))

    async def end_for(self, why: str) -> None:
        """End it, since something in it would never end by itself; all that runs on it gets this for a reason."""
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.died.wait(), END_S)

    def condemn(self) -> None:
        """End it as the system does when a page of a mapped file is gone: what it has mapped is not what it loaded."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGBUS)

    async def stop(self) -> None:
        """End it and remove its folder; idempotent."""
        self._stopping = True
        # At once: it has nothing to save.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            # A read that hangs in the system holds even a killed process; it goes when that returns.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_S)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._process.returncode is None:
            self._reading.cancel()
            self._watching.cancel()
        self._weighing.cancel()
        await asyncio.gather(self._reading, self._watching, self._weighing, return_exceptions=True)

    async def _watch(self) -> None:
        await self._process.wait()
        if not self._stopping:
            self.died.set()

    async def _read_errors(self) -> None:
        """Take what it writes, so that it never waits for us, and keep the end."""
        assert self._process.stderr is not None
        rest = b""
        while data := await self._process.stderr.read(2**16):
            *lines, rest = (rest + data).split(b"\n")
            self._lines.extend(line[:LINE_BYTES].decode(errors="replace") for line in lines)
            rest = rest[-LINE_BYTES:]
        if rest:
            self._lines.append(rest.decode(errors="replace"))


async def _is_ready(output: asyncio.StreamReader) -> bool:
    """Whether the line comes that says so, whatever else is printed before."""
    while line := await output.readline():
        if line.startswith(READY):
            return True
    return False


def _private_folder() -> Path:
    """For the socket; only this user can enter it.

    Raises:
        UnusableModelError: there is no place for it.
    """
    # A path of a socket holds 104 bytes on macOS, 108 on Linux; TMPDIR may be long.
    parent = tempfile.gettempdir()
    try:
        return Path(tempfile.mkdtemp(prefix="lmx-", dir=parent if len(parent) <= LONGEST_FOLDER else "/tmp"))
    except OSError as exc:
        raise UnusableModelError(
            f"llama.cpp needs a temporary folder, and {exc.filename or parent} cannot be made: {exc.strerror}; free "
            "space there, or set TMPDIR to another folder"
        ) from exc
