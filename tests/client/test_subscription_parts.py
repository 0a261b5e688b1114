"""Tests of the parts of a subscription: its position and buffer, the delays between connections, stored cursors."""

import asyncio
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.client.daemon_events import daemon_event
from lmx_lab.client.daemon_routes import ClientTimes
from lmx_lab.client.subscription import (
    Backoff,
    Cursor,
    Delivery,
    EventBuffer,
    EventPosition,
    FileCursor,
    MemoryCursor,
    SleepWatch,
)
from lmx_lab.errors import HostingError
from tests.client.event_server import event, heartbeat, hello, reset, snapshot, synced

pytestmark = pytest.mark.anyio


def process(position, *texts):
    return [position.process(daemon_event(text)) for text in texts]


def seqs(deliveries):
    return [item.event.seq for item in deliveries if item.event is not None]


@given(
    log=st.lists(st.integers(1, 50), unique=True).map(sorted),
    breaks=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=12),
)
def test_every_event_is_delivered_once_over_any_interruptions_and_repetitions(log, breaks):
    position, found = EventPosition(after=0), list[int | None]()
    for most, repeated in [*breaks, (len(log), 0)]:
        after = int(position.begin()["after"])
        position.process(daemon_event(hello(after)))
        # A proxy or a server with a bug may repeat events.
        rest = [seq for seq in log if seq > after - repeated]
        found += seqs(process(position, *map(event, rest[: most + repeated])))
    assert found == log


def test_a_heartbeat_moves_the_cursor_but_never_back():
    position = EventPosition(after=3)
    position.begin()
    (_, _, beat, late) = process(position, hello(3), event(4), heartbeat(90), heartbeat(20))
    assert beat == Delivery(cursor=Cursor(stream_id="stm_1", seq=90))
    assert late.cursor == position.cursor == Cursor(stream_id="stm_1", seq=90)


def test_a_hello_frame_does_not_move_a_known_cursor():
    position = EventPosition(Cursor(stream_id="stm_0", seq=5), after=99)
    assert position.begin() == {"after": "5", "stream_id": "stm_0"}
    assert process(position, hello(70)) == [Delivery()]
    assert position.cursor == Cursor(stream_id="stm_0", seq=5)


@pytest.mark.parametrize("rest", [[], [snapshot("a", 50)], [snapshot("a", 50), heartbeat(60)]])
def test_the_cursor_does_not_move_before_a_reset_is_complete(rest):
    position = EventPosition(Cursor(stream_id="stm_1", seq=5))
    position.begin()
    process(position, hello(50), reset(50), *rest)
    assert position.begin() == {"after": "5", "stream_id": "stm_1"}


@pytest.mark.parametrize("end", [synced(50), event(51)])
def test_the_cursor_moves_after_the_last_snapshot_of_a_reset(end):
    position = EventPosition(Cursor(stream_id="stm_1", seq=900))
    position.begin()
    process(position, hello(50), reset(50, "ahead"), snapshot("a", 50), end)
    assert position.cursor.seq in (50, 51)


def test_events_in_a_snapshot_are_not_delivered_again_on_the_next_connection():
    position = EventPosition(after=3)
    position.begin()
    process(position, hello(50), reset(50), snapshot("a", 60), synced(50))
    live = [event(55, session_id="a"), event(56, session_id="b")]
    assert seqs(process(position, *live)) == [56]
    assert position.begin()["after"] == "56"
    assert seqs(process(position, event(60, session_id="a"), event(61, session_id="a"))) == [61]


def test_another_reset_replaces_the_snapshots_of_the_previous_one():
    position = EventPosition(after=3)
    position.begin()
    process(position, hello(50), reset(50), snapshot("a", 60), synced(50))
    other = {"stream_id": "stm_2"}
    process(position, hello(7, **other), reset(7, "other-stream", **other), synced(7, **other))
    assert seqs(process(position, event(8, session_id="a", **other))) == [8]


@pytest.mark.parametrize("text", [event(4, stream_id=""), event(10**17), event(4, stream_id="s" * 201)])
def test_an_invalid_cursor_is_refused(text):
    position = EventPosition(after=3)
    position.begin()
    with pytest.raises(ValueError, match="Cursor"):
        process(position, text)


async def test_a_buffer_is_full_at_its_item_limit_and_has_room_again_at_half():
    buffer = EventBuffer(max_items=10)
    for number in range(10):
        assert buffer.room.is_set()
        buffer.put(number, 1)
    assert not buffer.room.is_set()
    assert [buffer.take() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert buffer.room.is_set()


async def test_one_item_can_fill_a_buffer_by_its_size():
    buffer = EventBuffer(max_characters=1000)
    buffer.put("long", 1000)
    assert not buffer.room.is_set()
    waiting = asyncio.create_task(buffer.room.wait())
    assert buffer.take() == "long"
    await waiting
    assert len(buffer) == 0


async def test_items_can_be_taken_after_the_end():
    buffer = EventBuffer()
    buffer.put(1, 1)
    buffer.end()
    await buffer.filled.wait()
    assert (buffer.take(), buffer.take()) == (1, None)
    await buffer.filled.wait()


def longest(low, high):
    assert low == 0
    return high


def test_delays_double_up_to_ten_seconds_and_start_again_after_a_reset():
    delays = Backoff(ClientTimes(), longest)
    assert [delays.next_delay_s() for _ in range(8)] == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
    delays.reset()
    assert (delays.next_delay_s(), delays.attempts) == (0.25, 1)


def test_delays_are_random_up_to_the_limit():
    drawn = [Backoff(ClientTimes()).next_delay_s() for _ in range(200)]
    assert min(drawn) < 0.05
    assert 0.2 < max(drawn) <= 0.25


def test_a_million_failures_do_not_overflow():
    delays = Backoff(ClientTimes(), longest)
    delays.attempts = 1_000_000
    assert delays.next_delay_s() == 10


@pytest.mark.parametrize(("advised_s", "delay_s"), [(None, 0.25), (0.0, 0.25), (7.0, 7.0), (1e9, 60.0), (-5.0, 0.25)])
def test_the_advised_delay_is_followed_up_to_a_limit(advised_s, delay_s):
    assert Backoff(ClientTimes(), longest).next_delay_s(advised_s) == delay_s


@pytest.mark.parametrize(("ahead_s", "wakes"), [(4.0, 0), (6.0, 1), (86_400.0, 1), (-86_400.0, 0)])
async def test_a_jump_of_the_wall_clock_is_reported_once_as_sleep(ahead_s, wakes):
    loop, seen, checks = asyncio.get_running_loop(), list[None](), list[None]()
    done = asyncio.Event()

    def wall():
        checks.append(None)
        if len(checks) == 20:
            done.set()
        return loop.time() + (ahead_s if len(checks) > 5 else 0.0)

    watch = SleepWatch(lambda: seen.append(None), wall=wall, interval_s=0.001)
    await done.wait()
    watch.close()
    watch.close()
    assert len(seen) == wakes


# Stored cursors

FIRST, SECOND = Cursor(stream_id="stm_1", seq=7), Cursor(stream_id="stm_1", seq=9)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_the_last_saved_cursor_is_loaded(tmp_path, kind):
    store = MemoryCursor() if kind == "memory" else FileCursor(tmp_path / "cursor.json")
    assert store.load() is None
    store.save(FIRST)
    store.save(SECOND)
    assert store.load() == SECOND
    if kind == "file":
        assert FileCursor(str(tmp_path / "cursor.json")).load() == SECOND


def test_the_file_is_private_and_no_temporary_file_remains(tmp_path):
    before = os.umask(0)
    try:
        FileCursor(tmp_path / "cursor.json").save(FIRST)
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_tilde_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    FileCursor("~/cursor.json").save(FIRST)
    assert (tmp_path / "cursor.json").exists()


@pytest.mark.parametrize(
    "text",
    [b"", b"7", b"{}", b'{"stream_id": "", "seq": 1}', b'{"stream_id": "s", "seq": -1}', b"\xff\xfe", b"x" * 10**5],
    ids=["empty", "number", "no fields", "no stream", "negative", "no UTF-8", "long"],
)
def test_a_file_with_other_content_is_not_overwritten(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with pytest.raises(HostingError, match=r"notes\.txt does not contain a cursor.*remove the file"):
        FileCursor(path).load()
    assert path.read_bytes() == text


def test_a_folder_or_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(HostingError, match="does not contain a cursor"):
            FileCursor(path).load()
    with pytest.raises(HostingError, match="cannot be read: Not a directory; give the path of another file"):
        FileCursor(tmp_path / "pipe" / "cursor").load()


def test_a_path_that_cannot_be_written_is_reported(tmp_path):
    store = FileCursor(tmp_path / "missing" / "cursor.json")
    assert store.load() is None
    with pytest.raises(HostingError, match="cannot be written"):
        store.save(FIRST)
    (tmp_path / "folder").mkdir()
    with pytest.raises(HostingError, match="cannot be written"):
        FileCursor(tmp_path / "folder").save(FIRST)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_longest_cursor_is_read_completely(tmp_path):
    longest = Cursor(stream_id="s" * 200, seq=10**15)
    store = FileCursor(tmp_path / "cursor.json")
    store.save(longest)
    assert store.load() == longest
