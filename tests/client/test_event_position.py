"""Tests of the position in a stream of events, over repetitions, interruptions and resets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.client.cursors import Cursor
from lmx_lab.client.daemon_events import daemon_event
from lmx_lab.client.event_position import Delivery, EventPosition
from tests.support.events import event, heartbeat, hello, reset, snapshot, synced


def process(position: EventPosition, *texts: str) -> list[Delivery]:
    return [position.process(daemon_event(text)) for text in texts]


def seqs(deliveries: list[Delivery]) -> list[int | None]:
    return [item.event.seq for item in deliveries if item.event is not None]


@given(
    log=st.lists(st.integers(1, 50), unique=True).map(sorted),
    breaks=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=12),
)
def test_every_event_is_delivered_once_over_any_interruptions_and_repetitions(
    log: list[int], breaks: list[tuple[int, int]]
) -> None:
    position, found = EventPosition(after=0), list[int | None]()
    for most, repeated in [*breaks, (len(log), 0)]:
        after = int(position.begin()["after"])
        position.process(daemon_event(hello(after)))
        # A proxy or a server with a bug may repeat events.
        rest = [seq for seq in log if seq > after - repeated]
        found += seqs(process(position, *map(event, rest[: most + repeated])))
    assert found == log


def test_a_heartbeat_moves_the_cursor_but_never_back() -> None:
    position = EventPosition(after=3)
    position.begin()
    (_, _, beat, late) = process(position, hello(3), event(4), heartbeat(90), heartbeat(20))
    assert beat == Delivery(cursor=Cursor(stream_id="stm_1", seq=90))
    assert late.cursor == position.cursor == Cursor(stream_id="stm_1", seq=90)


def test_a_hello_frame_does_not_move_a_known_cursor() -> None:
    position = EventPosition(Cursor(stream_id="stm_0", seq=5), after=99)
    assert position.begin() == {"after": "5", "stream_id": "stm_0"}
    assert process(position, hello(70)) == [Delivery()]
    assert position.cursor == Cursor(stream_id="stm_0", seq=5)


@pytest.mark.parametrize("rest", [[], [snapshot("a", 50)], [snapshot("a", 50), heartbeat(60)]])
def test_the_cursor_does_not_move_before_a_reset_is_complete(rest: list[str]) -> None:
    position = EventPosition(Cursor(stream_id="stm_1", seq=5))
    position.begin()
    process(position, hello(50), reset(50), *rest)
    assert position.begin() == {"after": "5", "stream_id": "stm_1"}


@pytest.mark.parametrize("end", [synced(50), event(51)])
def test_the_cursor_moves_after_the_last_snapshot_of_a_reset(end: str) -> None:
    position = EventPosition(Cursor(stream_id="stm_1", seq=900))
    position.begin()
    process(position, hello(50), reset(50, "ahead"), snapshot("a", 50), end)
    assert position.cursor is not None
    assert position.cursor.seq in (50, 51)


def test_events_in_a_snapshot_are_not_delivered_again_on_the_next_connection() -> None:
    position = EventPosition(after=3)
    position.begin()
    process(position, hello(50), reset(50), snapshot("a", 60), synced(50))
    live: list[Any] = [event(55, session_id="a"), event(56, session_id="b")]
    assert seqs(process(position, *live)) == [56]
    assert position.begin()["after"] == "56"
    assert seqs(process(position, event(60, session_id="a"), event(61, session_id="a"))) == [61]


def test_another_reset_replaces_the_snapshots_of_the_previous_one() -> None:
    position = EventPosition(after=3)
    position.begin()
    process(position, hello(50), reset(50), snapshot("a", 60), synced(50))
    other: Any = {"stream_id": "stm_2"}
    process(position, hello(7, **other), reset(7, "other-stream", **other), synced(7, **other))
    assert seqs(process(position, event(8, session_id="a", **other))) == [8]


@pytest.mark.parametrize("text", [event(4, stream_id=""), event(10**17), event(4, stream_id="s" * 201)])
def test_an_invalid_cursor_is_refused(text: str) -> None:
    position = EventPosition(after=3)
    position.begin()
    with pytest.raises(ValueError, match="Cursor"):
        process(position, text)
