"""A load on a server, watched: its steps are those that the server tells everybody who watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from lmx_lab.client.events import LabEvent
from lmx_lab.errors import LabError
from lmx_lab.wire.admin import LoadAnswer, ModelEvent

WATCH_S = 2.0
"""So long a load waits for its watcher: a proxy may keep the events back."""
STEPS = ("download", "verify", "convert", "store", "load")
"""The other stages are ends, which the load's own answer tells."""


async def watched(
    load: Callable[[], Coroutine[Any, Any, LoadAnswer]],
    *,
    events: AsyncGenerator[LabEvent, None],
    progress: Callable[[ModelEvent], None],
) -> LoadAnswer:
    """Load while somebody watches. Cancelling this ends the waiting, as does whatever ``progress`` raises.

    Raises:
        LabError: the load's own. Without steps it is loaded all the same.
    """
    heard = asyncio.Event()
    watching = asyncio.create_task(_watch(events, progress, heard), name="watch a load")
    tasks: list[asyncio.Task[Any]] = [watching]
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(heard.wait(), WATCH_S)
        loading = asyncio.create_task(load(), name="wait for a load")
        tasks.append(loading)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            # Nothing more comes, or ``progress`` has raised something.
            watching.result()
        return await loading
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(
    events: AsyncGenerator[LabEvent, None], progress: Callable[[ModelEvent], None], heard: asyncio.Event
) -> None:
    try:
        async with aclosing(events) as told:
            while (event := await _next(told)) is not None:
                heard.set()
                if isinstance(event, ModelEvent) and event.stage in STEPS:
                    progress(event)
    finally:
        heard.set()


async def _next(events: AsyncGenerator[LabEvent, None]) -> LabEvent | None:
    try:
        return await anext(events, None)
    except LabError:
        # Without steps the load is loaded all the same, or says itself what is wrong.
        return None
