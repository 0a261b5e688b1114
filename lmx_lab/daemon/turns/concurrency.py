"""Slots of turns that run at once: whoever comes back goes before those who begin, otherwise the first come first."""

from __future__ import annotations

import asyncio
from collections import deque


class TurnSlots:
    """On one loop. Who takes a slot gives it back."""

    def __init__(self, count: int) -> None:
        self.free = count
        """None is free while anybody waits."""
        self._back: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()

    def take_at_once(self) -> bool:
        """Take one if one is free."""
        taken = self.free > 0
        self.free -= taken
        return taken

    async def take(self, *, back: bool = False) -> None:
        """Wait for a slot.

        Args:
            back: Of one who lent its slot and whose own time goes on.
        """
        if self.take_at_once():
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._back if back else self._new
        waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():
                self.give()  # It was given in the same moment.
            elif mine in waiting:
                waiting.remove(mine)
            raise

    def give(self) -> None:
        """To whoever is the next, or to nobody."""
        for waiting in (self._back, self._new):
            while waiting:
                if not (next_one := waiting.popleft()).done():
                    next_one.set_result(None)
                    return
        self.free += 1
