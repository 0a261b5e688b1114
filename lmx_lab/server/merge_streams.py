"""Run several coroutines or streams as one: all results or the first error, all items in one stream.

No task outlives its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")
End = tuple[BaseException | None]


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results, in order. The first error cancels the other coroutines and is raised when they have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they arrive; those of each source in order.

    The sources wait for a slow reader: one item of each is kept. The first error is raised and closes the others, as
    does closing this generator.
    """
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[list[T] | End] = asyncio.Queue(len(sources))
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        running = len(pumps)
        while running:
            got = await queue.get()
            if isinstance(got, list):
                yield got[0]
            elif got[0] is not None:
                raise got[0]
            else:
                running -= 1
    finally:
        await _end(pumps)


async def _pump(source: AsyncGenerator[T, None], queue: asyncio.Queue[list[T] | End]) -> None:
    """Put the items of a source into the queue, as lists of one: so the end, a tuple, differs from any item."""
    failure: BaseException | None = None
    try:
        async with aclosing(source) as items:
            async for item in items:
                await queue.put([item])
    except Exception as exc:
        failure = exc
    await queue.put((failure,))


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
