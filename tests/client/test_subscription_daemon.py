"""Subscriptions to a real daemon: readers that are slow or stop, and tokens that have changed."""

import asyncio

import pytest

from lmx_lab.client.credentials import Credentials
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.daemon_routes import ClientTimes, DaemonRoutes
from lmx_lab.client.subscription import EventBuffer, Subscription
from lmx_lab.errors import InvalidRequestError
from tests.support.daemons import serving, settled, write_tokens
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.anyio
SHORT = ClientTimes(min_delay_s=0.005, refusal_s=0.005)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home")) as daemon:
        yield daemon


def client_of(daemon):
    return AsyncDaemonClient(daemon.url, token=daemon.token, times=SHORT)


async def take(events, count):
    async with asyncio.timeout(WAIT_S):
        return [await anext(events) for _ in range(count)]


def latest(daemon):
    return daemon.services.log.latest_seq


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
