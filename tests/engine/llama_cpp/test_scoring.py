"""Prompts are scored in a separate process, whose end does not end answers."""

import asyncio
import contextlib

import psutil
import pytest

from lmx_lab.errors import EngineError, OutOfMemoryError
from tests.support.engines import finish, numbers, request, run
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SCORED = {"score_prompt": True, "top_logprobs": 0, "max_tokens": 0}


def scoring_processes():
    """Return the processes that have not ended."""
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [each] * ("score_worker" in " ".join(each.cmdline()))
    return found


async def score(manager, prompt):
    stream = await manager.submit(request(prompt=prompt, **SCORED))
    await finish(stream)
    return [entry.logprob for entry in stream.prompt_scores.tokens]


async def test_if_the_process_dies_one_score_fails_and_no_answer(manager):
    assert scoring_processes() == []
    expected = await score(manager, numbers(100))
    (process,) = scoring_processes()
    answer = asyncio.create_task(run(manager, max_tokens=200, ignore_eos=True))
    scoring = await manager.submit(request(prompt=numbers(900), **SCORED))
    while scoring.progress is None or not scoring.progress.done:  # noqa: ASYNC110
        await asyncio.sleep(0)
    process.kill()
    with pytest.raises(EngineError, match="did not score the prompt: its process was ended by SIGKILL"):
        await finish(scoring)
    assert (await answer)[1].output_tokens == 200
    assert await score(manager, numbers(100)) == expected
    assert len(scoring_processes()) == 1


async def test_a_longer_prompt_gets_a_longer_context(manager):
    expected = await score(manager, numbers(100))
    longer = await score(manager, numbers(3000))
    assert longer[:100] == expected
    assert len(longer) == 3000
    assert len(scoring_processes()) == 1


async def test_the_process_ends_with_its_model(manager):
    await score(manager, numbers(10))
    assert len(scoring_processes()) == 1
    await manager.unload()
    assert scoring_processes() == []


async def test_a_process_that_was_killed_between_two_scores_is_replaced(manager):
    expected = await score(manager, numbers(100))
    (process,) = scoring_processes()
    process.kill()
    until(lambda: scoring_processes() == [])
    assert await score(manager, numbers(100)) == expected


async def test_a_process_that_dies_while_it_starts_ends_one_score(manager):
    expected = await score(manager, numbers(100))
    # A longer prompt needs another process.
    (old,) = scoring_processes()
    scoring = await manager.submit(request(prompt=numbers(3000), **SCORED))
    while not (started := [each for each in scoring_processes() if each != old]):  # noqa: ASYNC110
        await asyncio.sleep(0)
    started[0].kill()
    with pytest.raises(OutOfMemoryError, match=r"ended by SIGKILL, probably because memory ran out"):
        await finish(scoring)
    assert await score(manager, numbers(100)) == expected
