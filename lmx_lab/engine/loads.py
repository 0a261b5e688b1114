"""The loads that were asked for and have not ended: what is asked later ends them, also one that hangs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmx_lab.errors import NotLoadedError
from lmx_lab.values.models import ModelEntry

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class Load:
    """One of them."""

    entry: ModelEntry
    _given_up: NotLoadedError | None = field(default=None, init=False, repr=False)
    task: asyncio.Task[Any] | None = field(default=None, init=False, repr=False)
    """What of it may hang."""

    def check(self) -> None:
        """
        Raises:
            NotLoadedError: it was given up.
        """
        if self._given_up is not None:
            raise self._given_up

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the part of it that may hang.

        Raises:
            NotLoadedError: it was given up; the work was cancelled, and has ended.
        """
        if self._given_up is not None:
            work.close()
            raise self._given_up
        task = asyncio.create_task(work, name=f"lmx-lab loads {self.entry.id}")
        self.task = task
        try:
            return await task
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self.task = None

    def give_up(self, why: str) -> None:
        self._given_up = self._given_up or NotLoadedError(f"the load of {self.entry.id} was given up: {why}")
        if self.task is not None:
            self.task.cancel()


class Loads:
    """Belongs to the engine's loop."""

    def __init__(self) -> None:
        self._open: list[Load] = []

    @contextlib.contextmanager
    def begun(self, entry: ModelEntry, part_of: Load | None = None) -> Iterator[Load]:
        """The block is a load, from its place in the queue to its end. Loads of other models are given up for it.

        Raises:
            NotLoadedError: it is a part of one that was given up.
        """
        if part_of is not None:
            part_of.check()
        self.give_up(f"{entry.id} is loaded in its place", but=entry.path)
        load = Load(entry=entry)
        self._open.append(load)
        try:
            yield load
        finally:
            self._open.remove(load)

    async def end(self, why: str) -> None:
        """Give up all; returns when their processes have ended."""
        self.give_up(why)
        if tasks := [load.task for load in self._open if load.task is not None]:
            await asyncio.wait(tasks)

    def give_up(self, why: str, *, but: Path | None = None) -> None:
        """End all but those of the model at this path; whoever waits for one is told why."""
        for load in self._open:
            if load.entry.path != but:
                load.give_up(why)
