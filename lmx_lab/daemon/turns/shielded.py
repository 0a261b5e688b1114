"""Work that is finished once it was asked for: what it has written has its effect in memory, too."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ShieldedTasks:
    """Owns the work, on one loop."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        """That are not done."""

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What it returns; a caller that is cancelled leaves it to go on."""
        return await asyncio.shield(self.begin(work))

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever asked has been told, or has gone.
