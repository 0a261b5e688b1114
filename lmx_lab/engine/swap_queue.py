"""Give turns to requests that name different models, in the order of ``SwapOrder``. Belongs to the control loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from lmx_lab.engine.swap_order import SwapOrder, Ticket
from lmx_lab.errors import QueueFullError
from lmx_lab.settings import Settings


class SwapQueue:
    """The requests that wait for their model. One request at a time has its turn: its model is loaded and the request
    is submitted, and no other request can replace the model in between.

    Args:
        loaded: Returns the model that is loaded, or was unloaded because it was idle.
        is_busy: Returns whether the loaded model has requests.
        is_changing: Returns whether a model is being loaded or unloaded.
        on_change: Called when requests begin or cease to wait.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        loaded: Callable[[], str | None],
        is_busy: Callable[[], bool],
        is_changing: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._loaded = loaded
        self._is_busy = is_busy
        self._is_changing = is_changing
        self._on_change = on_change
        self._order = SwapOrder(share=settings.slots)
        self._tickets: dict[Ticket, asyncio.Event] = {}
        """The tickets that wait or have their turn, each with the event that starts its turn."""
        self._current: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.swap_s: float | None = None
        """How long the last replacement of the model took, including the wait for running requests."""

    def __len__(self) -> int:
        return len(self._tickets)

    def ticket(self, model: str | None, *, limited: bool) -> Ticket:
        """Return a ticket at the end of the queue. Then ``wait`` waits for its turn, and ``leave`` ends the turn.

        Args:
            limited: Whether the ticket is refused if too many requests wait.

        Raises:
            QueueFullError: too many requests wait.
        """
        slots, queue_limit = self._settings.slots, self._settings.queue_limit
        if limited and len(self._tickets) >= slots + queue_limit:
            message = (
                f"{len(self._tickets)} requests wait for their model, and the limit is {slots + queue_limit} "
                f"(slots {slots} + queue_limit {queue_limit}); try again when some have been answered"
            )
            if self.swap_s is not None:
                message += f"; the last replacement of the model took {self.swap_s:.1f} s"
            raise QueueFullError(message, retry_after_s=self.swap_s or 1.0)
        ticket = self._order.ticket(model, asyncio.get_running_loop().time())
        self._tickets[ticket] = asyncio.Event()
        self._on_change()
        return ticket

    async def wait(self, ticket: Ticket) -> None:
        """Wait for the turn of a ticket."""
        self._order.add(ticket)
        self.update()
        await self._tickets[ticket].wait()

    def turn(self, ticket: Ticket, model: str | None) -> SwapTurn:
        """Return the turn of a ticket after ``wait``.

        Args:
            model: Id of the loaded model.
        """
        loop = asyncio.get_running_loop()

        def leave() -> None:
            with suppress(RuntimeError):  # The loop is closed, because the manager was stopped.
                loop.call_soon_threadsafe(self.leave, ticket)

        return SwapTurn(leave, model)

    def leave(self, ticket: Ticket) -> None:
        """End the turn of a ticket, or its place in the queue. Idempotent."""
        if self._tickets.pop(ticket, None) is None:
            return
        if self._current is ticket:
            self._current = None
        self._order.discard(ticket)
        self.update()
        self._on_change()

    def update(self) -> None:
        """Start the next turn if possible. Called when one of the conditions has changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # The end of a turn, or of a load, calls this method again.
        if self._current is not None or not self._order or self._is_changing():
            return
        loop = asyncio.get_running_loop()
        ticket = self._order.take(self._loaded(), now=loop.time(), busy=self._is_busy())
        if ticket is not None:
            self._current = ticket
            self._tickets[ticket].set()
        elif (ends_s := self._order.share_ends_s()) is not None:
            self._timer = loop.call_at(ends_s, self.update)


class SwapTurn:
    """The turn of a request in swap mode. Its model is loaded, and stays loaded until the turn ends.

    Args:
        leave: Ends the turn. Idempotent; may be called from any thread.
        model: Id of the loaded model.
    """

    def __init__(self, leave: Callable[[], None], model: str | None) -> None:
        self.close = leave
        self.model = model
