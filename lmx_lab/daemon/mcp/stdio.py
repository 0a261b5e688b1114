"""The lines of an MCP server's process as the two streams that a session of the package ``mcp`` reads and writes; and
waiting for a server in a way that can be given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Generic, Self, TypeVar

import anyio

from lmx_lab.daemon.mcp.failure import McpFailure
from lmx_lab.daemon.mcp.lines import LineTooLongError
from lmx_lab.daemon.mcp.process import McpProcess

T = TypeVar("T")
STRAY_LINES = 10_000
"""Lines that are no messages, within ``STRAY_S``: more are a flood, which would take the loop from everybody else."""
STRAY_S = 10.0


class StopSignal:
    """Waits for a server, not longer than it may, and not when it is to be stopped. On one event loop."""

    def __init__(self) -> None:
        self._scope: anyio.CancelScope | None = None
        self.at_end = False
        """Whether the server is to be stopped."""

    def end(self) -> None:
        """Wait no more, now and later; from another task than the one that waits."""
        self.at_end = True
        if self._scope is not None:
            self._scope.cancel()

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """
        Raises:
            TimeoutError: after so many seconds.
            McpFailure: it was ended.
        """
        with anyio.fail_after(seconds) as scope:
            self._scope = scope
            if self.at_end:
                scope.cancel()
            try:
                yield
            finally:
                self._scope = None
        if scope.cancelled_caught:
            raise McpFailure("exited", "the server was stopped")


class MessageReader(Generic[T]):
    """The lines of a process as messages, for the session to read."""

    def __init__(self, process: McpProcess, read: Callable[[bytes], T], lost: Callable[[], None]) -> None:
        """
        Args:
            read: Makes a message of a line; a ``ValueError`` says that it is none.
            lost: Is told, once, that no more will come.
        """
        self._process = process
        self._read = read
        self._lost = lost
        self.strays = 0
        """Lines that were no messages."""
        self.flooded = False
        """Whether there were so many of these that no more is read."""
        self._window = (0.0, 0)
        self.at_end = False
        self.overlong: Callable[[], None] = lambda: None
        """Is told of a line that was too long to be read."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while (line := await self._line()) is not None:
            if not line.strip():
                continue
            try:
                return self._read(line)
            except ValueError:
                self._process.note(line)
                self.strays += 1
            if self._too_many():
                self.flooded = True
                break
        if not self.at_end:
            self.at_end = True
            self._lost()
        raise StopAsyncIteration

    async def _line(self) -> bytes | None:
        try:
            return await self._process.read_line()
        except LineTooLongError:
            self.overlong()
            return b""

    def _too_many(self) -> bool:
        now, (begun, count) = time.monotonic(), self._window
        if now - begun > STRAY_S:
            begun, count = now, self.strays
        self._window = (begun, count)
        return self.strays - count > STRAY_LINES

    async def receive(self) -> T:
        try:
            return await anext(self)
        except StopAsyncIteration:
            raise anyio.EndOfStream from None

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass


class MessageWriter(Generic[T]):
    """The session's messages as lines for a process."""

    def __init__(self, process: McpProcess, written: Callable[[T], tuple[bytes, bool]]) -> None:
        """
        Args:
            written: Makes a line of a message, and says whether to wait until it is on its way.
        """
        self._process = process
        self._written = written

    async def send(self, item: T, /) -> None:
        line, waits = self._written(item)
        try:
            await self._process.write_line(line, wait=waits)
        except (ConnectionError, OSError) as exc:
            raise anyio.BrokenResourceError from exc

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass
