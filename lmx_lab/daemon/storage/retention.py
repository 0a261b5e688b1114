"""Delete events that are no longer kept: tokens of ended turns, events of deleted sessions, old and excess events."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from operator import methodcaller

from lmx_lab.daemon.encoding import parse_timestamp, timestamp
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.event_log import EventLog, record_pruned
from lmx_lab.daemon.storage.store import DatabaseView, Store, Transaction
from lmx_lab.errors import LabError

log = logging.getLogger(__name__)
BATCH = 2000
"""Maximum number of events that one transaction deletes, because other writers wait for it."""


class CautiousClock:
    """The wall clock, except that a step forward by more than a minute is believed only when it has lasted for an hour.

    The reason is that deleted events cannot be recovered if the clock was wrong. After the computer has slept, which
    looks like a step, events are deleted one hour later.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        last_event_s: float = math.inf,
    ) -> None:
        """
        Args:
            last_event_s: Unix time of the last known event. A wall clock that is ahead of it also counts as a step.
        """
        self._wall = wall
        self._monotonic = monotonic
        self._offset_s = min(wall(), last_event_s) - monotonic()
        """Trusted difference between the wall clock and the monotonic clock."""
        self._step_seen_at: float | None = None

    def now_s(self) -> float:
        """Return the Unix time in seconds."""
        monotonic = self._monotonic()
        offset_s = self._wall() - monotonic
        if offset_s - self._offset_s > 60.0:
            self._step_seen_at = monotonic if self._step_seen_at is None else self._step_seen_at
            if monotonic - self._step_seen_at < 3600.0:
                return monotonic + self._offset_s
        self._offset_s, self._step_seen_at = offset_s, None
        return monotonic + offset_s


async def run_retention(store: Store, events: EventLog, limits: Limits, *, interval_s: float = 60.0) -> None:
    """Delete expired events every ``interval_s`` seconds until the task is cancelled."""
    clock = CautiousClock(
        last_event_s=math.inf if store.last_event_at is None else parse_timestamp(store.last_event_at)
    )
    while True:
        try:
            await delete_expired(store, events, limits, now_s=clock.now_s())
        except LabError as exc:
            # The likely reason is a full disk, which turns and requests report themselves.
            log.warning("expired events could not be deleted: %s", exc)
        await asyncio.sleep(interval_s)


async def delete_expired(store: Store, events: EventLog, limits: Limits, *, now_s: float | None = None) -> None:
    """Delete all events that have expired, in batches.

    Args:
        now_s: Unix time in seconds; the current time by default.
    """
    now_s = time.time() if now_s is None else now_s
    fold_before = timestamp(now_s - limits.fold_after_s)
    keep_since = timestamp(now_s - limits.keep_days * 86_400)
    while await store.write(lambda tx: _delete_tokens(tx, fold_before)):
        pass
    while await store.write(lambda tx: _delete_events_of_deleted_session(tx, fold_before)):
        pass
    first_kept = await _find_first_kept(store, limits.keep_events)
    while seq := await store.read(lambda view: _find_last_expired(view, keep_since, first_kept)):
        await store.write(partial(_prune, seq=seq))
        events.set_pruned(seq)


def _delete_tokens(tx: Transaction, ended_before: str) -> bool:
    """Delete the token events of some turns. Returns whether there may be more."""
    turns = tx.fetch_all(
        "SELECT position, session_id, turn_id FROM turns WHERE folded = 0 AND ended_at < ? LIMIT ?",
        ended_before,
        BATCH // 100,
    )
    left = BATCH
    for turn in turns:
        left -= tx.execute(
            "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE event IN ('turn.token', 'turn.thinking')"
            " AND session_id = ? AND turn_id = ? LIMIT ?)",
            *(turn["session_id"], turn["turn_id"], left),
        )
        if left == 0:
            break  # This turn may have more.
        tx.execute("UPDATE turns SET folded = 1 WHERE position = ?", turn["position"])
    return bool(turns)


def _delete_events_of_deleted_session(tx: Transaction, deleted_before: str) -> bool:
    """Delete some events of a deleted session. Returns whether there may be more."""
    session = tx.fetch_one("SELECT * FROM deleted_sessions WHERE deleted_at < ? LIMIT 1", deleted_before)
    if session is None:
        return False
    deleted = tx.execute(
        "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE session_id = ? AND seq < ? LIMIT ?)",
        *(session["session_id"], session["seq"], BATCH),
    )
    if deleted < BATCH:
        tx.execute("DELETE FROM deleted_sessions WHERE seq = ?", session["seq"])
    return True


async def _find_first_kept(store: Store, keep_events: int) -> int:
    """Return the lowest ``seq`` of the newest ``keep_events`` events, or 0 if there are no more events than that.

    The events have to be counted, because some between them were deleted. Counting a million takes 0.2 s. It is done in
    parts, so that others can read in between, and without a transaction, because all writers would wait for it.
    """
    oldest = await store.read(lambda view: view.fetch_one("SELECT seq FROM events ORDER BY seq LIMIT 1"))
    if oldest is None or store.issued_seq - oldest["seq"] < keep_events:
        return 0
    first, left = store.issued_seq + 1, keep_events
    while left:
        # Other readers wait for the count of a part, about 10 ms.
        part = min(left, 50_000)
        sql = "SELECT seq FROM events WHERE seq < ? ORDER BY seq DESC LIMIT 1 OFFSET ?"
        row = await store.read(methodcaller("fetch_one", sql, first, part - 1))
        if row is None:
            return 0
        first, left = row["seq"], left - part
    return int(first)


def _find_last_expired(view: DatabaseView, keep_since: str, first_kept: int) -> int:
    """Return the ``seq`` up to which one transaction may delete events, or 0 if none has expired."""
    last = 0
    # Stops at the first event that is kept: times are not always in order, because the clock can be set.
    for row in view.iterate("SELECT seq, at FROM events ORDER BY seq LIMIT ?", BATCH):
        if row["at"] >= keep_since and row["seq"] >= first_kept:
            break
        last = row["seq"]
    return last


def _prune(tx: Transaction, seq: int) -> None:
    tx.execute("DELETE FROM events WHERE seq <= ?", seq)
    record_pruned(tx, seq)
