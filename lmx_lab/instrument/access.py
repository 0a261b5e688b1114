"""Run the coroutines of instruments on the event loop of their lab."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from lmx_lab.backend import Backend

T = TypeVar("T")


class LoopRunner(Protocol):
    """The event loop of a lab, for callers on any thread and any loop."""

    def run(self, work: Coroutine[Any, Any, T]) -> T: ...
    async def call(self, work: Coroutine[Any, Any, T]) -> T: ...


class LabAccess:
    """The backend of a lab, and the event loop that uses it.

    Args:
        portal: Returns the loop; raises ``HostingError`` if the lab was stopped.
    """

    def __init__(self, backend: Backend, portal: Callable[[], LoopRunner]) -> None:
        self.backend = backend
        self._portal = portal

    def run(self, work: Callable[[Backend], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine with the backend, and wait for its result. Ctrl-C cancels it.

        Raises:
            HostingError: the lab was stopped.
        """
        portal = self._portal()
        return portal.run(work(self.backend))

    async def call(self, work: Callable[[Backend], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine with the backend, and return its result. Cancelling the caller cancels it.

        Raises:
            HostingError: the lab was stopped.
        """
        portal = self._portal()
        return await portal.call(work(self.backend))
