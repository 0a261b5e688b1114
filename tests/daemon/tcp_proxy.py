"""A TCP proxy between a client and the daemon that cuts connections, closes idle ones or delivers partial frames.

::

    async with Proxy(lambda: program.state.port) as proxy:
        client = AsyncDaemonClient.discover(program.home, transport=Through(proxy))
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from types import TracebackType
from typing import Self

import httpx2

PIECE = 4096


class Through(httpx2.AsyncBaseTransport):
    """An HTTP transport whose connections go through the proxy. Requests still name the daemon as their host."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._network = httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.url = request.url.copy_with(port=self._proxy.port)
        return await self._network.handle_async_request(request)

    async def aclose(self) -> None:
        await self._network.aclose()


class Proxy:
    """Accepts connections at ``port`` and forwards their bytes to the port that ``target`` returns.

    Args:
        target: Returns the current port of the daemon on this computer.
        idle_s: Time without data from the daemon after which a connection is closed.
    """

    def __init__(self, target: Callable[[], int], *, idle_s: float | None = None) -> None:
        self._target = target
        self._idle_s = idle_s
        self._open: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.is_shut = False
        """Whether new connections are refused."""
        self.connections = 0
        self.closed_as_idle = 0
        self.halves = 0
        """Number of pieces of which only a part was delivered before a cut."""
        self._cutting: dict[asyncio.Task[None], random.Random] = {}

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        if self._open:
            await asyncio.wait(self._open)

    def cut(self) -> int:
        """Cut all connections and return their number."""
        for task in self._open:
            task.cancel()
        return len(self._open)

    def cut_within_next_piece(self, chance: random.Random) -> int:
        """Cut all connections within the next piece from the daemon, and return their number."""
        for task in self._open:
            self._cutting[task] = chance
        return len(self._open)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                if not self.is_shut:
                    await self._pass_on(task, reader, writer)
        finally:
            self._open.discard(task)
            self._cutting.pop(task, None)
            writer.transport.abort()

    async def _pass_on(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target())
        up = asyncio.create_task(_copy(reader, back))
        try:
            while piece := await self._read(there):
                if (chance := self._cutting.get(task)) is not None:
                    self.halves += 1
                    writer.write(piece[: chance.randrange(len(piece))])
                    await writer.drain()
                    return
                writer.write(piece)
                await writer.drain()
        finally:
            up.cancel()
            back.transport.abort()

    async def _read(self, there: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._idle_s):
                return await there.read(PIECE)
        except TimeoutError:
            self.closed_as_idle += 1
            return b""


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
