"""Tests that streamed text equals the decoded whole at every token and byte boundary, and that entries match it."""

import codecs
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.text.channels import CONTENT, REASONING, TOOL, ChannelFormat, StopStrings
from lmx_lab.engine.text.splitter import Detokenizer, SplitText, TextSplitter
from lmx_lab.engine.text.tool_calls import CallFormat
from lmx_lab.values.outputs import ToolCallDelta
from tests.engine.text.splitting import Tokens, channel_format_of, places, run, tool_parser

json_tools = tool_parser("json_tools")
TEXTS = st.text(alphabet=st.sampled_from("ab -é€😀\n"), max_size=30)
STOPS = st.lists(st.text(alphabet="ab -é", min_size=1, max_size=4), max_size=3)
# Bytes that begin, continue and break characters, more often than arbitrary bytes.
BYTES = st.lists(
    st.sampled_from(
        [b"a", b" ", "é".encode(), "€".encode(), "😀".encode(), b"\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\xff"]
    )
    | st.binary(min_size=1, max_size=3)
    | st.sampled_from([b"\x80" * 40, b"\xf0\x9f\x98" * 20, "€".encode() * 20]),
    max_size=60,
).map(b"".join)
SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def decode_bytes(tokens):
    """Decode tokens that are single bytes, the most difficult case for streaming."""
    return bytes(tokens).decode("utf-8", "replace")


def decode_with_leading_space(tokens):
    """Decode as SentencePiece does: the leading space of a text is removed."""
    return decode_bytes(tokens).removeprefix(" ")


def decode_with_byte_fallback(tokens):
    """Decode as the byte fallback decoder of Hugging Face does: a run of bytes from 128 is invalid if any byte is."""

    def run(match):
        try:
            return match[0].decode().encode()
        except UnicodeDecodeError:
            return "\ufffd".encode() * len(match[0])

    return re.sub(rb"[\x80-\xff]+", run, bytes(tokens)).decode().removeprefix(" ")


class Chunks:
    """A tokenizer whose tokens have the given bytes. Empty bytes are a special token that decoding skips."""

    def __init__(self, chunks):
        self.chunks = list(chunks)

    def decode(self, tokens):
        return b"".join(self.chunks[token] for token in tokens).decode("utf-8", "replace")

    def decode_with_leading_space(self, tokens):
        return self.decode(tokens).removeprefix(" ")


def chunks(data, sizes):
    """Return a tokenizer that divides the data into tokens of these sizes, repeatedly."""
    out, at = [], 0
    while at < len(data):
        size = sizes[len(out) % len(sizes)] if any(sizes) else 1
        out.append(data[at : at + size])
        at += size
    return Chunks(out)


def streamed(decode, tokens):
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add(token) for token in tokens]
    assert sum(map(len, pieces)) <= detokenizer.length
    pieces.append(detokenizer.finish())
    assert detokenizer.length == sum(map(len, pieces))
    return "".join(pieces)


@pytest.mark.slow
@given(BYTES, SIZES)
def test_invalid_bytes_are_streamed_as_they_are_decoded_at_once_in_tokens_of_any_size(data, sizes):
    tokenizer = chunks(data, sizes)
    assert streamed(decode_bytes, data) == data.decode("utf-8", "replace")
    assert streamed(tokenizer.decode, range(len(tokenizer.chunks))) == data.decode("utf-8", "replace")


@pytest.mark.slow
@given(BYTES, st.lists(st.integers(1, 5), min_size=1))
def test_only_the_leading_space_of_the_whole_text_is_dropped(data, sizes):
    expected = data.decode("utf-8", "replace").removeprefix(" ")
    tokenizer = chunks(data, sizes)
    assert streamed(decode_with_leading_space, data) == expected
    assert streamed(tokenizer.decode_with_leading_space, range(len(tokenizer.chunks))) == expected


@pytest.mark.slow
@given(BYTES)
def test_text_that_a_further_byte_could_change_is_held_back(data):
    detokenizer, settled, out = Detokenizer(decode_bytes), codecs.getincrementaldecoder("utf-8")("replace"), ""
    final = ""
    for token in data:
        out += detokenizer.add(token)
        final += settled.decode(bytes([token]))
        assert final.startswith(out)
        # At most a few more characters than necessary are held back.
        assert len(final) - len(out) <= 3


@pytest.mark.slow
@given(BYTES.filter(lambda data: "\ufffd".encode() not in data))
def test_byte_fallback_loses_no_byte_and_breaks_no_valid_character(data):
    text = streamed(decode_with_byte_fallback, data)
    data = data.removeprefix(b" ")
    valid = data.decode("utf-8", "ignore")
    assert text.replace("\ufffd", "") == valid
    assert text.count("\ufffd") == len(data) - len(valid.encode())


def test_a_complete_character_is_streamed_immediately_even_after_an_invalid_byte():
    detokenizer = Detokenizer(decode_with_byte_fallback)
    pieces = [detokenizer.add(token) for token in b"\x80\xe2\x82\xac\x80\xc3\xa9"]
    assert pieces == ["", "", "", "\ufffd€", "", "", "\ufffdé"]


@pytest.mark.parametrize("decode", [decode_bytes, decode_with_leading_space, decode_with_byte_fallback])
@pytest.mark.parametrize(
    "run", [b"\x80", b"\xff", b"\xf0\x9f\x98", b"\xe2\x82\xac", b"\xe2\x82", b"a", b" ", b"\xc3\xa9\x80"]
)
def test_decoding_takes_time_linear_in_the_number_of_tokens(decode, run):
    decoded = 0

    def counting(tokens):
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens)

    count = 4000
    streamed(counting, (run * count)[:count])
    assert decoded <= 64 * count


@pytest.mark.parametrize("before", [b"", b"a", b"\xe2"])
def test_the_cost_of_a_skipped_token_does_not_grow_with_their_number(before):
    tokenizer = Chunks([before, b""])
    decoded = 0

    def counting(tokens):
        nonlocal decoded
        decoded += len(tokens)
        return tokenizer.decode(tokens)

    assert streamed(counting, [0, *[1] * 4000]) == before.decode("utf-8", "replace")
    assert decoded <= 200 * 4000


def test_skipped_tokens_between_the_bytes_of_a_character_do_not_break_it():
    tokenizer = Chunks([b"", b"\xf0", b"\x9f", b"\x98\x80"])
    for before in range(20):
        for between in range(30):
            assert streamed(tokenizer.decode, [*[0] * before, 1, 2, *[0] * between, 3]) == "😀"


def test_tokens_that_end_one_character_and_begin_the_next_are_streamed():
    count = 500
    tokenizer = Chunks([b"x\xe2", *[b"\x82\xac\xe2"] * count, b"\x82\xac"])
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.add(token) for token in range(count + 2)]
    assert pieces == ["x", *["€"] * (count + 1)]


def cut(text, stops):
    """Cut the whole text before the stop string that is complete first (the leftmost of several)."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@pytest.mark.slow
@given(TEXTS, STOPS)
def test_stop_strings_cut_streamed_text_as_they_cut_the_whole_text(text, stops):
    pieces = run(TextSplitter(decode_bytes, stops), text.encode())
    assert ("".join(piece.text for piece in pieces), pieces[-1].stopped) == cut(text, stops)


def test_the_stop_string_that_is_complete_first_ends_the_text():
    assert StopStrings(["bc", "abcd"]).feed("abcd") == ("a", True)


# Entries


@pytest.mark.slow
@given(TEXTS, STOPS, SIZES)
def test_entries_are_those_of_the_tokens_that_have_text_in_the_output(text, stops, sizes):
    tokenizer = chunks(text.encode(), sizes)
    pieces = run(TextSplitter(tokenizer.decode, stops), range(len(tokenizer.chunks)))
    kept, stopped = cut(text, stops)
    expected = [
        token
        for token, (start, end) in enumerate(places(tokenizer.chunks))
        if not stopped or start < len(kept) or end <= len(kept)
    ]
    assert [entry for piece in pieces for entry in piece.entries] == expected


@pytest.mark.slow
@given(TEXTS, STOPS, SIZES)
def test_an_entry_is_returned_with_the_last_part_of_its_text(text, stops, sizes):
    tokenizer = chunks(text.encode(), sizes)
    ends = [end for _, end in places(tokenizer.chunks)]
    out, taken = 0, 0
    for at, piece in enumerate(run(TextSplitter(tokenizer.decode, stops), range(len(tokenizer.chunks)))):
        out, taken = out + len(piece.text), taken + len(piece.entries)
        if not piece.stopped:
            assert taken == sum(end <= out for end in ends[: at + 1])


@pytest.mark.slow
@given(BYTES, SIZES, st.sampled_from([decode_bytes, decode_with_byte_fallback]), STOPS)
def test_entries_of_invalid_text_are_in_order_and_complete(data, sizes, decode, stops):
    for splitter, tokens in (
        (TextSplitter[int](decode, stops), list(enumerate(data))),
        (
            TextSplitter[int](chunks(data, sizes).decode, stops),
            [(i, i) for i in range(len(chunks(data, sizes).chunks))],
        ),
    ):
        out = []
        for at, token in tokens:
            piece = splitter.add(token, at)
            out += piece.entries
            if piece.stopped:
                break
        else:
            out += splitter.finish().entries
            assert len(out) == len(tokens)
        assert out == list(range(len(out)))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # Text that is held back for a possible stop string and then returned.
        ([b"a", b"E", b"x"], [("a", [0]), ("", []), ("Ex", [1, 2]), ("", [])]),
        # The entry of the token in which the stop string begins is returned, the one of the token that ends it is not.
        ([b"a", b"bE", b"ND"], [("a", [0]), ("b", []), ("", [1])]),
        ([b"a", b"END"], [("a", [0]), ("", [])]),
        # A character that is divided among tokens has one text for all of them.
        ([b"\xe2", b"\x82", b"\xac"], [("", []), ("", []), ("€", [0, 1, 2]), ("", [])]),
        ([b"\xe2", b"\x82\xacEND"], [("", []), ("€", [0, 1])]),
        ([b"\xe2\x82", b"a"], [("", []), ("\ufffda", [0, 1]), ("", [])]),
        # Tokens without text are returned with the preceding text.
        ([b"", b"a", b"", b"EN", b"", b"D"], [("", [0]), ("a", [1]), ("", [2]), ("", []), ("", []), ("", [])]),
        ([b"E", b"", b""], [("", []), ("", []), ("", []), ("E", [0, 1, 2])]),
    ],
)
def test_entries_are_returned_with_the_text_of_their_tokens(tokens, expected):
    pieces = run(TextSplitter(Chunks(tokens).decode, ["END"]), range(len(tokens)))
    assert [(piece.text, list(piece.entries)) for piece in pieces] == expected


def test_the_entries_of_one_character_are_returned_together():
    pieces = run(TextSplitter(decode_with_byte_fallback, ["x"]), b"\xe2\x82\xacx")
    assert [list(piece.entries) for piece in pieces] == [[], [], [0xE2, 0x82, 0xAC], []]


def test_tokens_without_entries_return_none():
    splitter = TextSplitter(decode_bytes, ())
    assert [splitter.add(token) for token in b"ab"] == [SplitText("a", False), SplitText("b", False)]
    assert splitter.finish() == SplitText("", False)


# With a channel format

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é€😀"}}\n</tool_call>'


@pytest.mark.slow
@given(BYTES, SIZES, STOPS)
def test_an_empty_channel_format_changes_nothing(data, sizes, stops):
    tokenizer = chunks(data, sizes)
    tokens = range(len(tokenizer.chunks))
    plain, shaped = (
        run(TextSplitter(tokenizer.decode, stops, channel_format), tokens) for channel_format in (None, ChannelFormat())
    )
    assert plain == shaped


@pytest.mark.slow
@given(TEXTS, TEXTS, st.sets(st.integers(0, 100)))
def test_a_literal_after_an_incomplete_character_changes_no_other_text(before, after, cuts):
    half = len(before.encode()) + 1
    tokenizer = Tokens(f"{before}€[X]{after}", {*cuts, half}, ["[X]"])
    tokens = [token for token, start in enumerate(tokenizer.edges[:-1]) if start != half]
    channel_format = ChannelFormat(transitions={CONTENT: [("a[X]b", REASONING)]}, literals=tokenizer.literals)
    pieces = run(TextSplitter(tokenizer.decode, (), channel_format), tokens)
    (literal,) = tokenizer.literals
    torn = b"".join(tokenizer.chunks[token] for token in tokens if token < literal)
    assert "".join(piece.text for piece in pieces) == f"{torn.decode('utf-8', 'replace')}[X]{after}"
    assert [entry for piece in pieces for entry in piece.entries] == tokens


def test_a_space_after_a_literal_is_kept():
    tokenizer = Chunks([b" a", b" b"])
    channel_format = ChannelFormat(
        transitions={CONTENT: [("[X]", CONTENT), ("[Y]z", CONTENT)]}, literals={2: "[X]", 3: "[Y]"}
    )
    splitter = TextSplitter(tokenizer.decode_with_leading_space, (), channel_format)
    pieces = [splitter.add(token) for token in [0, 1, 2, 1, 3, 1, 0]]
    assert [piece.text for piece in pieces] == ["a", " b", "", " b", "", "[Y] b", " a"]


def test_a_special_token_is_text_only_in_markers_and_calls():
    literals = {0: "<s>", 1: "</s>", 2: "<arg>"}
    tokenizer = Chunks([b"", b"", b"", b"f", b"x"])
    seen = []

    def parse(text):
        seen.append(text)
        return {"name": text, "arguments": {}}

    channel_format = ChannelFormat(
        transitions={CONTENT: [("<s>", TOOL)], TOOL: [("</s>", CONTENT)]},
        calls=CallFormat(start="<s>", end="</s>", parse=parse),
        literals=literals,
    )
    splitter = TextSplitter(tokenizer.decode, (), channel_format)
    pieces = [splitter.add(token, at) for at, token in enumerate([4, 2, 0, 3, 2, 1, 2, 4])]
    assert [piece.text for piece in pieces] == ["x", "", "", "", "", "", "", "x"]
    assert [list(piece.entries) for piece in pieces] == [[0], [1], [], [], [], [2, 3, 4, 5], [6], [7]]
    assert seen == ["f<arg>"]
    (delta,) = pieces[5].calls
    assert delta == ToolCallDelta(index=0, id=delta.id, name="f<arg>", arguments="{}")


@pytest.mark.parametrize(
    ("texts", "initial", "expected"),
    [
        (["a", "b"], CONTENT, 0),
        (["a", "b"], REASONING, 2),
        # Counted are the end marker of the reasoning and the last token of the start marker.
        (["a", "<thi", "nk>", "b", "</thi", "nk>", "c"], CONTENT, 4),
        (["a</think>b", "c"], REASONING, 1),
        (["a", CALL, "c"], REASONING, 2),
    ],
)
def test_reasoning_tokens_are_counted(texts, initial, expected):
    splitter = TextSplitter(
        Chunks(text.encode() for text in texts).decode, (), channel_format_of(json_tools, initial=initial)
    )
    run(splitter, range(len(texts)))
    assert splitter.reasoning_tokens == expected


def test_each_piece_has_the_channel_of_its_own_token():
    texts = ["hm", "</think>", "ok", CALL, "!"]
    splitter = TextSplitter(
        Chunks(text.encode() for text in texts).decode, (), channel_format_of(json_tools, initial=REASONING)
    )
    pieces = run(splitter, range(len(texts)))
    assert [(piece.text, piece.reasoning, len(piece.calls)) for piece in pieces] == [
        ("", "hm", 0),
        ("", "", 0),
        ("ok", "", 0),
        ("", "", 1),
        ("!", "", 0),
        ("", "", 0),
    ]
