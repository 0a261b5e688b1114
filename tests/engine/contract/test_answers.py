"""Texts, their ends, sampling, log-probabilities and reports have the same contract on every engine."""

import asyncio
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from lmx_lab.engine import AnswerFormat, ChatPrompt, Sampling, TextPrompt, TokenPrompt
from lmx_lab.engine.echo.model import EchoVocabulary
from lmx_lab.errors import ContextLengthError, InvalidRequestError
from tests.support.asking import invalid
from tests.support.engines import PROMPT, finish, finish_with_logprobs, numbers, request, run, text_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
WORDS = AnswerFormat(kind="regex", text="über 😀東京é!")
"""An answer whose characters are several tokens."""


def chat(*contents):
    roles = ("user", "assistant")
    return ChatPrompt(messages=tuple({"role": roles[at % 2], "content": text} for at, text in enumerate(contents)))


# Texts


async def test_all_tokens_are_streamed_and_counted(manager):
    stream = await manager.submit(request(max_tokens=40, ignore_eos=True))
    deltas = [delta async for delta in stream]
    assert sum(delta.tokens for delta in deltas) == stream.report.output_tokens == 40
    again, _ = await run(manager, max_tokens=40, ignore_eos=True)
    assert "".join(delta.text for delta in deltas) == again
    assert stream.report.finish_reason == "length"
    assert (stream.report.model, stream.report.prompt_tokens) == ("tiny", 3)


@pytest.mark.parametrize("prompt", [TextPrompt(text="Once upon a time"), chat("Who is there?"), PROMPT])
async def test_temperature_0_is_deterministic(manager, prompt):
    texts = {(await run(manager, prompt=prompt, max_tokens=20))[0] for _ in range(3)}
    assert len(texts) == 1
    assert texts != {""}


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_max_tokens_may_be_small(manager, max_tokens):
    text, report = await run(manager, max_tokens=max_tokens)
    assert (bool(text), report.output_tokens, report.finish_reason) == (bool(max_tokens), max_tokens, "length")


async def test_an_answer_ends_where_the_model_ends_its_text(manager):
    ends = Sampling(temperature=0, logit_bias=((2, 1000.0),))
    text, report = await run(manager, sampling=ends, max_tokens=50)
    assert (text, report.output_tokens, report.finish_reason) == ("", 1, "stop")
    _, report = await run(manager, sampling=ends, max_tokens=50, ignore_eos=True)
    assert (report.output_tokens, report.finish_reason) == (50, "length")


async def test_an_answer_has_the_minimum_length(manager):
    ends = Sampling(temperature=0, logit_bias=((2, 1000.0),))
    for length in (1, 7):
        text, report = await run(manager, sampling=ends, max_tokens=50, min_tokens=length)
        assert (report.output_tokens, report.finish_reason) == (length + 1, "stop")
        assert text
    _, report = await run(manager, sampling=ends, max_tokens=7, min_tokens=7)
    assert (report.output_tokens, report.finish_reason) == (7, "length")
    whole, _ = await run(manager, max_tokens=20)
    text, report = await run(manager, max_tokens=20, min_tokens=8, stop=(whole[0], "never"))
    assert report.output_tokens > 8
    assert text.startswith(whole[0])
    seeded = {"sampling": Sampling(temperature=0.8, seed=5), "min_tokens": 5, "max_tokens": 12}
    assert (await run(manager, **seeded))[0] == (await run(manager, **seeded))[0]


async def test_a_stop_string_may_span_tokens(manager):
    whole, _ = await run(manager, max_tokens=20)
    for start in range(2, len(whole) - 8, 5):
        stop = whole[start : start + 8]
        text, report = await run(manager, max_tokens=20, stop=("never", stop))
        assert text == whole[: whole.index(stop)]
        assert report.finish_reason == "stop"
        assert report.output_tokens < 20


@pytest.mark.parametrize(
    ("stop", "left"), [("😀", "über "), ("東京", "über 😀"), ("東", "über 😀"), ("京é!", "über 😀東")]
)
async def test_a_stop_string_may_have_characters_of_several_tokens(manager, stop, left):
    text, report = await run(manager, answer_format=WORDS, stop=(stop,), max_tokens=40)
    assert (text, report.finish_reason) == (left, "stop")


async def test_characters_of_several_tokens_are_delivered_whole(manager):
    stream = await manager.submit(request(answer_format=WORDS, max_tokens=40))
    deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == "über 😀東京é!"
    assert not any("\ufffd" in delta.text for delta in deltas)


async def test_an_answer_ends_when_the_context_is_full(manager):
    _, report = await run(manager, prompt=numbers(500), max_tokens=10**9, ignore_eos=True)
    assert (report.prompt_tokens, report.output_tokens, report.finish_reason) == (500, 12, "length")


async def test_simultaneous_requests_get_their_own_answers(manager):
    prompts = [numbers(5, start=1000 * at) for at in range(1, 9)]
    streams = await asyncio.gather(*(manager.submit(request(prompt=prompt, max_tokens=5)) for prompt in prompts))
    together = [(await finish(stream))[0] for stream in streams]
    assert together == [(await run(manager, prompt=prompt, max_tokens=5))[0] for prompt in prompts]
    assert len(set(together)) == 8


# Refusals before the first token


@pytest.mark.parametrize("prompt", [TextPrompt(text=""), TokenPrompt(tokens=()), ChatPrompt(messages=())])
async def test_an_empty_prompt_is_refused(manager, prompt):
    with pytest.raises(InvalidRequestError) as refused:
        await manager.submit(request(prompt=prompt))
    assert refused.value.param == ("messages" if isinstance(prompt, ChatPrompt) else "prompt")


@pytest.mark.parametrize(
    ("prompt", "param"), [(TextPrompt(text="a\ud800"), "prompt"), (chat("\udc00"), "messages.0.content")]
)
async def test_an_unpaired_surrogate_is_refused(manager, prompt, param):
    with invalid(param, "lone surrogate"):
        await manager.submit(request(prompt=prompt))


@pytest.mark.parametrize("token", [-1, 49152, 2**40])
async def test_tokens_outside_the_vocabulary_are_refused(manager, token, model_format):
    last = EchoVocabulary().size - 1 if model_format == "echo" else 49151
    with pytest.raises(InvalidRequestError, match=rf"prompt has the token id {token}; tiny knows 0 to {last}"):
        await manager.submit(request(prompt=TokenPrompt(tokens=(5, token))))
    with pytest.raises(InvalidRequestError, match=rf"logit_bias has the token id {token}; tiny knows 0 to {last}"):
        await manager.submit(request(sampling=Sampling(logit_bias=((token, 1.0),))))


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(manager):
    with pytest.raises(
        ContextLengthError,
        match=r"long: 512 tokens > 512 maximum\. .* 512 tokens \(tiny, including the answer\); shorten the prompt$",
    ) as refused:
        await manager.submit(request(prompt=numbers(512)))
    assert refused.value.param == "prompt"
    # The context has no room for another token, and the request needs none.
    assert (await run(manager, prompt=numbers(512), max_tokens=0))[1].prompt_tokens == 512


async def test_a_prompt_that_is_far_too_long_is_refused_with_its_least_length(manager, model_format):
    huge = "word " * 1_000_000
    for prompt in (TextPrompt(text=huge), chat(huge)):
        with pytest.raises(ContextLengthError, match=r"more than \d{3,6} tokens > 512 maximum"):
            await manager.submit(request(prompt=prompt))
    if model_format != "echo":
        # A long text of few tokens: a token contains many spaces. A far longer one is not tokenized completely.
        assert (await run(manager, prompt=TextPrompt(text=" " * 8000)))[1].prompt_tokens < 512
        with pytest.raises(ContextLengthError, match=r"prompt is too long: 5000000 characters > 51200 maximum"):
            await manager.submit(request(prompt=TextPrompt(text=" " * 5_000_000)))


@pytest.mark.parametrize("message", [{"content": "no role"}, {"role": "user"}])
async def test_messages_that_the_template_refuses_are_an_invalid_request(manager, message):
    with invalid("messages"):
        await manager.submit(request(prompt=ChatPrompt(messages=(message,))))


# Sampling

HOT = {"temperature": 5.0, "seed": 11}
"""A temperature at which every filter changes the text."""


async def sample_text(manager, max_tokens=12, **changes):
    text, report = await run(manager, sampling=Sampling(**changes), max_tokens=max_tokens, ignore_eos=True)
    assert report.output_tokens == max_tokens
    return text


@pytest.mark.parametrize("filter_options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
async def test_a_filter_that_leaves_one_token_is_greedy_at_any_temperature(manager, filter_options):
    greedy = await sample_text(manager, temperature=0)
    assert await sample_text(manager, **HOT) != greedy
    assert await sample_text(manager, **HOT, **filter_options) == greedy


@pytest.mark.parametrize("filter_options", [{"top_k": 40}, {"top_p": 0.5}, {"min_p": 0.2}])
async def test_a_filter_changes_the_answer(manager, filter_options):
    assert await sample_text(manager, **HOT, **filter_options) != await sample_text(manager, **HOT)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
)
async def test_a_penalty_prevents_repetition(manager, penalty, model_format):
    plain = await sample_text(manager, 24, temperature=0)
    repeated = await text_of(manager, PROMPT.tokens) if model_format == "echo" else "ancial"
    assert repeated * 3 in plain
    assert repeated * 2 not in await sample_text(manager, 24, temperature=0, **penalty)


async def test_a_frequency_penalty_counts_occurrences_and_a_presence_penalty_does_not(manager):
    # The bias leaves two tokens. The presence penalty applies to each once, the frequency penalty at each occurrence.
    pair = ((500, 100.0), (700, 101.0))
    once = await sample_text(manager, 9, temperature=0, logit_bias=pair, presence_penalty=10.0)
    each = await sample_text(manager, 9, temperature=0, logit_bias=pair, frequency_penalty=10.0)
    first, second = await text_of(manager, [500]), await text_of(manager, [700])
    assert each.count(second) >= 3
    assert each.count(first) >= 3
    assert once != each


REPEATS = {"dry_multiplier": 100.0, "dry_allowed_length": 1}


async def test_dry_prevents_repeated_sequences_on_llama_cpp(manager, model_format):
    if model_format != "gguf":
        with invalid("dry_multiplier", 'load a GGUF model with engine="llama.cpp"'):
            await sample_text(manager, 40, temperature=0, **REPEATS)
        return
    repeated = "ancial"
    assert repeated * 3 in await sample_text(manager, 40, temperature=0)
    assert repeated * 3 not in await sample_text(manager, 40, temperature=0, **REPEATS)
    assert repeated * 3 in await sample_text(manager, 40, temperature=0, **REPEATS, dry_sequence_breakers=(repeated,))


async def test_xtc_removes_the_most_likely_tokens_on_llama_cpp(manager, model_format):
    if model_format != "gguf":
        with invalid("xtc_probability", 'load a GGUF model with engine="llama.cpp"'):
            await sample_text(manager, temperature=1.0, xtc_probability=0.5)
        return
    # Of the two likely tokens, only the less likely one remains at each position.
    pair, seeds = {"temperature": 1.0, "logit_bias": ((500, 100.0), (700, 101.0))}, range(4)
    removed = {
        await sample_text(manager, 9, **pair, seed=seed, xtc_probability=1.0, xtc_threshold=1e-4) for seed in seeds
    }
    assert len(removed) == 1
    for off in ({}, {"xtc_probability": 1.0, "xtc_threshold": 0.6}):
        assert len({await sample_text(manager, 9, **pair, seed=seed, **off) for seed in seeds}) == len(seeds)


FEW_TOKENS = tuple(range(700, 720))
FEW_BIASES = tuple((token, 1000.0) for token in FEW_TOKENS)
"""A bias that leaves twenty tokens."""


async def sample_ids(manager, count, prompt=PROMPT, **changes):
    sampling = Sampling(**{"temperature": 0, "logit_bias": FEW_BIASES} | changes.pop("sampling", {}))
    stream = await manager.submit(
        request(prompt=prompt, sampling=sampling, max_tokens=count, ignore_eos=True, **changes)
    )
    return [id_ async for delta in stream for id_ in delta.ids]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(("penalty", "times"), [({"presence_penalty": 300.0}, 1), ({"frequency_penalty": 300.0}, 2)])
async def test_penalties_count_the_output_and_not_the_prompt(manager, penalty, times, seed):
    # Half of the tokens are in the prompt. With a penalty larger than their differences, all are chosen equally often.
    prompt = TokenPrompt(tokens=(*PROMPT.tokens, *FEW_TOKENS[:10], *FEW_TOKENS[:5] * 7))
    sampling = penalty | ({} if seed is None else {"temperature": 1.0, "seed": seed})
    expected = sorted([*FEW_TOKENS] * times)
    found = await sample_ids(manager, len(expected), prompt, sampling=sampling)
    assert sorted(found) == expected
    assert await sample_ids(manager, len(expected), prompt, sampling=sampling) == found


@pytest.mark.parametrize("changes", [{}, {"min_tokens": 4}, {"min_tokens": 5}])
async def test_an_answer_with_penalties_ends_like_others(manager, changes):
    # Each of three tokens is chosen once. Then the token that ends the text is the most likely one.
    bias = (*FEW_BIASES[:3], (2, 700.0))
    sampling = Sampling(temperature=0, logit_bias=bias, presence_penalty=600.0)
    stream = await manager.submit(request(sampling=sampling, max_tokens=12, top_logprobs=1, **changes))
    _, entries = await finish_with_logprobs(stream)
    assert sorted(entry.token for entry in entries[:3]) == [*FEW_TOKENS[:3]]
    assert (entries[-1].token, entries[-1].ends, stream.report.finish_reason) == (2, True, "stop")
    assert len(entries) == stream.report.output_tokens >= max(4, changes.get("min_tokens", 0))


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
async def test_an_enforced_format_with_penalties_is_complete(manager, penalty):
    sampling = Sampling(temperature=0, **{penalty: 1.1})
    text, report = await run(manager, sampling=sampling, max_tokens=60, answer_format=WORDS)
    assert (text, report.finish_reason) == ("über 😀東京é!", "stop")


async def test_a_prompt_is_not_penalized_at_all(manager):
    prompt = TokenPrompt(tokens=(*PROMPT.tokens, *FEW_TOKENS[:1] * 20))
    plain = await sample_ids(manager, 1, prompt)
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}):
        assert await sample_ids(manager, 1, prompt, sampling=penalty) == plain


async def test_a_bias_can_force_and_forbid_tokens(manager):
    greedy = await sample_text(manager, 3, temperature=0)
    (first,) = [entry.token for entry in await logprobs(manager, max_tokens=1)]
    forced = await sample_text(manager, 3, temperature=0, logit_bias=((500, 1000.0),))
    assert forced == await text_of(manager, [500] * 3)
    banned = await sample_text(manager, 3, temperature=0, logit_bias=((first, -1000.0),))
    assert await text_of(manager, [first]) not in banned
    assert greedy.startswith(await text_of(manager, [first]))


async def test_a_seeded_answer_is_reproducible(manager):
    seeds = [7, 8, 0, -1, 2**64, 2**64 + 1, 10**400, -(10**400)]
    texts, again = [[await sample_text(manager, temperature=1.0, seed=seed) for seed in seeds] for _ in range(2)]
    assert texts == again
    assert len(set(texts)) == len(seeds)


async def test_without_a_seed_texts_differ_except_on_the_echo_engine(manager, model_format):
    assert len({await sample_text(manager, temperature=1.0) for _ in range(3)}) == (1 if model_format == "echo" else 3)


async def test_several_answers_of_a_seeded_request_differ_and_are_reproducible(manager):
    async def answers(seed):
        seeded_request = request(sampling=Sampling(temperature=1, seed=seed), max_tokens=8, ignore_eos=True)
        return [(await finish(stream))[0] for stream in await manager.generate(seeded_request, 3)]

    first = await answers(5)
    assert len(set(first)) == 3
    assert await answers(5) == first
    assert len(set(await answers(None))) == 3
    assert first[0] == await sample_text(manager, 8, temperature=1, seed=5)


async def test_a_seeded_answer_does_not_depend_on_other_requests(manager, model_format):
    seeded_request = [Sampling(temperature=1, seed=seed) for seed in range(8)]
    alone = [(await run(manager, sampling=each, max_tokens=8, ignore_eos=True))[0] for each in seeded_request]
    results = await asyncio.gather(
        *(run(manager, sampling=each, max_tokens=8, ignore_eos=True) for each in seeded_request)
    )
    same = [text == one for (text, _), one in zip(results, alone, strict=True)]
    # On llama.cpp, the float32 weights of ``tiny`` are rounded differently if other requests run: see docs/engines.md.
    assert sum(same) >= 4 if model_format == "gguf" else all(same)
    assert len(set(alone)) == 8


# Log-probabilities


async def logprobs(manager, **changes):
    return (await finish_with_logprobs(await manager.submit(request(**{"top_logprobs": 0} | changes))))[1]


@pytest.mark.parametrize("top", [0, 1, 5, 20])
async def test_each_token_has_its_logprob_and_the_requested_number_of_alternatives(manager, top):
    stream = await manager.submit(request(max_tokens=10, top_logprobs=top, ignore_eos=True))
    text, results = await finish_with_logprobs(stream)
    assert len(results) == 10
    assert b"".join(entry.bytes for entry in results).decode() == text
    for entry in results:
        assert len(entry.top) == top
        assert entry.text == entry.bytes.decode()
        values = [one.logprob for one in (entry, *entry.top) if one.logprob is not None]
        assert len(values) == 1 + top
        assert all(math.isfinite(value) and value <= 0 for value in values)
        assert all(high >= low for high, low in pairwise(values[1:]))
        assert math.fsum(math.exp(value) for value in values[1:]) <= 1 + 1e-6
        # The temperature is 0, so the chosen token is the likeliest.
        assert not top or entry.top[0].token == entry.token


async def test_the_bytes_of_tokens_join_to_the_text(manager):
    text, results = await finish_with_logprobs(await manager.submit(request(answer_format=WORDS, top_logprobs=0)))
    assert text
    assert b"".join(entry.bytes for entry in results).decode(errors="replace").startswith(text)


async def test_tokens_of_a_stop_string_have_no_logprobs(manager):
    options = {"prompt": numbers(6), "max_tokens": 6, "top_logprobs": 0}
    whole = await logprobs(manager, **options)
    stop = whole[3].text
    text, results = await finish_with_logprobs(await manager.submit(request(**options, stop=(stop,))))
    assert text == "".join(entry.text for entry in whole[:3])
    assert [entry.token for entry in results] == [entry.token for entry in whole[:3]]


async def test_the_token_that_ends_the_text_is_marked_and_has_no_text(manager):
    (entry,) = await logprobs(manager, sampling=Sampling(temperature=0, logit_bias=((2, 1000.0),)))
    assert (entry.token, entry.bytes, entry.ends) == (2, b"", True)


async def test_logprobs_are_delivered_only_on_request(manager):
    assert await logprobs(manager, top_logprobs=None) == []


# Costs


async def test_the_second_turn_finds_the_first_in_the_cache(manager):
    before = manager.snapshot.totals
    question = "Where is the river? Tell me all of its story, from the source to the sea, and leave nothing out."
    answer, first = await run(manager, prompt=chat(question), max_tokens=12)
    _, second = await run(manager, prompt=chat(question, answer, "And then?"), max_tokens=3)
    assert first.cached_tokens < first.prompt_tokens
    assert first.prompt_tokens - 8 <= second.cached_tokens < second.prompt_tokens
    now = manager.snapshot.totals
    assert now.prompt_tokens - before.prompt_tokens == first.prompt_tokens + second.prompt_tokens
    assert now.cached_tokens - before.cached_tokens == first.cached_tokens + second.cached_tokens
    assert now.output_tokens - before.output_tokens == first.output_tokens + second.output_tokens


async def test_the_progress_of_a_prompt_is_reported_to_its_end(manager):
    stream = await manager.submit(request(prompt=numbers(450), max_tokens=2))
    await finish(stream)
    assert (stream.progress.done, stream.progress.total) == (450, 450)
    assert stream.prompt == numbers(450).tokens


async def test_times_are_positive_and_add_up(manager):
    loop = asyncio.get_running_loop()
    started = loop.time()
    _, report = await run(manager, prompt=numbers(300, start=4000), max_tokens=30, ignore_eos=True)
    elapsed = loop.time() - started
    assert min(report.queue_s, report.prefill_s, report.decode_s) > 0
    assert report.queue_s < report.ttft_s <= report.total_s <= elapsed
    assert report.total_s == pytest.approx(report.queue_s + report.prefill_s + report.decode_s)
    assert report.queue_s + report.prefill_s <= report.ttft_s
    assert report.peak_memory_bytes > 1_000_000


# Optional features


async def test_named_tokens_are_reported_whatever_their_rank(manager):
    # A single letter is one token of every vocabulary. On llama.cpp, tokens within a character have no entries.
    letters = AnswerFormat(kind="regex", text="[a-z]{8}")
    options = request(max_tokens=2, top_logprobs=1, logprob_tokens=(300, "q"), answer_format=letters)
    _, entries = await finish_with_logprobs(await manager.submit(options))
    assert len(entries) == 2
    for entry in entries:
        first, second = entry.named
        assert (first.token, second.bytes) == (300, b"q")
        assert entry.top[0].logprob is not None
        assert first.logprob <= entry.top[0].logprob + 1e-5
    for name in ("two words", 10**7):
        with invalid("logprob_tokens"):
            await manager.submit(replace(options, logprob_tokens=(name,)))


async def test_a_prompt_is_scored_before_the_first_token(manager):
    stream = await manager.submit(request(score_prompt=True, top_logprobs=2, max_tokens=1))
    await anext(stream)
    scores = stream.prompt_scores.tokens
    assert [entry.token for entry in scores] == list(PROMPT.tokens)
    assert scores[0].logprob is None
    assert all(entry.logprob is not None and entry.logprob < 0 for entry in scores[1:])
    assert all(len(entry.top) == 2 for entry in scores[1:])
    await stream.aclose()
