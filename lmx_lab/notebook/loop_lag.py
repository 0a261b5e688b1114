"""Measure how long an event loop is blocked, for example by a cell that runs on the loop of a server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

INTERVAL_S = 0.1
"""Time between two calls of the heartbeat."""
BLOCKED_S = 1.0
"""Minimum time that a loop has to be blocked to be reported; users notice a block of this length."""
MEMORY_S = 60.0
"""Time after the end of a block during which it is still reported."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A time in which the loop was blocked."""

    seconds: float
    ended_at: float
    """Value of ``time.monotonic`` at its end."""


class LoopLag:
    """Measures the lag of one loop with a heartbeat of ten short calls per second. Can be read from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat_at: float | None = None
        self._stopped = False
        self._blocks: deque[Block] = deque(maxlen=100)

    def start(self) -> None:
        """Start measuring the running loop."""
        self._loop = asyncio.get_running_loop()
        self._schedule_beat()

    def start_after_cell(self) -> None:
        """Start measuring the running loop when the running cell ends; immediately if no notebook runs this code.

        The cell that launches a lab blocks the loop, but there are no clients yet.
        """
        get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
        shell = get_ipython() if get_ipython is not None else None
        if shell is None:
            self.start()
            return
        self._loop = asyncio.get_running_loop()

        def start() -> None:
            shell.events.unregister("post_execute", start)
            if self._loop is not None and not self._stopped:
                self._loop.call_soon_threadsafe(self.start)

        shell.events.register("post_execute", start)

    def stop(self) -> None:
        """Stop measuring; the results stay. Can be called from any thread."""
        self._stopped = True

    @property
    def now_s(self) -> float:
        """The time in seconds for which the loop has been blocked so far; 0 if it is not blocked."""
        beat_at = self._beat_at
        return 0.0 if beat_at is None or self._stopped else max(0.0, time.monotonic() - beat_at - INTERVAL_S)

    @property
    def worst(self) -> Block | None:
        """The longest block of the last minute; None if no block was longer than a second."""
        since = time.monotonic() - MEMORY_S
        blocks = [block for block in list(self._blocks) if block.ended_at > since]
        return max(blocks, key=lambda block: block.seconds, default=None)

    def _beat(self) -> None:
        if self._stopped:
            return
        blocked_s = self.now_s
        if blocked_s > BLOCKED_S:
            self._blocks.append(Block(seconds=blocked_s, ended_at=time.monotonic()))
        self._schedule_beat()

    def _schedule_beat(self) -> None:
        assert self._loop is not None
        self._beat_at = time.monotonic()
        self._loop.call_later(INTERVAL_S, self._beat)
