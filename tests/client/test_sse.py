"""Tests of the decoder of server-sent events."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.client.sse import MAX_EVENT_BYTES, EventDecoder, Remark

TEXT = "a\u2028b\u0085c\x0bé\U0001f600"


def test_data_and_comments_are_returned_in_order():
    stream = b': queued\n\ndata: {"a": 1}\n\n:prompt 1/2\ndata:x\n\n'
    assert EventDecoder().feed(stream) == [Remark(text="queued"), '{"a": 1}', Remark(text="prompt 1/2"), "x"]


def test_the_lines_of_an_event_are_joined_and_other_fields_are_skipped():
    stream = b"event: e\r\nid: 1\r\nretry: 5\r\ndata: a\r\ndata:  b\r\ndata\r\n\r\nid: 2\r\n\r\n"
    assert EventDecoder().feed(stream) == ["a\n b\n"]


@pytest.mark.slow
@given(st.lists(st.text(max_size=5).map(json.dumps) | st.just(json.dumps(TEXT, ensure_ascii=False))), st.data())
def test_bytes_may_be_split_anywhere(texts, data):
    stream = "".join(f"data: {text}\n\n" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = EventDecoder()
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event for piece in pieces for event in decoder.feed(piece)] == texts


def test_an_incomplete_event_is_not_returned():
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.feed(b"\n") == ["a"]


def test_empty_lines_count_towards_the_limit(monkeypatch):
    monkeypatch.setattr("lmx_lab.client.sse.MAX_EVENT_BYTES", 1000)
    decoder = EventDecoder()
    assert decoder.feed(b"data:\n" * 1000) == []
    with pytest.raises(ValueError, match="more than"):
        decoder.feed(b"data:\n")


@pytest.mark.parametrize("line_end", [b"", b"\n"])
def test_the_size_of_an_event_is_limited(line_end):
    decoder = EventDecoder()
    piece = b"data: " + b"x" * (MAX_EVENT_BYTES // 2) + line_end
    assert decoder.feed(piece) == []
    with pytest.raises(ValueError, match="more than"):
        decoder.feed(piece + piece)
