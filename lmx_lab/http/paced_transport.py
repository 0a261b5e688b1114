"""Parse received data a little at a time, so that no connection occupies the event loop.

A parser needs about 10 µs for a chunk of a body or a frame of a WebSocket, no matter how short it is. The data that
asyncio reads at once can contain tens of thousands of them, which would take half a second.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

PIECE_BYTES = 2048
"""Number of bytes parsed at once if chunks or frames may be short; takes about 4 ms if each of them has one byte."""
STEP_S = 0.003
"""Duration of a step. The rest of the data waits for the next step of the connection."""
PAUSE_S = 0.002
"""Pause between two steps of full duration. The loop does all other work meanwhile."""
READ_BYTES = 64 * 1024
"""Number of bytes read from a connection at once, and so the largest amount that waits for its steps."""


class PacedProtocol(Protocol):
    """A protocol that gets its data from a ``PacedTransport``."""

    @property
    def piece_bytes(self) -> int:
        """Number of bytes that it can parse at once without occupying the loop for more than a few milliseconds."""

    def feed(self, data: bytes) -> None:
        """Parse a piece of the received data."""


class PacedTransport:
    """A transport that passes received data to the ``feed`` method of its protocol, one piece at a time.

    The protocol calls ``take`` with the data that it receives. Short data are passed on immediately. Longer data wait,
    and all connections of a loop take their steps in turn. No more is read while data wait, or while the protocol has
    paused reading.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiting = bytearray()
        self._paused = False
        self._feeding = False
        # An attribute of asyncio's selector transports; with others, the amount of data is not limited.
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def waiting_bytes(self) -> int:
        """Number of received bytes that were not passed on yet."""
        return len(self._waiting)

    def pause_reading(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if self._waiting:
            _scheduler().add(self)
        else:
            self._transport.resume_reading()

    def take(self, data: bytes, protocol: PacedProtocol) -> None:
        """Pass on data that ``protocol`` received."""
        if self._feeding:
            # The protocol of a request passes its head to its successor, such as the protocol of WebSockets.
            protocol.feed(data)
        elif not self._waiting and len(data) <= protocol.piece_bytes:
            self._feed(protocol, data)
        else:
            self._waiting += data
            self._transport.pause_reading()
            if not self._paused:
                _scheduler().add(self)

    def step(self) -> bool:
        """Pass on some of the waiting data, and return whether another step is needed."""
        end = time.perf_counter() + STEP_S
        while self._waiting and not self._paused and not self._transport.is_closing():
            # Looked up each time: a connection that becomes a WebSocket gets another protocol.
            protocol = cast("PacedProtocol", self._transport.get_protocol())
            piece = bytes(self._waiting[: protocol.piece_bytes])
            del self._waiting[: len(piece)]
            self._feed(protocol, piece)
            if time.perf_counter() >= end:
                break
        if self._transport.is_closing():
            self._waiting.clear()
        elif not self._waiting and not self._paused:
            self._transport.resume_reading()
        return bool(self._waiting) and not self._paused

    def _feed(self, protocol: PacedProtocol, data: bytes) -> None:
        self._feeding = True
        try:
            protocol.feed(data)
        finally:
            self._feeding = False


class _Scheduler:
    """Runs the steps of the connections of one loop in turn."""

    def __init__(self) -> None:
        self._transports: dict[PacedTransport, None] = {}
        self._scheduled = False

    def add(self, transport: PacedTransport) -> None:
        self._transports[transport] = None
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        transport = next(iter(self._transports))
        del self._transports[transport]
        try:
            if transport.step():
                self._transports[transport] = None
        except Exception as exc:
            # The same as asyncio does if a protocol fails.
            loop.call_exception_handler({"message": "a protocol failed to parse what it received", "exception": exc})
            transport.abort()
        finally:
            self._scheduled = bool(self._transports)
            if self._scheduled:
                loop.call_later(PAUSE_S if time.perf_counter() - began >= STEP_S else 0, self._run)


_SCHEDULERS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Scheduler] = WeakKeyDictionary()


def _scheduler() -> _Scheduler:
    return _SCHEDULERS.setdefault(asyncio.get_running_loop(), _Scheduler())
