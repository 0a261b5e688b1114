"""Parsing what connections send a little at a time, so that no connection keeps the event loop to itself.

A parser needs about 10 µs for a chunk of a body or a frame of a WebSocket, however short it is. What asyncio reads at
once can hold tens of thousands of them, which would take half a second.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

PIECE_BYTES = 2048
"""Parsed at once where chunks or frames may be short: in about 4 ms, if each has one byte."""
STEP_S = 0.003
"""After this time, the rest of what one connection sent waits for its next step."""
PAUSE_S = 0.002
"""Between two steps that took their whole time. Everything else on the loop runs meanwhile."""
READ_BYTES = 64 * 1024
"""Read from a connection at once, and so the most that waits for its steps."""


class Pieced(Protocol):
    """A protocol that is fed by a ``PacedTransport``."""

    @property
    def piece_bytes(self) -> int:
        """How much it can parse at once without keeping the loop for more than a few milliseconds."""

    def feed(self, data: bytes) -> None:
        """Parse a piece of what came."""


class PacedTransport:
    """A transport that passes what comes to its protocol's ``feed``, a piece at a time.

    The protocol calls ``take`` for what it receives. Short data are passed on at once. Longer data wait; all
    connections of a loop take their steps in turn. No more is read while data wait, or while the protocol has paused
    reading.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiting = bytearray()
        self._paused = False
        self._feeding = False
        # Of asyncio's transports on selectors; others read as much as they do.
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def waiting_bytes(self) -> int:
        return len(self._waiting)

    def pause_reading(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if self._waiting:
            _turns().add(self)
        else:
            self._transport.resume_reading()

    def take(self, data: bytes, protocol: Pieced) -> None:
        """Pass on data that ``protocol`` received."""
        if self._feeding:
            # A protocol passes the head of a request on to its successor.
            protocol.feed(data)
        elif not self._waiting and len(data) <= protocol.piece_bytes:
            self._feed(protocol, data)
        else:
            self._waiting += data
            self._transport.pause_reading()
            if not self._paused:
                _turns().add(self)

    def step(self) -> bool:
        """Pass on some of what waits; returns whether the next step is due."""
        end = time.perf_counter() + STEP_S
        while self._waiting and not self._paused and not self._transport.is_closing():
            # Asked each time: a connection that becomes a WebSocket gets another protocol.
            protocol = cast("Pieced", self._transport.get_protocol())
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

    def _feed(self, protocol: Pieced, data: bytes) -> None:
        self._feeding = True
        try:
            protocol.feed(data)
        finally:
            self._feeding = False


class _Turns:
    """The connections of one loop whose data wait."""

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
            # As asyncio does where a protocol fails.
            loop.call_exception_handler({"message": "a protocol failed to parse what it received", "exception": exc})
            transport.abort()
        finally:
            self._scheduled = bool(self._transports)
            if self._scheduled:
                loop.call_later(PAUSE_S if time.perf_counter() - began >= STEP_S else 0, self._run)


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


def _turns() -> _Turns:
    return _TURNS.setdefault(asyncio.get_running_loop(), _Turns())
