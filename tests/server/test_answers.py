"""Chunks are written as text: each equals what its pydantic model would dump."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine import Delta, TokenLogprob
from lmx_lab.server.answers import Answer, TextAnswer, TextLogprobs, socket_token
from lmx_lab.server.translate import chat_logprobs, timings, usage
from lmx_lab.wire.chat import ChatChunk, SocketToken
from lmx_lab.wire.completions import Completion, CompletionLogprobs
from tests.server.test_translate import report

TOP = TokenLogprob(token=6, text="y", bytes=b"y", logprob=-0.5)
LOGPROB = TokenLogprob(token=5, text='x"\n', bytes=b'x"\n', logprob=-1.25, top=(TOP,))
PROMPT = TokenLogprob(token=4, text="p", bytes=b"p", logprob=None)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("logprobs", [False, True])
@given(text=TEXTS, name=TEXTS)
def test_every_chat_chunk_equals_the_models_own_dump(logprobs: bool, text: str, name: str) -> None:
    answer = Answer(model=name, fingerprint="mlx", logprobs=logprobs)
    delta = Delta(text=text, tokens=1, logprobs=(LOGPROB,) if logprobs else ())
    spent = usage([report()])
    for chunk in (answer.first(), answer.piece(delta, 3), answer.last(report(), 1), answer.usage(spent)):
        assert ChatChunk.model_validate_json(chunk).model_dump_json(exclude_unset=True) == chunk


def test_a_chat_chunk_says_what_it_was_given() -> None:
    answer = Answer(model="tiny", fingerprint="mlx", logprobs=True)
    (choice,) = ChatChunk.model_validate_json(answer.piece(Delta(text="hé", tokens=1, logprobs=(LOGPROB,)), 2)).choices
    assert (choice.index, choice.delta.content, choice.finish_reason) == (2, "hé", None)
    assert choice.logprobs is not None
    assert [token.model_dump() for token in choice.logprobs.content] == chat_logprobs([LOGPROB])
    last = ChatChunk.model_validate_json(answer.last(report()))
    assert last.timings == timings(report())
    assert last.choices[0].logprobs is None


@given(text=TEXTS, name=TEXTS)
def test_every_text_chunk_equals_the_models_own_dump(text: str, name: str) -> None:
    answer = TextAnswer(model=name, fingerprint="mlx")
    logprobs = TextLogprobs().take([PROMPT, LOGPROB])
    spent = usage([report()])
    chunks = (
        answer.piece(text, logprobs, 0),
        answer.piece(text, None, 4),
        answer.last(report(), 1),
        answer.usage(spent),
    )
    for chunk in chunks:
        assert Completion.model_validate_json(chunk).model_dump_json(exclude_unset=True) == chunk


@given(text=TEXTS)
def test_a_socket_token_equals_the_models_own_dump(text: str) -> None:
    delta = Delta(text=text, tokens=1, logprobs=(LOGPROB,))
    for logprobs in (False, True):
        sent = socket_token(delta, logprobs=logprobs)
        assert SocketToken.model_validate_json(sent).model_dump_json(exclude_unset=True) == sent
        assert set(json.loads(sent)) == ({"token", "logprobs"} if logprobs else {"token"})


def test_several_choices_have_their_timings_together() -> None:
    answer, part = Answer(model="tiny", fingerprint="mlx"), (Delta(text="a", tokens=1), report())
    assert json.loads(answer.full([part], usage([report()])))["timings"]["predicted_n"] == 5
    both = json.loads(answer.full([part, part], usage([report(), report()])))
    assert both["timings"]["predicted_n"] == 10
    assert [choice["index"] for choice in both["choices"]] == [0, 1]


def test_legacy_logprobs_name_the_token_itself_among_the_likeliest() -> None:
    taken = TextLogprobs().take([PROMPT, LOGPROB])
    assert taken == CompletionLogprobs(
        tokens=["p", 'x"\n'],
        token_logprobs=[None, -1.25],
        top_logprobs=[None, {"y": -0.5, 'x"\n': -1.25}],
        text_offset=[0, 1],
    )


def test_of_tokens_that_look_alike_the_likeliest_counts() -> None:
    alike = TokenLogprob(token=7, text="y", bytes=b"y", logprob=-3.0, top=(TOP,))
    assert TextLogprobs().take([alike]).top_logprobs == [{"y": -0.5}]


def test_offsets_count_characters_over_all_pieces() -> None:
    tokens = [TokenLogprob(token=0, text="", bytes=part, logprob=-1.0) for part in (b"a", b"\xe2", b"\x82\xac", b"b")]
    whole = TextLogprobs().take(tokens).text_offset
    piecewise = TextLogprobs()
    assert whole == [0, 1, 1, 2]
    assert [offset for token in tokens for offset in piecewise.take([token]).text_offset] == whole
