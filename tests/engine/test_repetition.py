"""On both engines the real model gives the same answers alone and in parallel with others, greedy and seeded."""

import asyncio
import random
from dataclasses import replace

import pytest

from lmx_lab.engine import ChatPrompt, GenerationRequest, Sampling, TextPrompt
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec
from tests.support.engines import entry_of, finish_with_logprobs, manager_with

pytestmark = pytest.mark.anyio
# Topics of prompts of different lengths, one for each slot.
TOPICS = ("the sea", "a lighthouse", "mountains in winter", "a clockmaker")
TOPICS += ("the invention of paper", "bread", "two brothers", "a lost letter")


@pytest.fixture(scope="module", params=["mlx", "gguf"])
async def manager(request, smollm2, smollm2_gguf):
    async with manager_with(
        smollm2 if request.param == "mlx" else entry_of(smollm2_gguf, smollm2.id), Settings(queue_limit=100)
    ) as manager:
        yield manager


def story(topic, *, seed=None, max_tokens):
    messages = ({"role": "user", "content": f"Write a short story about {topic}."},)
    return GenerationRequest(
        prompt=ChatPrompt(messages=messages),
        sampling=Sampling(temperature=0 if seed is None else 0.9, seed=seed),
        max_tokens=max_tokens,
        top_logprobs=1,
    )


async def answer(manager, request):
    return await finish_with_logprobs(await manager.submit(request))


async def check_repetition(manager, requests, *, rounds):
    """Compare answers alone with answers in parallel, each time in another order."""
    alone = [await answer(manager, each) for each in requests]
    for number in range(rounds):
        at = number % len(requests)
        parallel = await asyncio.gather(*(answer(manager, each) for each in requests[at:] + requests[:at]))
        expected = alone[at:] + alone[:at]
        assert [text for text, _ in parallel] == [text for text, _ in expected]
        if manager.fingerprint.startswith("llama.cpp"):
            assert parallel == expected


@pytest.mark.long
async def test_64_greedy_answers_and_24_seeded_ones_repeat(manager):
    # ``make bench`` compares longer answers.
    await check_repetition(manager, [story(topic, max_tokens=20) for topic in TOPICS], rounds=8)
    seeded = [story(TOPICS[seed % len(TOPICS)], seed=seed, max_tokens=20) for seed in range(24)]
    await check_repetition(manager, seeded, rounds=1)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"engine": "mlx"}, {"deterministic": True}, {}], ids=["mlx", "exact", "short"])
async def test_answers_are_the_same_in_any_order_with_cached_prefixes_and_cancelled_requests(
    smollm2, smollm2_gguf, options
):
    """Compares all answers whose fingerprint does not end with ``-batch-dependent``.

    On llama.cpp without an option, these are the answers to short prompts.
    """
    entry = smollm2 if "engine" in options else entry_of(smollm2_gguf, smollm2.id)
    draw = random.Random(7)
    text = " ".join(draw.choices(("lamp", "keeper", "storm", "stairs", "evening", "boat", "gull", "north"), k=1500))
    requests = [
        replace(
            story("", seed=draw.choice((None, 3, 4)), max_tokens=draw.choice((2, 6, 12))),
            prompt=TextPrompt(text=text[: int(40 * 180 ** draw.random())]),
        )
        for _ in range(30)
    ]
    limit = asyncio.Semaphore(8)

    async def compute(manager, each):
        async with limit:
            opened = await manager.submit(each)
            found, logprobs = await finish_with_logprobs(opened)
        is_exact = not opened.origin.fingerprint.endswith("-batch-dependent")
        bits = [entry.logprob for entry in logprobs] if entry.format == "gguf" else None
        return (found, bits) if is_exact else None

    async def cancel(manager, each):
        async with limit:
            opened = await manager.submit(each)
            await anext(opened)
            await opened.aclose()

    async with manager_with(entry, Settings(queue_limit=100), spec=LoadSpec(model=smollm2.id, **options)) as manager:
        alone = [await compute(manager, each) for each in requests]
        assert sum(each is not None for each in alone) >= (5 if options == {} else 30)
        for _ in range(2):
            order = draw.sample(range(30), 30)
            cancelled = [cancel(manager, each) for each in draw.sample(requests, 5)]
            found, _ = await asyncio.gather(
                asyncio.gather(*(compute(manager, requests[at]) for at in order)), asyncio.gather(*cancelled)
            )
            assert found == [alone[at] for at in order]
