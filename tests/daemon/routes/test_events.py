"""Events over the WebSocket (cursors, filters, control frames, clients that misbehave) and by polling."""

import asyncio
import contextlib
import json
import threading

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage.event_log import record_pruned
from tests.support.daemons import client, connect, frames_until, raw_subscriber, serving, settled, write_tokens

pytestmark = pytest.mark.anyio
LIMITS = Limits(heartbeat_s=0.05, blocked_send_s=2.0, subscribers=8, ring_events=100, page_events=50)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), LIMITS) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def _no_subscribers_left(daemon):
    """Check after each test that no subscriber is counted and no task is left."""

    async def subscriber_tasks():
        return subscribers()

    before = daemon.run(subscriber_tasks())
    yield
    assert settled(daemon, lambda: len(daemon.services.subscribers) == 0)
    assert settled(daemon, lambda: subscribers() <= before)


def subscribers():
    """Return the tasks of subscribers on the current event loop."""
    return {task for task in asyncio.all_tasks() if "subscriber" in task.get_name()}


def seqs(frames):
    return [frame["seq"] for frame in frames if frame["seq"] is not None]


def latest(daemon):
    return daemon.services.log.latest_seq


async def stored(daemon, query):
    """Return the frames up to the first live one."""
    async with connect(daemon, query) as socket:
        return await frames_until(socket, "stream.synced")


# --- cursors


async def test_without_a_cursor_only_new_events_are_sent(daemon):
    write_tokens(daemon, 3)
    async with connect(daemon) as socket:
        hello, synced = await frames_until(socket, "stream.synced")
        assert hello["data"] == {
            "daemon_id": daemon.daemon_id,
            "cursor": latest(daemon),
            "latest_seq": latest(daemon),
            "heartbeat_s": LIMITS.heartbeat_s,
        }
        assert synced["data"] == {"cursor": latest(daemon)}
        last = write_tokens(daemon, 1)
        assert seqs(await frames_until(socket, "turn.token")) == [last]


@pytest.mark.parametrize("count", [1, 49, 50, 51, 1000])
async def test_missed_events_are_sent_first_and_once(daemon, count):
    start = latest(daemon)
    last = write_tokens(daemon, count)
    async with connect(daemon, f"?after={start}") as socket:
        frames = await frames_until(socket, "stream.synced")
        assert seqs(frames) == list(range(last - count + 1, last + 1))
        more = write_tokens(daemon, 1)
        assert seqs(await frames_until(socket, "turn.token")) == [more]


async def test_cursor_zero_receives_all_kept_events(daemon):
    frames = await stored(daemon, "?after=0")
    assert (frames[1]["event"], seqs(frames)[-1]) == ("daemon.started", latest(daemon))


@pytest.mark.slow
async def test_no_event_is_lost_between_stored_and_live_events(daemon):
    """Events are written while the client connects and reads stored events."""
    start, stop = latest(daemon), threading.Event()
    wanted = []

    def write():
        while not stop.is_set():
            wanted.append(write_tokens(daemon, 7))

    writing = threading.Thread(target=write)
    writing.start()
    try:
        async with connect(daemon, f"?after={start}", max_queue=1000) as socket:
            frames = await frames_until(socket, "stream.synced")
            while len(wanted) < 100:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            stop.set()
            await asyncio.to_thread(writing.join)
            while seqs(frames)[-1:] != wanted[-1:]:
                frames.append(json.loads(await socket.recv()))
    finally:
        stop.set()
        writing.join()
    assert seqs(frames) == list(range(start + 1, wanted[-1] + 1))


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *((query, "after") for query in ("?after=x", "?after=-1", "?after=", "?after=%D9%A5", "?after=1&after=2")),
        ("?types=turn.nothing", "types"),
        ("?session_id=a%20b", "session_id.0"),
        ("?" + "&".join(["session_id=a"] * 300), "session_id"),
        ("?from=1", "from"),
    ],
)
async def test_an_invalid_query_is_refused_before_the_handshake(daemon, query, param):
    with pytest.raises(InvalidStatus) as caught:
        async with connect(daemon, query):
            pass
    error = json.loads(caught.value.response.body)["error"]
    assert (caught.value.response.status_code, error["code"], error["param"]) == (400, "invalid-request", param)


@pytest.mark.parametrize(
    ("query", "reason"), [("?after=999999999", "ahead"), ("?after=0&stream_id=stm_other", "other-stream")]
)
async def test_an_unknown_cursor_is_reset_on_the_same_socket(daemon, query, reason):
    with client(daemon) as http:
        http.post("/v3/sessions", json={"session_id": "shown", "messages": [{"role": "user", "content": "hi"}]})
        async with connect(daemon, query) as socket:
            hello, reset, *snapshots, synced = await frames_until(socket, "stream.synced")
            assert (reset["event"], reset["data"]["reason"]) == ("stream.reset", reason)
            assert hello["data"]["cursor"] == reset["data"]["cursor"] == synced["data"]["cursor"] == latest(daemon)
            assert [frame["event"] for frame in snapshots] == ["stream.snapshot"]
            assert snapshots[0]["session_id"] == snapshots[0]["data"]["session"]["session_id"] == "shown"
            assert snapshots[0]["data"]["session"]["messages"][0]["content"] == "hi"
            http.patch("/v3/sessions/shown", json={"title": "after it"})
            (event,) = [frame for frame in await frames_until(socket, "session.updated") if frame["seq"]]
            assert event["seq"] > reset["data"]["cursor"]
        http.delete("/v3/sessions/shown")


async def test_a_pruned_cursor_is_reset(tmp_path):
    with serving(tmp_path, LIMITS) as daemon:
        last = write_tokens(daemon, 300)

        def prune(transaction):
            transaction.execute("DELETE FROM events WHERE seq <= 200")
            record_pruned(transaction, 200)

        daemon.run(daemon.services.store.write(prune))
        daemon.services.log.set_pruned(200)
        _, reset, synced = await stored(daemon, "?after=100")
        assert reset["data"] == {"reason": "pruned", "cursor": last, "oldest_seq": 201, "latest_seq": last}
        assert synced["data"]["cursor"] == last
        for query in ("?after=200", "?after=0"):
            assert seqs(await stored(daemon, query)) == list(range(201, last + 1))


# --- filters


async def test_a_filter_selects_the_events_that_are_sent(daemon):
    start = latest(daemon)
    with client(daemon) as http:
        for name in ("one", "two", "three"):
            http.post("/v3/sessions", json={"session_id": name})
            write_tokens(daemon, 2, session_id=name)
        queries = {
            "session_id=one&session_id=two": 6,
            "types=session.created": 3,
            "types=session.created,turn.*": 9,
            "types=session.*&types=turn.token&session_id=three": 3,
            "session_id=nobody": 0,
        }
        for query, count in queries.items():
            frames = await stored(daemon, f"?after={start}&{query}")
            assert len(seqs(frames)) == count, query
            assert frames[-1]["data"]["cursor"] == latest(daemon), query
        for name in ("one", "two", "three"):
            http.delete(f"/v3/sessions/{name}")


async def test_heartbeats_report_the_cursor_of_a_silent_stream(daemon):
    async with connect(daemon, "?session_id=nobody") as socket:
        await frames_until(socket, "stream.synced")
        last = write_tokens(daemon, 5)
        while (await frames_until(socket, "stream.heartbeat"))[-1]["data"]["cursor"] != last:
            pass


# --- clients


async def test_the_number_of_subscribers_is_limited(daemon):
    open_ones = [await connect(daemon) for _ in range(LIMITS.subscribers)]
    with pytest.raises(InvalidStatus) as caught:
        await connect(daemon)
    assert caught.value.response.status_code == 429
    assert caught.value.response.headers["retry-after"] == "5"
    await open_ones.pop().close()
    assert settled(daemon, lambda: len(daemon.services.subscribers) < LIMITS.subscribers)
    open_ones.append(await connect(daemon))
    for socket in open_ones:
        await socket.close()


@pytest.mark.slow
async def test_a_client_that_never_reads_is_disconnected_and_delays_no_other(daemon):
    stuck = await asyncio.to_thread(raw_subscriber, daemon, receive_bytes=1024)
    async with connect(daemon, max_queue=1000) as socket:
        await frames_until(socket, "stream.synced")
        assert len(daemon.services.subscribers) == 2
        for _ in range(20):
            last = write_tokens(daemon, 50, text="x" * 10_000)
            while (json.loads(await socket.recv()))["seq"] != last:
                pass
        assert await asyncio.to_thread(settled, daemon, lambda: len(daemon.services.subscribers) == 1)
        # Aborted, since data that the client does not receive would stay in memory after a normal close.
        assert await asyncio.to_thread(settled, daemon, lambda: not is_connected(stuck.getsockname()[1]))
    stuck.close()


def is_connected(port):
    """Return whether this process has the server's end of a connection."""
    return any(end.raddr and end.raddr.port == port for end in psutil.Process().net_connections("tcp"))


async def test_a_client_that_disappears_leaves_nothing_behind(daemon):
    for _ in range(5):
        bare = await asyncio.to_thread(raw_subscriber, daemon, "?after=0")
        bare.close()


async def test_messages_of_a_client_are_ignored_and_too_many_end_the_connection(daemon):
    async with connect(daemon) as socket:
        await frames_until(socket, "stream.synced")
        for message in ("ping", b"\x00\xff", "{}", ""):
            await socket.send(message)
        last = write_tokens(daemon, 1)
        assert seqs(await frames_until(socket, "turn.token")) == [last]
        with contextlib.suppress(ConnectionClosed):
            for _ in range(200):
                await socket.send("and again")
        with pytest.raises(ConnectionClosed) as caught:
            await frames_until(socket, "never")
    assert caught.value.rcvd.code == 1008


@pytest.mark.parametrize(("frame", "code"), [(b"\xff\xfe", 1007), (b"x" * 100_000, 1009)], ids=["not UTF-8", "large"])
async def test_an_invalid_message_ends_the_connection(daemon, frame, code):
    async with connect(daemon) as socket:
        await frames_until(socket, "stream.synced")
        await socket.send(frame, text=True)
        with pytest.raises(ConnectionClosed) as caught:
            await frames_until(socket, "never")
    assert caught.value.rcvd.code == code


async def test_events_of_any_length_arrive_complete(daemon):
    texts = ["", "ä€😀" * 40, "x" * 125, "x" * 65_535, "y" * 70_000, "z" * 600_000]
    async with connect(daemon, max_size=None) as socket:
        await frames_until(socket, "stream.synced")
        for text in texts:
            write_tokens(daemon, 1, text=text)
        received = [(await frames_until(socket, "turn.token"))[-1]["data"]["text"] for _ in texts]
    assert received == texts


@pytest.mark.slow
async def test_a_stop_is_announced_to_all_subscribers(tmp_path):
    with serving(tmp_path, LIMITS) as daemon:
        async with connect(daemon, "?types=daemon.*") as socket:
            await frames_until(socket, "stream.synced")
            stuck = await asyncio.to_thread(raw_subscriber, daemon, receive_bytes=1024)
            await asyncio.to_thread(daemon.stop)
            frames = await frames_until(socket, "stream.closing")
            assert [frame["event"] for frame in frames if frame["seq"]] == ["daemon.stopping"]
            assert frames[-1]["data"] == {"reason": "stopping", "cursor": seqs(frames)[-1]}
            with pytest.raises(ConnectionClosed) as caught:
                await socket.recv()
            stuck.close()
    assert caught.value.rcvd.code == 1001


def test_a_waiting_poll_receives_the_event_when_it_occurs(http, daemon, session):
    start = http.get("/v3/events").json()["cursor"]
    with client(daemon) as other:
        answers = []
        parameters = {"after": start, "wait": 5, "types": "session.updated"}
        waiting = threading.Thread(target=lambda: answers.append(other.get("/v3/events", params=parameters).json()))
        waiting.start()
        http.post("/v3/sessions", json={"title": "not of this kind"})
        http.patch(f"/v3/sessions/{session}", json={"title": "awaited"})
        waiting.join()
    assert [event["data"]["session"]["title"] for event in answers[0]["events"]] == ["awaited"]


@pytest.mark.parametrize("wait", ["0.05", "5e-2", "0.0123456789"])
def test_a_waiting_poll_returns_after_its_time(http, wait):
    answer = http.get("/v3/events", params={"wait": wait}).json()
    assert answer["events"] == []
