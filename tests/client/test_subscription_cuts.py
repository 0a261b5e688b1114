"""Events and turns of the client while connections are cut, and while the daemon is killed and restarted."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.daemon_events import TurnDoneEvent, TurnErrorEvent, TurnTokenEvent
from lmx_lab.client.daemon_routes import ClientTimes
from lmx_lab.errors import DaemonRestartedError
from tests.support.daemons import Program, whole_log
from tests.support.model_server import Scripted, counted
from tests.support.sockets import Proxy, Through
from tests.support.waiting import auntil

pytestmark = [pytest.mark.anyio, pytest.mark.long]
TOKENS = 60
CUTS = 200
WAIT_S = 60.0
EXPECTED = "".join(f"w{at} " for at in range(TOKENS))
SHORT = ClientTimes(min_delay_s=0.01, max_delay_s=0.1)


@pytest.fixture
def program(tmp_path):
    # A second or so: twenty batches and more.
    with Scripted(lambda body: counted(TOKENS, pause_s=0.03, every=2)) as upstream:
        program = Program(tmp_path, upstream.url).start()
        yield program
        assert program.stop() == 0


class Seen:
    """Collects all events of a daemon through a subscription."""

    def __init__(self, client):
        self.events = []
        self.subscription = client.events(after=0)
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def following(self):
        async def follow():
            async for event in self.subscription:
                async with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()

        async with self.subscription:
            task = asyncio.create_task(follow())
            yield
        await task

    async def live(self):
        """Wait until all events of the log were received."""
        async for state in self.subscription.states():
            if state.state == "live":
                return

    async def until(self, seq):
        async with self._changed, asyncio.timeout(WAIT_S):
            await self._changed.wait_for(lambda: any((event.seq or 0) >= seq for event in self.events))

    async def more(self, kind, count):
        """Wait until ``count`` more events of this kind were received."""

        def found():
            return sum(event.event == kind for event in self.events)

        expected = found() + count
        async with self._changed, asyncio.timeout(WAIT_S):
            await self._changed.wait_for(lambda: found() >= expected)


async def logged_seqs(program):
    """Return the seq of each event in the log, read from the daemon directly."""
    async with program.client() as http:
        return [event["seq"] for event in await whole_log(http)]


async def test_two_hundred_cut_connections_lose_and_repeat_no_event(program):
    chance = random.Random(8)
    cuts, streamed = 0, dict[str, list[str]]()

    def note(event):
        if isinstance(event, TurnTokenEvent):
            streamed.setdefault(str(event.turn_id), []).append(event.data.text)

    async def cut():
        nonlocal cuts
        while cuts < CUTS:
            # At different moments of a connection, sometimes within a frame. Half of the cuts wait until a client is
            # connected, however long that takes.
            if chance.random() < 0.5:
                await seen.live()
            await asyncio.sleep(chance.uniform(0.0, 0.06))
            cuts += bool(proxy.cut_within_next_piece(chance) if chance.random() < 0.5 else proxy.cut())

    async with (
        Proxy(lambda: program.state.port) as proxy,
        AsyncDaemonClient.discover(program.home, transport=Through(proxy), times=SHORT) as client,
    ):
        seen, results = Seen(client), []
        async with seen.following():
            sessions = [await client.session() for _ in range(3)]
            cutter = asyncio.create_task(cut())
            while not cutter.done():
                turns = (session.run("write", on_event=note) for session in sessions)
                results += await asyncio.wait_for(asyncio.gather(*turns), WAIT_S)
            await cutter
            log = await logged_seqs(program)
            await seen.until(log[-1])
        assert [event.seq for event in seen.events] == log
        assert {result.text for result in results} == {EXPECTED}
        assert {"".join(texts) for texts in streamed.values()} == {EXPECTED}
        assert len(streamed) == len(results) == sum(isinstance(event, TurnDoneEvent) for event in seen.events)
        assert seen.subscription.reconnects > CUTS / 20
        assert sum(result.reconnects for result in results) > CUTS / 20
        assert proxy.halves > CUTS / 10


async def test_a_subscription_continues_after_the_daemon_was_killed_and_restarted(program):
    chance = random.Random(5)
    async with AsyncDaemonClient.discover(program.home, times=SHORT) as client:
        seen = Seen(client)
        async with seen.following():
            session = await client.session()
            for _ in range(2):
                running = asyncio.create_task(session.run("write"))
                await seen.more("turn.token", chance.randint(1, 10))
                await asyncio.to_thread(program.kill)
                await asyncio.to_thread(program.start)
                with pytest.raises(DaemonRestartedError, match="turn trn_"):
                    await asyncio.wait_for(running, WAIT_S)
            result = await asyncio.wait_for(session.run("write"), WAIT_S)
            log = await logged_seqs(program)
            await seen.until(log[-1])
        assert [event.seq for event in seen.events] == log
        assert result.text == EXPECTED
        assert sum(isinstance(event, TurnErrorEvent) for event in seen.events) == 2
        assert seen.subscription.reconnects == 2


async def test_a_queued_turn_runs_after_a_restart_and_its_caller_receives_the_result(program):
    async with AsyncDaemonClient.discover(program.home, times=SHORT) as client:
        seen = Seen(client)
        async with seen.following():
            session = await client.session()
            first = asyncio.create_task(session.run("write"))
            await seen.more("turn.token", 1)
            second = asyncio.create_task(session.run("write"))
            await seen.more("turn.queued", 1)
            await asyncio.to_thread(program.kill)
            await asyncio.to_thread(program.start)
            with pytest.raises(DaemonRestartedError):
                await asyncio.wait_for(first, WAIT_S)
            result = await asyncio.wait_for(second, WAIT_S)
        assert (result.text, result.stop_reason) == (EXPECTED, "end")


async def test_a_proxy_that_closes_idle_connections_loses_no_event(program):
    async with (
        Proxy(lambda: program.state.port, idle_s=2.0) as proxy,
        AsyncDaemonClient.discover(program.home, transport=Through(proxy), times=SHORT) as client,
    ):
        seen = Seen(client)
        async with seen.following():
            session = await client.session()
            for _ in range(2):
                before = proxy.closed_as_idle
                await auntil(lambda: proxy.closed_as_idle >= before + 2)  # noqa: B023
                result = await asyncio.wait_for(session.run("write"), WAIT_S)
                assert result.text == EXPECTED
            log = await logged_seqs(program)
            await seen.until(log[-1])
        assert [event.seq for event in seen.events] == log
