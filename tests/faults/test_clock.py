"""Tests with a wall clock that jumps by hours and weeks: durations are measured with the monotonic clock."""

import asyncio
import itertools
import time
from dataclasses import replace

import pytest

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import retention, sessions
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.retention import CautiousClock
from lmx_lab.daemon.storage.store import Store
from lmx_lab.errors import GenerationTimeoutError
from lmx_lab.settings import Settings
from lmx_lab.wire.sessions import CreateSession, Decision
from tests.support.daemons import ASKS, check_log, daemon
from tests.support.engines import entry_of, finish, manager_with, request, run
from tests.support.model_server import Scripted, calls, says
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
HOUR_S, DAY_S = 3600.0, 86_400.0
JUMPS_S = (0.0, 9 * HOUR_S, -9 * HOUR_S, 40 * DAY_S, -40 * DAY_S)
SETTINGS = Settings(slots=2, threads=1, memory_limit_bytes=2**30)


@pytest.fixture
def _wild_clock(monkeypatch):
    """Make the wall clock jump at every call."""
    wall, jumps = time.time, itertools.cycle(JUMPS_S)
    monkeypatch.setattr(time, "time", lambda: wall() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: round((wall() + next(jumps)) * 1e9))


@pytest.fixture
def longs(tmp_path, tiny, long_gguf):
    return {"mlx": tiny, "gguf": entry_of(long_gguf)}


@pytest.mark.usefixtures("_wild_clock")
@pytest.mark.parametrize("made_for", ["mlx", "gguf"])
async def test_deadlines_and_idle_timeouts_do_not_depend_on_the_wall_clock(longs, made_for):
    async with manager_with(longs[made_for], replace(SETTINGS, idle_unload_s=0.4)) as manager:
        assert (await run(manager))[1].output_tokens == 8
        begun = time.perf_counter()
        stream = await manager.submit(request(max_tokens=480, ignore_eos=True, timeout_s=0.05))
        with pytest.raises(GenerationTimeoutError, match=r"time limit of 0\.05 s"):
            await finish(stream)
        assert time.perf_counter() - begun > 0.05
        used = time.perf_counter()
        await auntil(lambda: manager.snapshot.state != "ready")
        assert time.perf_counter() - used > 0.3
        assert manager.snapshot.unload_cause == "idle"


@pytest.mark.usefixtures("_wild_clock")
async def test_a_permission_does_not_expire_early(tmp_path):
    with Scripted() as upstream:
        upstream.then(calls((ASKS, {})), says("done"))
        async with daemon(tmp_path, upstream, permission_timeout_s=60) as here:
            session = await here.session()
            turn = await here.submit(session)
            (asked,) = await here.asked()
            await here.turns.decide(asked.permission_id, Decision(decision="allow"))
            assert (await here.ended(session, turn)).text == "done"
            check_log(await here.events())


@pytest.mark.usefixtures("_wild_clock")
async def test_a_permission_expires_after_its_timeout(tmp_path):
    with Scripted() as upstream:
        upstream.then(calls((ASKS, {})), says("pity"))
        async with daemon(tmp_path, upstream, permission_timeout_s=0.05) as here:
            session = await here.session()
            assert (await here.run(session)).text == "pity"
            (resolved,) = await here.seen("permission.resolved")
            assert resolved["data"]["permission"]["resolved_by"] == "expiry"
            check_log(await here.events())


@pytest.mark.usefixtures("_wild_clock")
async def test_events_and_turns_are_in_the_order_of_writing(tmp_path):
    with Scripted() as upstream:
        upstream.then(*(says(str(at)) for at in range(8)))
        async with daemon(tmp_path, upstream) as here:
            session = await here.session()
            turns = [await here.submit(session, f"{at}") for at in range(8)]
            texts = [(await here.ended(session, turn)).text for turn in turns]
            events = await here.events()
            page = await here.log.read_page(0, limit=1000)
            snapshot = (await here.snapshot(session)).messages
    assert texts == [str(at) for at in range(8)]
    assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
    assert [event.seq for event in page.events] == [event["seq"] for event in events][: len(page.events)]
    assert [event["at"] for event in events] != sorted(event["at"] for event in events), "the clock jumped"
    assert [e["turn_id"] for e in events if e["event"] == "turn.done"] == turns
    assert snapshot
    check_log(events)


# Retention of events


class Clocks:
    def __init__(self):
        self.wall, self.steady = 1_000_000.0, 50.0

    def advance(self, seconds):
        self.wall += seconds
        self.steady += seconds


def test_a_step_forward_is_accepted_after_some_time():
    clocks = Clocks()
    clock = CautiousClock(lambda: clocks.wall, lambda: clocks.steady)
    clocks.advance(60)
    assert clock.now_s() == 1_000_060
    clocks.wall += 40 * DAY_S
    assert clock.now_s() == 1_000_060
    clocks.advance(HOUR_S - 1)
    assert clock.now_s() == 1_000_060 + HOUR_S - 1
    clocks.advance(1)
    assert clock.now_s() == clocks.wall
    clocks.advance(60)
    assert clock.now_s() == clocks.wall


def test_a_step_forward_that_is_reversed_is_ignored():
    clocks = Clocks()
    clock = CautiousClock(lambda: clocks.wall, lambda: clocks.steady)
    for _ in range(3):
        clocks.wall += 40 * DAY_S
        clocks.advance(HOUR_S / 2)
        assert clock.now_s() == clocks.wall - 40 * DAY_S
        clocks.wall -= 40 * DAY_S
        assert clock.now_s() == clocks.wall


def test_steps_back_and_drift_are_followed():
    clocks = Clocks()
    clock = CautiousClock(lambda: clocks.wall, lambda: clocks.steady)
    clocks.wall -= DAY_S
    assert clock.now_s() == clocks.wall
    for _ in range(100):
        clocks.advance(60)
        clocks.wall += 1
        assert clock.now_s() == clocks.wall


async def test_a_clock_that_is_weeks_ahead_for_a_moment_deletes_no_events(tmp_path, monkeypatch):
    store, rounds, limits = await Store.open(tmp_path / "daemon.db"), asyncio.Semaphore(0), Limits(keep_days=30)
    delete_expired, wall, ahead_s = retention.delete_expired, time.time, 0.0

    async def counted(*args, **options):
        await delete_expired(*args, **options)
        rounds.release()

    monkeypatch.setattr(retention, "delete_expired", counted)
    monkeypatch.setattr(retention, "CautiousClock", lambda last_event_s: CautiousClock(lambda: wall() + ahead_s))
    await store.write(lambda tx: sessions.create(tx, CreateSession(session_id="s")))
    keeping = asyncio.create_task(retention.run_retention(store, EventLog(store, limits), limits, interval_s=0.001))
    await rounds.acquire()
    ahead_s = 40 * DAY_S
    # One call may have read the clock before.
    for _ in range(3):
        await rounds.acquire()
    keeping.cancel()
    await asyncio.wait([keeping])
    assert len(await store.read(lambda reading: reading.fetch_all("SELECT * FROM events"))) == 1
    await store.close()


async def test_a_daemon_that_starts_while_the_clock_is_weeks_ahead_keeps_its_events(tmp_path, monkeypatch):
    store, limits = await Store.open(tmp_path / "daemon.db"), Limits(keep_days=30)
    await store.write(lambda tx: sessions.create(tx, CreateSession(session_id="s")))
    await store.close()
    store, rounds = await Store.open(tmp_path / "daemon.db"), asyncio.Event()
    delete_expired, wall = retention.delete_expired, time.time
    steady_s = 0.0

    async def counted(*args, **options):
        await delete_expired(*args, **options)
        rounds.set()

    def clock(last_event_s):
        return CautiousClock(
            lambda: wall() + 40 * DAY_S + steady_s, lambda: time.monotonic() + steady_s, last_event_s=last_event_s
        )

    monkeypatch.setattr(retention, "delete_expired", counted)
    monkeypatch.setattr(retention, "CautiousClock", clock)
    keeping = asyncio.create_task(retention.run_retention(store, EventLog(store, limits), limits, interval_s=0.001))
    for passed_s, left in ((0.0, 1), (HOUR_S + 1, 0)):
        steady_s = passed_s
        for _ in range(3):
            rounds.clear()
            await rounds.wait()
        assert len(await store.read(lambda reading: reading.fetch_all("SELECT * FROM events"))) == left
    keeping.cancel()
    await asyncio.wait([keeping])
    await store.close()
