"""Provide the blocking subscription to the daemon's events."""

# Generated from subscription.py by "make blocking"; do not edit.

from __future__ import annotations

from contextlib import aclosing

from lmx_lab.client.blocking.base import SubscriptionBase
from lmx_lab.client.blocking.stream import BlockingStream
from lmx_lab.client.cursors import Cursor
from lmx_lab.client.subscription import ConnectionState


class BlockingSubscription(SubscriptionBase):
    """Events of the daemon for a ``for`` loop: ``with client.events() as events: for event in events: …``

    It has the properties and methods of ``Subscription``.
    """

    @property
    def state(self) -> ConnectionState:
        """The current state of the connection."""
        return self._subscription.state

    def states(self) -> BlockingStream[ConnectionState]:
        """Yield the current state, then each change until the subscription is closed. Any number of readers.

        A slow reader misses old changes, but never the newest one.
        """
        self._started()
        return BlockingStream(self._portal, lambda _: aclosing(self._subscription.states()))

    @property
    def cursor(self) -> Cursor | None:
        """The cursor after the last event that was read; None before the daemon has answered for the first time."""
        return self._subscription.cursor

    @property
    def reconnects(self) -> int:
        """Number of reconnects so far."""
        return self._subscription.reconnects

    def opened(self) -> Cursor | None:
        """Connect, and wait for the result of the first attempt.

        Returns:
            The cursor after which all events will be received; None if the attempt has failed and will be repeated.

        Raises:
            LabError: the attempt has failed and will not be repeated.
        """
        self._started()
        return self._portal.run(self._subscription.opened())
