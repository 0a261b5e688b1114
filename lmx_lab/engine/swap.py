"""Give turns to requests that name different models, of which not all are in memory at a time.

``SwapOrder`` decides which request is next. It is pure: the caller passes the time. All requests that wait for a model
are served in its turn, so that they are computed together. Requests for loaded models that arrive later may pass
requests for other models only within a share. Then the turn goes to the model of the request that has waited longest.
Thus no request waits forever, and the requests for one model are served in the order of arrival.

``SwapQueue`` lets requests wait for their turn. It belongs to the manager's loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from lmx_lab.errors import QueueFullError
from lmx_lab.settings import Settings


@dataclass(eq=False, kw_only=True)
class Ticket:
    """The place of a request in the order. Times are seconds of one clock."""

    model: str | None
    """Model that the request needs; None takes a loaded one."""
    number: int
    arrived_s: float
    passed: int = field(default=0)
    """Number of later requests for loaded models that were served first."""


class SwapOrder:
    """Orders tickets by arrival and by model.

    Args:
        share: How many later requests may pass one ticket.
        share_s: Time in seconds for which later requests may extend the turn of loaded models while a request for
            another model waits.
    """

    def __init__(self, *, share: int, share_s: float = 2.0) -> None:
        self._share = share
        self._share_s = share_s
        self._waiting: list[Ticket] = []
        self._numbers = itertools.count()
        self._loaded: frozenset[str] = frozenset()
        self._turn_began = 0
        """Number of the first ticket that did not exist when the loaded models got their turn."""

    def __len__(self) -> int:
        return len(self._waiting)

    def ticket(self, model: str | None, now: float) -> Ticket:
        """Return a ticket for the next place in the order. It gets a turn only after it was added with ``add``."""
        return Ticket(model=model, number=next(self._numbers), arrived_s=now)

    def add(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)
        self._waiting.sort(key=lambda other: other.number)

    def discard(self, ticket: Ticket) -> None:
        """Remove a ticket; ignored if it was taken or never added."""
        self._waiting = [other for other in self._waiting if other is not ticket]

    def take(self, loaded: frozenset[str], *, now: float, busy: bool) -> Ticket | None:
        """Remove and return the ticket whose turn it is; None if later requests for loaded models may still pass.

        Args:
            loaded: The loaded models.
            busy: Whether another model can be loaded only after running requests have ended.
        """
        if loaded != self._loaded:
            self._loaded, self._turn_began = loaded, next(self._numbers)
        here = next((ticket for ticket in self._waiting if ticket.model is None or ticket.model in loaded), None)
        other = self._first_for_another(loaded)
        shared = other is not None and now - other.arrived_s < self._share_s and other.passed < self._share
        if other is None:
            chosen = here
        elif here is None:
            chosen = None if shared and busy else other
        elif here.number < max(other.number, self._turn_began):
            chosen = here
        elif not shared:
            chosen = other
        else:
            other.passed += 1
            chosen = here
        if chosen is not None:
            self._waiting.remove(chosen)
        return chosen

    def share_ends_s(self) -> float | None:
        """Return the latest time at which the oldest ticket for a model that is not loaded gets its turn; None without
        such a ticket.
        """
        other = self._first_for_another(self._loaded)
        return other.arrived_s + self._share_s if other is not None else None

    def _first_for_another(self, loaded: frozenset[str]) -> Ticket | None:
        return next((it for it in self._waiting if it.model is not None and it.model not in loaded), None)


class SwapQueue:
    """The requests that wait for their model. One request at a time has its turn: its model is loaded and the request
    is submitted, and no other request can replace the model in between.

    Args:
        loaded: Returns the models that are loaded, and the one that was unloaded because it was idle.
        is_busy: Returns whether another model can be loaded only after running requests have ended.
        is_changing: Returns whether a model is being loaded or unloaded.
        share_s: See ``SwapOrder``.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        loaded: Callable[[], frozenset[str]],
        is_busy: Callable[[], bool],
        is_changing: Callable[[], bool],
        share_s: float = 2.0,
    ) -> None:
        self._settings = settings
        self._loaded = loaded
        self._is_busy = is_busy
        self._is_changing = is_changing
        self._order = SwapOrder(share=settings.slots, share_s=share_s)
        self._tickets: dict[Ticket, asyncio.Event] = {}
        """The tickets that wait or have their turn, each with the event that starts its turn."""
        self._current: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.swap_s: float | None = None
        """How long the last replacement of the model took, including the wait for running requests."""

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def has_turn(self) -> bool:
        """Whether a request has its turn."""
        return self._current is not None

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
                f"requests that wait for their model: {len(self._tickets)}, and the limit is {slots + queue_limit} "
                f"(slots {slots} + queue_limit {queue_limit}); try again when some have been answered"
            )
            if self.swap_s is not None:
                message += f"; the last replacement of the model took {self.swap_s:.1f} s"
            raise QueueFullError(message, retry_after_s=self.swap_s or 1.0)
        ticket = self._order.ticket(model, asyncio.get_running_loop().time())
        self._tickets[ticket] = asyncio.Event()
        return ticket

    async def wait(self, ticket: Ticket) -> None:
        """Wait for the turn of a ticket."""
        self._order.add(ticket)
        self.update()
        await self._tickets[ticket].wait()

    def leave(self, ticket: Ticket) -> None:
        """End the turn of a ticket, or its place in the queue. Idempotent."""
        if self._tickets.pop(ticket, None) is None:
            return
        if self._current is ticket:
            self._current = None
        self._order.discard(ticket)
        self.update()

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
