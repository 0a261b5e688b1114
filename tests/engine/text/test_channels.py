"""Compare the channel parser with a simple implementation that divides the whole text at once."""

import json
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmx_lab.engine import Tool, ToolUse
from lmx_lab.engine.text.channels import (
    CONTENT,
    REASONING,
    TOOL,
    ChannelFormat,
    ChannelOutput,
    ChannelParser,
    TrailingWhitespace,
)
from lmx_lab.engine.text.tool_calls import CallFormat
from tests.engine.text.splitting import Tokens, answer, places, require_linear
from tests.support.engines import merge

TRANSITIONS = {
    CONTENT: [("<r>", REASONING), ("<t>", TOOL), ("<|h|>", "header"), ("<|s|>", CONTENT)],
    REASONING: [("</r>", CONTENT), ("<t>", TOOL)],
    TOOL: [("</t>", CONTENT)],
    "header": [("<|m|>", CONTENT)],
}
MARKERS = ["<r>", "</r>", "<t>", "</t>", "<t>a</t>", "<|h|>", "<|m|>", "<|s|>"]
PIECES = [*MARKERS, "a", "b", "é", " ", "\n", " \n", "<", "!"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
STOPS = st.lists(st.sampled_from(["ab", "b b", "a<t>", "!</t>b", "\n", "<<", "b"]), max_size=2)
INITIAL = st.sampled_from([CONTENT, REASONING, TOOL, "header"])


def parse(text):
    if not text.isalpha():
        raise ValueError(text)
    return {"name": text, "arguments": {"of": text}}


CALLS = CallFormat(start="<t>", end="</t>", parse=parse)


def channel_format(initial=CONTENT, calls=CALLS):
    return ChannelFormat(initial=initial, transitions=TRANSITIONS, calls=calls)


@dataclass
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    cut: int | None = None
    """Index in the raw text where a stop string ends the answer."""


def streamed(channel_format, pieces, stops=()):
    channels, parts, last = ChannelParser(channel_format, stops), [], 0
    raw = sum(map(len, pieces))
    for piece in pieces:
        parts.append(channels.feed(piece))
        assert last <= channels.passed <= raw
        last = channels.passed
        if parts[-1].stopped:
            break
    else:
        parts.append(channels.finish())
        assert parts[-1].stopped or channels.passed == raw
    return Parsed(
        content="".join(text for part in parts for text in part.content),
        reasoning="".join(text for part in parts for text in part.reasoning),
        calls=merge(call for part in parts for call in part.calls)[0],
        cut=channels.passed if parts[-1].stopped else None,
    )


# The simple implementation


def find_items(raw, state):
    """Return the sections of the raw text. An invalid call is content, and is joined with adjacent content.

    A section is its kind, its text, the index of its text, and the state after it (``""`` for the last one).
    """
    found = []
    at, begin = 0, 0
    while True:
        ends = [(raw.index(text, at) + len(text), text, to) for text, to in TRANSITIONS[state] if text in raw[at:]]
        end, marker, after = min(ends, default=(len(raw), "", ""))
        text = raw[at : end - len(marker)]
        if state == TOOL and not text.isalpha():
            _append_item(found, (CONTENT, raw[begin:end], begin, after))
        else:
            _append_item(found, (state, text, at, after))
        if not marker:
            return found
        begin, at, state = end - len(marker), end, after


def _append_item(found, item):
    kind, text, begin, after = item
    # Content is joined only at the beginning or end of an invalid call.
    if kind == CONTENT and found and found[-1][0] == CONTENT and begin == found[-1][2] + len(found[-1][1]):
        found[-1] = (CONTENT, found[-1][1] + text, found[-1][2], after)
    else:
        found.append(item)


def parse_whole(raw, initial, stops=()):
    out, leading, after_call = Parsed(), False, False
    found = find_items(raw, initial)
    for number, (kind, text, start, after) in enumerate(found):
        following = found[number + 1][0] if number + 1 < len(found) else ""
        if kind == REASONING:
            out.reasoning += text.lstrip() if not after else text.strip()
            leading = True
        elif kind == TOOL:
            out.calls.append((text, json.dumps({"of": text}, ensure_ascii=False)))
            leading, after_call = False, True
        elif kind == CONTENT:
            kept = text.lstrip() if leading else text
            begin = start + len(text) - len(kept)
            kept = kept.rstrip() if following == TOOL else kept
            if not kept or (after_call and not kept.strip()):
                continue
            leading = after_call = False
            ends = [(at + len(stop), at) for stop in stops if (at := kept.find(stop)) >= 0]
            if ends:
                out.cut = begin + min(ends)[1]
                out.content += kept[: min(ends)[1]]
                return out
            out.content += kept
    return out


def split(raw, sizes):
    out, at = [], 0
    while at < len(raw):
        out.append(raw[at : at + sizes[len(out) % len(sizes)]])
        at += len(out[-1])
    return out


@given(TEXTS, INITIAL, STOPS, st.lists(st.integers(1, 7), min_size=1))
@example("a\n", CONTENT, ["\n"], [1])  # A stop string in the text that is output at the end.
def test_streamed_channels_are_those_of_the_whole_text(raw, initial, stops, sizes):
    expected = parse_whole(raw, initial, stops)
    assert streamed(channel_format(initial), [raw], stops) == expected
    assert streamed(channel_format(initial), list(raw), stops) == expected
    assert streamed(channel_format(initial), split(raw, sizes), stops) == expected


@pytest.mark.slow
@given(TEXTS, INITIAL, STOPS, st.sets(st.integers(1, 40)))
def test_entries_are_those_of_the_tokens_that_begin_before_the_stop_string(raw, initial, stops, cuts):
    tokens = Tokens(raw, cuts)
    cut = parse_whole(raw, initial, stops).cut
    expected = [
        token for token, (start, end) in enumerate(places(tokens.chunks)) if cut is None or start < cut or end <= cut
    ]
    assert answer(tokens, channel_format(initial), stops).entries == expected


@pytest.mark.slow
@given(TEXTS)
def test_whitespace_is_not_held_back_in_a_format_without_calls(raw):
    channels, out = ChannelParser(ChannelFormat(transitions={CONTENT: [("<r>", REASONING)]}), ()), ""
    raw = raw.replace("<", "")
    for character in raw:
        out += "".join(channels.feed(character).content)
        assert out == raw[: len(out)]
        assert channels.passed == len(out)
    assert out == raw


# Examples


def feed_all(channels, *texts):
    given = []
    for text in texts:
        parts = channels.feed(text)
        given.append(("".join(parts.content), "".join(parts.reasoning), channels.passed))
    return given


def test_possible_markers_and_stop_strings_are_held_back_until_they_are_decided():
    channels = ChannelParser(channel_format(REASONING), ["END"])
    assert feed_all(channels, " \n", "so ", "it", " is <", "/r", ">\n", "\nA E", "N", "x\n", " y") == [
        ("", "", 2),
        ("", "so", 4),
        ("", " it", 7),
        ("", " is", 10),
        ("", "", 10),
        ("", "", 16),
        ("A ", "", 19),
        ("", "", 19),
        ("ENx", "", 22),
        ("\n y", "", 25),
    ]
    assert channels.state == CONTENT
    assert channels.finish() == ChannelOutput(content=[""], reasoning=[""])


def test_a_call_is_passed_at_its_end_marker_and_whitespace_after_it_with_the_next_text():
    channels = ChannelParser(channel_format(), ["xyz"])
    texts = ["ok x", " ", "<t", ">", "f", "</t>", "\n", "<t>g</t>", " ", "!"]
    assert [passed for _, _, passed in feed_all(channels, *texts)] == [3, 3, 3, 3, 3, 13, 13, 22, 22, 24]
    assert channels.has_called


def test_repeated_beginnings_of_markers_are_not_held_back():
    channels = ChannelParser(channel_format(), ())
    given = "".join(text for text, _, _ in feed_all(channels, *"<" * 1000))
    assert 990 <= len(given) <= 1000
    assert feed_all(channels, "r>x")[0][0] == "<" * (999 - len(given))
    assert channels.state == REASONING


def test_a_call_is_dropped_without_a_call_format():
    found = streamed(ChannelFormat(transitions=TRANSITIONS), list("a <t>f</t> b"))
    assert (found.content, found.calls) == ("a  b", [])


def test_a_marker_can_lead_to_a_state_without_transitions():
    channels = ChannelParser(ChannelFormat(transitions={CONTENT: [("<x>", "elsewhere")]}), ())
    assert feed_all(channels, "a<x>b") == [("a", "", 5)]


def test_whitespace_before_a_call_is_kept_if_a_marker_follows_it():
    assert streamed(channel_format(), ["a <|s|><t>f</t>"]).content == "a "


def test_a_marker_inside_reasoning_is_passed_with_the_whitespace_before_it():
    channels = ChannelParser(ChannelFormat(initial=REASONING, transitions={REASONING: [("<x>", REASONING)]}), ())
    assert feed_all(channels, "a ", "<x>", "b") == [("", "a", 1), ("", " ", 5), ("", "b", 6)]


def test_the_shorter_of_two_markers_with_the_same_beginning_matches():
    transitions = {CONTENT: [("<think>!", TOOL), ("<think>", REASONING), ("", TOOL)]}
    for pieces in (["a<think>!b"], list("a<think>!b")):
        assert streamed(ChannelFormat(transitions=transitions), pieces) == Parsed("a", "!b")


def test_content_after_a_call_keeps_its_leading_space_even_after_reasoning():
    assert streamed(channel_format(REASONING), ["x</r> <t>f</t> b"]) == Parsed(" b", "x", [("f", '{"of": "f"}')])


def test_one_marker_can_end_a_call_and_begin_the_next():
    transitions = {CONTENT: [("<t>", TOOL)], TOOL: [("<n>", TOOL)]}
    found = streamed(ChannelFormat(transitions=transitions, calls=CALLS), ["<t>f<n>!"])
    assert found == Parsed("!", calls=[("f", '{"of": "f"}')])


def test_a_stop_string_before_a_call_prevents_the_call():
    for pieces in (["a END <t>f</t>"], list("a END <t>f</t>")):
        assert streamed(channel_format(), pieces, ["END"]) == Parsed("a ", cut=2)


@pytest.mark.parametrize(
    "raw", ["<t>STOP</t>", "<r>STOP</r>", "<|h|>STOP<|m|>", "ST<t>a</t>OP", "ST<r></r>OP", "a\n<t>a</t>"]
)
def test_stop_strings_apply_only_to_content(raw):
    for pieces in ([raw], list(raw)):
        assert streamed(channel_format(), pieces, ["STOP", "\n"]).cut is None


def test_holding_back_whitespace_takes_linear_time():
    def hold_back(count):
        space = TrailingWhitespace()
        for _ in range(count):
            space.feed(" ")
        assert len(space.feed("x")) == count + 1

    require_linear(hold_back, 5_000)


@pytest.mark.slow
@pytest.mark.parametrize("text", [" ", "x", "<", "<t", "é"])
@pytest.mark.parametrize("opened", ["", "<r>", "<t>"])
def test_parsing_takes_time_linear_in_the_length_of_the_answer(opened, text):
    def parse(count):
        channels = ChannelParser(channel_format(), ["xxxy"])
        channels.feed(opened)
        for _ in range(count):
            channels.feed(text)
        channels.finish()

    require_linear(parse, 1_000)


def remembered(channel_format, pieces, stops=()):
    found = []

    def remember(calls, raw, begin):
        found.append(([name for _, name, _ in calls], raw[begin:]))

    streamed(replace(channel_format, remember=remember), pieces, stops)
    return found


def test_consecutive_calls_are_remembered_together():
    pieces = ("x<t>a</t> <t>b", "</t> ", "y<t>c</t>", "\n")
    assert remembered(channel_format(), pieces) == [(["a", "b"], "<t>a</t> <t>b</t>"), (["c"], "<t>c</t>")]


def test_calls_before_a_stop_string_are_remembered():
    call = '{"name": "a", "arguments": {}}'
    unmarked = replace(CALLS, unmarked=ToolUse(tools=(Tool(name="a", parameters={}),)))
    assert remembered(channel_format(calls=unmarked), [call, "END"], ["END"]) == [(["a"], call)]
    assert remembered(channel_format(), ["<t>a</t>", " END"], ["END"]) == [(["a"], "<t>a</t>")]
