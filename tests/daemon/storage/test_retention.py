"""Deleting expired events."""

import asyncio
import threading
import time

import pytest

from lmx_lab.daemon.encoding import timestamp
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import sessions
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.retention import BATCH, delete_expired
from lmx_lab.wire.events import TurnText
from lmx_lab.wire.sessions import CreateSession

pytestmark = pytest.mark.anyio
LIMITS = Limits(fold_after_s=600, keep_days=30)


async def kinds(store):
    return [row["event"] for row in await store.read(lambda r: r.fetch_all("SELECT event FROM events ORDER BY seq"))]


def create_session(tx):
    sessions.create(tx, CreateSession(session_id="s"))


def write_turn(tx, turn_id, ended_s):
    ended = None if ended_s is None else timestamp(ended_s)
    tx.execute(
        "INSERT INTO turns (session_id, turn_id, status, content, digest, queued_at, ended_at)"
        " VALUES ('s', ?, ?, '', '', ?, ?)",
        *(turn_id, "running" if ended is None else "done", tx.now, ended),
    )
    for kind in ("turn.started", "turn.token", "turn.thinking", "turn.token", "message.done", "turn.done"):
        tx.append(kind, TurnText(message_id="m", text="x"), session_id="s", turn_id=turn_id)


async def test_token_events_are_deleted_ten_minutes_after_their_turn(store):
    log = EventLog(store, LIMITS)
    now = time.time()
    await store.write(create_session)
    for turn_id, ended in (("old", now - 700), ("young", now - 500), ("running", None)):
        await store.write(lambda tx, t=turn_id, e=ended: write_turn(tx, t, e))
    await delete_expired(store, log, LIMITS, now_s=now)
    rows = await store.read(lambda r: r.fetch_all("SELECT turn_id, event FROM events WHERE turn_id IS NOT NULL"))
    left = {turn_id: [r["event"] for r in rows if r["turn_id"] == turn_id] for turn_id in ("old", "young", "running")}
    assert left["old"] == ["turn.started", "message.done", "turn.done"]
    assert len(left["young"]) == len(left["running"]) == 6
    assert log.oldest_seq == 1, "deleting tokens is not pruning: every cursor can still be resumed"
    log.check_cursor(2)


async def test_only_the_deletion_event_of_a_deleted_session_is_kept(store):
    log = EventLog(store, LIMITS)
    await store.write(create_session)
    await store.write(lambda tx: write_turn(tx, "t", time.time()))
    await store.write(lambda tx: sessions.delete(tx, "s"))
    await store.write(create_session)
    await delete_expired(store, log, LIMITS)
    assert len(await kinds(store)) == 9
    await delete_expired(store, log, LIMITS, now_s=time.time() + 700)
    assert await kinds(store) == ["session.deleted", "session.created"]


@pytest.mark.parametrize(
    ("old", "oldest_seq", "count"), [("seq <= 3", 4, 4), ("seq = 6", 1, 7)], ids=["the first events", "a wrong time"]
)
async def test_old_events_are_deleted_only_from_the_start_of_the_log(store, old, oldest_seq, count):
    log = EventLog(store, LIMITS)
    await store.write(create_session)
    await store.write(lambda tx: write_turn(tx, "t", time.time()))
    at = timestamp(time.time() - 31 * 86400)
    await store.write(lambda tx: tx.execute(f"UPDATE events SET at = ? WHERE {old}", at))
    await delete_expired(store, log, LIMITS)
    assert (log.oldest_seq, len(await kinds(store))) == (oldest_seq, count)


class Counting:
    """A store that records how many events each of its transactions deletes."""

    def __init__(self, store):
        self.read, self.issued_seq = store.read, store.issued_seq
        self.deleted = []
        self._store = store

    async def write(self, work):
        def counted(tx):
            sql = "SELECT count(*) AS count FROM events"
            before, result = tx.fetch_one(sql)["count"], work(tx)
            self.deleted.append(before - tx.fetch_one(sql)["count"])
            return result

        return await self._store.write(counted)


@pytest.mark.slow
@pytest.mark.parametrize("expired", ["tokens of ended turns", "events of a deleted session", "excess events"])
async def test_expired_events_are_deleted_in_small_transactions(store, expired):
    limits = Limits(keep_events=100 if expired == "excess events" else 10_000)
    now = time.time()

    def write(tx):
        create_session(tx)
        for turn_id in ("one", "two", "three"):
            write_turn(tx, turn_id, now - 700 if expired == "tokens of ended turns" else None)
            for _ in range(1500):
                tx.append("turn.token", TurnText(message_id="m", text="x"), session_id="s", turn_id=turn_id)

    await store.write(write)
    if expired == "events of a deleted session":
        await store.write(lambda tx: sessions.delete(tx, "s"))
        now += 700
    log, counting = EventLog(store, limits), Counting(store)
    await delete_expired(counting, log, limits, now_s=now)
    left = {"tokens of ended turns": 10, "events of a deleted session": 1, "excess events": 100}[expired]
    assert len(await kinds(store)) == left
    assert max(counting.deleted) == BATCH
    await delete_expired(counting, log, limits, now_s=now)
    assert counting.deleted[-1] == 0


async def test_events_are_counted_while_others_write(store):
    limits = Limits(keep_events=5)
    log = EventLog(store, limits)
    await store.write(create_session)
    await store.write(lambda tx: write_turn(tx, "t", None))
    reader_is_free = threading.Event()
    reading = asyncio.create_task(store.read(lambda view: reader_is_free.wait()))
    deleting = asyncio.create_task(delete_expired(store, log, limits))
    for _ in range(20):
        await store.write(lambda tx: None)
    assert not deleting.done()
    reader_is_free.set()
    await asyncio.gather(reading, deleting)
    assert (log.oldest_seq, len(await kinds(store))) == (3, 5)
