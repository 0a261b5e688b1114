"""Tests of the answers of the echo engine. ``tests/contract/engines`` tests its common behavior with other engines, and
``tests/contract/formats`` tests calls and errors after a text.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine import AnswerFormat, ChatPrompt, EmbeddingRequest, ModelManager, RerankRequest, TextPrompt
from lmx_lab.engine.echo.model import END, FIRST_BYTE, LONGEST_PIECE, EchoVocabulary
from lmx_lab.errors import (
    ContextLengthError,
    GenerationTimeoutError,
    InvalidRequestError,
    QueueFullError,
    UnusableModelError,
)
from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO
from lmx_lab.values.steering import SteeringVector
from tests.support.asking import invalid
from tests.support.engines import (
    PLACE_FORMAT,
    PLACE_TOOLS,
    chat_request,
    finish_answer,
    load_entry,
    manager_with,
)
from tests.support.engines import run_chat as run
from tests.support.programs import run_script

pytestmark = pytest.mark.anyio
ARGUMENTS = '{"kind": "river", "wet": true}'


@pytest.fixture(scope="module")
async def manager():
    async with manager_with(ECHO) as manager:
        yield manager


@pytest.mark.parametrize("text", ["Hello!", "  spaces \n\n stay ", "東京 é 😀", "<tool_call>", "a <think> b", ""])
async def test_the_last_message_is_repeated(manager, text):
    result = await run(manager, content=text)
    assert (result.text, result.reasoning, result.reason) == (text, "", "stop")


async def test_the_last_message_is_repeated_whatever_its_role(manager):
    messages = ({"role": "user", "content": "one"}, {"role": "tool", "tool_call_id": "1", "content": "two"})
    assert (await run(manager, prompt=ChatPrompt(messages=messages))).text == "two"
    assert (await run(manager, prompt=TextPrompt(text="plain <think>text"))).text == "plain <think>text"


async def test_a_message_may_contain_reasoning(manager):
    result = await run(manager, content="<think>Is it?</think>It is.")
    assert (result.reasoning, result.text, result.report.reasoning_tokens) == ("Is it?", "It is.", 10)
    short = await run(manager, content="<think>Is it, or is it not?</think>It is.", thinking_budget=3)
    assert "Is it, or is it not?".startswith(short.reasoning.strip())
    assert len(short.reasoning) < 12


async def test_an_answer_in_a_format_is_short_and_reproducible(manager):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["name", "age", "tags"],
    }
    form = AnswerFormat(kind="json_schema", text=json.dumps(schema))
    result = {(await run(manager, content="Hi", answer_format=form, top_logprobs=top)).text for top in (None, 2)}
    assert len(result) == 1
    value = json.loads(result.pop())
    assert (value["name"], value["age"] in range(-9, 10)) == ("", True)


async def test_a_message_that_matches_the_format_is_repeated(manager):
    message = '{"kind": "mountain", "wet": false}'
    assert (await run(manager, content=message, answer_format=PLACE_FORMAT)).text == message


async def test_vectors_are_refused(manager):
    with invalid("steer", 'engine="mlx"'):
        await run(manager, steer=(SteeringVector(layer=0, vector="AAAAAA=="),))


async def test_similar_texts_have_similar_vectors(manager):
    texts = ("the sea is salty", "salty sea water", "bread and butter")
    sea, water, bread = (await manager.embed(EmbeddingRequest(inputs=texts, model="echo"))).vectors
    assert sea @ water > 0.3 > sea @ bread
    ranking = await manager.rerank(RerankRequest(query="Salty water", documents=texts))
    assert ranking.order()[0] == 1


# Scripts


@pytest.fixture
async def scripted(tmp_path):
    """A function that creates an engine whose script has these answers."""
    engines = []

    async def create(*answers, **settings):
        (tmp_path / "script.json").write_text(json.dumps(answers))
        manager = ModelManager(replace(Settings(echo_script=tmp_path / "script.json"), **settings))
        engines.append(manager)
        await load_entry(manager, ECHO)
        return manager

    yield create
    for manager in engines:
        await asyncio.to_thread(manager.stop)


@pytest.mark.slow
async def test_messages_are_repeated_after_the_end_of_a_script(scripted):
    call = {"name": "look", "arguments": json.loads(ARGUMENTS)}
    manager = await scripted("One.", {"reasoning": "Hm.", "text": "Two.", "tool_calls": [call]})
    assert (await run(manager)).text == "One."
    result = await run(manager, tools=PLACE_TOOLS)
    assert (result.reasoning, result.text, result.calls) == ("Hm.", "Two.", [("look", ARGUMENTS)])
    assert result.reason == "tool_calls"
    assert (await run(manager, content="Three.")).text == "Three."
    await manager.unload()
    await load_entry(manager, ECHO)
    assert (await run(manager)).text == "One."


@pytest.mark.slow
async def test_a_refused_request_does_not_use_an_answer_of_the_script(scripted):
    manager = await scripted({"tool_calls": [{"name": "look", "arguments": json.loads(ARGUMENTS)}]}, "Last.")
    with pytest.raises(
        InvalidRequestError, match=r"answer 1 of the echo script calls the tool 'look'; this request offers no"
    ):
        await run(manager)
    assert (await run(manager, tools=PLACE_TOOLS)).calls == [("look", ARGUMENTS)]
    streams = await manager.generate(chat_request(), 3)
    assert [(await finish_answer(stream)).text for stream in streams] == ["Last."] * 3


async def test_a_scripted_error_without_a_text_occurs_at_once(scripted):
    manager = await scripted({"error": "later", "code": "queue-full"})
    with pytest.raises(QueueFullError, match="later"):
        await manager.submit(chat_request())


async def test_a_request_ends_at_its_deadline_before_a_later_error_of_the_script(scripted):
    manager = await scripted({"error": "later", "delay_s": 30})
    with pytest.raises(GenerationTimeoutError):
        await manager.submit(chat_request(timeout_s=0.05))


async def test_an_answer_is_not_faster_than_its_rate(scripted):
    manager = await scripted({"text": "one two three", "delay_s": 0.05, "tokens_per_s": 200}, echo_tokens_per_s=1000)
    slow, usual = (await run(manager)).report, (await run(manager, content="one two three")).report
    assert slow.ttft_s >= 0.05
    assert slow.decode_s >= 0.05 + (slow.output_tokens - 1) / 200
    assert usual.decode_s >= (usual.output_tokens - 1) / 1000
    assert usual.output_tokens == slow.output_tokens


async def test_an_invalid_script_is_refused_before_the_current_model_is_unloaded(scripted, tmp_path):
    manager = await scripted("One.")
    (tmp_path / "script.json").write_text('"fine"\n{"text": 1}')
    with pytest.raises(UnusableModelError, match="line 2: text is 1"):
        await load_entry(manager, replace(ECHO, path=Path("other")))
    assert (await run(manager)).text == "One."


@pytest.mark.slow
def test_a_process_that_uses_only_echo_does_not_import_mlx():
    program = """
import sys
from lmx_lab import launch
with launch("echo", port=0, loop="thread") as lab:
    assert lab.chat("Hello") and lab.models() is not None
    print(*({"mlx.core", "mlx_lm", "transformers", "xllamacpp"} & set(sys.modules)))
"""
    assert run_script(program).strip() == ""


@pytest.mark.slow
async def test_only_the_beginning_of_a_text_that_is_far_too_long_is_tokenized(manager, monkeypatch):
    lengths = []
    encode = EchoVocabulary.encode

    def record_length(vocabulary, text):
        lengths.append(len(text))
        return encode(vocabulary, text)

    monkeypatch.setattr(EchoVocabulary, "encode", record_length)
    text = "word " * 1_000_000
    with pytest.raises(ContextLengthError, match="more than 32768 tokens"):
        await manager.embed(EmbeddingRequest(inputs=(text,), model="echo"))
    cut = await manager.embed(EmbeddingRequest(inputs=(text,), model="echo", truncate=True))
    assert cut.report.tokens == 32768
    assert max(lengths) < 200_000


VOCABULARY = EchoVocabulary()


@given(st.text())
def test_tokens_decode_to_the_text_that_was_encoded(text):
    tokens = VOCABULARY.encode(text)
    assert VOCABULARY.decode(tokens) == text
    assert len(text.encode()) <= LONGEST_PIECE * len(tokens)


def test_words_are_split_into_pieces_of_three_letters_with_their_space():
    tokens = VOCABULARY.encode("Once upon a time, 東")
    shown = [VOCABULARY.text_of(token) for token in tokens]
    assert shown[:9] == ["O", "nce", " upo", "n", " a", " tim", "e", ",", " "]
    assert shown[9:] == ["bytes:\\xe6", "bytes:\\x9d", "bytes:\\xb1"]


def test_ids_never_change():
    assert VOCABULARY.size == 36_802
    assert VOCABULARY.encode("Once upon a time!") == [95, 9792, 33150, 126, 18524, 32290, 117, 49]


def test_special_tokens_are_shown_by_name_only():
    assert VOCABULARY.decode([END]) == ""
    assert VOCABULARY.show([END]) == "<|end|>"
    assert min(VOCABULARY.encode("<|end|>")) >= FIRST_BYTE
