"""Events of the daemon for callers that block."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Self

from lmx_lab.client.blocking.portal import Portal
from lmx_lab.client.blocking.stream import BlockingStream
from lmx_lab.client.cursors import Cursor
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.event_subscription import ConnectionState, Subscription
from lmx_lab.errors import LabError
from lmx_lab.wire.events import DaemonEvent


def check_upstream(client: AsyncDaemonClient, portal: Portal) -> None:
    """
    Raises:
        HostingError: a turn needs the server of its model meanwhile, and the caller's own loop is what serves it.
    """
    if asyncio._get_running_loop() is None:
        return
    portal.check()
    try:
        upstream = portal.run(client.state()).upstream.url
    except LabError:
        return  # what waits for the daemon says it, or waits until it is back
    portal.check(also=upstream)


class BlockingSubscription(BlockingStream[DaemonEvent]):
    """``Subscription`` for a ``for`` loop: ``with client.events() as events: for event in events``."""

    def __init__(self, client: AsyncDaemonClient, portal: Portal, subscription: Subscription) -> None:
        super().__init__(portal, lambda _: subscription)
        self._client = client
        self._subscription = subscription

    def __repr__(self) -> str:
        return f"<BlockingSubscription to {self._client.url}: {self.state.state}>"

    @property
    def state(self) -> ConnectionState:
        """How the connection is now."""
        return self._subscription.state

    def states(self) -> BlockingStream[ConnectionState]:
        """The state as it is, then each change, until it is closed; for another thread than the one that reads."""
        return BlockingStream(self._portal, lambda _: aclosing(self._subscription.states()))

    @property
    def cursor(self) -> Cursor | None:
        """Where the reader is; None before the daemon has answered once."""
        return self._subscription.cursor

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and is there again."""
        return self._subscription.reconnects

    def opened(self) -> Cursor | None:
        """Connect, and wait for what comes of the first attempt.

        Returns:
            The cursor after which every event comes; None if the attempt has failed, and others follow.

        Raises:
            LabError: it has failed for good.
        """
        self._begun()
        return self._portal.run(self._subscription.opened())

    def __enter__(self) -> Self:
        self._begun()
        return self

    def _check(self) -> None:
        check_upstream(self._client, self._portal)
