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
