"""Delete events that are no longer kept: tokens of ended turns, events of deleted sessions, old and excess events."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from itertools import takewhile

from lmx_lab.daemon.encoding import parse_timestamp, timestamp
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.event_log import EventLog, record_pruned
from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.errors import LabError

log = logging.getLogger(__name__)
INTERVAL_S = 60.0
BATCH = 2000
"""Maximum number of events that one transaction deletes, because other writers wait for it."""
DAY_S = 86_400.0
TOKEN_EVENTS = "event IN ('turn.token', 'turn.thinking')"
STEP_S = 60.0
"""Difference between the wall clock and the monotonic clock that counts as a step of the wall clock."""
STEP_TRUSTED_AFTER_S = 3600.0
"""Time after which a step of the wall clock is believed."""


class CautiousClock:
    """The wall clock, except that a step forward is believed only when it has lasted for an hour.

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
        if offset_s - self._offset_s > STEP_S:
            self._step_seen_at = monotonic if self._step_seen_at is None else self._step_seen_at
            if monotonic - self._step_seen_at < STEP_TRUSTED_AFTER_S:
                return monotonic + self._offset_s
        self._offset_s, self._step_seen_at = offset_s, None
        return monotonic + offset_s


async def run_retention(store: Store, events: EventLog, limits: Limits, *, interval_s: float = INTERVAL_S) -> None:
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
    keep_since = timestamp(now_s - limits.keep_days * DAY_S)
    while await store.write(lambda tx: _delete_tokens(tx, fold_before)):
        pass
    while await store.write(lambda tx: _delete_events_of_deleted_session(tx, fold_before)):
        pass
    while seq := await store.write(lambda tx: _prune(tx, keep_since, limits.keep_events)):
        events.set_pruned(seq)


def _delete_tokens(tx: Transaction, ended_before: str) -> bool:
    """Delete the token events of some turns. Returns whether there may be more turns."""
    turns = tx.fetch_all(
        "SELECT position, session_id, turn_id FROM turns WHERE folded = 0 AND ended_at < ? LIMIT ?",
        ended_before,
        BATCH // 100,
    )
    for turn in turns:
        tx.execute(
            f"DELETE FROM events WHERE {TOKEN_EVENTS} AND session_id = ? AND turn_id = ?",
            turn["session_id"],
            turn["turn_id"],
        )
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


def _prune(tx: Transaction, keep_since: str, keep_events: int) -> int:
    """Delete some of the oldest events if they are too old or too many.

    Returns:
        ``seq`` of the last deleted event, or 0 if there was none.
    """
    oldest = tx.fetch_all("SELECT seq, at FROM events ORDER BY seq LIMIT ?", BATCH)
    first_kept = tx.fetch_one("SELECT seq FROM events ORDER BY seq DESC LIMIT 1 OFFSET ?", keep_events - 1)
    # Stops at the first event that is kept: times are not always in order, because the clock can be set.
    expired = [
        row["seq"]
        for row in takewhile(
            lambda row: row["at"] < keep_since or (first_kept and row["seq"] < first_kept["seq"]), oldest
        )
    ]
    if not expired:
        return 0
    tx.execute("DELETE FROM events WHERE seq <= ?", expired[-1])
    record_pruned(tx, expired[-1])
    return int(expired[-1])
