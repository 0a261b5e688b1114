"""Track the servers that answer the rows of a run: which of them accept rows, and how many each has answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lmx_lab.backend import Backend
from lmx_lab.batch.answer import RowAnswer

WAITING = 2
"""Number of additional requests that wait in a server's queue, so that a slot that becomes free is used immediately."""


class RowServer:
    """A server that answers rows.

    Args:
        slots: Number of requests that the server decodes at the same time.
    """

    def __init__(self, backend: Backend, slots: int) -> None:
        self.backend = backend
        self.url = backend.state().url
        self.running = 0
        """Number of rows that the server is answering."""
        self.returned = 0
        """Number of rows that the server could not answer, and that other servers got instead."""
        self.error = ""
        """The reason why the server gets no rows at present; empty if it gets rows."""
        self.has_failed = False
        """Whether the server has had such an error during the run."""
        self._slots = slots
        self._answers = 0
        self._output_tokens = 0
        self._started_at: float | None = None
        self._answered_at = 0.0

    @property
    def occupancy(self) -> float:
        """The fraction of the slots in use; above 1 if requests wait in the queue."""
        return self.running / self._slots

    @property
    def has_room(self) -> bool:
        return not self.error and self.running < self._slots + WAITING

    def begin(self) -> None:
        """Count a row that the server starts to answer."""
        self._started_at = self._started_at or time.monotonic()
        self.running += 1

    def count(self, answer: RowAnswer) -> None:
        """Count an answer."""
        self._answers += 1
        self._output_tokens += answer.output_tokens or 0
        self._answered_at = time.monotonic()

    def figures(self) -> dict[str, Any]:
        """Return the statistics of the server as a row of a table."""
        elapsed_s = self._answered_at - self._started_at if self._answers and self._started_at else 0.0
        return {
            "url": self.url,
            "slots": self._slots,
            "answers": self._answers,
            "output_tokens": self._output_tokens,
            "tokens_per_s": self._output_tokens / elapsed_s if elapsed_s else 0.0,
            "returned": self.returned,
            "error": self.error,
        }


def next_server(servers: Sequence[RowServer]) -> RowServer | None:
    """Return the server that gets the next row, the one with the lowest occupancy; None if none of them has room."""
    return min((each for each in servers if each.has_room), key=lambda each: each.occupancy, default=None)
