"""Whose turn it is where requests name several models and one is loaded at a time. Pure: it is told the time.

All that wait for a model go in when it has its turn, so that they are computed together. Those that come for it later
may pass the requests for other models only within a share. Then the model of the longest waiting request has its turn:
nobody starves, and within a model the order is that of arrival.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

SHARE_S = 2.0
"""How long one model may keep its turn, by requests that came late, while another is waited for."""


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A place in the line. Dates are on the event loop's clock."""

    model: str | None
    """None takes whatever is loaded."""
    number: int
    arrived_s: float
    passed: int = field(default=0)
    """How many that came later went before it, for the model that was loaded."""


class Line:
    """Tickets in order of arrival.

    Args:
        share: How many that came late may pass one ticket.
    """

    def __init__(self, *, share: int) -> None:
        self._share = share
        self._waiting: list[Ticket] = []
        self._numbers = itertools.count()
        self._loaded: str | None = None
        self._turn_began = 0
        """The first number that was not in line when the loaded model got its turn."""

    def __len__(self) -> int:
        return len(self._waiting)

    def ticket(self, model: str | None, now: float) -> Ticket:
        """The next place; it counts from now on, but is called only once it was added."""
        return Ticket(model=model, number=next(self._numbers), arrived_s=now)

    def add(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)
        self._waiting.sort(key=lambda other: other.number)

    def discard(self, ticket: Ticket) -> None:
        """It leaves; one that has been taken, or was never added, is not here."""
        self._waiting = [other for other in self._waiting if other is not ticket]

    def take(self, loaded: str | None, *, now: float, busy: bool) -> Ticket | None:
        """Who goes in next; None if nobody does yet, since others that want the loaded model may still come.

        Args:
            loaded: The model that a ticket without one means too.
            busy: Another model would have to wait anyway, for running requests.
        """
        if loaded != self._loaded:
            self._loaded, self._turn_began = loaded, next(self._numbers)
        chosen = self._choose(loaded, now, busy)
        if chosen is not None:
            self._waiting.remove(chosen)
        return chosen

    def _choose(self, loaded: str | None, now: float, busy: bool) -> Ticket | None:
        here = next((ticket for ticket in self._waiting if ticket.model in (None, loaded)), None)
        other = next((ticket for ticket in self._waiting if ticket.model not in (None, loaded)), None)
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
