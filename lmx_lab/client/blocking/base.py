"""Provide the parts of the blocking clients that are written by hand; ``generate`` adds the methods."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from lmx_lab.client.blocking.portal import Portal
from lmx_lab.client.blocking.stream import BlockingStream
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.session import AsyncSession
from lmx_lab.client.subscription import Subscription
from lmx_lab.wire.events import DaemonEvent


class _AsyncClient(Protocol):
    @property
    def url(self) -> str: ...

    async def aclose(self) -> None: ...


Client = TypeVar("Client", bound=_AsyncClient)


class BlockingClient(Generic[Client]):
    """A blocking client: an async client, and the portal to it."""

    def __init__(self, client: Client) -> None:
        self._start(client)

    def _start(self, client: Client) -> None:
        self._client = client
        self._portal = Portal(client.aclose)

    @property
    def url(self) -> str:
        """The server's address at the time of the last request."""
        return self._client.url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    def close(self) -> None:
        """Close all connections; the server stops its work for them. Idempotent."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SessionBase:
    """A blocking session: an async session, and the portal to it."""

    def __init__(self, client: AsyncDaemonClient, portal: Portal, session: AsyncSession) -> None:
        self._client = client
        self._portal = portal
        self._session = session

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self._session.session_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id} of {self._client.url}>"


class SubscriptionBase(BlockingStream[DaemonEvent]):
    """A blocking subscription: the stream of an async subscription, which starts when the ``with`` block is entered."""

    def __init__(self, client: AsyncDaemonClient, portal: Portal, subscription: Subscription) -> None:
        super().__init__(portal, lambda _: subscription)
        self._client = client
        self._subscription = subscription

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._client.url}: {self._subscription.state.state}>"

    def __enter__(self) -> Self:
        self._started()
        return self
