"""Tests that a stream has the parts and the cost of the whole answer, in every format."""

import json
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import pytest

from tests.support.formats import CLOCK, FORMATS, STOP, Answer, Request, each_format
from tests.support.labs import serving

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
CALLED = ("clock", {"zone": "UTC"})
UNMARKED = '{"name": "clock", "arguments": {"zone": "UTC"}}'
UNKNOWN = UNMARKED.replace("clock", "watch")
FORCED = Answer(calls=(("clock", {"zone": ""}),), finish="tool_calls")
"""The echo engine fills enforced texts with as little as possible."""


@dataclass(frozen=True)
class Case:
    """A message that the echo engine repeats, and the answer to it."""

    name: str
    text: str
    answer: Answer
    fields: dict[str, Any]
    needs: frozenset[str] = frozenset()


def case(name, text, *needs, answer, **fields):
    return Case(name, text, answer, fields, frozenset(needs))


THOUGHT = "<think>hm</think>one"
CASES = [
    case("text", 'hello "world" <b> \u2028 é', answer=Answer(text='hello "world" <b> \u2028 é')),
    case("empty", "", "history", answer=Answer()),
    case("length", "one two three", answer=Answer(text="one two", finish="length"), max_tokens=2),
    case("stop", "one two three", "stop", answer=Answer(text="one "), stop=STOP),
    case("reasoning", THOUGHT, "reasoning", answer=Answer(text="one", reasoning="hm")),
    case("only reasoning", "<think>hm</think>", "reasoning", answer=Answer(reasoning="hm")),
    case("reasoning off", THOUGHT, "reasoning", answer=Answer(text=THOUGHT), thinks=False),
    case("call", CALL, "tools", answer=Answer(calls=(CALLED,), finish="tool_calls"), tools=[CLOCK]),
    case(
        "reasoning, text and calls",
        f"<think>hm</think>one\n{CALL}\n{CALL}",
        "tools",
        answer=Answer(text="one", reasoning="hm", calls=(CALLED, CALLED), finish="tool_calls"),
        tools=[CLOCK],
        max_tokens=200,
    ),
    case(
        "calls without markers",
        f"<think>hm</think>\n```json\n{UNMARKED}\n{UNMARKED}\n```",
        "tools",
        answer=Answer(reasoning="hm", calls=(CALLED, CALLED), finish="tool_calls"),
        tools=[CLOCK],
        max_tokens=200,
    ),
    case("unknown tool", UNKNOWN, "tools", answer=Answer(text=UNKNOWN), tools=[CLOCK]),
    case("call as an example", f"{UNMARKED} is", "tools", answer=Answer(text=f"{UNMARKED} is"), tools=[CLOCK]),
    case("no choice, no markers", UNMARKED, "forced", answer=Answer(text=UNMARKED), tools=[CLOCK], choice="none"),
    case("tools, no call", "hello", "tools", answer=Answer(text="hello"), tools=[CLOCK], choice="auto"),
    case("no choice", CALL, "forced", answer=Answer(text=CALL), tools=[CLOCK], choice="none"),
    case("forced", "x", "forced", answer=FORCED, tools=[CLOCK], choice="required", parallel=False),
    case("named", "x", "forced", answer=FORCED, tools=[CLOCK | {"name": "watch"}, CLOCK], choice="clock"),
]


@pytest.mark.parametrize(
    ("form", "case"),
    [
        pytest.param(form, case, id=f"{form.name}-{case.name}")
        for form in FORMATS
        for case in CASES
        if form.can >= case.needs
    ],
)
def test_a_stream_is_the_whole_answer(form, case, http):
    request = Request(messages=[{"role": "user", "content": case.text}], **case.fields)
    body = form.assemble(form.frames(form.streamed(http, request)))
    found = form.answer(body)
    assert found.prompt_tokens > 0 < found.output_tokens
    assert replace(found, prompt_tokens=0, output_tokens=0) == case.answer
    whole = form.post(http, request).json()
    assert form.answer(whole) == found
    if "http" in form.can:
        assert form.comparable(whole) == form.comparable(body)


@each_format()
def test_a_stream_has_no_line_ends_that_only_unicode_has(form, http):
    text = "a\u2028b\u2029c\x85d"
    streamed = form.streamed(http, Request(messages=[{"role": "user", "content": text}]))
    assert streamed.splitlines() == streamed.removesuffix("\n").split("\n")
    assert form.answer(form.assemble(form.frames(streamed))).text == text


@each_format("forced")
def test_parallel_calls_can_be_disabled(form, tmp_path):
    calls = [{"name": "clock", "arguments": {"zone": zone}} for zone in ("UTC", "CET")]
    script = tmp_path / "script.jsonl"
    script.write_text(f"{json.dumps({'tool_calls': calls})}\n" * 3)
    with serving(tmp_path, "echo", echo_script=script) as lab, httpx2.Client(base_url=lab.url) as http:
        for parallel, count in ((True, 2), (None, 2), (False, 1)):
            request = Request(tools=[CLOCK], choice="required", parallel=parallel, max_tokens=300)
            body = form.assemble(form.frames(form.streamed(http, request)))
            assert len(form.answer(body).calls) == count
