"""Test the conversion of conversations to prompts, to files and from files."""

from __future__ import annotations

import json

import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.panels.conversation import (
    MAX_CHARACTERS,
    MAX_MESSAGES,
    TranscriptMessage,
    from_json,
    to_chat_messages,
    to_json,
    to_markdown,
    trim_transcript,
)

TRANSCRIPT = (
    TranscriptMessage(id=1, role="user", text="a\nb \u00fc"),
    TranscriptMessage(id=2, role="assistant", text="c", reasoning="d\ne", stats="3 tokens"),
    TranscriptMessage(id=3, role="user", text="f"),
    TranscriptMessage(id=4, role="assistant", text="", error="no model is loaded"),
)


def test_the_transcript_is_bounded_and_begins_with_a_question() -> None:
    turns = tuple(TranscriptMessage(id=i, role=("user", "assistant")[i % 2], text="x") for i in range(MAX_MESSAGES + 3))
    kept = trim_transcript(turns)
    assert len(kept) == MAX_MESSAGES - 1
    assert kept[0].role == "user"
    assert kept[-1] is turns[-1]
    large = tuple(
        TranscriptMessage(id=i, role=("user", "assistant")[i % 2], text="x" * (MAX_CHARACTERS // 3)) for i in range(6)
    )
    assert trim_transcript(large) == large[4:]


def test_questions_without_an_answer_are_not_in_the_prompt() -> None:
    turns = (
        TranscriptMessage(id=1, role="user", text="a"),
        TranscriptMessage(id=2, role="assistant", text="", error="no"),
        TranscriptMessage(id=3, role="user", text="b"),
        TranscriptMessage(id=4, role="assistant", text="c"),
        TranscriptMessage(id=5, role="user", text="d"),
    )
    assert [it["content"] for it in to_chat_messages(turns, " ", unanswered=turns[-1])] == ["b", "c", "d"]


def test_a_file_has_the_messages_of_the_chat_format_and_all_that_is_shown() -> None:
    saved = to_json(TRANSCRIPT, {"temperature": 0.5, "system": "Be short."})
    messages = json.loads(saved)["messages"]
    assert messages[0] == {"role": "system", "content": "Be short."}
    assert messages[2] == {"role": "assistant", "content": "c", "reasoning_content": "d\ne", "stats": "3 tokens"}
    loaded, settings = from_json(saved)
    assert tuple(TranscriptMessage(id=at, **each) for at, each in enumerate(loaded, 1)) == TRANSCRIPT
    assert settings == {"temperature": 0.5, "system": "Be short."}


def test_a_list_of_messages_is_a_conversation_too() -> None:
    loaded, settings = from_json('[{"role": "user", "content": "a \\ud800"}]')
    assert (loaded[0]["role"], loaded[0]["text"], settings) == ("user", "a ?", {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("3", "no list of messages"),
        ("[]", "no list of messages"),
        ('{"messages": {}}', "no list of messages"),
        ('{"messages": [{"role": "user", "content": "a"}], "sampling": 3}', "sampling is 3"),
        ("[3]", "message 0 .*it is 3"),
        ('[{"role": "user", "content": ["a"]}]', "content is .*must be a string"),
        ('[{"role": "tool", "content": "a"}]', "role is 'tool'"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]', "message 1 .*role is"),
    ],
)
def test_a_file_without_a_conversation_is_refused_with_the_next_step(text: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refusal:
        from_json(text)
    assert "sampling" in words or "choose a file" in refusal.value.message


def test_a_conversation_as_markdown_has_a_heading_for_each_message() -> None:
    assert to_markdown(TRANSCRIPT, " ") == (
        "## You\n\na\nb \u00fc\n\n## Model\n\n> d\n> e\n\nc\n\n*3 tokens*\n\n"
        "## You\n\nf\n\n## Model\n\n**no model is loaded**\n"
    )
