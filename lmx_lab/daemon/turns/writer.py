"""Write the changes of one turn: in order, each batch in one transaction, without losing or repeating any."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.errors import LabError, StoppingError, StorageFullError
from lmx_lab.wire.events import ModelStatus

log = logging.getLogger(__name__)
Change = Callable[[Transaction], object]
"""Changes rows and appends events."""
MIN_RETRY_S = 1.0
MAX_RETRY_S = 30.0


class TurnWriter:
    """Writes the pending changes of a turn. Changes that could not be written stay pending, before later ones."""

    def __init__(self, store: Store, upstream: ModelClient) -> None:
        self.pending: list[Change] = []
        self._store = store
        self._upstream = upstream
        self._abandoned = asyncio.Event()

    async def write(self, *, ending: bool = False) -> None:
        """Write the pending changes, and the state of the model server if it has changed.

        Args:
            ending: Whether the changes end something. They are then tried even on a full disk.

        Raises:
            StorageFullError: The disk is full. All changes are still pending.
        """
        pending, status = list(self.pending), self._upstream.unreported_status()
        if not pending and status is None:
            return
        await self._store.write(partial(_apply, pending, status), ending=ending)
        del self.pending[: len(pending)]
        if status is not None:
            self._upstream.mark_reported(status)

    async def write_end(self, retry_on: type[LabError] = StorageFullError) -> bool:
        """Write the pending changes, and retry until it succeeds.

        Args:
            retry_on: Exceptions after which to retry. Others are raised.

        Returns:
            False if the changes were not written because of ``abandon`` or because the database is closed.
        """
        retry_s = MIN_RETRY_S
        while not self._abandoned.is_set():
            try:
                await self.write(ending=True)
                return True
            except StoppingError:
                return False  # The database is closed.
            except retry_on as exc:
                log.warning("the end of a turn cannot be written yet: %s", exc)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._abandoned.wait(), retry_s)
            retry_s = min(MAX_RETRY_S, 2 * retry_s)
        return False

    def abandon(self) -> None:
        """Stop retrying. The next start of the daemon ends the turn."""
        self._abandoned.set()


def _apply(changes: Sequence[Change], status: ModelStatus | None, tx: Transaction) -> None:
    if status is not None:
        tx.append("model.status", status)
    for change in changes:
        change(tx)
