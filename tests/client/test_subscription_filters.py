"""Subscriptions to a real daemon: filters, cursors, resets, changed tokens, and readers that are slow or stop."""

import asyncio

import pytest

from lmx_lab.client.credentials import Credentials
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.daemon_events import ResetFrame, SessionCreatedEvent, SnapshotFrame
from lmx_lab.client.daemon_routes import ClientTimes, DaemonRoutes
from lmx_lab.client.subscription import EventBuffer, FileCursor, MemoryCursor, Subscription
from lmx_lab.daemon.limits import Limits
from lmx_lab.errors import InvalidRequestError, QueueFullError
from tests.support.daemons import serving, settled, write_tokens

pytestmark = pytest.mark.anyio
WAIT_S = 20.0
SHORT = ClientTimes(min_delay_s=0.005, refusal_s=0.005)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), Limits(heartbeat_s=0.1, subscribers=3)) as daemon:
        yield daemon


def client_of(daemon):
    return AsyncDaemonClient(daemon.url, token=daemon.token, times=SHORT)


async def take(events, count):
    async with asyncio.timeout(WAIT_S):
        return [await anext(events) for _ in range(count)]


def latest(daemon):
    return daemon.services.log.latest_seq


async def test_a_filter_selects_events_by_session_and_type(daemon):
    start = latest(daemon)
    async with client_of(daemon) as client, client.events(after=start, session_ids=["a"], types=["turn.*"]) as events:
        write_tokens(daemon, 2, "b")
        first = write_tokens(daemon, 1, "a")
        await client.session("a")
        second = write_tokens(daemon, 1, "a")
        assert [event.seq for event in await take(events, 2)] == [first, second]


async def test_a_filter_that_the_daemon_refuses_raises_an_error_for_the_reader(daemon):
    async with client_of(daemon) as client, client.events(types=["turn.nonsense"]) as events:
        with pytest.raises(InvalidRequestError, match=r"turn\.nonsense"):
            await take(events, 1)
        assert events.state.state == "closed"


async def test_a_cursor_in_a_file_continues_where_the_last_process_stopped(daemon, tmp_path):
    path, start = tmp_path / "cursor.json", latest(daemon)
    last = write_tokens(daemon, 5)
    async with client_of(daemon) as client:
        async with client.events(after=start, cursor=FileCursor(path)) as events:
            first = await take(events, 3)
        async with client.events(after=start, cursor=FileCursor(path)) as events:
            rest = await take(events, 2)
    assert [event.seq for event in first + rest] == list(range(start + 1, last + 1))


async def test_heartbeats_advance_the_cursor_of_a_reader_with_a_narrow_filter(daemon):
    store = MemoryCursor()
    async with client_of(daemon) as client, client.events(after=0, session_ids="missing", cursor=store) as events:
        reading = asyncio.ensure_future(anext(events))
        last = write_tokens(daemon, 5, "b")
        async with asyncio.timeout(WAIT_S):
            while (seen := store.load()) is None or seen.seq < last:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reading.cancel()


async def test_a_cursor_ahead_of_the_log_receives_snapshots_and_then_live_events(daemon):
    store = MemoryCursor()
    async with client_of(daemon) as client:
        known = await client.session()
        async with client.events(after=10**9, cursor=store) as events:
            reset = await take(events, 1)
            assert isinstance(reset[0], ResetFrame)
            assert reset[0].data.reason == "ahead"
            found = []
            async for state in events.states():
                if state.state == "live":
                    break
            # If it were created earlier, it would be among the snapshots.
            new = await client.session()
            while not any(isinstance(event, SessionCreatedEvent) for event in found):
                found += await take(events, 1)
            ids = {event.session_id for event in found if isinstance(event, SnapshotFrame)}
            assert known.session_id in ids
            assert found[-1].session_id == new.session_id
        async with client.events(after=10**9, cursor=store) as events:
            last = write_tokens(daemon, 1)
            assert [event.seq for event in await take(events, 1)] == [last]


@pytest.mark.slow
async def test_a_slow_reader_receives_all_events_while_few_are_buffered_for_it(daemon):
    buffer, start = EventBuffer(max_items=50), latest(daemon)
    last = write_tokens(daemon, 3000)
    async with client_of(daemon) as client, Subscription(client, after=start, buffer=buffer) as events:
        most, seqs = 0, list[int | None]()
        async with asyncio.timeout(WAIT_S):
            while len(seqs) < 3000:
                if len(seqs) % 500 == 0:
                    # Until the reader stops reading ahead.
                    while buffer.room.is_set():  # noqa: ASYNC110
                        await asyncio.sleep(0)
                most = max(most, len(buffer))
                seqs.append((await anext(events)).seq)
        assert seqs == list(range(start + 1, last + 1))
        assert most <= 50


async def test_a_reader_that_stops_is_no_longer_a_subscriber(daemon):
    start = latest(daemon)
    write_tokens(daemon, 1)
    async with client_of(daemon) as client:
        async for _ in client.events(after=start):
            break
        assert await asyncio.to_thread(settled, daemon, lambda: len(daemon.services.subscribers) == 0)


async def test_a_client_that_is_closed_ends_its_subscriptions(daemon):
    client = client_of(daemon)
    events = client.events()
    await events.opened()
    await client.aclose()
    with pytest.raises(InvalidRequestError, match="closed"):
        await take(events, 1)


async def test_a_reader_waits_while_there_are_too_many_subscribers(daemon):
    async with client_of(daemon) as client:
        others = [client.events() for _ in range(3)]
        for other in others:
            await other.opened()
        start = latest(daemon)
        async with client.events(after=start) as events:
            async for state in events.states():
                if state.state == "waiting":
                    assert isinstance(state.error, QueueFullError)
                    assert (state.retry_in_s or 0) >= (state.error.retry_after_s or 0) > 0
                    break
        for other in others:
            await other.aclose()


@pytest.mark.slow
async def test_a_new_daemon_at_the_same_port_has_a_new_token(tmp_path):
    home = tmp_path / "home"
    with serving(home) as first:
        port, client = first.port, AsyncDaemonClient.discover(home, times=SHORT)
        events = client.events(after=0)
        kinds = [event.event for event in await take(events, 1)]
    with serving(home, daemon_port=port) as second:
        assert second.token != first.token
        last = write_tokens(second, 1)
        while kinds[-1] != "turn.token":
            kinds += [event.event for event in await take(events, 1)]
        assert events.cursor is None or events.cursor.seq <= last
        assert kinds == ["daemon.started", "daemon.stopping", "daemon.started", "turn.token"]
        await client.aclose()
        await events.aclose()


async def test_an_outdated_token_is_replaced_by_that_of_the_state_file_without_delay(tmp_path):
    with serving(tmp_path) as daemon:
        access = Credentials(daemon.url, "stale", state_path=tmp_path / "daemon" / "state.json")
        async with DaemonRoutes(access, times=SHORT) as routes, Subscription(routes, after=0) as events:
            states = events.states()
            told = [(await anext(states)).state]
            (event,) = await take(events, 1)
            assert event.event == "daemon.started"
            while told[-1] not in ("live", "waiting"):
                told.append((await anext(states)).state)
            assert "waiting" not in told
