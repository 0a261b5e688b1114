"""Requests reuse the caches of earlier requests, which does not change their answers."""

import asyncio

import pytest

from lmx_lab.engine import Sampling, TokenPrompt
from lmx_lab.engine.mlx import memory
from lmx_lab.settings import Settings
from tests.support.engines import (
    engine_paused,
    finish,
    generating,
    load_entry,
    manager_with,
    mlx_thread,
    numbers,
    request,
    run,
    submit_while_paused,
)

pytestmark = pytest.mark.anyio
FIRST = numbers(100)


async def test_a_cached_prefix_does_not_change_the_answer(manager, tiny):
    await run(manager, prompt=FIRST)
    different = TokenPrompt(tokens=(*FIRST.tokens[:60], *range(7000, 7030)))
    with_cache, report = await run(manager, prompt=different, max_tokens=20)
    assert report.cached_tokens == 60
    async with manager_with(tiny, Settings(prefix_cache_bytes=0)) as fresh:
        assert (await run(fresh, prompt=different, max_tokens=20))[0] == with_cache
        assert (await run(fresh, prompt=different, max_tokens=20))[1].cached_tokens == 0


async def test_choices_are_scored_after_their_cached_question(manager, tiny):
    async def score(by, *choice, start=100):
        prompt = TokenPrompt(tokens=(*FIRST.tokens, *choice))
        changes = {"max_tokens": 0, "score_prompt": True, "score_from": start}
        stream = await by.submit(request(prompt=prompt, **changes))
        _, report = await finish(stream)
        assert [entry.token for entry in stream.prompt_scores.tokens] == list(prompt.tokens)
        return [entry.logprob for entry in stream.prompt_scores.tokens], report.cached_tokens

    before = manager.snapshot.totals
    choices = [(7, 8), (9, 8, 7, 6), (7, 8)]
    found = [await score(manager, *choice) for choice in choices]
    assert [cached for _, cached in found] == [0, 99, 99]
    assert manager.snapshot.totals.cached_tokens - before.cached_tokens == 198
    assert manager.snapshot.totals.prompt_tokens - before.prompt_tokens == 308 - len(choices)
    whole, cached = await score(manager, *choices[0], start=0)
    assert cached == 0
    assert whole.count(None) == 1
    _, report = await run(manager, prompt=FIRST)
    assert report.cached_tokens == 99
    async with manager_with(tiny, Settings(prefix_cache_bytes=0)) as fresh:
        for choice, (scores, _) in zip(choices, found, strict=True):
            expected, _ = await score(fresh, *choice)
            assert scores[100:] == pytest.approx(expected[100:], abs=1e-5)


async def test_the_cache_of_an_answer_that_a_stop_string_ends_is_stored_too(manager):
    stopped = numbers(100, start=3000)
    words, _ = await run(manager, prompt=stopped)
    await run(manager, prompt=stopped, stop=(words[3:6],))
    assert (await run(manager, prompt=TokenPrompt(tokens=(*stopped.tokens, 7))))[1].cached_tokens == 100


async def test_simultaneous_requests_compute_their_common_prefix_once(manager):
    prompts = [TokenPrompt(tokens=(*FIRST.tokens, 2000 + at)) for at in range(4)]
    async with engine_paused(manager):
        submits = [await submit_while_paused(manager, manager.submit(request(prompt=prompt))) for prompt in prompts]
    reports = [(await finish(await submit))[1] for submit in submits]
    assert [report.cached_tokens for report in reports] == [0, 100, 100, 100]


async def test_a_request_that_waits_for_a_cancelled_one_computes_the_prefix_itself(manager, tiny):
    long = numbers(400)
    async with await manager.submit(request(prompt=long)):
        waits = await manager.submit(request(prompt=TokenPrompt(tokens=(*long.tokens, 7))))
    _, report = await finish(waits)
    assert report.output_tokens == 8


async def test_the_answers_to_one_request_share_its_prompt(manager):
    streams = await manager.generate(request(prompt=FIRST, sampling=Sampling(temperature=1.5)), choices=3)
    texts = {text for text, _ in await asyncio.gather(*map(finish, streams))}
    assert len(texts) == 3
    assert [stream.report.cached_tokens for stream in streams if stream.report] == [0, 99, 99]


@pytest.fixture
async def small(tiny):
    """A cache for about 200 tokens, of 512 bytes each."""
    async with manager_with(tiny, Settings(prefix_cache_bytes=100_000)) as manager:
        yield manager


async def test_the_cache_stays_within_its_limit(small):
    for start in range(1000, 3000, 200):
        await run(small, prompt=numbers(100, start=start))
        assert small.snapshot.prefix_cache_bytes <= 100_000
    assert small.snapshot.prefix_cache_bytes > 50_000
    assert (await run(small, prompt=numbers(100, start=1000)))[1].cached_tokens == 0


async def test_unloading_drops_the_cache(own_manager, tiny):
    await run(own_manager, prompt=FIRST)
    assert own_manager.snapshot.prefix_cache_bytes > 0
    await own_manager.unload()
    assert own_manager.snapshot.prefix_cache_bytes == 0
    await load_entry(own_manager, tiny)
    assert (await run(own_manager, prompt=FIRST))[1].cached_tokens == 0


async def footprint(model):
    async with manager_with(model) as manager:
        # Only the numbers: a reference to the model would keep its weights in the memory that is measured next.
        return await mlx_thread(manager).call(lambda thread: generating(thread).weights.traits.footprint)


@pytest.mark.usefixtures("no_shared_model")
async def test_the_cache_is_dropped_first_when_memory_is_short(tiny, tiny_home):
    # Beside the weights there is memory for one request of 300 tokens and the computation of its prompt.
    needed = (await footprint(tiny)).running_bytes([300], chunk=memory.MAX_CHUNK_TOKENS)
    async with manager_with(tiny, Settings(memory_limit_bytes=needed + 60_000, prefix_cache_bytes=200_000)) as manager:
        await run(manager, prompt=FIRST)
        kept = manager.snapshot.prefix_cache_bytes
        await run(manager, prompt=numbers(250, start=9000), max_tokens=50)
        assert kept > 50_000
        assert (await run(manager, prompt=FIRST))[1].cached_tokens == 0


@pytest.mark.long
@pytest.mark.usefixtures("no_shared_model")
async def test_requests_wait_for_memory(tiny):
    two = (await footprint(tiny)).running_bytes([200, 200], chunk=memory.MAX_CHUNK_TOKENS)
    async with manager_with(tiny, Settings(memory_limit_bytes=two + 1000, prefix_cache_bytes=0)) as manager:
        most = 0
        prompts = [numbers(100, start=1000 * at) for at in range(1, 6)]
        streams = [await manager.submit(request(prompt=prompt, max_tokens=100)) for prompt in prompts]

        async def watch():
            nonlocal most
            while True:
                most = max(most, manager.snapshot.active_requests)
                await asyncio.sleep(0)

        watcher = asyncio.ensure_future(watch())
        reports = [report for _, report in await asyncio.gather(*map(finish, streams))]
        watcher.cancel()
        assert most == 2
        assert [report.output_tokens for report in reports] == [100] * 5


@pytest.mark.usefixtures("no_shared_model")
async def test_the_error_names_the_context_that_memory_allows_and_that_of_the_model(tiny):
    limit = (await footprint(tiny)).running_bytes([256], chunk=256)
    async with manager_with(tiny, Settings(memory_limit_bytes=limit)) as manager:
        assert manager.snapshot.context_length == 256
        with pytest.raises(Exception, match=r"400 tokens > 256 maximum.*as it is loaded.*its own limit is 512"):
            await run(manager, prompt=numbers(400))
        _, report = await run(manager, prompt=numbers(246), max_tokens=100)
        assert report.output_tokens == 10


async def test_long_prompts_with_a_cached_beginning_are_computed_together(manager):
    beginning = numbers(300, start=12_000)
    await run(manager, prompt=beginning)
    prompts = [TokenPrompt(tokens=(*beginning.tokens, 2000 + at, *range(3000, 3008))) for at in range(2)]
    async with engine_paused(manager):
        submits = [await submit_while_paused(manager, manager.submit(request(prompt=prompt))) for prompt in prompts]
    streams = [await submit for submit in submits]
    reports = [(await finish(stream))[1] for stream in streams]
    assert [report.cached_tokens for report in reports] == [300, 300]
    prefills = [next(step for step in stream.steps.steps() if step.kind == "prefill") for stream in streams]
    assert len({step.step for step in prefills}) == 1


async def test_a_request_from_another_event_loop_uses_the_cache(manager):
    """The arrays of the cache are used on the engine thread only."""
    text, _ = await run(manager, prompt=FIRST)

    def other_loop():
        return asyncio.run(run(manager, prompt=FIRST))

    again, report = await asyncio.to_thread(other_loop)
    assert (again, report.cached_tokens) == (text, 99)


@pytest.mark.long
@pytest.mark.usefixtures("no_shared_model")
async def test_a_request_that_waits_for_memory_does_not_drop_the_cache(tiny):
    sizes = await footprint(tiny)
    two, one = (
        sizes.running_bytes([500, 500], chunk=memory.MAX_CHUNK_TOKENS),
        sizes.running_bytes([500], chunk=memory.MAX_CHUNK_TOKENS),
    )
    assert two - one > 300_000
    async with manager_with(tiny, Settings(memory_limit_bytes=two - 20_000, prefix_cache_bytes=200_000)) as manager:
        await run(manager, prompt=FIRST)
        kept = manager.snapshot.prefix_cache_bytes
        runs = await manager.submit(request(prompt=numbers(4, start=30_000), max_tokens=490, ignore_eos=True))
        await anext(runs)
        waits = await manager.submit(request(prompt=numbers(250, start=9000), max_tokens=250))
        while (await anext(runs)) and manager.snapshot.queued_requests == 0:
            pass
        assert manager.snapshot.prefix_cache_bytes == kept > 0
        await finish(runs)
        assert (await finish(waits))[1].output_tokens > 0


async def test_without_a_cache_no_request_waits_for_the_prefix_of_another(tiny):
    async with manager_with(tiny, Settings(prefix_cache_bytes=0)) as manager:
        first = await manager.submit(request(prompt=numbers(400), max_tokens=50))
        second = await manager.submit(request(prompt=numbers(400), max_tokens=50))
        await anext(first)
        assert second.progress is not None
        await finish(first)
        await finish(second)
