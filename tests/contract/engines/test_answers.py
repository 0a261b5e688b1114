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
from tests.support.engines import PROMPT, finish, finish_with_logprobs, numbers, request, run

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
WORDS = AnswerFormat(kind="regex", text="über 😀東京é!")
"""An answer whose characters are several tokens."""


def chat(*contents):
    roles = ("user", "assistant")
    return ChatPrompt(messages=tuple({"role": roles[at % 2], "content": text} for at, text in enumerate(contents)))


# Texts


async def test_all_tokens_are_streamed_and_counted(model):
    stream = await model.submit(request(max_tokens=40, ignore_eos=True))
    deltas = [delta async for delta in stream]
    assert sum(delta.tokens for delta in deltas) == stream.report.output_tokens == 40
    again, _ = await run(model, max_tokens=40, ignore_eos=True)
    assert "".join(delta.text for delta in deltas) == again
    assert stream.report.finish_reason == "length"
    assert (stream.report.model, stream.report.prompt_tokens) == ("tiny", 3)


@pytest.mark.parametrize("prompt", [TextPrompt(text="Once upon a time"), chat("Who is there?"), PROMPT])
async def test_temperature_0_is_deterministic(model, prompt):
    texts = {(await run(model, prompt=prompt, max_tokens=20))[0] for _ in range(3)}
    assert len(texts) == 1
    assert texts != {""}


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_max_tokens_may_be_small(model, max_tokens):
    text, report = await run(model, max_tokens=max_tokens)
    assert (bool(text), report.output_tokens, report.finish_reason) == (bool(max_tokens), max_tokens, "length")


async def test_an_answer_ends_where_the_model_ends_its_text(model):
    ends = Sampling(temperature=0, logit_bias=((2, 1000.0),))
    text, report = await run(model, sampling=ends, max_tokens=50)
    assert (text, report.output_tokens, report.finish_reason) == ("", 1, "stop")
    _, report = await run(model, sampling=ends, max_tokens=50, ignore_eos=True)
    assert (report.output_tokens, report.finish_reason) == (50, "length")


async def test_an_answer_has_the_minimum_length(model):
    ends = Sampling(temperature=0, logit_bias=((2, 1000.0),))
    for length in (1, 7):
        text, report = await run(model, sampling=ends, max_tokens=50, min_tokens=length)
        assert (report.output_tokens, report.finish_reason) == (length + 1, "stop")
        assert text
    _, report = await run(model, sampling=ends, max_tokens=7, min_tokens=7)
    assert (report.output_tokens, report.finish_reason) == (7, "length")
    whole, _ = await run(model, max_tokens=20)
    text, report = await run(model, max_tokens=20, min_tokens=8, stop=(whole[0], "never"))
    assert report.output_tokens > 8
    assert text.startswith(whole[0])
    seeded = {"sampling": Sampling(temperature=0.8, seed=5), "min_tokens": 5, "max_tokens": 12}
    assert (await run(model, **seeded))[0] == (await run(model, **seeded))[0]


async def test_a_stop_string_may_span_tokens(model):
    whole, _ = await run(model, max_tokens=20)
    for start in range(2, len(whole) - 8, 5):
        stop = whole[start : start + 8]
        text, report = await run(model, max_tokens=20, stop=("never", stop))
        assert text == whole[: whole.index(stop)]
        assert report.finish_reason == "stop"
        assert report.output_tokens < 20


@pytest.mark.parametrize(
    ("stop", "left"), [("😀", "über "), ("東京", "über 😀"), ("東", "über 😀"), ("京é!", "über 😀東")]
)
async def test_a_stop_string_may_have_characters_of_several_tokens(model, stop, left):
    text, report = await run(model, answer_format=WORDS, stop=(stop,), max_tokens=40)
    assert (text, report.finish_reason) == (left, "stop")


async def test_characters_of_several_tokens_are_delivered_whole(model):
    stream = await model.submit(request(answer_format=WORDS, max_tokens=40))
    deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == "über 😀東京é!"
    assert not any("\ufffd" in delta.text for delta in deltas)


async def test_an_answer_ends_when_the_context_is_full(model):
    _, report = await run(model, prompt=numbers(500), max_tokens=10**9, ignore_eos=True)
    assert (report.prompt_tokens, report.output_tokens, report.finish_reason) == (500, 12, "length")


async def test_simultaneous_requests_get_their_own_answers(model):
    prompts = [numbers(5, start=1000 * at) for at in range(1, 9)]
    streams = await asyncio.gather(*(model.submit(request(prompt=prompt, max_tokens=5)) for prompt in prompts))
    together = [(await finish(stream))[0] for stream in streams]
    assert together == [(await run(model, prompt=prompt, max_tokens=5))[0] for prompt in prompts]
    assert len(set(together)) == 8


# Refusals before the first token


@pytest.mark.parametrize("prompt", [TextPrompt(text=""), TokenPrompt(tokens=()), ChatPrompt(messages=())])
async def test_an_empty_prompt_is_refused(model, prompt):
    with pytest.raises(InvalidRequestError) as refused:
        await model.submit(request(prompt=prompt))
    assert refused.value.param == ("messages" if isinstance(prompt, ChatPrompt) else "prompt")


@pytest.mark.parametrize(
    ("prompt", "param"), [(TextPrompt(text="a\ud800"), "prompt"), (chat("\udc00"), "messages.0.content")]
)
async def test_an_unpaired_surrogate_is_refused(model, prompt, param):
    with invalid(param, "lone surrogate"):
        await model.submit(request(prompt=prompt))


@pytest.mark.parametrize("token", [-1, 49152, 2**40])
async def test_tokens_outside_the_vocabulary_are_refused(model, token, model_format):
    last = EchoVocabulary().size - 1 if model_format == "echo" else 49151
    with pytest.raises(InvalidRequestError, match=rf"prompt has the token id {token}; tiny knows 0 to {last}"):
        await model.submit(request(prompt=TokenPrompt(tokens=(5, token))))
    with pytest.raises(InvalidRequestError, match=rf"logit_bias has the token id {token}; tiny knows 0 to {last}"):
        await model.submit(request(sampling=Sampling(logit_bias=((token, 1.0),))))


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(model):
    with pytest.raises(
        ContextLengthError,
        match=r"long: 512 tokens > 512 maximum\. .* 512 tokens \(tiny, including the answer\); shorten the prompt$",
    ) as refused:
        await model.submit(request(prompt=numbers(512)))
    assert refused.value.param == "prompt"
    # The context has no room for another token, and the request needs none.
    assert (await run(model, prompt=numbers(512), max_tokens=0))[1].prompt_tokens == 512


async def test_a_prompt_that_is_far_too_long_is_refused_with_its_least_length(model, model_format):
    huge = "word " * 1_000_000
    for prompt in (TextPrompt(text=huge), chat(huge)):
        with pytest.raises(ContextLengthError, match=r"more than \d{3,6} tokens > 512 maximum"):
            await model.submit(request(prompt=prompt))
    if model_format != "echo":
        # A long text of few tokens: a token contains many spaces. A far longer one is not tokenized completely.
        assert (await run(model, prompt=TextPrompt(text=" " * 8000)))[1].prompt_tokens < 512
        with pytest.raises(ContextLengthError, match=r"prompt is too long: 5000000 characters > 51200 maximum"):
            await model.submit(request(prompt=TextPrompt(text=" " * 5_000_000)))


async def test_a_prompt_that_exceeds_the_context_length_is_counted(model):
    count = len(await model.model.encode(request(prompt=chat("word " * 50_000))))
    # 512 tokens fit.
    assert 50_000 <= count < 110_000


@pytest.mark.parametrize("message", [{"content": "no role"}, {"role": "user"}])
async def test_messages_that_the_template_refuses_are_an_invalid_request(model, message):
    with invalid("messages"):
        await model.submit(request(prompt=ChatPrompt(messages=(message,))))


# Sampling

HOT = {"temperature": 5.0, "seed": 11}
"""A temperature at which every filter changes the text."""


async def sample_text(model, max_tokens=12, **changes):
    text, report = await run(model, sampling=Sampling(**changes), max_tokens=max_tokens, ignore_eos=True)
    assert report.output_tokens == max_tokens
    return text


@pytest.mark.parametrize("filter_options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
async def test_a_filter_that_leaves_one_token_is_greedy_at_any_temperature(model, filter_options):
    greedy = await sample_text(model, temperature=0)
    assert await sample_text(model, **HOT) != greedy
    assert await sample_text(model, **HOT, **filter_options) == greedy


@pytest.mark.parametrize("filter_options", [{"top_k": 40}, {"top_p": 0.5}, {"min_p": 0.2}])
async def test_a_filter_changes_the_answer(model, filter_options):
    assert await sample_text(model, **HOT, **filter_options) != await sample_text(model, **HOT)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
)
async def test_a_penalty_prevents_repetition(model, penalty, model_format):
    plain = await sample_text(model, 24, temperature=0)
    repeated = await model.model.decode(PROMPT.tokens) if model_format == "echo" else "ancial"
    assert repeated * 3 in plain
    assert repeated * 2 not in await sample_text(model, 24, temperature=0, **penalty)


async def test_a_frequency_penalty_counts_occurrences_and_a_presence_penalty_does_not(model):
    # The bias leaves two tokens. The presence penalty applies to each once, the frequency penalty at each occurrence.
    pair = ((500, 100.0), (700, 101.0))
    once = await sample_text(model, 9, temperature=0, logit_bias=pair, presence_penalty=10.0)
    each = await sample_text(model, 9, temperature=0, logit_bias=pair, frequency_penalty=10.0)
    first, second = await model.model.decode([500]), await model.model.decode([700])
    assert each.count(second) >= 3
    assert each.count(first) >= 3
    assert once != each


REPEATS = {"dry_multiplier": 100.0, "dry_allowed_length": 1}


async def test_dry_prevents_repeated_sequences_on_llama_cpp(model, model_format):
    if model_format != "gguf":
        with invalid("dry_multiplier", 'load a GGUF model with engine="llama.cpp"'):
            await sample_text(model, 40, temperature=0, **REPEATS)
        return
    repeated = "ancial"
    assert repeated * 3 in await sample_text(model, 40, temperature=0)
    assert repeated * 3 not in await sample_text(model, 40, temperature=0, **REPEATS)
    assert repeated * 3 in await sample_text(model, 40, temperature=0, **REPEATS, dry_sequence_breakers=(repeated,))


async def test_xtc_removes_the_most_likely_tokens_on_llama_cpp(model, model_format):
    if model_format != "gguf":
        with invalid("xtc_probability", 'load a GGUF model with engine="llama.cpp"'):
            await sample_text(model, temperature=1.0, xtc_probability=0.5)
        return
    # Of the two likely tokens, only the less likely one remains at each position.
    pair, seeds = {"temperature": 1.0, "logit_bias": ((500, 100.0), (700, 101.0))}, range(4)
    removed = {
        await sample_text(model, 9, **pair, seed=seed, xtc_probability=1.0, xtc_threshold=1e-4) for seed in seeds
    }
    assert len(removed) == 1
    for off in ({}, {"xtc_probability": 1.0, "xtc_threshold": 0.6}):
        assert len({await sample_text(model, 9, **pair, seed=seed, **off) for seed in seeds}) == len(seeds)


FEW_TOKENS = tuple(range(700, 720))
FEW_BIASES = tuple((token, 1000.0) for token in FEW_TOKENS)
"""A bias that leaves twenty tokens."""


async def sample_ids(model, count, prompt=PROMPT, **changes):
    sampling = Sampling(**{"temperature": 0, "logit_bias": FEW_BIASES} | changes.pop("sampling", {}))
    stream = await model.submit(request(prompt=prompt, sampling=sampling, max_tokens=count, ignore_eos=True, **changes))
    return [id_ async for delta in stream for id_ in delta.ids]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(("penalty", "times"), [({"presence_penalty": 300.0}, 1), ({"frequency_penalty": 300.0}, 2)])
async def test_penalties_count_the_output_and_not_the_prompt(model, penalty, times, seed):
    # Half of the tokens are in the prompt. With a penalty larger than their differences, all are chosen equally often.
    prompt = TokenPrompt(tokens=(*PROMPT.tokens, *FEW_TOKENS[:10], *FEW_TOKENS[:5] * 7))
    sampling = penalty | ({} if seed is None else {"temperature": 1.0, "seed": seed})
    expected = sorted([*FEW_TOKENS] * times)
    found = await sample_ids(model, len(expected), prompt, sampling=sampling)
    assert sorted(found) == expected
    assert await sample_ids(model, len(expected), prompt, sampling=sampling) == found


@pytest.mark.parametrize("changes", [{}, {"min_tokens": 4}, {"min_tokens": 5}])
async def test_an_answer_with_penalties_ends_like_others(model, changes):
    # Each of three tokens is chosen once. Then the token that ends the text is the most likely one.
    bias = (*FEW_BIASES[:3], (2, 700.0))
    sampling = Sampling(temperature=0, logit_bias=bias, presence_penalty=600.0)
    stream = await model.submit(request(sampling=sampling, max_tokens=12, top_logprobs=1, **changes))
    _, entries = await finish_with_logprobs(stream)
    assert sorted(entry.token for entry in entries[:3]) == [*FEW_TOKENS[:3]]
    assert (entries[-1].token, entries[-1].ends, stream.report.finish_reason) == (2, True, "stop")
    assert len(entries) == stream.report.output_tokens >= max(4, changes.get("min_tokens", 0))


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
async def test_an_enforced_format_with_penalties_is_complete(model, penalty):
    sampling = Sampling(temperature=0, **{penalty: 1.1})
    text, report = await run(model, sampling=sampling, max_tokens=60, answer_format=WORDS)
    assert (text, report.finish_reason) == ("über 😀東京é!", "stop")


@pytest.mark.parametrize("penalty", [{"presence_penalty": 300.0}, {"frequency_penalty": 300.0}])
async def test_penalties_may_count_only_the_last_tokens(model, penalty):
    # The first token is far more likely than the others, so it returns as soon as it is not counted.
    likely = FEW_TOKENS[0]
    sampling = {"logit_bias": ((likely, 1200.0), *FEW_BIASES[1:]), **penalty}
    found = await sample_ids(model, 10, sampling={**sampling, "repeat_last_n": 2})
    assert found[::3] == [likely] * 4
    assert all(found[at] not in found[max(0, at - 2) : at] for at in range(10))
    assert await sample_ids(model, 5, sampling={**sampling, "repeat_last_n": 0}) == [likely] * 5
    assert (await sample_ids(model, 10, sampling=sampling)).count(likely) < 4


async def test_a_prompt_is_not_penalized_at_all(model):
    prompt = TokenPrompt(tokens=(*PROMPT.tokens, *FEW_TOKENS[:1] * 20))
    plain = await sample_ids(model, 1, prompt)
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}):
        assert await sample_ids(model, 1, prompt, sampling=penalty) == plain


async def test_a_bias_can_force_and_forbid_tokens(model):
    greedy = await sample_text(model, 3, temperature=0)
    (first,) = [entry.token for entry in await logprobs(model, max_tokens=1)]
    forced = await sample_text(model, 3, temperature=0, logit_bias=((500, 1000.0),))
    assert forced == await model.model.decode([500] * 3)
    banned = await sample_text(model, 3, temperature=0, logit_bias=((first, -1000.0),))
    assert await model.model.decode([first]) not in banned
    assert greedy.startswith(await model.model.decode([first]))


async def test_a_seeded_answer_is_reproducible(model):
    seeds = [7, 8, 0, -1, 2**32 - 1, 2**64, 2**64 + 1, 10**400, -(10**400)]
    texts, again = [[await sample_text(model, temperature=1.0, seed=seed) for seed in seeds] for _ in range(2)]
    assert texts == again
    assert len(set(texts)) == len(seeds)


async def test_without_a_seed_texts_differ_except_on_the_echo_engine(model, model_format):
    assert len({await sample_text(model, temperature=1.0) for _ in range(3)}) == (1 if model_format == "echo" else 3)


async def test_several_answers_of_a_seeded_request_differ_and_are_reproducible(model):
    async def answers(seed):
        seeded_request = request(sampling=Sampling(temperature=1, seed=seed), max_tokens=8, ignore_eos=True)
        return [(await finish(stream))[0] for stream in await model.generate(seeded_request, 3)]

    first = await answers(5)
    assert len(set(first)) == 3
    assert await answers(5) == first
    assert len(set(await answers(None))) == 3
    assert first[0] == await sample_text(model, 8, temperature=1, seed=5)


async def test_a_seeded_answer_does_not_depend_on_other_requests(model, model_format):
    seeded_request = [Sampling(temperature=1, seed=seed) for seed in range(8)]
    alone = [(await run(model, sampling=each, max_tokens=8, ignore_eos=True))[0] for each in seeded_request]
    results = await asyncio.gather(
        *(run(model, sampling=each, max_tokens=8, ignore_eos=True) for each in seeded_request)
    )
    same = [text == one for (text, _), one in zip(results, alone, strict=True)]
    # On llama.cpp, the float32 weights of ``tiny`` are rounded differently if other requests run: see docs/engines.md.
    assert sum(same) >= 4 if model_format == "gguf" else all(same)
    assert len(set(alone)) == 8


# Log-probabilities


async def logprobs(model, **changes):
    return (await finish_with_logprobs(await model.submit(request(**{"top_logprobs": 0} | changes))))[1]


@pytest.mark.parametrize("top", [0, 1, 5, 20])
async def test_each_token_has_its_logprob_and_the_requested_number_of_alternatives(model, top):
    stream = await model.submit(request(max_tokens=10, top_logprobs=top, ignore_eos=True))
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


async def test_the_bytes_of_tokens_join_to_the_text(model):
    text, results = await finish_with_logprobs(await model.submit(request(answer_format=WORDS, top_logprobs=0)))
    assert text
    assert b"".join(entry.bytes for entry in results).decode(errors="replace").startswith(text)


async def test_tokens_of_a_stop_string_have_no_logprobs(model):
    options = {"prompt": numbers(6), "max_tokens": 6, "top_logprobs": 0}
    whole = await logprobs(model, **options)
    stop = whole[3].text
    text, results = await finish_with_logprobs(await model.submit(request(**options, stop=(stop,))))
    assert text == "".join(entry.text for entry in whole[:3])
    assert [entry.token for entry in results] == [entry.token for entry in whole[:3]]


async def test_the_token_that_ends_the_text_is_marked_and_has_no_text(model):
    (entry,) = await logprobs(model, sampling=Sampling(temperature=0, logit_bias=((2, 1000.0),)))
    assert (entry.token, entry.bytes, entry.ends) == (2, b"", True)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=0), 1),
        (Sampling(temperature=2.0, top_k=3, seed=1), 3),
        (Sampling(temperature=0.5, top_k=4, min_p=1e-99, seed=2), 4),
        # The first token alone has this probability.
        (Sampling(temperature=1.0, top_p=1e-9, seed=3), 1),
    ],
)
async def test_logprobs_after_sampling_are_those_of_the_sampled_distribution(model, sampling, kept):
    (plain,) = await logprobs(model, top_logprobs=5, max_tokens=1)
    (entry,) = await logprobs(model, top_logprobs=5, max_tokens=1, sampling=sampling, after_sampling=True)
    # Except for the temperature, the ratios of the remaining probabilities are unchanged.
    weights = [math.exp((one.logprob - plain.top[0].logprob) / (sampling.temperature or 1)) for one in plain.top[:kept]]
    drawn = {one.token: math.exp(one.logprob) for one in entry.top}
    assert list(drawn) == [one.token for one in plain.top[:kept]]
    assert list(drawn.values()) == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-3)
    assert math.exp(entry.logprob) == pytest.approx(drawn[entry.token])


async def test_logprobs_are_delivered_only_on_request(model):
    assert await logprobs(model, top_logprobs=None) == []


# Costs


async def test_the_second_turn_finds_the_first_in_the_cache(model):
    before = model.snapshot.totals
    question = "Where is the river? Tell me all of its story, from the source to the sea, and leave nothing out."
    answer, first = await run(model, prompt=chat(question), max_tokens=12)
    _, second = await run(model, prompt=chat(question, answer, "And then?"), max_tokens=3)
    assert first.cached_tokens < first.prompt_tokens
    assert first.prompt_tokens - 8 <= second.cached_tokens < second.prompt_tokens
    now = model.snapshot.totals
    assert now.prompt_tokens - before.prompt_tokens == first.prompt_tokens + second.prompt_tokens
    assert now.cached_tokens - before.cached_tokens == first.cached_tokens + second.cached_tokens
    assert now.output_tokens - before.output_tokens == first.output_tokens + second.output_tokens


async def test_the_progress_of_a_prompt_is_reported_to_its_end(model):
    stream = await model.submit(request(prompt=numbers(450), max_tokens=2))
    await finish(stream)
    assert (stream.progress.done, stream.progress.total) == (450, 450)
    assert stream.prompt == numbers(450).tokens


async def test_times_are_positive_and_add_up(model):
    loop = asyncio.get_running_loop()
    started = loop.time()
    _, report = await run(model, prompt=numbers(300, start=4000), max_tokens=30, ignore_eos=True)
    elapsed = loop.time() - started
    assert min(report.queue_s, report.prefill_s, report.decode_s) > 0
    assert report.queue_s < report.ttft_s <= report.total_s <= elapsed
    assert report.total_s == pytest.approx(report.queue_s + report.prefill_s + report.decode_s)
    assert report.queue_s + report.prefill_s <= report.ttft_s
    assert report.peak_memory_bytes > 1_000_000


# Optional features


async def test_named_tokens_are_reported_whatever_their_rank(model):
    # A single letter is one token of every vocabulary. On llama.cpp, tokens within a character have no entries.
    letters = AnswerFormat(kind="regex", text="[a-z]{8}")
    options = request(max_tokens=2, top_logprobs=1, logprob_tokens=(300, "q"), answer_format=letters)
    _, entries = await finish_with_logprobs(await model.submit(options))
    assert len(entries) == 2
    for entry in entries:
        first, second = entry.named
        assert (first.token, second.bytes) == (300, b"q")
        assert entry.top[0].logprob is not None
        assert first.logprob <= entry.top[0].logprob + 1e-5
    for name in ("two words", 10**7):
        with invalid("logprob_tokens"):
            await model.submit(replace(options, logprob_tokens=(name,)))


async def test_a_prompt_is_scored_before_the_first_token(model):
    stream = await model.submit(request(score_prompt=True, top_logprobs=2, max_tokens=1))
    await anext(stream)
    scores = stream.prompt_scores.tokens
    assert [entry.token for entry in scores] == list(PROMPT.tokens)
    assert scores[0].logprob is None
    assert all(entry.logprob is not None and entry.logprob < 0 for entry in scores[1:])
    assert all(len(entry.top) == 2 for entry in scores[1:])
    await stream.aclose()


async def test_scores_are_the_same_wherever_they_begin_and_whatever_came_before(model):
    prompt, other = numbers(400), numbers(400, start=9)
    mixed = TokenPrompt(tokens=(*prompt.tokens[:300], *other.tokens[:60]))
    whole = await scores_of(model, prompt)
    for start in (0, 1, 2, 129, 250, 398, 399):
        part = await scores_of(model, prompt, score_from=start)
        first = max(1, start)
        assert part[first:] == pytest.approx(whole[first:], abs=1e-4)
    await scores_of(model, mixed)
    assert await scores_of(model, prompt) == pytest.approx(whole, abs=1e-4)
    both = await asyncio.gather(scores_of(model, mixed), scores_of(model, prompt))
    assert both[1] == pytest.approx(whole, abs=1e-4)
    assert await scores_of(model, TokenPrompt(tokens=prompt.tokens[:1])) == [0.0]


async def test_a_scored_prompt_that_is_cancelled_leaves_nothing_behind(model):
    prompt = numbers(400)
    whole = await scores_of(model, prompt)
    for _ in range(3):
        stream = await model.submit(request(prompt=prompt, score_prompt=True, top_logprobs=0, max_tokens=0))
        await stream.aclose()
    assert await scores_of(model, prompt) == pytest.approx(whole, abs=1e-4)


async def scores_of(model, prompt, **changes):
    """Return the log-probabilities of a prompt, with 0 for tokens that are not scored."""
    asked = {"prompt": prompt, "score_prompt": True, "top_logprobs": 1, "max_tokens": 0, **changes}
    stream = await model.submit(request(**asked))
    await finish(stream)
    scores = stream.prompt_scores.tokens
    assert [entry.token for entry in scores] == list(prompt.tokens)
    assert all(entry.rank and entry.entropy >= 0 for entry in scores if entry.logprob is not None)
    return [entry.logprob or 0.0 for entry in scores]
