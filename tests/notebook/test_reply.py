"""Test replies: how they are assembled from deltas, and that a model's text never becomes HTML, a link or an image."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from pydantic import BaseModel

from lmx_lab.arguments import chat_request
from lmx_lab.backend import AnswerToolCall, FinishedAnswer, RunningAnswer
from lmx_lab.blocking import Portal
from lmx_lab.instrument.lens import TokenTable
from lmx_lab.notebook.reply import Reply, ReplyStream, json_shape, safe_markdown
from lmx_lab.portal import LoopThread
from lmx_lab.server.translate import timings, usage
from lmx_lab.values.outputs import Delta, TokenLogprob, ToolCallDelta
from tests.support.asking import report
from tests.support.panels import Page

MARKUP = [
    *("<script>", "</script>", "</details>", "<img src=x onerror=alert(1)>", "<a href='x'>", "<!--", "-->", "<pre>"),
    *("![a](http://x/y)", "[a](javascript:x)", "[a]: javascript:x", "[a][a]", "[a]", "<javascript:x>", '"'),
    *("&lt;", "&lt;b&gt;", "&#60;i&#62;", "```\n", "```html\n", "~~~\n", "`", "``", "\r", "\n", "\n\n", "    "),
    *("- ", "> ", "1. ", "\\", "word", "* ", "|", "---"),
]
"""Parts of Markdown and HTML that could become elements of a page, and those that arrange text."""
HARMLESS = {"p", "pre", "code", "ul", "ol", "li", "blockquote", "em", "strong", "hr", "br", "start"} | {
    *("h1", "h2", "h3", "table", "thead", "tbody", "tr", "th", "td", "s", "class")
}
PIECES = (
    ToolCallDelta(index=0, id="c1", name="look", arguments='{"at":'),
    ToolCallDelta(index=1, id="c2", name="see"),
    ToolCallDelta(index=0, arguments=' "sea"}'),
)


def finished(answer, report):
    return FinishedAnswer.of(
        answer,
        model="tiny",
        finish_reason="stop",
        usage=usage([[report]]),
        timings=timings([[report]]),
        ttft_s=report.ttft_s,
        report=report,
    )


def reply(text="hi", *, reasoning="", calls=()):
    answer = Delta(text=text, tokens=1, reasoning=reasoning, tool_calls=tuple(calls))
    return Reply.of_answer(finished(answer, report(reasoning=3)))


def rendered(markdown):
    return Page(MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(markdown))


# --- replies


def test_calls_are_assembled_from_their_pieces():
    look, see = reply(calls=PIECES).tool_calls
    assert (look.id, look.name, look.arguments, look.parsed) == ("c1", "look", '{"at": "sea"}', {"at": "sea"})
    assert (see.name, see.arguments, see.parsed) == ("see", "", {})


@pytest.mark.parametrize("arguments", ['{"at": "se', "[1]", "[" * 100_000])
def test_arguments_that_are_not_an_object_are_not_parsed(arguments):
    assert AnswerToolCall(id="c", name="look", arguments=arguments).parsed is None


def test_a_reply_can_be_a_message_of_the_next_prompt():
    assert reply("Hello").message == {"role": "assistant", "content": "Hello"}
    pieces = (ToolCallDelta(index=0, id="a", name="add"), ToolCallDelta(index=0, arguments='{"x":1}'))
    called = reply("", calls=pieces).message
    result = {"role": "tool", "tool_call_id": "a", "content": "2"}
    request = chat_request([{"role": "user", "content": "?"}, called, result], {})
    (call,) = request.messages[1].tool_calls or ()
    assert (call.id, call.function.name, call.function.arguments) == ("a", "add", {"x": 1})


class City(BaseModel):
    name: str
    people: int


CITY = '{"name":"Ulm","people":128}'
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "City", "schema": City.model_json_schema()}}


def test_a_json_answer_is_parsed_and_shown_with_indentation():
    answer = Delta(text=CITY, tokens=1)
    for shape, value in ((City, City(name="Ulm", people=128)), (JSON_FORMAT, {"name": "Ulm", "people": 128})):
        made = Reply.of_answer(finished(answer, report()), json_shape(shape))
        assert made.parsed == value
        assert '{\n  "name": "Ulm",\n  "people": 128\n}' in repr(made)
        assert rendered(made._repr_markdown_()).text.startswith('{\n  "name": "Ulm"')
    assert Reply.of_answer(finished(answer, report())).parsed is None


@pytest.mark.parametrize("text", [CITY[:-1], "", "[" * 100_000])
def test_a_json_answer_that_was_cut_has_no_value_and_says_so(text):
    made = Reply.of_answer(finished(Delta(text=text, tokens=1), report()), City)
    assert made.parsed is None
    assert ("not complete" in repr(made)) == ("not complete" in made._repr_markdown_()) == bool(text)


def test_an_answer_that_was_cut_does_not_end_in_a_part_of_a_character():
    cut = replace(reply("Grüße \U0001f468\u200d\ufffd"), finish_reason="length")
    for shown in (str(cut), repr(cut), cut._repr_markdown_()):
        assert "Grüße \U0001f468" in shown
        assert "\ufffd" not in shown
    assert cut.text.endswith("\ufffd")
    assert str(replace(cut, finish_reason="stop")) == cut.text


def test_log_probabilities_are_a_table():
    def token(text, logprob, *top):
        return TokenLogprob(token=1, text=text, bytes=text.encode(), logprob=logprob, top=top)

    chosen = token("<b>", -0.5, token("<b>", -0.5), token(" c", -1.5))
    table = Reply.of_answer(finished(Delta(text="<b>", tokens=1, logprobs=(chosen,)), report())).logprobs
    assert (len(table), table[0], table[:1]) == (1, chosen, [chosen])
    assert repr(table).splitlines()[1].split() == ["'<b>'", "-0.500", "60.7%", "'", "c'", "22.3%"]
    assert "<b>" not in table._repr_html_()
    assert table.df.to_dict("records")[0]["alternatives"] == {"<b>": -0.5, " c": -1.5}
    assert TokenTable([]).df.dtypes.to_dict() == table.df.dtypes.to_dict()
    assert "60 more tokens" in repr(TokenTable([chosen] * 100))


def test_a_plain_reply_shows_only_text_and_cost():
    assert repr(reply()).splitlines()[:2] == ["hi", ""]
    assert f"{reply()}{reply():>4}" == "hi  hi"
    assert "thoughts" not in repr(reply()) + reply()._repr_markdown_()


def test_a_reply_shows_its_calls_and_mentions_thoughts():
    shown = reply("", reasoning="hm", calls=PIECES)
    lines = repr(shown).splitlines()
    assert lines[:4] == ["[thoughts, 3 tokens: see .reasoning]", "", '→ look({"at": "sea"})', "→ see()"]
    page = rendered(shown._repr_markdown_())
    assert all(part in page.text for part in ("thoughts, 3 tokens", "hm", '→ look({"at": "sea"})', "→ see()"))
    assert {"details", "summary", "code"} <= page.names


@pytest.mark.slow
@given(st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=8).map("".join))
def test_thoughts_and_calls_never_become_html(text):
    calls = (ToolCallDelta(index=0, id=text, name=text, arguments=text),)
    page = rendered(reply("", reasoning=text, calls=calls)._repr_markdown_())
    assert page.names <= {"p", "details", "summary", "small", "br", "code"}


def test_a_reply_displays_its_text_and_cost():
    page = rendered(reply()._repr_markdown_())
    assert "5 tokens" in page.text
    assert page.names <= {*HARMLESS, "small"}


# --- Markdown


@pytest.mark.slow
@given(st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=12).map("".join))
def test_no_text_of_a_model_becomes_live_html_a_link_or_an_image(text):
    assert rendered(safe_markdown(text)).names <= HARMLESS


def test_html_of_a_model_is_shown_as_its_text():
    text = "Use <b>bold</b> & `a < b`:\n\n```html\n<script>x</script>\n\n  <i>\n```\nand **so** on"
    page = rendered(safe_markdown(text))
    lines = [line for line in page.text.splitlines() if line]
    assert lines == ["Use <b>bold</b> & a < b:", "<script>x</script>", "  <i>", "and so on"]
    assert {"strong", "pre", "code"} <= page.names


def test_a_block_that_was_cut_off_is_still_code():
    assert rendered(safe_markdown("```python\nif a < b:\n    x")).text == "if a < b:\n    x\n"


# --- streams


class ScriptedStream:
    """An answer with these deltas."""

    def __init__(self, *deltas):
        self._deltas = list(deltas)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.pop(0)

    def close(self):
        self._deltas.clear()


@pytest.fixture
def portal():
    thread = LoopThread()
    thread.start()
    yield Portal(lambda: thread)
    thread.stop()


def test_iterating_a_stream_gives_text_and_its_reply_has_everything(portal):
    deltas = [
        Delta(text="", tokens=2, reasoning="hm"),
        Delta(text="Let me ", tokens=1),
        Delta(text="see.", tokens=1, tool_calls=PIECES[:2]),
        Delta(text="", tokens=1, tool_calls=PIECES[2:]),
    ]
    running = RunningAnswer(ScriptedStream(*deltas), lambda answer: finished(answer, report(reasoning=2)))
    stream = ReplyStream(running, SimpleNamespace(portal=portal))
    pieces = []
    for piece in stream:
        assert stream.reasoning == "hm"
        pieces.append(piece)
    assert pieces == ["Let me ", "see."]
    assert (stream.reply.text, stream.reply.reasoning) == ("Let me see.", "hm")
    assert stream.reply.tool_calls == reply(calls=PIECES).tool_calls
