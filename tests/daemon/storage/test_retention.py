"""What the log forgets, and when."""

from __future__ import annotations

import time

import pytest

from lmx_lab.daemon import sessions
from lmx_lab.daemon.clock import iso
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.retention import forget
from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.wire.events import TurnText
from lmx_lab.wire.sessions import CreateSession

pytestmark = pytest.mark.anyio
LIMITS = Limits(fold_after_s=600, keep_days=30)


async def kinds(store: Store) -> list[str]:
    return [row["event"] for row in await store.read(lambda r: r.rows("SELECT event FROM events ORDER BY seq"))]


def write_turn(tx: Transaction, turn_id: str, ended_s: float | None) -> None:
    ended = None if ended_s is None else iso(ended_s)
    tx.run(
        "INSERT INTO turns (session_id, turn_id, status, content, digest, queued_at, ended_at)"
        " VALUES ('s', ?, ?, '', '', ?, ?)",
        *(turn_id, "running" if ended is None else "done", tx.now, ended),
    )
    for kind in ("turn.started", "turn.token", "turn.thinking", "turn.token", "message.done", "turn.done"):
        tx.append(kind, TurnText(message_id="m", text="x"), session_id="s", turn_id=turn_id)


async def test_tokens_are_folded_ten_minutes_after_their_turn(store: Store) -> None:
    log = EventLog(store, LIMITS)
    now = time.time()
    await store.write(lambda tx: sessions.create(tx, CreateSession(session_id="s")))
    for turn_id, ended in (("old", now - 700), ("young", now - 500), ("running", None)):
        await store.write(lambda tx, t=turn_id, e=ended: write_turn(tx, t, e))
    await forget(store, log, LIMITS, now_s=now)
    rows = await store.read(lambda r: r.rows("SELECT turn_id, event FROM events WHERE turn_id IS NOT NULL"))
    left = {turn_id: [r["event"] for r in rows if r["turn_id"] == turn_id] for turn_id in ("old", "young", "running")}
    assert left["old"] == ["turn.started", "message.done", "turn.done"]
    assert len(left["young"]) == len(left["running"]) == 6
    assert log.oldest_seq == 1, "folding is no pruning: every cursor can still be resumed"
    log.check(2)


async def test_of_a_deleted_session_the_deletion_stays(store: Store) -> None:
    log = EventLog(store, LIMITS)
    await store.write(lambda tx: sessions.create(tx, CreateSession(session_id="s")))
    await store.write(lambda tx: write_turn(tx, "t", time.time()))
    await store.write(lambda tx: sessions.delete(tx, "s"))
    await store.write(lambda tx: sessions.create(tx, CreateSession(session_id="s")))
    await forget(store, log, LIMITS)
    assert len(await kinds(store)) == 9
    await forget(store, log, LIMITS, now_s=time.time() + 700)
    assert await kinds(store) == ["session.deleted", "session.created"]


async def test_what_is_too_old_goes_from_the_beginning(store: Store) -> None:
    log = EventLog(store, LIMITS)
    await store.write(lambda tx: sessions.create(tx, CreateSession(session_id="s")))
    await store.write(lambda tx: write_turn(tx, "t", time.time()))
    await store.write(lambda tx: tx.run("UPDATE events SET at = ? WHERE seq <= 3", iso(time.time() - 31 * 86400)))
    await forget(store, log, LIMITS)
    assert (log.oldest_seq, len(await kinds(store))) == (4, 4)


async def test_many_more_than_are_kept_go_in_bounded_steps(store: Store) -> None:
    limits = Limits(keep_events=100)
    log = EventLog(store, limits)

    def many(tx: Transaction) -> None:
        for _ in range(5000):
            tx.append("turn.token", TurnText(message_id="m", text="x"), session_id="s", turn_id="t")

    await store.write(many)
    await forget(store, log, limits)
    assert (log.oldest_seq, len(await kinds(store))) == (4901, 100)


async def test_a_clock_that_was_wrong_for_a_moment_costs_nothing(store: Store) -> None:
    log = EventLog(store, LIMITS)
    await store.write(lambda tx: sessions.create(tx, CreateSession(session_id="s")))
    await store.write(lambda tx: write_turn(tx, "t", None))
    await store.write(lambda tx: tx.run("UPDATE events SET at = '2020-01-01T00:00:00.000Z' WHERE seq = 6"))
    await forget(store, log, LIMITS)
    assert (log.oldest_seq, len(await kinds(store))) == (1, 7)
