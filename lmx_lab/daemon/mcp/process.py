"""The process of an MCP server: started without a shell in a session of its own, spoken to in lines, ended with all
that it has started. Nothing that it does to its pipes blocks the loop or fills the memory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from lmx_lab.daemon.mcp.failure import McpFailure
from lmx_lab.daemon.mcp.lines import LineSplitter, LineTooLongError, OutputTail, one_line, shown
from lmx_lab.daemon.mcp.process_cleanup import MARK, RootProcess, end, family, root_of
from lmx_lab.daemon.mcp.redaction import SecretRedactor
from lmx_lab.wire.mcp import McpServerConfig

INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "LOGNAME",
    "USER",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
)
"""All that a server gets of the daemon's environment."""
STDIN_GRACE_S = 1.0
"""How long a server may take to end when its stdin is closed."""
TERM_GRACE_S = 2.0
UNREAD_BYTES = 2**20
"""Above it, the server's stdout waits."""
UNSENT_BYTES = 16 * 2**20
STRAY_BYTES = 500
STDERR_BYTES = 20_480
"""More than is shown: what the end of a cut secret may be in is left out."""
LAST_WORDS_S = 0.2
"""After its end, what is still in its pipes is read for so long: a child of it may keep them open for ever."""


def environment(config: McpServerConfig) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {"PATH": os.defpath, **inherited, **config.env}


def found_program(config: McpServerConfig) -> str:
    """The path of the server's program. Blocking.

    Raises:
        McpFailure: not found, or not to be executed.
    """
    command = config.command or ""
    if os.sep in command:
        path = Path(config.cwd or ".", command)
        if not os.path.exists(path):  # Path would raise where a name is too long
            raise McpFailure("command-not-found", f"there is no file {command!r:.200}; check the path in command")
        if path.is_dir() or not os.access(path, os.X_OK):
            raise McpFailure("invalid", f"{command!r:.200} is no program that may be executed; check command")
        return str(path.absolute())
    search = environment(config)["PATH"]
    if (program := shutil.which(command, path=search)) is None:
        searched = one_line(SecretRedactor.of(config).hidden(search))
        raise McpFailure(
            "command-not-found",
            f"no program {command!r:.200} is in the PATH, {searched!r}; install it, give its whole path as command, or "
            "set PATH in env",
        )
    return program


class _Pipes(asyncio.SubprocessProtocol):
    """What asyncio tells of the process, kept within bounds."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.lines = LineSplitter()
        self.waiting: deque[bytes | None] = deque()
        self.size = 0
        self.discarding = False
        self.ended = False
        """Whether no more will come from its stdout."""
        self.news = asyncio.Event()
        """Set when there may be a line, or the end."""
        self.writable = asyncio.Event()
        self.writable.set()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        """Done when it has exited and all that it wrote is read."""
        self.stderr = OutputTail(STDERR_BYTES)
        self.stderr_cut = False
        self._stderr_size = 0
        self.transport: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd != 1:
            self.stderr.feed(data)
            self._stderr_size += len(data)
            self.stderr_cut = self._stderr_size > STDERR_BYTES
            return
        for line in self.lines.feed(data):
            if not self.discarding:
                self.waiting.append(line)
                self.size += _cost(line)
        if self.size > UNREAD_BYTES:
            self._reading().pause_reading()
        self.news.set()

    def taken(self) -> bytes | None:
        line = self.waiting.popleft()
        self.size -= _cost(line)
        if self.size <= UNREAD_BYTES and not self.ended:
            self._reading().resume_reading()
        return line

    def discard(self) -> None:
        """Read what comes and forget it: a server that cannot write cannot end."""
        self.discarding = True
        self.waiting.clear()
        self.size = 0
        if not self.ended:
            self._reading().resume_reading()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.ended = True
            self.news.set()
        self.writable.set()

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self.close)
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.ended = True
        self.news.set()

    def _reading(self) -> asyncio.ReadTransport:
        assert self.transport is not None
        pipe = self.transport.get_pipe_transport(1)
        assert isinstance(pipe, asyncio.ReadTransport)
        return pipe


class McpProcess:
    """A running server. Read it in one task; whoever started it calls ``stop``."""

    def __init__(self, transport: asyncio.SubprocessTransport, pipes: _Pipes, mark: str, hide: SecretRedactor) -> None:
        self._transport = transport
        self._pipes = pipes
        self._hide = hide
        self._strays = OutputTail(4 * STRAY_BYTES)
        self._known: list[psutil.Process] = []
        self._returncode: int | None = None
        self.pid = transport.get_pid()
        self.root: RootProcess = root_of(self.pid, mark)

    @classmethod
    async def start(cls, config: McpServerConfig, mark: str) -> Self:
        """
        Args:
            mark: Its own, in its environment and in that of all that it starts.

        Raises:
            McpFailure: it cannot be started.
        """
        program = await asyncio.to_thread(found_program, config)
        env = {**environment(config), MARK: mark}
        try:
            transport, pipes = await asyncio.get_running_loop().subprocess_exec(
                _Pipes, program, *config.args, **_options(config.cwd, env)
            )
        except (OSError, ValueError) as exc:
            raise _unstarted(config, exc) from exc
        return cls(transport, pipes, mark, SecretRedactor.of(config))

    @property
    def exited(self) -> asyncio.Future[None]:
        return self._pipes.exited

    @property
    def gone(self) -> asyncio.Future[None]:
        """Done when it has exited and all that it wrote is read; soon after its exit, whoever holds its pipes open."""
        return self._pipes.gone

    @property
    def returncode(self) -> int | None:
        return self._transport.get_returncode()

    @property
    def stderr_tail(self) -> str:
        """The last lines of its stderr, below lines of its stdout that were no messages; without secrets."""
        stderr, hide = self._pipes.stderr.text(), self._hide
        return shown(
            f"{self._strays.text()}\n{hide.hidden_end(stderr) if self._pipes.stderr_cut else hide.hidden(stderr)}"
        )

    def note(self, line: bytes) -> None:
        """Keep a line that was no message, for those who wonder."""
        # Hidden first: the beginning of a secret that is cut would not be found.
        self._strays.feed(b"(stdout) " + self._hide.hidden_bytes(line)[:STRAY_BYTES] + b"\n")

    def said(self) -> str:
        """How it ended, for people: exit code or signal, and its last line."""
        code = self.returncode
        if code is None:
            how = "closed its output"
        elif code < 0:
            how = f"was ended by signal {-code}"
        else:
            how = f"exited with code {code}"
        last = self.stderr_tail.rpartition("\n")[2]
        return f"{how}; its last line was: {one_line(last)}" if last else how

    async def read_line(self) -> bytes | None:
        """The next line of its stdout; None after the last.

        Raises:
            TooLongError: in the place of a line of more than 8 MiB; the ones after it can be read.
        """
        pipes = self._pipes
        # Also where lines wait already: a flood of them must not keep the loop for itself.
        await asyncio.sleep(0)
        while not pipes.waiting:
            if pipes.ended:
                return None
            pipes.news.clear()
            await pipes.news.wait()
        if (line := pipes.taken()) is None:
            raise LineTooLongError
        return line

    async def write_line(self, line: bytes, *, wait: bool = True) -> None:
        """Send a line; waits for room in the pipe, if it is to.

        Raises:
            ConnectionError: it does not read any more.
        """
        stdin: Any = self._transport.get_pipe_transport(0)
        if stdin is None or stdin.is_closing() or self._pipes.exited.done():
            raise ConnectionError("the server's stdin is closed")
        if stdin.get_write_buffer_size() + len(line) > UNSENT_BYTES:
            raise ConnectionError("the server does not read its stdin")
        stdin.write(line + b"\n")
        if wait:
            await self._pipes.writable.wait()

    async def stop(self) -> None:
        """End it and all that it has started: stdin is closed, then TERM, then KILL. Idempotent.

        Takes 1 s for one that ends by itself, at most 3 s for one that ends by TERM, and then KILL.
        """
        try:
            self._known = await asyncio.to_thread(family, self.root)
            self._pipes.discard()
            if (stdin := self._transport.get_pipe_transport(0)) is not None:
                stdin.close()
            await asyncio.wait({self.exited}, timeout=STDIN_GRACE_S)
            await asyncio.to_thread(end, self.root, self._known, term_s=TERM_GRACE_S)
            await asyncio.wait({self.exited}, timeout=TERM_GRACE_S)
        finally:
            # Kills the leader at once, where the task that stops it was itself cancelled.
            self._pipes.close()


def _cost(line: bytes | None) -> int:
    """A line's part of what may be unread; also empty ones take memory."""
    return len(line or b"") + 64


def _options(cwd: str | None, env: Mapping[str, str]) -> dict[str, Any]:
    pipe = asyncio.subprocess.PIPE
    return {"stdin": pipe, "stdout": pipe, "stderr": pipe, "cwd": cwd, "env": env, "start_new_session": True}


def _unstarted(config: McpServerConfig, exc: OSError | ValueError) -> McpFailure:
    reason = one_line(SecretRedactor.of(config).hidden(str(exc)))
    if isinstance(exc, OSError) and exc.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return McpFailure("exited", f"{config.command!r} could not be started now: {reason}")
    return McpFailure("invalid", f"{config.command!r} could not be started: {reason}; check command, args, env and cwd")
