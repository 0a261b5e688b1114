"""Who waits for the ends of turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from lmx_lab.daemon.turns.records import TurnKey


class TurnWaiters:
    """On one loop."""

    def __init__(self) -> None:
        self._waiting: dict[TurnKey, set[asyncio.Future[None]]] = {}

    @contextlib.contextmanager
    def of(self, key: TurnKey) -> Iterator[asyncio.Future[None]]:
        """A future that is resolved when the turn has ended after this."""
        ended = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(ended)
        try:
            yield ended
        finally:
            waiting.discard(ended)
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]

    def tell(self, key: TurnKey) -> None:
        """It has ended, which is in the log."""
        for ended in self._waiting.pop(key, ()):
            if not ended.done():
                ended.set_result(None)
