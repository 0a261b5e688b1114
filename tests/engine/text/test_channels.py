"""The channels of an answer against the obvious way of dividing the whole text, however it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from tests.engine.answers import Tokens, answer, merge, places

TRANSITIONS = {
    CONTENT: [("<r>", REASONING), ("<t>", TOOL), ("<|h|>", "header"), ("<|s|>", CONTENT)],
    REASONING: [("</r>", CONTENT), ("<t>", TOOL)],
    TOOL: [("</t>", CONTENT)],
    "header": [("<|m|>", CONTENT)],
}
PIECES = [
    "<r>",
    "</r>",
    "<t>",
    "</t>",
    "<t>a</t>",
    "<|h|>",
    "<|m|>",
    "<|s|>",
    "a",
    "b",
    "é",
    " ",
    "\n",
    " \n",
    "<",
    "!",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
STOPS = st.lists(st.sampled_from(["ab", "b b", "a<t>", "!</t>b", "\n", "<<", "b"]), max_size=2)
INITIAL = st.sampled_from([CONTENT, REASONING, TOOL, "header"])


def parse(text: str) -> dict[str, Any]:
    if not text.isalpha():
        raise ValueError(text)
    return {"name": text, "arguments": {"of": text}}


CALLS = CallFormat(start="<t>", end="</t>", parse=parse)


def shape(initial: str = CONTENT, calls: CallFormat | None = CALLS) -> ChannelFormat:
    return ChannelFormat(initial=initial, transitions=TRANSITIONS, calls=calls)


@dataclass
class Divided:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    cut: int | None = None
    """Where a stop string cuts, in the raw text."""


def streamed(shape: ChannelFormat, pieces: Sequence[str], stops: Sequence[str] = ()) -> Divided:
    channels, parts, last = ChannelParser(shape, stops), list[ChannelOutput](), 0
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
    return Divided(
        content="".join(text for part in parts for text in part.content),
        reasoning="".join(text for part in parts for text in part.reasoning),
        calls=merge(call for part in parts for call in part.calls)[0],
        cut=channels.passed if parts[-1].stopped else None,
    )


# The obvious way

Item = tuple[str, str, int, str]
"""Its kind, its text, where that begins, and the state after it (of the last one ``""``)."""


def items(raw: str, state: str) -> list[Item]:
    """The stretches of the raw text; a call that is none is content, joined with what is around it."""
    found: list[Item] = []
    at, begin = 0, 0
    while True:
        ends = [(raw.index(text, at) + len(text), text, to) for text, to in TRANSITIONS[state] if text in raw[at:]]
        end, marker, after = min(ends, default=(len(raw), "", ""))
        text = raw[at : end - len(marker)]
        if state == TOOL and not text.isalpha():
            _join(found, (CONTENT, raw[begin:end], begin, after))
        else:
            _join(found, (state, text, at, after))
        if not marker:
            return found
        begin, at, state = end - len(marker), end, after


def _join(found: list[Item], item: Item) -> None:
    kind, text, begin, after = item
    # Content goes on where a broken call begins or ends, and nowhere else.
    if kind == CONTENT and found and found[-1][0] == CONTENT and begin == found[-1][2] + len(found[-1][1]):
        found[-1] = (CONTENT, found[-1][1] + text, found[-1][2], after)
    else:
        found.append(item)


def at_once(raw: str, initial: str, stops: Sequence[str] = ()) -> Divided:
    out, leading, after_call = Divided(), False, False
    found = items(raw, initial)
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


def pieces_of(raw: str, sizes: Sequence[int]) -> list[str]:
    out, at = [], 0
    while at < len(raw):
        out.append(raw[at : at + sizes[len(out) % len(sizes)]])
        at += len(out[-1])
    return out


@given(TEXTS, INITIAL, STOPS, st.lists(st.integers(1, 7), min_size=1))
def test_an_answer_is_divided_as_its_whole_text_would_be(
    raw: str, initial: str, stops: list[str], sizes: list[int]
) -> None:
    expected = at_once(raw, initial, stops)
    assert streamed(shape(initial), [raw], stops) == expected
    assert streamed(shape(initial), list(raw), stops) == expected
    assert streamed(shape(initial), pieces_of(raw, sizes), stops) == expected


@given(TEXTS, INITIAL, STOPS, st.sets(st.integers(1, 40)))
def test_entries_are_those_of_the_tokens_that_begin_before_the_cut(
    raw: str, initial: str, stops: list[str], cuts: set[int]
) -> None:
    tokens = Tokens(raw, cuts)
    cut = at_once(raw, initial, stops).cut
    expected = [
        token for token, (start, end) in enumerate(places(tokens.chunks)) if cut is None or start < cut or end <= cut
    ]
    assert answer(tokens, shape(initial), stops).entries == expected


@given(TEXTS)
def test_without_calls_no_whitespace_waits(raw: str) -> None:
    channels, out = ChannelParser(ChannelFormat(transitions={CONTENT: [("<r>", REASONING)]}), ()), ""
    raw = raw.replace("<", "")
    for character in raw:
        out += "".join(channels.feed(character).content)
        assert out == raw[: len(out)]
        assert channels.passed == len(out)
    assert out == raw


@given(TEXTS, st.lists(st.integers(1, 7), min_size=1))
def test_where_no_call_can_be_read_all_is_content(raw: str, sizes: list[int]) -> None:
    transitions = {CONTENT: [("<t>", TOOL)], TOOL: [("</t>", CONTENT)]}
    for calls in (CallFormat(start="<t>", end="</t>", parse=json.loads), CallFormat(start="<t>", end="</t>")):
        found = streamed(ChannelFormat(transitions=transitions, calls=calls), pieces_of(raw, sizes))
        assert found == Divided(content=raw)


@given(TEXTS, st.lists(st.integers(1, 7), min_size=1))
def test_thoughts_and_content_are_the_text_without_the_markers_between(raw: str, sizes: list[int]) -> None:
    transitions = {CONTENT: [("<r>", REASONING)], REASONING: [("</r>", CONTENT)]}
    # No space, so none is dropped.
    raw = "".join(raw.split())
    found = streamed(ChannelFormat(transitions=transitions), pieces_of(raw, sizes))
    content, _, rest = raw.partition("<r>")
    reasoning = ""
    while rest:
        thoughts, _, rest = rest.partition("</r>")
        more, _, rest = rest.partition("<r>")
        reasoning, content = reasoning + thoughts, content + more
    assert (found.content, found.reasoning) == (content, reasoning)


# By hand


def fed(channels: ChannelParser, *texts: str) -> list[tuple[str, str, int]]:
    given = []
    for text in texts:
        parts = channels.feed(text)
        given.append(("".join(parts.content), "".join(parts.reasoning), channels.passed))
    return given


def test_what_is_held_back_and_for_how_long() -> None:
    channels = ChannelParser(shape(REASONING), ["END"])
    assert fed(channels, " \n", "so ", "it", " is <", "/r", ">\n", "\nA E", "N", "x\n", " y") == [
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


def test_a_call_is_passed_with_its_end_marker_and_the_space_after_it_with_the_next() -> None:
    channels = ChannelParser(shape(), ["xyz"])
    texts = ["ok x", " ", "<t", ">", "f", "</t>", "\n", "<t>g</t>", " ", "!"]
    assert [passed for _, _, passed in fed(channels, *texts)] == [3, 3, 3, 3, 3, 13, 13, 22, 22, 24]
    assert channels.has_called


def test_a_run_of_half_markers_is_not_held_back_for_ever() -> None:
    channels = ChannelParser(shape(), ())
    given = "".join(text for text, _, _ in fed(channels, *"<" * 1000))
    assert 990 <= len(given) <= 1000
    assert fed(channels, "r>x")[0][0] == "<" * (999 - len(given))
    assert channels.state == REASONING


def test_a_call_without_a_format_to_read_it_is_dropped() -> None:
    found = streamed(ChannelFormat(transitions=TRANSITIONS), list("a <t>f</t> b"))
    assert (found.content, found.calls) == ("a  b", [])


def test_a_marker_may_lead_to_a_state_without_an_end() -> None:
    channels = ChannelParser(ChannelFormat(transitions={CONTENT: [("<x>", "elsewhere")]}), ())
    assert fed(channels, "a<x>b") == [("a", "", 5)]


def test_a_marker_between_space_and_a_call_keeps_the_space() -> None:
    assert streamed(shape(), ["a <|s|><t>f</t>"]).content == "a "


def test_a_marker_inside_the_thoughts_is_passed_with_the_space_before_it() -> None:
    channels = ChannelParser(ChannelFormat(initial=REASONING, transitions={REASONING: [("<x>", REASONING)]}), ())
    assert fed(channels, "a ", "<x>", "b") == [("", "a", 1), ("", " ", 5), ("", "b", 6)]


def test_of_two_markers_that_begin_alike_the_shorter_is_met() -> None:
    transitions = {CONTENT: [("<think>!", TOOL), ("<think>", REASONING), ("", TOOL)]}
    for pieces in (["a<think>!b"], list("a<think>!b")):
        assert streamed(ChannelFormat(transitions=transitions), pieces) == Divided("a", "!b")


def test_content_behind_a_call_keeps_its_space_though_thoughts_came_before() -> None:
    assert streamed(shape(REASONING), ["x</r> <t>f</t> b"]) == Divided(" b", "x", [("f", '{"of": "f"}')])


def test_a_marker_may_end_one_call_and_begin_the_next() -> None:
    transitions = {CONTENT: [("<t>", TOOL)], TOOL: [("<n>", TOOL)]}
    found = streamed(ChannelFormat(transitions=transitions, calls=CALLS), ["<t>f<n>!"])
    assert found == Divided("!", calls=[("f", '{"of": "f"}')])


def test_a_stop_string_before_a_call_leaves_no_call() -> None:
    for pieces in (["a END <t>f</t>"], list("a END <t>f</t>")):
        assert streamed(shape(), pieces, ["END"]) == Divided("a ", cut=2)


@pytest.mark.parametrize(
    "raw", ["<t>STOP</t>", "<r>STOP</r>", "<|h|>STOP<|m|>", "ST<t>a</t>OP", "ST<r></r>OP", "a\n<t>a</t>"]
)
def test_a_stop_string_counts_in_content_only(raw: str) -> None:
    for pieces in ([raw], list(raw)):
        assert streamed(shape(), pieces, ["STOP", "\n"]).cut is None


def test_whitespace_is_held_in_linear_work() -> None:
    def seconds(count: int) -> float:
        space = TrailingWhitespace()
        begun = time.thread_time()
        for _ in range(count):
            space.feed(" ")
        assert len(space.feed("x")) == count + 1
        return time.thread_time() - begun

    few, many = min(seconds(5_000) for _ in range(3)), min(seconds(100_000) for _ in range(2))
    # Quadratic work would be 400 times as much.
    assert many < 100 * few


@pytest.mark.parametrize("text", [" ", "x", "<", "<t", "é"])
@pytest.mark.parametrize("opened", ["", "<r>", "<t>"])
def test_work_grows_with_the_length_of_an_answer_only(opened: str, text: str) -> None:
    def seconds(count: int) -> float:
        channels = ChannelParser(shape(), ["xxxy"])
        channels.feed(opened)
        begun = time.thread_time()
        for _ in range(count):
            channels.feed(text)
        channels.finish()
        return time.thread_time() - begun

    few, many = min(seconds(1_000) for _ in range(3)), seconds(20_000)
    assert many < 100 * few
