"""Sampling parameters change the answer of their request, and no other answer of the batch."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine import Sampling, TokenPrompt
from lmx_lab.engine.mlx.sampling import RandomSampler, answer_token, prompt_token
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings
from tests.support.engines import (
    GREEDY,
    PROMPT,
    finish,
    finish_with_logprobs,
    generating,
    manager_with,
    mlx_thread,
    numbers,
    request,
    run,
)

pytestmark = pytest.mark.anyio
# The tiny model's probabilities are nearly uniform: without a filter, two samples are rarely equal.
WILD = Sampling(temperature=1.0)
VOCABULARY = 49152


EIGHT_SLOTS = Settings(slots=8)


@pytest.fixture
def wide(shared, tiny):
    with shared.use(EIGHT_SLOTS, tiny) as manager:
        yield manager


@pytest.fixture
async def own_wide(no_shared_model, tiny):
    async with manager_with(tiny, EIGHT_SLOTS) as manager:
        yield manager


async def tokens(manager, sampling, count=12):
    stream = await manager.submit(request(sampling=sampling, max_tokens=count, top_logprobs=0, ignore_eos=True))
    return [entry.token for entry in (await finish_with_logprobs(stream))[1]]


@pytest.mark.parametrize("temperature", [1e-40, 1e-20, 1e-6, 1e-3])
async def test_a_tiny_temperature_is_greedy(manager, temperature):
    assert await tokens(manager, replace(WILD, temperature=temperature)) == await tokens(manager, GREEDY)


async def test_penalties_of_one_request_do_not_change_the_precision_of_others(own_wide):
    def narrow(thread):
        generating(thread).weights.model.set_dtype(mx.bfloat16)

    await mlx_thread(own_wide).call(narrow)
    seeded = replace(WILD, seed=11)
    alone = await tokens(own_wide, seeded, 30)
    beside = await own_wide.submit(
        request(prompt=numbers(5), sampling=replace(WILD, presence_penalty=1.0), max_tokens=60, ignore_eos=True)
    )
    assert await tokens(own_wide, seeded, 30) == alone
    await finish(beside)


async def test_top_k_samples_only_the_most_likely_tokens(manager):
    stream = await manager.submit(
        request(sampling=replace(WILD, top_k=3), max_tokens=60, top_logprobs=3, ignore_eos=True)
    )
    _, entries = await finish_with_logprobs(stream)
    for entry in entries:
        assert {top.token: top.logprob for top in entry.top}[entry.token] == entry.logprob
    assert len({[top.token for top in entry.top].index(entry.token) for entry in entries}) == 3


@pytest.mark.parametrize("top_k", [VOCABULARY, VOCABULARY + 1, 10**9])
async def test_top_k_of_the_whole_vocabulary_removes_nothing(manager, top_k):
    seeded = replace(WILD, seed=5)
    assert await tokens(manager, replace(seeded, top_k=top_k)) == await tokens(manager, seeded)


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_a_limit_does_not_change_the_tokens_before_it(manager, limit):
    # The last token is returned before mlx-lm returns it, and must have the same id, log-probabilities and reason.
    _, usual = await finish_with_logprobs(await manager.submit(request(top_logprobs=2, max_tokens=8)))
    text, entries = await finish_with_logprobs(await manager.submit(request(top_logprobs=2, max_tokens=limit)))
    assert entries == usual[:limit]
    assert text.encode() == b"".join(entry.bytes for entry in entries)
    ends = replace(GREEDY, logit_bias=((2, 100.0),))
    assert (await run(manager, sampling=ends, max_tokens=1))[1].finish_reason == "stop"
    assert (await run(manager, sampling=ends, max_tokens=1, ignore_eos=True))[1].finish_reason == "length"


async def test_an_answer_of_one_token_takes_one_forward_pass(own_manager):
    passes = 0

    def count(thread):
        model = generating(thread).batch._generator.model

        def counted(*args, **kwargs):
            nonlocal passes
            passes += 1
            return model(*args, **kwargs)

        generating(thread).batch._generator._prompt_batch.model = counted

    await mlx_thread(own_manager).call(count)
    await run(own_manager, prompt=TokenPrompt(tokens=(300,)), max_tokens=1)
    assert passes == 1


async def test_the_token_that_ends_the_text_is_marked_and_has_no_text(manager):
    ends = replace(GREEDY, logit_bias=((2, 100.0),))
    _, (entry,) = await finish_with_logprobs(await manager.submit(request(top_logprobs=1, sampling=ends)))
    assert (entry.token, entry.text, entry.bytes, entry.ends) == (2, "<|im_end|>", b"", True)
    assert entry.logprob == pytest.approx(0, abs=1e-3)
    stream = await manager.submit(request(top_logprobs=0, sampling=ends, ignore_eos=True))
    text, entries = await finish_with_logprobs(stream)
    assert text == ""
    assert [(one.bytes, one.ends) for one in entries] == [(b"", False)] * 8


async def test_scores_of_a_prompt_equal_the_logprobs_of_generating_it(manager):
    _, entries = await finish_with_logprobs(await manager.submit(request(top_logprobs=2, max_tokens=20)))
    whole_text = TokenPrompt(tokens=(*PROMPT.tokens, *(entry.token for entry in entries)))
    stream = await manager.submit(request(prompt=whole_text, top_logprobs=2, score_prompt=True, max_tokens=0))
    _, report = await finish(stream)
    scores = stream.prompt_scores.tokens
    assert (report.finish_reason, report.output_tokens, report.prompt_tokens) == ("length", 0, len(whole_text.tokens))
    assert [score.token for score in scores] == list(whole_text.tokens)
    assert scores[0].logprob is None
    for score, entry in zip(scores[3:], entries, strict=True):
        assert score.logprob == pytest.approx(entry.logprob, abs=1e-3)
        assert score.top[0].token == score.token


async def test_generation_follows_scoring(manager):
    plain, _ = await run(manager, prompt=numbers(150))
    stream = await manager.submit(request(prompt=numbers(150), score_prompt=True))
    text, report = await finish(stream)
    assert text == plain
    assert report.cached_tokens == 0
    assert len(stream.prompt_scores.tokens) == 150


async def test_a_prompt_that_fills_the_context_can_be_scored(manager):
    stream = await manager.submit(request(prompt=numbers(512), score_prompt=True, max_tokens=0))
    await finish(stream)
    assert len(stream.prompt_scores.tokens) == 512


async def test_max_tokens_0_only_checks_the_prompt(manager):
    before = manager.snapshot.totals.prompt_tokens
    text, report = await run(manager, max_tokens=0)
    assert (text, report.output_tokens, report.finish_reason, report.prompt_tokens) == ("", 0, "length", 3)
    assert manager.snapshot.totals.prompt_tokens == before
    with pytest.raises(InvalidRequestError):
        await run(manager, max_tokens=0, prompt=TokenPrompt(tokens=(10**6,)))


@pytest.mark.slow
def test_rounding_errors_do_not_change_seeded_sampling():
    random = np.random.default_rng(0)
    cut = RandomSampler(temperature=1.5, top_p=1.0, top_k=0, min_p=0.0)
    logprobs = random.normal(0, 1.7, (1, 49_152)).astype(np.float32)
    rounded = logprobs + random.normal(0, 1e-6, logprobs.shape).astype(np.float32)
    keys = [mx.random.key(number) for number in range(100)]
    draws = [[cut.sample(mx.array(each), key).item() for key in keys] for each in (logprobs, rounded)]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 90


class Letters:
    """A tokenizer whose token ids are the first characters of the alphabet."""

    def __len__(self):
        return 20

    def decode(self, tokens, **options):
        return "".join(chr(ord("a") + token) for token in tokens)


def test_rank_and_entropy_equal_those_of_numpy():
    logits = np.random.default_rng(0).normal(size=20).astype(np.float32) * 3
    logits[7] = -np.inf
    exact = logits.astype(np.float64)
    probabilities = np.exp(exact) / np.exp(exact).sum()
    positive = probabilities[probabilities > 0]
    entropy = -(positive * np.log(positive)).sum()
    order = list(np.argsort(-exact))
    vocabulary = Vocabulary(Letters())
    logprobs = (exact - np.log(np.exp(exact).sum())).astype(np.float32)
    for token in (3, 7, order[0]):
        for entry in (
            prompt_token(vocabulary, logits, token, 2),
            answer_token(vocabulary, logprobs, token, 2, named=(7, 5), ends=False),
        ):
            assert entry.rank == 1 + order.index(token)
            assert entry.entropy == pytest.approx(entropy, abs=1e-5)
            assert [other.token for other in entry.top] == order[:2]
    assert [other.logprob for other in entry.named] == [-np.inf, pytest.approx(logprobs[5])]
