"""Where the events panel has its events from: the seam between it and a daemon."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    # For the types alone: every lab has a workbench, and not every one a daemon.
    from lmx_lab.client.event_subscription import ConnectionState
    from lmx_lab.wire.events import DaemonEvent


class EventSource(Protocol):
    """A daemon as the events panel needs it. All of it runs on the panels' own loop, and fails with a ``LabError``."""

    @property
    def place(self) -> str:
        """The daemon's address, for the eye."""

    def events(self) -> AsyncGenerator[DaemonEvent | ConnectionState, None]:
        """Events and what becomes of the connection, in the order in which it happens; for ever.

        It ends, or raises, where no further attempt can help.
        """

    async def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], scope: Literal["once", "session"]
    ) -> None:
        """Let a call run or not; ``session`` is about all later ones of the tool, too."""

    async def cancel(self, session_id: str) -> None:
        """Stop the session's running turn; nothing happens if there is none."""
