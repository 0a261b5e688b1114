"""A cached prefix is used for the requests of the caller that it comes from, unless its owner has shared it."""

import asyncio

import pytest

from lmx_lab.engine import Caller, TokenPrompt
from tests.support.engines import finish, numbers, request, run

pytestmark = pytest.mark.anyio
OWNER = Caller(local=True, client="127.0.0.1")
NOTEBOOK = Caller(local=True, own=True)
ANNA, BERT = Caller(client="192.168.1.5"), Caller(client="192.168.1.6")


async def cached(model, prompt, caller, **changes):
    """Return how many tokens of a prompt were not computed."""
    return (await run(model, prompt=prompt, caller=caller, max_tokens=2, **changes))[1].cached_tokens


def longer(prompt, *tokens):
    return TokenPrompt(tokens=(*prompt.tokens, *tokens))


async def test_callers_do_not_find_the_prompts_of_others(model):
    prompt = numbers(100, start=2000)
    for caller in (OWNER, ANNA, BERT):
        assert await cached(model, prompt, caller) == 0
    for caller in (OWNER, ANNA, BERT, NOTEBOOK):
        assert await cached(model, longer(prompt, 7), caller) >= 100, "each caller finds its own"


async def test_the_common_prefix_with_the_prompt_of_another_caller_is_not_visible(model):
    secret = numbers(60, start=3000)
    await cached(model, secret, OWNER)
    for number, length in enumerate((10, 30, 59, 60)):
        guess = TokenPrompt(tokens=(*secret.tokens[:length], *range(5000 + 50 * number, 5040 + 50 * number)))
        assert await cached(model, guess, Caller(client=f"192.168.2.{number}")) == 0


async def test_simultaneous_requests_of_several_callers_do_not_wait_for_the_prompts_of_each_other(model):
    prompt = numbers(200, start=4000)
    streams = [
        await model.submit(request(prompt=prompt, caller=caller, max_tokens=2)) for caller in (OWNER, ANNA, BERT)
    ]
    reports = [report for _, report in await asyncio.gather(*map(finish, streams))]
    assert [report.cached_tokens for report in reports] == [0, 0, 0]


async def test_all_callers_find_a_shared_prefix(model):
    prompt = numbers(100, start=6000)
    assert await cached(model, prompt, OWNER) == 0
    assert await cached(model, prompt, OWNER, share_prefix=True) == 0, "the prefix of the caller is not shared later"
    for number, caller in enumerate((ANNA, BERT, OWNER)):
        assert await cached(model, longer(prompt, *range(7000 + 50 * number, 7040 + 50 * number)), caller) == 100
    assert await cached(model, longer(prompt, *range(7000, 7045)), BERT) == 100, "what continues it is not shared"
    assert await cached(model, longer(prompt, *range(7000, 7045)), ANNA) >= 140


async def test_scores_of_a_prompt_show_nothing_of_another_caller(model):
    prompt = numbers(80, start=8000)
    scored = {"max_tokens": 0, "score_prompt": True, "top_logprobs": 0, "score_from": 70}
    for caller in (OWNER, BERT):
        stream = await model.submit(request(prompt=prompt, caller=caller, **scored))
        assert (await finish(stream))[1].cached_tokens == 0


@pytest.mark.parametrize("stopped", ["before the next turn", "after the next turn was sent", "later"])
async def test_the_next_turn_continues_an_answer_that_was_stopped(busy, stopped):
    prompt = numbers(400, start=9000)
    answer = await busy.submit(request(prompt=prompt, max_tokens=4000, ignore_eos=True))
    first = await anext(answer)
    if stopped == "before the next turn":
        await answer.aclose()
    turn = await busy.submit(request(prompt=longer(prompt, *first.ids, 7, 8, 9), max_tokens=2))
    if stopped == "after the next turn was sent":
        await answer.aclose()
    assert (await finish(turn))[1].cached_tokens >= 400
    assert answer.report is None, "it is still running, or was cancelled"
    await answer.aclose()


async def test_an_interrupted_answer_continues_unchanged(busy):
    prompt, long = numbers(400, start=15_000), {"max_tokens": 60, "ignore_eos": True}
    alone = await run(busy, prompt=prompt, **long)
    for seed in range(3):
        other = numbers(400, start=16_000 + 1000 * seed)
        answer = await busy.submit(request(prompt=other, **long))
        first = await anext(answer)
        await cached(busy, longer(other, *first.ids, 7, 8, 9), OWNER)
        interrupted = first.text + (await finish(answer))[0]
        assert interrupted == (await run(busy, prompt=other, **long))[0]
    assert (await run(busy, prompt=prompt, **long))[0] == alone[0]


async def test_a_prompt_that_was_stopped_leaves_what_was_computed(busy):
    prompt = numbers(6000, start=20_000)
    answer = await busy.submit(request(prompt=prompt, max_tokens=4))
    while answer.progress is None or answer.progress.done == 0:  # noqa: ASYNC110 - the progress has no event
        await asyncio.sleep(0)
    await answer.aclose()
    computed = min(answer.progress.done, 5999)
    assert await cached(busy, prompt, Caller()) >= computed
