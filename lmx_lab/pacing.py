"""Parsing what connections send a little at a time, so that no connection keeps the event loop to itself.

A parser needs about 10 µs for a chunk of a body or a frame of a WebSocket, however short it is. What asyncio reads at
once can hold tens of thousands of them, which would take half a second.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from weakref import WeakKeyDictionary

PIECE_BYTES = 2048
"""Parsed at once: in about 4 ms, if each chunk or frame has one byte."""
STEP_S = 0.003
"""After this time, the rest of what one connection sent waits for its next step."""
PAUSE_S = 0.002
"""Between two steps; everything else on the loop runs in it."""
READ_BYTES = 64 * 1024
"""Read from a connection at once, and so the most that waits for its steps."""


class PacedTransport:
    """A transport that passes what comes to its protocol's ``feed``, a piece at a time.

    The protocol calls ``take`` for what it receives. Short data are passed on at once. Longer data wait; all connections
    of a loop take their steps in turn. No more is read while data wait, or while the protocol has paused reading.
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

    def take(self, data: bytes, protocol: Any) -> None:
        """Pass on data that ``protocol`` received."""
        if self._feeding:
            # A protocol passes the head of a request on to its successor.
            protocol.feed(data)
        elif not self._waiting and len(data) <= PIECE_BYTES:
            self._feed(data)
        else:
            self._waiting += data
            self._transport.pause_reading()
            if not self._paused:
                _turns().add(self)

    def step(self) -> bool:
        """Pass on some of what waits; returns whether the next step is due."""
        end = time.perf_counter() + STEP_S
        while self._waiting and not self._paused and not self._transport.is_closing():
            piece = bytes(self._waiting[:PIECE_BYTES])
            del self._waiting[:PIECE_BYTES]
            self._feed(piece)
            if time.perf_counter() >= end:
                break
        if self._transport.is_closing():
            self._waiting.clear()
        elif not self._waiting and not self._paused:
            self._transport.resume_reading()
        return bool(self._waiting) and not self._paused

    def _feed(self, data: bytes) -> None:
        # Asked each time: a connection that becomes a WebSocket gets another protocol.
        protocol: Any = self._transport.get_protocol()
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
        transport = next(iter(self._transports))
        del self._transports[transport]
        try:
            if transport.step():
                self._transports[transport] = None
        except Exception as exc:
            # As asyncio does where a protocol fails.
            context = {"message": "a protocol failed to parse what it received", "exception": exc}
            asyncio.get_running_loop().call_exception_handler(context)
            transport.abort()
        finally:
            self._scheduled = bool(self._transports)
            if self._scheduled:
                asyncio.get_running_loop().call_later(PAUSE_S, self._run)


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


def _turns() -> _Turns:
    return _TURNS.setdefault(asyncio.get_running_loop(), _Turns())
