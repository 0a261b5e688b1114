"""Features of llama.cpp only: calls and reasoning in a model's own format, deterministic loads, and prompt lookup."""

import asyncio
import gc
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import lmx_lab
from lmx_lab.engine import (
    ChatPrompt,
    EmbeddingRequest,
    GenerationRequest,
    ModelManager,
    Sampling,
    TextPrompt,
    Tool,
    ToolUse,
)
from lmx_lab.engine.llama_cpp.grammar import GrammarChecker
from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import LoadSpec
from lmx_lab.values.outputs import Delta, merge_deltas
from tests.support.engines import (
    LLAMA_SETTINGS,
    PLACE_FORMAT,
    entry_of,
    finish_answer,
    finish_with_logprobs,
    load_entry,
    manager_with,
    numbers,
    pin,
    request,
    run,
    toward,
    until_idle,
    until_written,
)
from tests.support.families import FAMILIES
from tests.support.gguf import (
    TEMPLATE_KEY,
    with_tokens,
    with_values,
)
from tests.support.models import MARKERS

pytestmark = pytest.mark.anyio
LOOK = Tool(name="look", parameters={"type": "object", "properties": {"at": {"type": "string"}}})
ALL = ToolUse(tools=(LOOK,))
START, END = 5, 6


def chat(**changes):
    prompt = ChatPrompt(messages=({"role": "user", "content": "Where?"},), **changes)
    return GenerationRequest(prompt=prompt, sampling=Sampling(temperature=0), max_tokens=60)


def forced_request(tool_request, tokens):
    """Return the request whose answer consists of these tokens."""
    return replace(toward(tool_request, tokens), max_tokens=len(tokens))


@pytest.fixture(scope="module")
def pieces(tiny):
    return Tokenizer.from_file(str(tiny.path / "tokenizer.json")).get_vocab()


@pytest.fixture(scope="module")
def caller_gguf(tiny_gguf, tmp_path_factory):
    return with_tokens(tiny_gguf, MARKERS, tmp_path_factory.mktemp("caller") / "caller.gguf", FAMILIES["glm"].template)


# Tool calls


async def test_calls_in_the_models_own_format_are_parsed_and_have_ids_and_logprobs(caller_gguf, pieces):
    tokens = [START, pieces["look"], END, 2]
    async with manager_with(entry_of(caller_gguf), LLAMA_SETTINGS) as manager:
        forced = replace(forced_request(chat(tools=ALL), tokens), top_logprobs=0)
        async with await manager.submit(forced) as stream:
            answer = merge_deltas([delta async for delta in stream])
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look", "{}")]
        assert (answer.text, answer.ids, stream.report.finish_reason) == ("", tuple(tokens), "tool_calls")
        assert [entry.token for entry in answer.logprobs] == tokens
        free = await finish_answer(await manager.submit(replace(chat(tools=ALL), max_tokens=10, min_tokens=10)))
        assert (free.calls, free.reason, free.report.output_tokens) == ([], "length", 10)
        assert free.text


async def test_special_tokens_are_parts_of_the_models_own_format_and_no_text(tiny_gguf, pieces, tmp_path):
    names = dict(zip(MARKERS, ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]"), strict=True))
    path = with_tokens(tiny_gguf, names, tmp_path / "tiny.gguf", FAMILIES["mistral"].template, special=True)
    (calls, arguments, outside, _), look, empty = range(3, 7), pieces["look"], pieces["Ġ{}"]
    tokens = [pieces["river"], outside, calls, look, arguments, empty, 2]
    async with manager_with(entry_of(path), LLAMA_SETTINGS) as manager:
        forced = forced_request(chat(tools=ALL), tokens)
        async with await manager.submit(forced) as stream:
            answer = merge_deltas([delta async for delta in stream])
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look", "{}")]
    assert (answer.text, answer.ids, stream.report.finish_reason) == ("river", tuple(tokens), "tool_calls")


async def test_an_answer_whose_missing_ids_cannot_be_found_ends_without_them(tiny, tiny_gguf, tmp_path):
    path = Path(shutil.copy(tiny_gguf, tmp_path / "tiny.gguf"))
    # llama.cpp reports only the last token of a character.
    tokens = Tokenizer.from_file(str(tiny.path / "tokenizer.json")).encode("😀").ids
    assert len(tokens) > 1
    async with manager_with(entry_of(path), LLAMA_SETTINGS) as manager:
        forced = forced_request(request(prompt=TextPrompt(text="It is")), tokens)
        # The vocabulary, in which the other tokens are looked up, is not read before it is needed.
        os.unlink(path)
        async with await manager.submit(forced) as stream:
            answer = merge_deltas([delta async for delta in stream])
    assert (answer.text, answer.ids) == ("😀", ())
    assert stream.report.output_tokens == len(tokens)


async def test_nothing_of_a_model_stays_in_memory_after_its_unload(tiny_gguf):
    def checkers():
        return [each for each in gc.get_objects() if isinstance(each, GrammarChecker)]

    before = {id(checker) for checker in checkers()}
    async with manager_with(entry_of(tiny_gguf), LLAMA_SETTINGS) as manager:
        await run(manager, answer_format=PLACE_FORMAT)
        # It refers to the vocabulary and the connection of the model.
        created = [weakref.ref(checker) for checker in checkers() if id(checker) not in before]
        await manager.unload()
        gc.collect()
        assert [checker() for checker in created] == [None]


def test_a_recorded_answer_that_may_call_tools_is_scored_and_repeated(caller_gguf, tmp_path):
    tool = {"type": "function", "function": {"name": LOOK.name, "parameters": dict(LOOK.parameters)}}
    with lmx_lab.Lab(replace(LLAMA_SETTINGS, home=tmp_path, port=0), loop="thread") as lab:
        lab.load(str(caller_gguf))
        reply = lab.chat("Where?", tools=[tool], temperature=1, seed=4, max_tokens=10)
        assert lab.requests[-1].answer == reply.ids
        assert len(reply.ids) == reply.usage.completion_tokens == 10
        assert len(reply.lens()) == 10
        replay = lab.requests[-1].replay()
        assert replay.replayed.answer is not None


async def test_stop_strings_and_seeds_work_with_calls_in_the_models_own_format(caller_gguf):
    async with manager_with(entry_of(caller_gguf), LLAMA_SETTINGS) as manager:
        tool_request = replace(chat(tools=ALL), sampling=Sampling(temperature=1, seed=4), max_tokens=20)
        # The values of a cached prompt are rounded differently from those of a computed one.
        await finish_answer(await manager.submit(tool_request))
        whole = await finish_answer(await manager.submit(tool_request))
        assert (await finish_answer(await manager.submit(tool_request))).text == whole.text
        stop = whole.text[12:16]
        cut = await finish_answer(await manager.submit(replace(tool_request, stop=(stop,))))
        assert (cut.text, cut.reason) == (whole.text[: whole.text.index(stop)], "stop")


# Reasoning


async def test_a_file_may_have_a_template_for_chats_with_tools_and_a_token_that_begins_each_prompt(tiny_gguf, tmp_path):
    shown = "{% for message in messages %}{{ message.content }}{% endfor %}"
    changes = {
        "tokenizer.ggml.add_bos_token": True,
        TEMPLATE_KEY: f"{{{{ bos_token }}}}{shown}",
        f"{TEMPLATE_KEY}.tool_use": f"{shown} with {{{{ tools[0].function.name }}}}{{# <arg_key> #}}",
    }
    entry = entry_of(with_values(tiny_gguf, tmp_path / "tiny.gguf", changes))
    async with manager_with(entry, LLAMA_SETTINGS) as manager:
        prompts = [await manager.encode(chat(tools=tools)) for tools in (None, ALL)]
        decode = [lambda model, prompt=prompt: model.decode(prompt) for prompt in prompts]
        texts = [await manager.with_model(request(), each) for each in decode]
    # Whether or not the template writes the token.
    assert texts == ["<|im_start|>Where?", "<|im_start|>Where? with look"]


# Exact repetition


async def test_a_deterministic_load_gives_the_same_bits_with_other_requests_and_cached_prompts(tiny_gguf):
    """The weights of ``tiny`` are float32, whose products depend on the number of rows."""
    settings = replace(LLAMA_SETTINGS, slots=8, queue_limit=8)
    requests = [
        request(
            prompt=numbers(60 + at, start=1000 * (at % 2)), max_tokens=12, ignore_eos=True, top_logprobs=2,
            sampling=Sampling(temperature=at % 3, seed=at),
        )
        for at in range(8)
    ]  # fmt: skip
    async with manager_with(entry_of(tiny_gguf), settings) as manager:
        assert manager.fingerprint.endswith("-batch-dependent")
        await load_entry(manager, entry_of(tiny_gguf), LoadSpec(model="tiny", deterministic=True))
        assert not manager.fingerprint.endswith("-batch-dependent")

        async def answer(each):
            return await finish_with_logprobs(await manager.submit(each))

        alone = [await answer(each) for each in requests]
        # The prompts are in the cache of some slot now.
        assert await asyncio.gather(*map(answer, requests)) == alone
        assert [await answer(each) for each in reversed(requests)] == alone[::-1]


async def test_a_text_of_many_characters_and_few_tokens_is_not_truncated(manager, minilm_gguf):
    long = "sea" + " " * 20_000 + "mountain"
    await pin(manager, entry_of(minilm_gguf, "minilm"))
    result = await manager.embed(EmbeddingRequest(inputs=(long, "sea mountain", "sea")))
    np.testing.assert_allclose(result.vectors[0], result.vectors[1], atol=1e-4)
    assert result.report.tokens == 4 + 4 + 3


@pytest.mark.long
async def test_a_quantized_kv_cache_changes_little_and_has_its_own_prefixes_on_disk(smollm2_gguf, tmp_path):
    story = "The old lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down the weather. " * 3
    found = []
    for dtype in (None, "q8_0", "q8_0"):
        async with ModelManager(replace(LLAMA_SETTINGS, prefix_cache_dir=tmp_path)) as manager:
            report = await load_entry(
                manager, entry_of(smollm2_gguf, "smollm2"), LoadSpec(model="smollm2", kv_cache_dtype=dtype)
            )
            assert report.kv_cache_dtype == dtype
            async with until_written(manager, files=len(found) < 2):
                stream = await manager.submit(request(prompt=TextPrompt(text=story), max_tokens=40, top_logprobs=0))
                _, (first, *_) = await finish_with_logprobs(stream)
            found.append((first.logprob, manager.snapshot.totals.disk_cached_tokens))
    (exact, _), (quantized, others), (again, own) = found
    assert 0 < abs(quantized - exact) < 0.1
    assert (again, others) == (quantized, 0)
    assert own > 0


@pytest.mark.long
async def test_a_draft_model_does_not_change_answers(smollm2_gguf, tiny_gguf, tmp_path, caller_gguf):
    """The model itself drafts only accepted tokens, at temperature 0; a random model drafts almost none."""
    prompt = ChatPrompt(messages=({"role": "user", "content": "Name three colors, and describe each of them."},))
    sampled = (Sampling(temperature=0), Sampling(temperature=0.8, seed=7))
    answers, counts = [], []
    for draft in (None, smollm2_gguf, tiny_gguf):
        spec = LoadSpec(model="smollm2", draft=str(draft) if draft is not None else None)
        async with ModelManager(replace(LLAMA_SETTINGS, prefix_cache_dir=tmp_path)) as manager:
            report = await load_entry(manager, entry_of(smollm2_gguf, "smollm2"), spec)
            assert (report.draft is not None) == (draft is not None)
            assert ("is not smaller than smollm2" in report.warning) == (draft == smollm2_gguf)
            found = [await run(manager, prompt=prompt, max_tokens=40, sampling=each) for each in sampled]
            answers.append([text for text, _ in found])
            counts.append([(each.accepted_tokens, each.drafted_tokens) for _, each in found])
            total = sum(drafted for _, drafted in counts[-1])
            assert manager.snapshot.totals.drafted_tokens == total
            # Drafts of a cancelled answer are counted as well.
            async with await manager.submit(request(prompt=prompt, max_tokens=200)) as stream:
                async for item in stream:
                    if isinstance(item, Delta) and " " in item.text:
                        break
            await until_idle(manager)
            assert (manager.snapshot.totals.drafted_tokens > total) == (draft is not None)
            # The file of another model, whose tokens are not the same.
            with pytest.raises(
                UnusableModelError, match=r"vocabulary of 49,152 tokens and smollm2 one of 49,152; different tokens: "
            ):
                await load_entry(manager, entry_of(smollm2_gguf, "smollm2"), replace(spec, draft=str(caller_gguf)))
    assert answers[1:] == [answers[0]] * 2
    assert counts[0] == [(0, 0), (0, 0)]
    (accepted, drafted), (sampled_accepted, sampled_drafted) = counts[1]
    assert accepted == drafted > 0
    assert 0 < sampled_accepted <= sampled_drafted
    assert all(accepted < drafted / 2 for accepted, drafted in counts[2])


@pytest.mark.long
async def test_prompt_lookup_drafts_copied_text_and_does_not_change_it(smollm2_gguf):
    listed = "\n".join(f"{number}. item number {number} of the list" for number in range(1, 9))
    prompt = ChatPrompt(messages=({"role": "user", "content": f"Repeat this list without changes:\n{listed}"},))
    answers = []
    for prompt_lookup in (None, True):
        async with ModelManager(LLAMA_SETTINGS) as manager:
            await load_entry(
                manager, entry_of(smollm2_gguf, "smollm2"), LoadSpec(model="smollm2", prompt_lookup=prompt_lookup)
            )
            answers.append(await run(manager, prompt=prompt, max_tokens=60))
            totals = manager.snapshot.totals
        report = answers[-1][1]
        assert (totals.drafted_tokens, totals.accepted_tokens) == (report.drafted_tokens, report.accepted_tokens)
    (plain_text, plain), (text, drafted) = answers
    assert text == plain_text
    assert plain.drafted_tokens == 0 < drafted.accepted_tokens <= drafted.drafted_tokens
