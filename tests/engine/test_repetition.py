"""On both engines the real model gives the same answers alone and in parallel with others, greedy and seeded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmx_lab.engine import ChatPrompt, GenerationRequest, ModelManager, Sampling
from lmx_lab.settings import Settings
from lmx_lab.values.generation import TokenLogprob
from lmx_lab.values.models import ModelEntry
from tests.engine.conftest import finish_with_logprobs
from tests.engine.llama_cpp.conftest import entry_of

pytestmark = pytest.mark.anyio
TOPICS = (
    "the sea",
    "a lighthouse",
    "mountains in winter",
    "a clockmaker",
    "the invention of paper",
    "bread",
    "two brothers",
    "a lost letter",
)
"""Topics of prompts of different lengths, one for each slot."""


@pytest.fixture(scope="module", params=["mlx", "gguf"])
async def manager(
    request: pytest.FixtureRequest, smollm2: ModelEntry, smollm2_gguf: Path
) -> AsyncIterator[ModelManager]:
    async with ModelManager(Settings(queue_limit=100)) as manager:
        await manager.load_entry(smollm2 if request.param == "mlx" else entry_of(smollm2_gguf, smollm2.id))
        yield manager


def story(topic: str, *, seed: int | None = None, max_tokens: int) -> GenerationRequest:
    messages = ({"role": "user", "content": f"Write a short story about {topic}."},)
    return GenerationRequest(
        prompt=ChatPrompt(messages=messages),
        sampling=Sampling(temperature=0 if seed is None else 0.9, seed=seed),
        max_tokens=max_tokens,
        top_logprobs=1,
    )


async def answer(manager: ModelManager, request: GenerationRequest) -> tuple[str, list[TokenLogprob]]:
    return await finish_with_logprobs(await manager.submit(request))


async def check_repetition(manager: ModelManager, requests: list[GenerationRequest], *, rounds: int) -> None:
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
async def test_64_greedy_answers_and_24_seeded_ones_repeat(manager: ModelManager) -> None:
    # ``make bench`` compares longer answers.
    await check_repetition(manager, [story(topic, max_tokens=20) for topic in TOPICS], rounds=8)
    seeded = [story(TOPICS[seed % len(TOPICS)], seed=seed, max_tokens=20) for seed in range(24)]
    await check_repetition(manager, seeded, rounds=1)
