"""Decide which request is next if requests name several models, of which one is loaded at a time.

Pure: the caller passes the time. All requests that wait for a model are served in its turn, so that they are computed
together. Requests for the same model that arrive later may pass requests for other models only within a share. Then the
turn goes to the model of the request that has waited longest. Thus no request waits forever, and the requests for one
model are served in the order of arrival.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

SHARE_S = 2.0
"""Time in seconds for which later requests may extend the turn of a model while a request for another model waits."""


@dataclass(eq=False, kw_only=True)
class Ticket:
    """The place of a request in the order. Times are seconds of one clock."""

    model: str | None
    """Model that the request needs; None takes the loaded one."""
    number: int
    arrived_s: float
    passed: int = field(default=0)
    """Number of later requests for the loaded model that were served first."""


class SwapOrder:
    """Orders tickets by arrival and by model.

    Args:
        share: How many later requests may pass one ticket.
    """

    def __init__(self, *, share: int) -> None:
        self._share = share
        self._waiting: list[Ticket] = []
        self._numbers = itertools.count()
        self._loaded: str | None = None
        self._turn_began = 0
        """Number of the first ticket that did not exist when the loaded model got its turn."""

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

    def take(self, loaded: str | None, *, now: float, busy: bool) -> Ticket | None:
        """Remove and return the ticket whose turn it is; None if later requests for the loaded model may still pass.

        Args:
            loaded: The loaded model.
            busy: Whether the loaded model has requests, which another model would have to wait for.
        """
        if loaded != self._loaded:
            self._loaded, self._turn_began = loaded, next(self._numbers)
        chosen = self._choose(loaded, now, busy)
        if chosen is not None:
            self._waiting.remove(chosen)
        return chosen

    def share_ends_s(self) -> float | None:
        """Return the latest time at which the oldest ticket for a model that is not loaded gets its turn; None without
        such a ticket.
        """
        other = self._first_for_another(self._loaded)
        return other.arrived_s + SHARE_S if other is not None else None

    def _first_for_another(self, loaded: str | None) -> Ticket | None:
        return next((ticket for ticket in self._waiting if ticket.model not in (None, loaded)), None)

    def _choose(self, loaded: str | None, now: float, busy: bool) -> Ticket | None:
        here = next((ticket for ticket in self._waiting if ticket.model in (None, loaded)), None)
        other = self._first_for_another(loaded)
        if other is None:
            return here
        shared = now - other.arrived_s < SHARE_S and other.passed < self._share
        if here is None:
            return None if shared and busy else other
        if here.number < max(other.number, self._turn_began):
            return here
        if not shared:
            return other
        other.passed += 1
        return here
