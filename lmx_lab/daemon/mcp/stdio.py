"""Convert between the output of an MCP server's process and the messages that a session of the package ``mcp`` reads.

The process is not trusted: the length of a line and the number of lines that are not messages are limited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, Self, TypeVar

import anyio

T = TypeVar("T")
MESSAGE_BYTES = 8 * 2**20
"""Maximum size of one message. Longer lines are discarded while they are read."""
INVALID_LINES = 10_000
"""Maximum number of lines within ``INVALID_LINES_S`` that are not messages. More than that would block the loop."""
INVALID_LINES_S = 10.0


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
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Return the lines that end in these bytes, without line feeds; None as soon as a line exceeds the limit."""
        *complete, rest = data.split(b"\n")
        for piece in complete:
            if not self._add(piece):
                yield None
            if not self._is_skipping:
                yield b"".join(self._pieces)
            self._is_skipping = False
            self._clear()
        if not self._add(rest):
            yield None

    def _add(self, piece: bytes) -> bool:
        """Add a piece to the current line. Returns False if the line exceeds the limit for the first time."""
        if self._is_skipping:
            return True
        if self._size + len(piece) > self._limit:
            self._is_skipping = True
            self._clear()
            return False
        self._pieces.append(piece)
        self._size += len(piece)
        return True

    def _clear(self) -> None:
        self._pieces.clear()
        self._size = 0


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


class LineProcess(Protocol):
    """A process that is read and written line by line."""

    async def read_line(self) -> bytes | None:
        """Return the next line, or None after the last one. Raises ``LineTooLongError``."""
        ...

    async def write_line(self, line: bytes, *, wait: bool = True) -> None:
        """Write a line. Raises ``ConnectionError``."""
        ...

    def keep_invalid_line(self, line: bytes) -> None:
        """Keep a line that is not a message, for display."""
        ...


class MessageReader(Generic[T]):
    """The messages of a process, as the stream that a session reads."""

    def __init__(self, process: LineProcess, parse: Callable[[bytes], T], on_end: Callable[[], None]) -> None:
        """
        Args:
            parse: Converts a line to a message; raises ``ValueError`` if it is not a message.
            on_end: Called once, when there are no more messages.
        """
        self._process = process
        self._parse = parse
        self._on_end = on_end
        self.invalid_lines = 0
        """Number of lines that were not messages."""
        self.is_flooded = False
        """Whether reading has ended because there were too many lines that are not messages."""
        self._window = (0.0, 0)
        """Start of the current interval, and the number of invalid lines at that time."""
        self.at_end = False
        self.on_long_line: Callable[[], None] = lambda: None
        """Called for each line that exceeds the limit. The line was discarded."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while (line := await self._read_line()) is not None:
            if not line.strip():
                continue
            try:
                return self._parse(line)
            except ValueError:
                self._process.keep_invalid_line(line)
                self.invalid_lines += 1
            if self._exceeds_limit():
                self.is_flooded = True
                break
        if not self.at_end:
            self.at_end = True
            self._on_end()
        raise StopAsyncIteration

    async def _read_line(self) -> bytes | None:
        try:
            return await self._process.read_line()
        except LineTooLongError:
            self.on_long_line()
            return b""

    def _exceeds_limit(self) -> bool:
        now, (started, count) = time.monotonic(), self._window
        if now - started > INVALID_LINES_S:
            started, count = now, self.invalid_lines
        self._window = (started, count)
        return self.invalid_lines - count > INVALID_LINES

    async def receive(self) -> T:
        """Return the next message.

        Raises:
            anyio.EndOfStream: There are no more messages.
        """
        try:
            return await anext(self)
        except StopAsyncIteration:
            raise anyio.EndOfStream from None

    async def aclose(self) -> None:
        """Do nothing: the process is stopped by its owner."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass


class MessageWriter(Generic[T]):
    """The messages for a process, as the stream that a session writes."""

    def __init__(self, process: LineProcess, serialize: Callable[[T], tuple[bytes, bool]]) -> None:
        """
        Args:
            serialize: Converts a message to a line; also returns whether to wait until the process can accept more.
        """
        self._process = process
        self._serialize = serialize

    async def send(self, item: T, /) -> None:
        """Send a message.

        Raises:
            anyio.BrokenResourceError: The process no longer reads its input.
        """
        line, wait = self._serialize(item)
        try:
            await self._process.write_line(line, wait=wait)
        except (ConnectionError, OSError) as exc:
            raise anyio.BrokenResourceError from exc

    async def aclose(self) -> None:
        """Do nothing: the process is stopped by its owner."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass
