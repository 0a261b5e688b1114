"""Tests that chunks, which are written as text, equal the dumps of their pydantic models."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.server.chat import ChatWriter, RunningAnswers
from lmx_lab.server.completions import CompletionWriter, LogprobsWriter
from lmx_lab.server.websocket import SocketWriter
from lmx_lab.values.outputs import Delta, TokenLogprob, ToolCallDelta
from lmx_lab.wire.chat import ChatChunk, SocketToken
from lmx_lab.wire.completions import Completion, CompletionLogprobs
from tests.support.asking import report

TOP = TokenLogprob(token=6, text="y", bytes=b"y", logprob=-0.5)
LOGPROB = TokenLogprob(token=5, text='x"\n', bytes=b'x"\n', logprob=-1.25, top=(TOP,))
PROMPT = TokenLogprob(token=4, text="p", bytes=b"p", logprob=None)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
BEGIN = ToolCallDelta(index=0, id="call_1", name="look", arguments='{"at":')
END = ToolCallDelta(index=0, arguments=' "sea"}')
OTHER = ToolCallDelta(index=1, id="call_2", name="see")


def data(event):
    """Return the content of an event."""
    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    return event.removeprefix("data: ")[:-2]


@st.composite
def calls(draw):
    """Draw pieces of tool calls, with or without their names."""
    pieces = []
    for index in draw(st.lists(st.integers(0, 2), max_size=3, unique=True)):
        identity = {"id": draw(TEXTS), "name": draw(TEXTS)} if draw(st.booleans()) else {}
        pieces.append(ToolCallDelta(index=index, arguments=draw(TEXTS), **identity))
    return tuple(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("logprobs", [False, True])
@given(text=TEXTS, name=TEXTS, thoughts=TEXTS, tool_calls=calls())
def test_a_chat_chunk_equals_the_dump_of_its_model(logprobs, text, name, thoughts, tool_calls):
    writer = ChatWriter(RunningAnswers(), name, "mlx", logprobs=logprobs, include_usage=True)
    shown = (LOGPROB,) if logprobs else ()
    delta = Delta(text=text, tokens=1, logprobs=shown, reasoning=thoughts, tool_calls=tool_calls)
    *last, done = writer.finish([[report()]])
    assert done == "data: [DONE]\n\n"
    ends = (*writer.end(1, report(finish="tool_calls")), *last)
    for chunk in map(data, (*writer.begin(3, 7), *writer.delta(3, delta), *ends)):
        assert ChatChunk.model_validate_json(chunk).model_dump_json(exclude_unset=True) == chunk


def deltas(writer, delta):
    """Return the choice of each chunk."""
    return [json.loads(data(chunk))["choices"][0] for chunk in writer.delta(0, delta)]


def test_reasoning_text_and_calls_have_separate_chunks():
    delta = Delta(text="hi", tokens=5, reasoning="hm", tool_calls=(BEGIN, END, OTHER))
    named = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    other = {"id": "call_2", "type": "function", "function": {"name": "see", "arguments": ""}}
    assert [choice["delta"] for choice in deltas(ChatWriter(RunningAnswers(), "tiny", "mlx"), delta)[1:]] == [
        {"reasoning_content": "hm"},
        {"content": "hi"},
        {"tool_calls": [{"index": 0, **named}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": "sea"}'}}]},
        {"tool_calls": [{"index": 1, **other}]},
    ]


@pytest.mark.parametrize(
    ("delta", "chunks"),
    [
        (Delta(text="", tokens=1), 0),
        (Delta(text="", tokens=1, logprobs=(LOGPROB,)), 1),
        (Delta(text="", tokens=1, logprobs=(LOGPROB,), tool_calls=(ToolCallDelta(index=0),)), 1),
        (Delta(text="a", tokens=1, logprobs=(LOGPROB,), reasoning="b", tool_calls=(BEGIN,)), 4),
    ],
)
def test_the_logprobs_of_a_delta_are_sent_once_and_first(delta, chunks):
    found = [
        choice["logprobs"] for choice in deltas(ChatWriter(RunningAnswers(), "tiny", "mlx", logprobs=True), delta)[1:]
    ]
    assert [logprobs is not None for logprobs in found] == [number == 0 for number in range(chunks)]


@given(text=TEXTS, name=TEXTS)
def test_a_completion_chunk_equals_the_dump_of_its_model(text, name):
    delta = Delta(text=text, tokens=2, logprobs=(PROMPT, LOGPROB))
    chunks = []
    for writer in (
        CompletionWriter(RunningAnswers(), name, "mlx", logprobs=True, include_usage=True),
        CompletionWriter(RunningAnswers(), name, "mlx"),
    ):
        *spent, done = writer.finish([[report()]])
        assert (len(spent), done) == (int(not chunks), "data: [DONE]\n\n")
        chunks += [*writer.delta(4, delta), *writer.end(1, report()), *spent]
    for chunk in map(data, chunks):
        assert Completion.model_validate_json(chunk).model_dump_json(exclude_unset=True) == chunk


@pytest.mark.slow
@given(text=TEXTS, thoughts=TEXTS, tool_calls=calls())
def test_a_socket_token_equals_the_dump_of_its_model(text, thoughts, tool_calls):
    delta = Delta(text=text, tokens=1, logprobs=(LOGPROB,), reasoning=thoughts, tool_calls=tool_calls)
    for logprobs in (False, True):
        (sent,) = SocketWriter(logprobs=logprobs).delta(0, delta)
        assert SocketToken.model_validate_json(sent).model_dump_json(exclude_unset=True) == sent


def test_a_socket_token_has_only_fields_with_values():
    writer = SocketWriter()
    assert list(writer.delta(0, Delta(text="", tokens=1))) == []
    assert list(writer.delta(0, Delta(text="a", tokens=1))) == ['{"token":"a"}']
    everything = Delta(text="", tokens=1, logprobs=(LOGPROB,), reasoning="hm", tool_calls=(BEGIN, END))
    (message,) = SocketWriter(logprobs=True).delta(0, everything)
    sent = json.loads(message)
    assert set(sent) == {"token", "reasoning_content", "tool_calls", "logprobs"}
    assert (sent["token"], sent["reasoning_content"]) == ("", "hm")
    assert [call["function"] for call in sent["tool_calls"]] == [
        {"name": "look", "arguments": ""},
        {"arguments": '{"at": "sea"}'},
    ]


def test_legacy_logprobs_list_the_token_itself_among_the_most_likely():
    written = LogprobsWriter().write([PROMPT, LOGPROB])
    assert written == CompletionLogprobs(
        tokens=["p", 'x"\n'],
        token_logprobs=[None, -1.25],
        top_logprobs=[None, {"y": -0.5, 'x"\n': -1.25}],
        text_offset=[0, 1],
    )


def test_of_tokens_with_the_same_text_the_most_likely_one_is_listed():
    alike = TokenLogprob(token=7, text="y", bytes=b"y", logprob=-3.0, top=(TOP,))
    assert LogprobsWriter().write([alike]).top_logprobs == [{"y": -0.5}]


def test_offsets_count_the_characters_of_all_pieces():
    tokens = [TokenLogprob(token=0, text="", bytes=part, logprob=-1.0) for part in (b"a", b"\xe2", b"\x82\xac", b"b")]
    whole = LogprobsWriter().write(tokens).text_offset
    piecewise = LogprobsWriter()
    assert whole == [0, 1, 1, 2]
    assert [offset for token in tokens for offset in piecewise.write([token]).text_offset] == whole
