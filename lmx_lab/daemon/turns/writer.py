"""What one turn has to write: in its order, each batch in one transaction, nothing lost and nothing twice."""

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
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class TurnWriter:
    """Changes that could not be written stay due, and go before those that come later."""

    def __init__(self, store: Store, upstream: ModelClient) -> None:
        self.due: list[Change] = []
        self._store = store
        self._upstream = upstream
        self._given_up = asyncio.Event()

    async def write(self, *, ending: bool = False) -> None:
        """
        Args:
            ending: It ends something: tried on a full disk, too.

        Raises:
            StorageFullError: no room; all of it is still due.
        """
        due, news = list(self.due), self._upstream.news()
        if not due and news is None:
            return
        await self._store.write(partial(_apply, due, news), ending=ending)
        del self.due[: len(due)]
        if news is not None:
            self._upstream.reported(news)

    async def write_end(self, patient_of: type[LabError] = StorageFullError) -> bool:
        """The same, tried again until there is room; False if that was given up.

        Args:
            patient_of: What is waited for to pass; all else is raised.
        """
        pause_s = FIRST_PAUSE_S
        while not self._given_up.is_set():
            try:
                await self.write(ending=True)
                return True
            except StoppingError:
                return False  # The database is closed.
            except patient_of as exc:
                log.warning("the end of a turn cannot be written yet: %s", exc)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._given_up.wait(), pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        return False

    def give_up(self) -> None:
        """What cannot be written now is left to the next start."""
        self._given_up.set()


def _apply(changes: Sequence[Change], news: ModelStatus | None, tx: Transaction) -> None:
    if news is not None:
        tx.append("model.status", news)
    for change in changes:
        change(tx)
