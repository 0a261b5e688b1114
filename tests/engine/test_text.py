"""Exactness of text: joined pieces are the whole, at every token and byte boundary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.text import Detokenizer, StopStrings, TextSplitter

TEXTS = st.text(alphabet=st.sampled_from("ab -é€😀\n"), max_size=30)
STOPS = st.lists(st.text(alphabet="ab -é", min_size=1, max_size=4), max_size=3)


def decode_bytes(tokens: Sequence[int]) -> str:
    """The hardest tokenizer: every byte is a token."""
    return bytes(tokens).decode("utf-8", "replace")


def decode_with_leading_space(tokens: Sequence[int]) -> str:
    """As SentencePiece does: the first token of a text loses its space."""
    return decode_bytes(tokens).removeprefix(" ")


@given(TEXTS)
def test_pieces_of_split_characters_join_to_the_text(text: str) -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.add(token) for token in text.encode()]
    assert "".join(pieces) + detokenizer.finish() == text


@given(st.binary(max_size=20))
def test_broken_bytes_come_out_as_decoding_everything_at_once_has_them(data: bytes) -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.add(token) for token in data]
    assert "".join(pieces) + detokenizer.finish() == data.decode("utf-8", "replace")


@given(TEXTS)
def test_a_leading_space_is_dropped_once_and_inner_ones_are_kept(text: str) -> None:
    detokenizer = Detokenizer(decode_with_leading_space)
    pieces = [detokenizer.add(token) for token in text.encode()]
    assert "".join(pieces) + detokenizer.finish() == text.removeprefix(" ")


@given(st.binary(max_size=20))
def test_no_torn_character_is_streamed(data: bytes) -> None:
    detokenizer = Detokenizer(decode_bytes)
    for token in data:
        piece = detokenizer.add(token)
        assert not piece.endswith("\ufffd")


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The obvious way: the text before the stop string that is complete first, and of those the leftmost."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(TEXTS, STOPS)
def test_stop_strings_cut_the_stream_as_they_cut_the_whole_text(text: str, stops: list[str]) -> None:
    splitter = TextSplitter(decode_bytes, stops)
    out = ""
    for token in text.encode():
        piece, stopped = splitter.add(token)
        out += piece
        if stopped:
            break
    else:
        piece, stopped = splitter.finish()
        out += piece
    assert (out, stopped) == cut(text, stops)


@given(TEXTS, STOPS, st.lists(st.integers(1, 5), max_size=30))
def test_where_the_text_is_split_does_not_matter(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher, out, rest = StopStrings(stops), "", text
    for size in [*sizes, len(text) + 1]:
        piece, stopped = matcher.feed(rest[:size])
        out, rest = out + piece, rest[size:]
        if stopped:
            break
    else:
        out += matcher.finish()
    assert (out, stopped) == cut(text, stops)


def test_of_two_stop_strings_the_one_that_is_complete_first_counts() -> None:
    assert StopStrings(["bc", "abcd"]).feed("abcd") == ("a", True)


@pytest.mark.parametrize("pieces", [["a", "bb", "c"], ["ab", "bc"], ["abbc"], ["a", "b", "b", "c"]])
def test_a_stop_string_is_found_whatever_the_split(pieces: list[str]) -> None:
    stops = StopStrings(["bb"])
    out = ""
    for piece in pieces:
        text, stopped = stops.feed(piece)
        out += text
        if stopped:
            break
    assert (out, stopped) == ("a", True)


def test_what_looked_like_a_stop_string_is_given_back_at_the_end() -> None:
    stops = StopStrings(["END"])
    assert stops.feed("the EN") == ("the ", False)
    assert stops.finish() == "EN"
