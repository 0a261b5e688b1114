"""How late an event loop is: what a blocking cell does to those who are served on the kernel's loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

BEAT_S = 0.1
BLOCKED_S = 1.0
"""From here on somebody has noticed, and should learn the remedy."""
REMEMBERED_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Block:
    """A time in which the loop did not come round."""

    seconds: float
    ended_at: float
    """On ``time.monotonic``'s clock."""


class LoopLag:
    """A heartbeat on a loop. Any thread may ask; the loop itself pays ten short calls a second."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat_at: float | None = None
        self._stopped = False
        self._blocks: deque[Block] = deque(maxlen=100)

    def start(self) -> None:
        """Begin, on the loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self._beat_again()

    def stop(self) -> None:
        """End the heartbeat, with its next beat; from any thread. What was seen stays."""
        self._stopped = True

    @property
    def now_s(self) -> float:
        """How long the loop has been due."""
        beat_at = self._beat_at
        return 0.0 if beat_at is None or self._stopped else max(0.0, time.monotonic() - beat_at - BEAT_S)

    @property
    def worst(self) -> Block | None:
        """The longest block of the last minute, if one was longer than a second."""
        recent = time.monotonic() - REMEMBERED_S
        blocks = [block for block in list(self._blocks) if block.ended_at > recent]
        return max(blocks, key=lambda block: block.seconds, default=None)

    def _beat(self) -> None:
        if self._stopped:
            return
        late_s = self.now_s
        if late_s > BLOCKED_S:
            self._blocks.append(Block(seconds=late_s, ended_at=time.monotonic()))
        self._beat_again()

    def _beat_again(self) -> None:
        assert self._loop is not None
        self._beat_at = time.monotonic()
        self._loop.call_later(BEAT_S, self._beat)
