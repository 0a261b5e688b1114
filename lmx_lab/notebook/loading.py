"""A load as the one who asked for it sees it: steps to show, then a result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from lmx_lab.server import InferenceServer
from lmx_lab.values.models import LoadReport
from lmx_lab.wire.admin import ModelEvent

Work = Callable[[], Coroutine[Any, Any, LoadReport]]


class Loading:
    """Begun when it is made, on the server's loop.

    Drawing the steps is left to whoever asked, on its thread: output of another thread would appear in another cell.
    """

    def __init__(self, server: InferenceServer, work: Work) -> None:
        self._events = server.feed.subscribe()
        self._task = asyncio.create_task(work(), name="wait for a load")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[LoadReport]) -> None:
        self._events.close()
        if not task.cancelled():
            task.exception()  # seen: whoever asked may have left

    async def step(self) -> ModelEvent | None:
        """The next thing to show; None when the load is over."""
        async for event in self._events:
            if isinstance(event, ModelEvent) and event.done_bytes is not None:
                return event
        return None

    async def result(self) -> LoadReport:
        return await self._task
