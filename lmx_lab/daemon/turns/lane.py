"""What a daemon in memory has of one session."""

from __future__ import annotations

import asyncio

from lmx_lab.daemon.turns.active import ActiveTurn


class Lane:
    """One session's turns, one at a time."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.lock = asyncio.Lock()
        """Of what begins, is submitted and is cancelled, so that each finds the others whole."""
        self.users = 0
        self.task: asyncio.Task[None] | None = None
        self.active: ActiveTurn | None = None
        self.deleting = False
        """Nothing begins and nobody comes in any more."""
        self.deletion: asyncio.Task[None] | None = None
