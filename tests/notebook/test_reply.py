"""Thoughts and calls in replies: gathered from the pieces, and shown without becoming live."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lmx_lab.notebook.arguments import chat_request
from lmx_lab.notebook.reply import Reply, ReplyStream, ToolCall, tool_calls
from lmx_lab.server.translate import timings, usage
from lmx_lab.values.generation import Delta, GenerationReport, ToolCallDelta
from tests.server.test_translate import report

LIVE = [
    "<script>",
    "</details>",
    "<img src=x onerror=y>",
    "![a](http://b)",
    "[a](b)",
    "`",
    "```\n",
    "\n\n",
    "&lt;",
    "\r",
]
PIECES = (
    ToolCallDelta(index=0, id="c1", name="look", arguments='{"at":'),
    ToolCallDelta(index=1, id="c2", name="see"),
    ToolCallDelta(index=0, arguments=' "sea"}'),
)


def reply(text: str = "hi", done: GenerationReport | None = None) -> Reply:
    cost = done or report(reasoning=3)
    spent, took = usage([cost]), timings(cost)
    return Reply(
        text=text, model="tiny", finish_reason="stop", usage=spent, timings=took, ttft_s=cost.ttft_s, report=cost
    )


class Page(HTMLParser):
    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.text = ""
        self.feed(MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(markdown))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements |= {tag, *(name for name, _ in attributes)}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_calls_are_assembled_from_their_pieces() -> None:
    look, see = tool_calls(PIECES)
    assert (look.id, look.name, look.arguments, look.parsed) == ("c1", "look", '{"at": "sea"}', {"at": "sea"})
    assert (see.name, see.arguments, see.parsed) == ("see", "", {})


@pytest.mark.parametrize("arguments", ['{"at": "se', "[1]", "[" * 100_000])
def test_arguments_that_are_not_an_object_are_not_parsed(arguments: str) -> None:
    assert ToolCall(id="c", name="look", arguments=arguments).parsed is None


def test_a_reply_can_be_a_message_of_the_next_prompt() -> None:
    assert reply("Hello").message == {"role": "assistant", "content": "Hello"}
    pieces = (ToolCallDelta(index=0, id="a", name="add"), ToolCallDelta(index=0, arguments='{"x":1}'))
    called = reply("").including(Delta(text="", tokens=1, tool_calls=pieces)).message
    result = {"role": "tool", "tool_call_id": "a", "content": "2"}
    request = chat_request([{"role": "user", "content": "?"}, called, result], {})
    (call,) = request.messages[1].tool_calls or ()
    assert (call.id, call.function.name, call.function.arguments) == ("a", "add", {"x": 1})


def test_a_plain_reply_shows_only_text_and_cost() -> None:
    assert repr(reply()).splitlines()[:2] == ["hi", ""]
    assert "thoughts" not in repr(reply()) + reply()._repr_markdown_()


def test_a_reply_shows_its_calls_and_mentions_thoughts() -> None:
    shown = reply("").including(Delta(text="", tokens=0, reasoning="hm", tool_calls=PIECES))
    lines = repr(shown).splitlines()
    assert lines[:4] == ["[thoughts, 3 tokens: see .reasoning]", "", '→ look({"at": "sea"})', "→ see()"]
    page = Page(shown._repr_markdown_())
    assert all(part in page.text for part in ("thoughts, 3 tokens", "hm", '→ look({"at": "sea"})', "→ see()"))
    assert {"details", "summary", "code"} <= page.elements


@given(st.lists(st.sampled_from(LIVE) | st.text(max_size=5), max_size=8).map("".join))
def test_thoughts_and_calls_never_become_html(text: str) -> None:
    calls = (ToolCallDelta(index=0, id=text, name=text, arguments=text),)
    page = Page(reply("").including(Delta(text="", tokens=0, reasoning=text, tool_calls=calls))._repr_markdown_())
    assert page.elements <= {"p", "details", "summary", "small", "br", "code"}


class Pieces:
    """A generation that has these to say."""

    def __init__(self, *deltas: Delta) -> None:
        self._deltas = list(deltas)

    async def __anext__(self) -> Delta:
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.pop(0)

    def finished(self) -> GenerationReport:
        return report(reasoning=2)

    def close(self) -> None:
        self._deltas.clear()


async def hand_over(work: Coroutine[Any, Any, Any]) -> Any:
    return await work


def test_iterating_a_stream_gives_text_and_its_reply_has_everything() -> None:
    deltas = [
        Delta(text="", tokens=2, reasoning="hm"),
        Delta(text="Let me ", tokens=1),
        Delta(text="see.", tokens=1, tool_calls=PIECES[:2]),
        Delta(text="", tokens=1, tool_calls=PIECES[2:]),
    ]
    stream = ReplyStream(Pieces(*deltas), finish=reply, block=asyncio.run, hand_over=hand_over)
    pieces = []
    for piece in stream:
        assert stream.reasoning == "hm"
        pieces.append(piece)
    assert pieces == ["Let me ", "see."]
    assert stream.reply is not None
    assert (stream.reply.text, stream.reply.reasoning) == ("Let me see.", "hm")
    assert stream.reply.tool_calls == tool_calls(PIECES)
