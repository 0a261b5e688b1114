"""What the log forgets: tokens of ended turns, events of deleted sessions, and what is older or more than is kept."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from itertools import takewhile

from lmx_lab.daemon.clock import CautiousClock, iso, unix_s
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.event_log import EventLog, note_pruned
from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.errors import LabError

log = logging.getLogger(__name__)
ROUND_S = 60.0
BATCH = 2000
"""Events, or turns, of one transaction: others wait to write for so long."""
DAY_S = 86_400.0
STREAMED = "event IN ('turn.token', 'turn.thinking')"


async def keep(store: Store, events: EventLog, limits: Limits, *, round_s: float = ROUND_S) -> None:
    """Forget what is due, again and again, until cancelled."""
    clock = CautiousClock(known_s=math.inf if store.last_at is None else unix_s(store.last_at))
    while True:
        try:
            await forget(store, events, limits, now_s=clock.now_s())
        except LabError as exc:
            # A full disk, most likely, for which turns and submits have the words.
            log.warning("the log was not cut: %s", exc)
        await asyncio.sleep(round_s)


async def forget(store: Store, events: EventLog, limits: Limits, *, now_s: float | None = None) -> None:
    """Forget everything that is due now.

    Args:
        now_s: Unix seconds, in the place of the clock's.
    """
    now_s = time.time() if now_s is None else now_s
    folded_until, kept_from = iso(now_s - limits.fold_after_s), iso(now_s - limits.keep_days * DAY_S)
    while await store.write(lambda transaction: _fold_turns(transaction, folded_until)):
        pass
    while await store.write(lambda transaction: _fold_deleted(transaction, folded_until)):
        pass
    while seq := await store.write(lambda transaction: _prune(transaction, kept_from, limits.keep_events)):
        events.pruned(seq)


def _fold_turns(transaction: Transaction, until: str) -> bool:
    """Whether there may be more."""
    turns = transaction.rows(
        "SELECT position, session_id, turn_id FROM turns WHERE folded = 0 AND ended_at < ? LIMIT ?", until, BATCH // 100
    )
    for turn in turns:
        transaction.run(
            f"DELETE FROM events WHERE {STREAMED} AND session_id = ? AND turn_id = ?",
            turn["session_id"],
            turn["turn_id"],
        )
        transaction.run("UPDATE turns SET folded = 1 WHERE position = ?", turn["position"])
    return bool(turns)


def _fold_deleted(transaction: Transaction, until: str) -> bool:
    session = transaction.row("SELECT * FROM deleted_sessions WHERE deleted_at < ? LIMIT 1", until)
    if session is None:
        return False
    gone = transaction.run(
        "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE session_id = ? AND seq < ? LIMIT ?)",
        *(session["session_id"], session["seq"], BATCH),
    )
    if gone < BATCH:
        transaction.run("DELETE FROM deleted_sessions WHERE seq = ?", session["seq"])
    return True


def _prune(transaction: Transaction, kept_from: str, most: int) -> int:
    """Delete the oldest events, if they are too old or too many; the seq of the last one that went, or 0."""
    oldest = transaction.rows("SELECT seq, at FROM events ORDER BY seq LIMIT ?", BATCH)
    first_kept = transaction.row("SELECT seq FROM events ORDER BY seq DESC LIMIT 1 OFFSET ?", most - 1)
    # From the beginning up to the first that is kept: times may jump with the clock.
    gone = [
        row["seq"]
        for row in takewhile(
            lambda row: row["at"] < kept_from or (first_kept and row["seq"] < first_kept["seq"]), oldest
        )
    ]
    if not gone:
        return 0
    transaction.run("DELETE FROM events WHERE seq <= ?", gone[-1])
    note_pruned(transaction, gone[-1])
    return int(gone[-1])
