"""Events of the daemon for callers that block."""

# Generated from event_subscription.py by "make blocking"; do not edit.

from __future__ import annotations

from contextlib import aclosing
from typing import Self

from lmx_lab.client.blocking.portal import Portal, check_upstream
from lmx_lab.client.blocking.stream import BlockingStream
from lmx_lab.client.cursors import Cursor
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.event_receiver import ConnectionState
from lmx_lab.client.event_subscription import Subscription
from lmx_lab.wire.events import DaemonEvent


class BlockingSubscription(BlockingStream[DaemonEvent]):
    """``Subscription`` for a ``for`` loop: ``with client.events() as events: for event in events: …``"""

    def __init__(self, client: AsyncDaemonClient, portal: Portal, subscription: Subscription) -> None:
        super().__init__(portal, lambda _: subscription)
        self._client = client
        self._subscription = subscription

    def __repr__(self) -> str:
        return f"<BlockingSubscription to {self._client.url}: {self.state.state}>"

    def __enter__(self) -> Self:
        self._begun()
        return self

    def _check(self) -> None:
        check_upstream(self._client, self._portal)

    @property
    def state(self) -> ConnectionState:
        """The current state of the connection."""
        return self._subscription.state

    def states(self) -> BlockingStream[ConnectionState]:
        """The current state, then each change, until the subscription is closed. Any number of readers."""
        return BlockingStream(self._portal, lambda _: aclosing(self._subscription.states()))

    @property
    def cursor(self) -> Cursor | None:
        """The cursor after the last event that was read; None before the first answer of the daemon."""
        return self._subscription.cursor

    @property
    def reconnects(self) -> int:
        """Number of reconnects so far."""
        return self._subscription.reconnects

    def opened(self) -> Cursor | None:
        """Connect, and wait for the result of the first attempt.

        Returns:
            The cursor after which all events are received; None if the attempt has failed and will be repeated.

        Raises:
            LabError: the attempt has failed and will not be repeated.
        """
        self._begun()
        return self._portal.run(self._subscription.opened())
