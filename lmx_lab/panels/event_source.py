"""The interface between the events panel and a daemon."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    # Imported for types only, because most labs have no daemon, and the client takes time to import.
    from lmx_lab.client.subscription import ConnectionState
    from lmx_lab.wire.events import DaemonEvent


class EventSource(Protocol):
    """The part of a daemon that the events panel uses. All methods run on the panels' loop and raise only
    ``LabError``."""

    @property
    def place(self) -> str:
        """The daemon's address, for display."""

    def events(self) -> AsyncGenerator[DaemonEvent | ConnectionState, None]:
        """Yield events and states of the connection, in order.

        The stream ends or raises when no further attempt to connect can succeed.
        """

    async def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], scope: Literal["once", "session"]
    ) -> None:
        """Allow or deny a call; ``session`` also applies to later calls of the tool."""

    async def cancel(self, session_id: str) -> None:
        """Cancel the session's running turn; does nothing if there is none."""
