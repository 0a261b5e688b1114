"""An accepted request for embeddings or scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """Leaving it, by cancelling ``result`` or by dropping this, gives the work up.

    Args:
        done: What the engine computes.
        finish: Makes the result of it, on the reader's side.
        give_up: Tells the engine that nobody waits any more.
    """

    def __init__(self, done: Future[Any], finish: Callable[[Any], Result], give_up: Callable[[], object]) -> None:
        self._done = done
        self._finish = finish
        self._give_up = give_up

    async def result(self) -> Result:
        """What came of it, when it is done.

        Raises:
            LabError: it did not end well.
        """
        try:
            return self._finish(await asyncio.wrap_future(self._done))
        finally:
            self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._done.done():
            self._give_up()
