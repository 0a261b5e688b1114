"""Conversations without a slot of llama.cpp are continued from their saved states."""

import asyncio
from dataclasses import replace

import pytest

from lmx_lab.engine import Caller, TokenPrompt
from tests.support.engines import (
    LLAMA_SETTINGS,
    entry_of,
    llama_model,
    manager_with,
    numbers,
    request,
    run,
    until_busy,
    until_idle,
)

pytestmark = pytest.mark.anyio
CALLERS = [Caller(client=f"192.168.1.{number}") for number in range(5)]
PROMPTS = [numbers(100, start=1000 * number) for number in range(1, 6)]


async def cached(manager, prompt, caller):
    return (await run(manager, prompt=prompt, caller=caller))[1].cached_tokens


@pytest.mark.parametrize("callers", [CALLERS, CALLERS[:1] * 5], ids=["several", "one"])
async def test_more_conversations_than_slots_keep_their_prefixes(long_gguf, callers):
    async with manager_with(entry_of(long_gguf), LLAMA_SETTINGS) as manager:
        for _ in range(2):
            texts = [
                (await run(manager, prompt=prompt, caller=caller))[0]
                for prompt, caller in zip(PROMPTS, callers, strict=True)
            ]
        turns = [TokenPrompt(tokens=(*prompt.tokens, 7, 8, 9)) for prompt in PROMPTS]
        found = [await cached(manager, turn, caller) for turn, caller in zip(turns, callers, strict=True)]
        assert found == [100] * 5
        again = [
            await run(manager, prompt=prompt, caller=caller) for prompt, caller in zip(PROMPTS, callers, strict=True)
        ]
        assert [(text, report.cached_tokens) for text, report in again] == [(text, 99) for text in texts]


@pytest.mark.parametrize(
    "limit", [{"prefix_cache_bytes": 0}, {"prefix_cache_bytes": 1000}, {"disk_reserve_bytes": 2**60}]
)
async def test_without_room_for_states_only_slots_keep_them(long_gguf, limit):
    async with manager_with(entry_of(long_gguf), replace(LLAMA_SETTINGS, **limit)) as manager:
        for prompt, caller in zip(PROMPTS[:3], CALLERS[:3], strict=True):
            await cached(manager, prompt, caller)
        assert [await cached(manager, PROMPTS[at], CALLERS[at]) for at in (2, 0)] == [99, 0]


async def test_short_prompts_that_repeat_use_cached_tokens_of_short_prompts_only(long_gguf):
    short, caller = numbers(40, start=300), CALLERS[0]
    longer, long = (numbers(length, start=300) for length in (50, 100))
    async with manager_with(entry_of(long_gguf), replace(LLAMA_SETTINGS, slots=1)) as manager:
        found = [await cached(manager, prompt, caller) for prompt in (short, longer, long, longer, longer)]
    assert found == [0, 40, 50, 49, 49], "the first 50 tokens of the long prompt are those of the short one"
    async with manager_with(entry_of(long_gguf), replace(LLAMA_SETTINGS, slots=1)) as manager:
        found = [await cached(manager, prompt, caller) for prompt in (long, longer, short, longer)]
    assert found == [0, 0, 39, 40]


async def test_files_of_another_caller_are_not_restored(long_gguf, tmp_path):
    settings = replace(LLAMA_SETTINGS, prefix_cache_dir=tmp_path)
    async with manager_with(entry_of(long_gguf), settings) as manager:
        await cached(manager, PROMPTS[0], CALLERS[0])
    for caller, expected in ((CALLERS[1], 0), (CALLERS[0], 99)):
        async with manager_with(entry_of(long_gguf), settings) as manager:
            assert await cached(manager, PROMPTS[0], caller) == expected


async def test_a_request_that_is_cancelled_leaves_nothing_to_another_caller(long_gguf):
    async with manager_with(entry_of(long_gguf), replace(LLAMA_SETTINGS, slots=1)) as manager:
        for at in range(10):
            await cached(manager, PROMPTS[at % 2], CALLERS[0])
            stream = await manager.submit(request(prompt=PROMPTS[at % 2], caller=CALLERS[1]))
            await until_busy(manager)
            for _ in range(at):
                await asyncio.sleep(0)
            await stream.aclose()
            await until_idle(manager)
            fresh = Caller(client=f"192.168.2.{at}")
            assert await cached(manager, PROMPTS[at % 2], fresh) == 0


async def test_a_shared_prefix_is_found_again_after_it_has_lost_its_slot(long_gguf):
    async with manager_with(entry_of(long_gguf), LLAMA_SETTINGS) as manager:
        await run(manager, prompt=PROMPTS[0], caller=Caller(local=True), share_prefix=True)
        for at in range(1, 5):
            await cached(manager, PROMPTS[at], CALLERS[at])
        turns = [TokenPrompt(tokens=(*PROMPTS[0].tokens, *range(7 + at, 50 + at))) for at in range(4)]
        assert [await cached(manager, turn, caller) for turn, caller in zip(turns, CALLERS[:4], strict=True)] == [
            100
        ] * 4


async def used_slots(manager):
    """Return the ids of the slots that llama.cpp computes now."""
    slots = await llama_model(manager).tokenizer.connection.get("/slots")
    return [slot["id"] for slot in slots if slot["is_processing"]]


async def start(manager, prompt):
    answer = await manager.submit(request(prompt=prompt, caller=CALLERS[0], max_tokens=5000, ignore_eos=True))
    await anext(answer)
    return answer


def turn(at, *tokens):
    return TokenPrompt(tokens=(*range(1000 * at, 1000 * at + 200), *tokens))


async def test_answers_are_computed_in_consecutive_slots_and_find_their_prefixes(long_gguf):
    """llama.cpp computes only consecutive slots together."""
    async with manager_with(entry_of(long_gguf), replace(LLAMA_SETTINGS, slots=6)) as manager:
        # Each conversation has a slot now.
        for at in range(1, 5):
            await cached(manager, turn(at), CALLERS[0])
        for first, second, third in ((1, 3, 2), (4, 2, 3), (3, 1, 4)):
            answers = [await start(manager, prompt) for prompt in (turn(first, 5), turn(second, 5), turn(9, third))]
            used = await used_slots(manager)
            assert used == list(range(used[0], used[0] + 3))
            # Whichever slot becomes free, there is no gap afterwards. llama.cpp may not have stopped that answer yet.
            await answers[1].aclose()
            answers.append(await start(manager, turn(third, 5)))
            used = await used_slots(manager)
            assert used == list(range(used[0], used[-1] + 1))
            for answer in answers:
                await answer.aclose()
            await until_idle(manager)
        assert [await cached(manager, turn(at), CALLERS[0]) for at in range(1, 5)] == [199] * 4
