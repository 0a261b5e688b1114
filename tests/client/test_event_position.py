"""What of a stream is new: whatever connections repeat, leave out by breaking off, or reset."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.client.cursors import Cursor
from lmx_lab.client.daemon_events import daemon_event
from lmx_lab.client.event_position import Delivery, EventPosition
from tests.client.event_server import event, heartbeat, hello, reset, snapshot, synced


def told(position: EventPosition, *texts: str) -> list[Delivery]:
    return [position.take(daemon_event(text)) for text in texts]


def seqs(taken: list[Delivery]) -> list[int | None]:
    return [item.event.seq for item in taken if item.event is not None]


@given(
    log=st.lists(st.integers(1, 50), unique=True).map(sorted),
    breaks=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=12),
)
def test_every_event_comes_once_whatever_is_cut_and_repeated(log: list[int], breaks: list[tuple[int, int]]) -> None:
    position, found = EventPosition(after=0), list[int | None]()
    for most, repeated in [*breaks, (len(log), 0)]:
        after = int(position.begin()["after"])
        position.take(daemon_event(hello(after)))
        # A proxy, or a wrong server, that says things again.
        rest = [seq for seq in log if seq > after - repeated]
        found += seqs(told(position, *map(event, rest[: most + repeated])))
    assert found == log


def test_a_heartbeat_moves_the_cursor_and_never_back() -> None:
    position = EventPosition(after=3)
    position.begin()
    (_, _, beat, late) = told(position, hello(3), event(4), heartbeat(90), heartbeat(20))
    assert beat == Delivery(cursor=Cursor(stream_id="stm_1", seq=90))
    assert late.cursor == position.cursor == Cursor(stream_id="stm_1", seq=90)


def test_with_a_cursor_the_greeting_moves_nothing() -> None:
    position = EventPosition(Cursor(stream_id="stm_0", seq=5), after=99)
    assert position.begin() == {"after": "5", "stream_id": "stm_0"}
    assert told(position, hello(70)) == [Delivery()]
    assert position.cursor == Cursor(stream_id="stm_0", seq=5)


@pytest.mark.parametrize("rest", [[], [snapshot("a", 50)], [snapshot("a", 50), heartbeat(60)]])
def test_until_a_reset_is_whole_the_cursor_stays(rest: list[str]) -> None:
    position = EventPosition(Cursor(stream_id="stm_1", seq=5))
    position.begin()
    told(position, hello(50), reset(50), *rest)
    assert position.begin() == {"after": "5", "stream_id": "stm_1"}


@pytest.mark.parametrize("end", [synced(50), event(51)])
def test_after_the_last_snapshot_the_cursor_is_the_resets(end: str) -> None:
    position = EventPosition(Cursor(stream_id="stm_1", seq=900))
    position.begin()
    told(position, hello(50), reset(50, "ahead"), snapshot("a", 50), end)
    assert position.cursor is not None
    assert position.cursor.seq in (50, 51)


def test_what_is_in_a_snapshot_is_left_out_also_on_the_next_connection() -> None:
    position = EventPosition(after=3)
    position.begin()
    told(position, hello(50), reset(50), snapshot("a", 60), synced(50))
    live: list[Any] = [event(55, session_id="a"), event(56, session_id="b")]
    assert seqs(told(position, *live)) == [56]
    assert position.begin()["after"] == "56"
    assert seqs(told(position, event(60, session_id="a"), event(61, session_id="a"))) == [61]


def test_another_reset_forgets_the_snapshots_of_the_one_before() -> None:
    position = EventPosition(after=3)
    position.begin()
    told(position, hello(50), reset(50), snapshot("a", 60), synced(50))
    other: Any = {"stream_id": "stm_2"}
    told(position, hello(7, **other), reset(7, "other-stream", **other), synced(7, **other))
    assert seqs(told(position, event(8, session_id="a", **other))) == [8]


@pytest.mark.parametrize("text", [event(4, stream_id=""), event(10**17), event(4, stream_id="s" * 201)])
def test_a_cursor_that_could_not_be_sent_back_is_none(text: str) -> None:
    position = EventPosition(after=3)
    position.begin()
    with pytest.raises(ValueError, match="Cursor"):
        told(position, text)
