"""Run the process of an MCP server: start it without a shell, exchange lines with it, and stop it and its children.

The process is not trusted: nothing that it writes, or fails to read, blocks the event loop or fills the memory.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Iterator
from typing import Any, Self

from lmx_lab.daemon.mcp.config import McpFailure, SecretRedactor, environment, find_program, last_lines, one_line
from lmx_lab.daemon.mcp.process_cleanup import MARK, RootProcess, end_processes, find_processes, root_of_child
from lmx_lab.wire.mcp import McpServerConfig

MESSAGE_BYTES = 8 * 2**20
"""Maximum size of one message. Longer lines are discarded while they are read."""
UNREAD_BYTES = 2**20
"""Size of unread output above which reading the server's stdout is paused."""
INVALID_LINE_BYTES = 500
"""Maximum size of a line that is not a message, when it is kept for display."""
STDERR_BYTES = 20_480
"""Size of stderr that is kept. This is more than is displayed, because the first characters are removed: they may be
the end of a secret that was cut in two."""


class LineTooLongError(ValueError):
    """A line is longer than ``MESSAGE_BYTES``."""


class LineSplitter:
    """Splits a stream of bytes into lines."""

    def __init__(self, limit: int = MESSAGE_BYTES) -> None:
        """
        Args:
            limit: Maximum size of a line in bytes.
        """
        self._limit = limit
        self._line = bytearray()
        self._is_skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Return the lines that end in these bytes, without line feeds; None as soon as a line exceeds the limit."""
        for number, piece in enumerate(data.split(b"\n")):
            if number:  # The current line has ended before this piece.
                if not self._is_skipping:
                    yield bytes(self._line)
                self._line.clear()
                self._is_skipping = False
            if self._is_skipping:
                continue
            self._line += piece
            if len(self._line) > self._limit:
                self._line.clear()
                self._is_skipping = True
                yield None


class OutputTail:
    """Keeps the last bytes of a stream."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep = keep_bytes
        self._bytes = b""

    def feed(self, data: bytes) -> None:
        """Append bytes to the stream."""
        keep = self._keep
        self._bytes = data[-keep:] if len(data) >= keep else (self._bytes + data)[-keep:]

    def text(self) -> str:
        """Return the bytes that are kept as text, neither redacted nor cleaned."""
        return self._bytes.decode("utf-8", "replace")


class McpProcess(asyncio.SubprocessProtocol):
    """The running process of a server, whose output is buffered within limits.

    One task reads it; the owner that has started it calls ``stop``. The event loop calls the methods of the protocol.
    """

    pid: int
    root: RootProcess
    _transport: asyncio.SubprocessTransport

    def __init__(self, config: McpServerConfig, mark: str) -> None:
        loop = asyncio.get_running_loop()
        self._mark = mark
        self._redactor = SecretRedactor.of(config)
        self._splitter = LineSplitter()
        self._unread: deque[bytes | None] = deque()
        """Lines that were not read yet. None stands for a line that was too long."""
        self._unread_bytes = 0
        self._is_discarding = False
        self._stdout_ended = False
        """Whether there will be no more output on stdout."""
        self._changed = asyncio.Event()
        """Set when there may be a new line, or the end of stdout."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._invalid_lines = OutputTail(4 * INVALID_LINE_BYTES)
        self._stderr = OutputTail(STDERR_BYTES)
        self._stderr_size = 0
        self.exited: asyncio.Future[None] = loop.create_future()
        """Done when the process has exited."""
        self.closed: asyncio.Future[None] = loop.create_future()
        """Done when the process has exited and its output was read, at the latest 0.2 s after the exit."""

    @classmethod
    async def start(cls, config: McpServerConfig, mark: str) -> Self:
        """Start the process of a server.

        Args:
            mark: Unique text in the environment of the process and of all processes that it starts.

        Raises:
            McpFailure: The process could not be started.
        """
        program = await asyncio.to_thread(find_program, config)
        process, pipe = cls(config, mark), asyncio.subprocess.PIPE
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: process,
                program,
                *config.args,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=config.cwd,
                env={**environment(config), MARK: mark},
                start_new_session=True,
            )
        except (OSError, ValueError) as exc:
            reason = one_line(process._redactor.redact(str(exc)))
            if isinstance(exc, OSError) and exc.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                # The configuration is not the reason, so a restart can help.
                message = f"{config.command!r} could not be started at the moment: {reason}"
                raise McpFailure("exited", message) from exc
            message = f"{config.command!r} could not be started: {reason}; check command, args, env and cwd"
            raise McpFailure("invalid", message) from exc
        return process

    # The protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport, self.pid = transport, transport.get_pid()
        self.root = root_of_child(self.pid, self._mark)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd != 1:
            self._stderr.feed(data)
            self._stderr_size += len(data)
            return
        for line in self._splitter.feed(data):
            if not self._is_discarding:
                self._unread.append(line)
                self._unread_bytes += _memory_cost(line)
        if self._unread_bytes > UNREAD_BYTES:
            self._stdout().pause_reading()
        self._changed.set()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._stdout_ended = True
            self._changed.set()
        self._writable.set()

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)
        # Remaining output is read for 0.2 s. Longer is useless: a child may keep the pipes open forever.
        asyncio.get_running_loop().call_later(0.2, self._close)
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _stdout(self) -> asyncio.ReadTransport:
        pipe = self._transport.get_pipe_transport(1)
        assert isinstance(pipe, asyncio.ReadTransport)
        return pipe

    # How it has ended, and what it has written

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal that ended the process; None while it runs."""
        return self._transport.get_returncode()

    @property
    def stderr_tail(self) -> str:
        """The last lines of stderr, after lines of stdout that were not messages. Secrets are redacted."""
        stderr, redactor = self._stderr.text(), self._redactor
        redacted = redactor.redact_tail(stderr) if self._stderr_size > STDERR_BYTES else redactor.redact(stderr)
        return last_lines(f"{self._invalid_lines.text()}\n{redacted}")

    def keep_invalid_line(self, line: bytes) -> None:
        """Keep a line of stdout that is not a message, for display."""
        # Redacted before it is cut, because the beginning of a secret would not be recognized.
        self._invalid_lines.feed(b"(stdout) " + self._redactor.redact_bytes(line)[:INVALID_LINE_BYTES] + b"\n")

    def describe_end(self) -> str:
        """Describe how the process has ended: its exit code or signal, and its last line of output."""
        code = self.returncode
        if code is None:
            end = "closed its output"
        elif code < 0:
            end = f"was ended by signal {-code}"
        else:
            end = f"exited with code {code}"
        last = self.stderr_tail.rpartition("\n")[2]
        return f"{end}; its last line was: {one_line(last)}" if last else end

    # Lines in and out

    async def read_line(self) -> bytes | None:
        """Return the next line of stdout, or None after the last one.

        Raises:
            LineTooLongError: The line is longer than 8 MiB. The lines after it can still be read.
        """
        # Yields even if there are unread lines, so that many lines at once do not block the loop.
        await asyncio.sleep(0)
        while not self._unread:
            if self._stdout_ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        line = self._unread.popleft()
        self._unread_bytes -= _memory_cost(line)
        if self._unread_bytes <= UNREAD_BYTES and not self._stdout_ended:
            self._stdout().resume_reading()
        if line is None:
            raise LineTooLongError
        return line

    async def write_line(self, line: bytes, *, wait: bool = True) -> None:
        """Write a line to stdin.

        Args:
            wait: Whether to wait until the pipe can accept more.

        Raises:
            ConnectionError: The process no longer reads its stdin.
        """
        stdin: Any = self._transport.get_pipe_transport(0)
        if stdin is None or stdin.is_closing() or self.exited.done():
            raise ConnectionError("the server's stdin is closed")
        if stdin.get_write_buffer_size() + len(line) > 2 * MESSAGE_BYTES:
            raise ConnectionError("the server does not read its stdin")
        stdin.write(line + b"\n")
        if wait:
            await self._writable.wait()

    async def stop(self, *, stdin_grace_s: float = 1.0, term_grace_s: float = 2.0) -> None:
        """Stop the process and all processes that it has started. Idempotent.

        Args:
            stdin_grace_s: Time in which the process may exit after its stdin was closed, before it receives SIGTERM.
            term_grace_s: Time in which it may exit after that, before it receives SIGKILL.
        """
        try:
            known = await asyncio.to_thread(find_processes, [self.root])
            # All further output is discarded, since a process that cannot write may not be able to exit.
            self._is_discarding, self._unread_bytes = True, 0
            self._unread.clear()
            if not self._stdout_ended:
                self._stdout().resume_reading()
            if (stdin := self._transport.get_pipe_transport(0)) is not None:
                stdin.close()
            await asyncio.wait({self.exited}, timeout=stdin_grace_s)
            await asyncio.to_thread(end_processes, [self.root], known, term_s=term_grace_s)
            await asyncio.wait({self.exited}, timeout=term_grace_s)
        finally:
            # If the task that stops the process is cancelled itself, this kills the process immediately.
            self._close()

    def _close(self) -> None:
        """Close all pipes. Kills the process if it still runs."""
        self._transport.close()
        # The rest of a line can be long, and the server keeps its last process for display.
        self._splitter = LineSplitter()
        self._stdout_ended = True
        self._changed.set()


def _memory_cost(line: bytes | None) -> int:
    """Return the size of a line for the limit of unread output. Empty lines also use memory."""
    return len(line or b"") + 64
