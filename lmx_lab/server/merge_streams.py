"""Several works as one: all results or the first failure, all streams as one stream. Nothing outlives its caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")
End = tuple[BaseException | None]


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. The first failure cancels the others and is raised when they have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all sources as they come; each source's own in order.

    A slow reader holds the sources up: one item of each is kept. The first failure is raised, and closes the others, as
    does closing this.
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
    """Items go as lists of one, so that an end, a tuple, can be told from any item."""
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
