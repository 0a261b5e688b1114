"""Tests of subscriptions against servers, proxies and clocks that misbehave."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from lmx_lab import errors
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.daemon_events import ResetFrame, SnapshotFrame, TurnTokenEvent, UnknownEvent
from lmx_lab.client.daemon_routes import ClientTimes
from lmx_lab.client.subscription import ConnectionState, Cursor, EventBuffer, MemoryCursor, Subscription, max_silence_s
from tests.client.event_server import (
    CUT,
    HALF,
    STAY,
    EventServer,
    Raw,
    Refused,
    event,
    frame,
    heartbeat,
    hello,
    reset,
    snapshot,
    synced,
)
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.anyio
SHORT = ClientTimes(min_delay_s=0.001, refusal_s=0.001, watch_s=0.01)


@asynccontextmanager
async def subscribed(server, **options):
    async with (
        AsyncDaemonClient(server.url, token="secret", times=SHORT) as client,
        asyncio.timeout(WAIT_S),
        Subscription(client, **options) as events,
    ):
        yield events


@asynccontextmanager
async def reading(*scripts, after=3, **options):
    """Subscribe to a server with these scripts."""
    async with EventServer(*scripts) as server, subscribed(server, after=after, **options) as events:
        yield events


async def take(events, count):
    return [await anext(events) for _ in range(count)]


async def seqs_of(server, count, **options):
    async with subscribed(server, **options) as events:
        return [event.seq for event in await take(events, count)]


def error(code, message="no"):
    return json.dumps({"error": {"code": code, "message": message, "type": "t"}})


# Continuing


async def test_the_next_connection_continues_after_the_last_event_or_heartbeat():
    """Heartbeats report the events that a filter has left out."""
    first, second = [hello(3), event(4), event(5), CUT], [hello(5), event(6), heartbeat(90), CUT]
    async with EventServer(first, second, [hello(90), event(91), STAY]) as server:
        assert await seqs_of(server, 4, after=3, types=["turn.*"], session_ids="s") == [4, 5, 6, 91]
    chosen = {"types": "turn.*", "session_id": "s"}
    assert server.queries == [
        {"after": "3", **chosen},
        *({"after": after, "stream_id": "stm_1", **chosen} for after in ("5", "90")),
    ]


async def test_no_event_is_missed_between_the_hello_frame_and_the_first_event():
    async with EventServer([hello(7), CUT], [hello(9), event(8), event(9), STAY]) as server:
        assert await seqs_of(server, 2) == [8, 9]
    assert server.queries == [{}, {"after": "7", "stream_id": "stm_1"}]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param([HALF], id="half a frame"),
        pytest.param(["this is not JSON", STAY], id="text"),
        pytest.param(['{"event": "turn.token"}', STAY], id="half an event"),
        pytest.param(["[" * 100_000, STAY], id="deep"),
        pytest.param([frame("turn.new", "DATA", seq=5).replace('"DATA"', "[" * 100_000), STAY], id="deep event"),
        pytest.param(["[]", STAY], id="list"),
        pytest.param([b'{"bytes": true}', STAY], id="bytes"),
        pytest.param([Raw(b"\x81\x02\xff\xfe"), STAY], id="no UTF-8"),
        pytest.param([Raw(b"\xff\xff\xff\xff"), STAY], id="no frame"),
        pytest.param([Raw(b"HTTP/1.1 200 OK\r\n\r\n"), STAY], id="HTTP"),
        pytest.param([event(-5), event(5, stream_id=""), STAY], id="no stream"),
        pytest.param([event(10**17), STAY], id="huge"),
    ],
)
async def test_an_invalid_message_ends_the_connection_and_loses_no_event(end):
    async with reading([hello(3), event(4), *end], [hello(4), event(5), STAY]) as events:
        assert [found.seq for found in await take(events, 2)] == [4, 5]
        assert events.reconnects == 1


async def test_types_and_fields_of_a_newer_daemon_are_passed_on():
    new = frame("turn.dreamt", {"of": ["sheep"]}, seq=5, mood="calm")
    odd = frame("turn.token", {"letters": "abc"}, seq=6)
    control = frame("stream.weather", {"sunny": True})
    more = json.dumps({**json.loads(event(7, text="x")), "colour": "red"})
    async with reading([hello(4), new, odd, control, more, STAY], after=4) as events:
        dreamt, token, weather, known = await take(events, 4)
        assert isinstance(dreamt, UnknownEvent)
        assert (dreamt.event, dreamt.seq, dreamt.data) == ("turn.dreamt", 5, {"of": ["sheep"]})
        assert isinstance(token, UnknownEvent)
        assert (token.event, token.seq) == ("turn.token", 6)
        assert isinstance(weather, UnknownEvent)
        assert weather.seq is None
        assert isinstance(known, TurnTokenEvent)


@pytest.mark.slow
async def test_silence_for_several_heartbeats_ends_a_connection():
    async with EventServer([hello(3, heartbeat_s=0.4), event(4), STAY], [hello(4), event(5), STAY]) as server:
        assert await seqs_of(server, 2, after=3) == [4, 5]


@pytest.mark.parametrize("heartbeat_s", [float("nan"), float("inf"), 0.0, -1.0, 1e9])
async def test_implausible_heartbeat_intervals_are_ignored(heartbeat_s):
    assert (max_silence_s(heartbeat_s), max_silence_s(20.0)) == (37.5, 50.0)
    async with reading([hello(3, heartbeat_s=heartbeat_s), synced(3), event(4), STAY]) as events:
        assert (await anext(events)).seq == 4


async def test_a_bug_is_raised_and_not_treated_as_a_broken_connection(monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr("lmx_lab.client.subscription.EventPosition.process", fail)
    async with reading([hello(3), STAY]) as events:
        with pytest.raises(ZeroDivisionError):
            await anext(events)
        assert events.state == ConnectionState(state="closed")


@pytest.mark.slow
async def test_a_slow_reader_does_not_count_as_silence():
    many = [event(seq) for seq in range(4, 40)]
    async with reading([hello(3, heartbeat_s=0.6), *many, STAY], buffer=EventBuffer(max_items=2)) as events:
        first = await anext(events)
        # Longer than the silence that ends a connection.
        await asyncio.sleep(2.0)
        rest = await take(events, len(many) - 1)
        assert [found.seq for found in [first, *rest]] == list(range(4, 40))
        assert events.reconnects == 0


# Resets


async def test_a_reset_delivers_snapshots_and_the_events_after_them():
    script = [hello(50), reset(50), snapshot("a", 52), snapshot("b", 50), synced(50)]
    live = [event(51, session_id="a"), event(52, session_id="b"), event(53, session_id="a"), STAY]
    async with reading([*script, *live]) as events:
        found = await take(events, 5)
    assert isinstance(found[0], ResetFrame)
    assert all(isinstance(frame, SnapshotFrame) for frame in found[1:3])
    assert [(event.seq, event.session_id) for event in found[3:]] == [(52, "b"), (53, "a")]


async def test_an_interrupted_reset_is_repeated_completely():
    whole = [hello(50), reset(50), snapshot("a", 50), snapshot("b", 50), synced(50), event(51), CUT]
    async with (
        EventServer([hello(50), reset(50), snapshot("a", 50), CUT], whole, [STAY]) as server,
        subscribed(server, after=3) as events,
    ):
        found = await take(events, 6)
        await server.wait_for_requests(3)
    assert [event.event.removeprefix("stream.") for event in found] == [
        *("reset", "snapshot", "reset", "snapshot", "snapshot"),
        "turn.token",
    ]
    assert [query["after"] for query in server.queries] == ["3", "3", "51"]


async def test_a_new_database_may_have_smaller_numbers():
    other = {"stream_id": "stm_2"}
    script = [hello(7, **other), reset(7, "other-stream", **other), synced(7, **other), event(8, **other), CUT]
    store = MemoryCursor(Cursor(stream_id="stm_1", seq=900))
    async with EventServer(script, [STAY]) as server, subscribed(server, cursor=store) as events:
        found = await take(events, 2)
        await server.wait_for_requests(2)
    assert [event.seq for event in found] == [None, 8]
    assert server.queries == [{"after": "900", "stream_id": "stm_1"}, {"after": "8", "stream_id": "stm_2"}]
    assert store.load() == Cursor(stream_id="stm_2", seq=8)


# Refusals


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "7"}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}])
async def test_a_busy_daemon_is_tried_again(headers):
    refused = Refused(503, error("queue-full"), headers=headers)
    async with reading(refused, [hello(3), event(4), STAY]) as events:
        state = await until(events, "waiting")
        assert isinstance(state.error, errors.QueueFullError)
        assert state.retry_in_s is not None
        if headers.get("Retry-After") == "7":
            assert state.retry_in_s >= 7
        else:
            assert state.retry_in_s < 1
            assert (await anext(events)).seq == 4


async def test_a_proxy_without_its_server_is_tried_again():
    bad_gateway = Refused(502, "<html>Bad Gateway</html>", kind="text/html")
    async with EventServer(bad_gateway, bad_gateway, bad_gateway, [hello(3), event(4), STAY]) as server:
        assert await seqs_of(server, 1, after=3) == [4]


@pytest.mark.parametrize(
    ("answer", "kind", "requests"),
    [
        (Refused(401, error("unauthorized")), errors.UnauthorizedError, 2),
        (Refused(200, "<html>Welcome</html>", kind="text/html"), errors.WrongServerError, 2),
        (Refused(404, "not found", kind="text/plain"), errors.WrongServerError, 2),
        (Refused(200, "{}"), errors.WrongServerError, 2),
        (Refused(400, error("invalid-request")), errors.InvalidRequestError, 1),
    ],
    ids=["token", "web page", "404", "other JSON", "filter"],
)
async def test_some_refusals_are_final(answer, kind, requests):
    async with EventServer(answer) as server, subscribed(server, after=3) as events:
        with pytest.raises(kind) as caught:
            await anext(events)
        with pytest.raises(kind):
            await anext(events)
        assert events.state == ConnectionState(state="closed", attempts=events.state.attempts, error=events.state.error)
        assert events.state.error is caught.value
    assert len(server.queries) == requests
    assert "secret" not in f"{caught.value!r} {events!r} {events.state!r}"


async def test_a_refused_token_is_tried_again_once():
    async with EventServer(Refused(401, error("unauthorized")), [hello(3), event(4), STAY]) as server:
        assert await seqs_of(server, 1, after=3) == [4]
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_events_before_a_final_refusal_are_read_first():
    async with reading([hello(3), event(4), event(5), CUT], Refused(400, error("invalid-request"))) as events:
        await until(events, "closed")
        assert [event.seq for event in await take(events, 2)] == [4, 5]
        with pytest.raises(errors.InvalidRequestError):
            await anext(events)


async def test_the_subscription_waits_until_a_daemon_answers():
    async with EventServer([STAY]) as server:
        address = server.url
    async with AsyncDaemonClient(address, token=None, times=SHORT) as client, Subscription(client) as events:
        assert await events.opened() is None
        state = await until(events, "waiting")
        assert isinstance(state.error, errors.UnreachableError)


# States and delays


async def until(events, state):
    async for found in events.states():
        if found.state == state:
            return found
    raise AssertionError(f"closed without {state}")


async def test_states_describe_the_connection():
    states = []
    async with EventServer([hello(3), synced(3), event(4), CUT], [hello(4), synced(4), STAY]) as server:
        async with subscribed(server, after=3) as events:
            async for state in events.states():
                states.append(state)
                if [found.state for found in states].count("live") == 2:
                    break
        states += [state async for state in events.states()]
    once = ["connecting", "catching-up", "live"]
    assert [state.state for state in states] == [*once, "waiting", *once, "closed"]
    assert [state.attempts for state in states] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert [type(state.error) for state in states] == [*[type(None)] * 3, errors.ConnectionLostError, *[type(None)] * 4]


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        pytest.param(CUT, "broke the connection (WebSocketNetworkError)", id="cut"),
        pytest.param(Raw(b"\x88\x07\x03\xe9leave"), "closed the stream (1001 leave)", id="closed"),
        pytest.param(Raw(b"\x88\x02\x03\xe8"), "closed the stream (1000)", id="closed without a reason"),
        pytest.param(Raw(b"\xff\xff\xff\xff"), "closed the stream (1002 Invalid opcode 0xf)", id="no frame"),
        pytest.param("rubbish", "sent 'rubbish', which is not an event", id="no event"),
        pytest.param(STAY, "has sent nothing for 0.5 s", id="silence", marks=pytest.mark.slow),
    ],
)
async def test_the_error_of_a_lost_connection_says_what_the_daemon_did(end, cause):
    async with EventServer([hello(3, heartbeat_s=0.2), end, STAY]) as server, subscribed(server, after=3) as events:
        error = (await until(events, "waiting")).error
        assert str(error) == f"{server.url} {cause}; the events continue with the next connection"


async def test_a_connection_with_an_event_resets_the_delays():
    bad = [hello(3), CUT]
    async with reading(bad, bad, bad, [hello(3), event(4), CUT], [hello(4), STAY]) as events:
        attempts = []
        async for state in events.states():
            if state.state == "waiting":
                attempts.append(state.attempts)
            if len(attempts) == 4:
                break
    assert attempts == [1, 2, 3, 1]


class Clock:
    """A wall clock that a test sets."""

    def __init__(self):
        self.ahead_s = 0.0

    def __call__(self):
        return asyncio.get_running_loop().time() + self.ahead_s


@pytest.mark.parametrize("ahead_s", [3600.0, 86_400.0 * 365])
async def test_after_sleep_a_new_connection_is_opened_at_once(ahead_s):
    clock = Clock()
    async with (
        EventServer([hello(3), synced(3), STAY], [hello(3), event(4), STAY]) as server,
        subscribed(server, after=3, wall=clock) as events,
    ):
        await until(events, "live")
        clock.ahead_s = ahead_s
        assert (await anext(events)).seq == 4
    assert len(server.queries) == 2


async def test_after_sleep_the_next_attempt_starts_at_once():
    clock = Clock()
    busy = Refused(503, error("queue-full"), headers={"Retry-After": "3600"})
    async with reading(busy, [hello(3), event(4), STAY], wall=clock) as events:
        state = await until(events, "waiting")
        assert (state.retry_in_s or 0) > WAIT_S
        clock.ahead_s = 60.0
        assert (await anext(events)).seq == 4


# Readers


async def test_cancelling_the_wait_for_an_event_loses_none():
    async with reading([hello(3), *[event(seq) for seq in range(4, 60)], STAY]) as events:
        found = []
        while len(found) < 56:
            task = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                found.append(task.result().seq)
            else:
                found.append((await anext(events)).seq)
    assert found == list(range(4, 60))


async def test_two_tasks_cannot_read_the_same_subscription():
    async with reading([hello(3), STAY]) as events:
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one for each"):
            await anext(events)
        first.cancel()


async def test_leaving_the_loop_closes_the_subscription():
    async with (
        EventServer([hello(3), event(4), event(5), STAY]) as server,
        AsyncDaemonClient(server.url, token=None, times=SHORT) as client,
    ):
        events = Subscription(client, after=3)
        async for found in events:
            assert found.seq == 4
            break
        await until(events, "closed")
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_closing_ends_the_readers_loop():
    async with (
        EventServer([hello(3), event(4), STAY]) as server,
        AsyncDaemonClient(server.url, token=None, times=SHORT) as client,
    ):
        events = Subscription(client, after=3)
        read = []
        async with events, asyncio.timeout(WAIT_S):
            async for found in events:
                read.append(found.seq)
                closing = asyncio.create_task(events.aclose())
        await closing
    assert read == [4]


async def test_a_subscription_can_be_closed_before_it_starts():
    async with AsyncDaemonClient("http://127.0.0.1:9", token=None) as client, asyncio.timeout(WAIT_S):
        events = Subscription(client)
        closed = asyncio.create_task(until(events, "closed"))
        opened = asyncio.create_task(events.opened())
        await asyncio.sleep(0)
        async with events:
            pass
        assert (await closed).state == events.state.state == "closed"
        assert await opened is None


# Cursors


async def test_an_event_counts_as_read_when_the_next_one_is_requested():
    store = MemoryCursor()

    async def read():
        async with subscribed(server, after=3, cursor=store) as events:
            async for found in events:
                assert events.cursor.seq == found.seq - 1
                if found.seq == 5:
                    raise ZeroDivisionError

    async with EventServer([hello(3), event(4), event(5), STAY]) as server:
        with pytest.raises(ZeroDivisionError):
            await read()
        assert store.load() == Cursor(stream_id="stm_1", seq=4)
        async with subscribed(server, after=0, cursor=store) as events:
            assert (await anext(events)).seq == 5
        assert store.load() == Cursor(stream_id="stm_1", seq=5)
    assert server.queries[-1]["after"] == "4"


async def test_a_cursor_is_saved_when_the_reader_waits():
    store = MemoryCursor()
    async with reading([hello(3), event(4), event(5), STAY], cursor=store) as events:
        await take(events, 2)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert store.load() == Cursor(stream_id="stm_1", seq=5)
        waiting.cancel()
