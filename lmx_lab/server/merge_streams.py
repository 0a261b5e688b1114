"""Run several coroutines or streams concurrently, and cancel all of them at the first error.

Unlike ``asyncio.gather``, these functions end only after all of their tasks have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")
End = tuple[BaseException | None]
"""The end of a source in the queue: its error, or None."""


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results, in order.

    The first error cancels the other coroutines. It is raised when they have ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they arrive. The items of each source stay in order.

    If the reader is slow, the sources wait: at most one item of each is buffered. The first error is raised and closes
    the other sources. Closing this generator closes all of them.
    """
    return sources[0] if len(sources) == 1 else _merge(sources)


async def _merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[list[T] | End] = asyncio.Queue(len(sources))
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        running = len(pumps)
        while running:
            entry = await queue.get()
            if isinstance(entry, list):
                yield entry[0]
            elif entry[0] is not None:
                raise entry[0]
            else:
                running -= 1
    finally:
        await _cancel(pumps)


async def _pump(source: AsyncGenerator[T, None], queue: asyncio.Queue[list[T] | End]) -> None:
    """Put each item of a source into the queue as a list of one item, and the end as a tuple, which differs from it."""
    failure: BaseException | None = None
    try:
        async with aclosing(source) as items:
            async for item in items:
                await queue.put([item])
    except Exception as exc:
        failure = exc
    await queue.put((failure,))


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
