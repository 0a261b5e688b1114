"""What one request has computed, the next one need not; and nothing it says changes by that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from lmx_lab.engine import ModelManager, Sampling, TokenPrompt
from lmx_lab.engine.mlx.memory_plan import Footprint
from lmx_lab.engine.mlx.state import MlxCore
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from tests.engine.conftest import finish, held, mlx_thread, numbers, posted, request, run, until_idle

pytestmark = pytest.mark.anyio
FIRST = numbers(100)


async def test_the_next_turn_computes_only_what_is_new(manager: ModelManager) -> None:
    before = manager.snapshot
    stream = await manager.submit(request(prompt=FIRST))
    _, first = await finish(stream)
    turn = TokenPrompt(tokens=(*FIRST.tokens, *range(500, 510)))
    _, second = await run(manager, prompt=turn)
    assert (first.cached_tokens, second.cached_tokens) == (0, 100)
    assert second.prompt_tokens == 110
    assert manager.snapshot.cached_tokens - before.cached_tokens == 100
    assert manager.snapshot.prompt_tokens - before.prompt_tokens == 210


async def test_a_prompt_that_is_kept_whole_says_the_same_again(manager: ModelManager) -> None:
    text, _ = await run(manager, prompt=FIRST)
    again, report = await run(manager, prompt=FIRST)
    assert again == text
    assert report.cached_tokens == 99


async def test_a_kept_beginning_changes_no_word(manager: ModelManager, tiny: ModelEntry) -> None:
    await run(manager, prompt=FIRST)
    departs = TokenPrompt(tokens=(*FIRST.tokens[:60], *range(7000, 7030)))
    with_cache, report = await run(manager, prompt=departs, max_tokens=20)
    assert report.cached_tokens == 60
    async with ModelManager(Settings(prefix_cache_bytes=0)) as fresh:
        await fresh.load(tiny)
        assert (await run(fresh, prompt=departs, max_tokens=20))[0] == with_cache
        assert (await run(fresh, prompt=departs, max_tokens=20))[1].cached_tokens == 0


async def test_an_answer_cut_by_a_stop_string_or_a_cancel_is_kept_too(manager: ModelManager) -> None:
    stopped = numbers(100, start=3000)
    words, _ = await run(manager, prompt=stopped)
    await run(manager, prompt=stopped, stop=(words[3:6],))
    assert (await run(manager, prompt=TokenPrompt(tokens=(*stopped.tokens, 7))))[1].cached_tokens == 100
    left = numbers(100, start=5000)
    async with await manager.submit(request(prompt=left, max_tokens=300)) as stream:
        await anext(stream)
    await until_idle(manager)
    assert (await run(manager, prompt=TokenPrompt(tokens=(*left.tokens, 7))))[1].cached_tokens == 100


async def test_requests_that_begin_alike_at_the_same_time_compute_it_once(manager: ModelManager) -> None:
    prompts = [TokenPrompt(tokens=(*FIRST.tokens, 2000 + at)) for at in range(4)]
    async with held(manager):
        submits = [await posted(manager, manager.submit(request(prompt=prompt))) for prompt in prompts]
    reports = [(await finish(await submit))[1] for submit in submits]
    assert [report.cached_tokens for report in reports] == [0, 100, 100, 100]


async def test_one_that_waits_for_a_prompt_that_is_cancelled_computes_it_itself(
    manager: ModelManager, tiny: ModelEntry
) -> None:
    long = numbers(400)
    async with await manager.submit(request(prompt=long)):
        waits = await manager.submit(request(prompt=TokenPrompt(tokens=(*long.tokens, 7))))
    _, report = await finish(waits)
    assert report.output_tokens == 8


async def test_the_answers_to_one_request_share_its_prompt(manager: ModelManager) -> None:
    streams = await manager.submit_all(request(prompt=FIRST, sampling=Sampling(temperature=1.5)), choices=3)
    texts = {text for text, _ in await asyncio.gather(*map(finish, streams))}
    assert len(texts) == 3
    assert [stream.report.cached_tokens for stream in streams if stream.report] == [0, 99, 99]


@pytest.fixture
async def small(tiny: ModelEntry) -> AsyncIterator[ModelManager]:
    """512 bytes a token: about 200 tokens may be kept."""
    async with ModelManager(Settings(prefix_cache_bytes=100_000)) as manager:
        await manager.load_entry(tiny)
        yield manager


async def test_what_is_kept_stays_within_its_bytes(small: ModelManager) -> None:
    for start in range(1000, 3000, 200):
        await run(small, prompt=numbers(100, start=start))
        assert small.snapshot.prefix_cache_bytes <= 100_000
    assert small.snapshot.prefix_cache_bytes > 50_000
    assert (await run(small, prompt=numbers(100, start=1000)))[1].cached_tokens == 0


async def test_unloading_drops_it(own_manager: ModelManager, tiny: ModelEntry) -> None:
    await run(own_manager, prompt=FIRST)
    assert own_manager.snapshot.prefix_cache_bytes > 0
    await own_manager.unload()
    assert own_manager.snapshot.prefix_cache_bytes == 0
    await own_manager.load_entry(tiny)
    assert (await run(own_manager, prompt=FIRST))[1].cached_tokens == 0


async def footprint(model: ModelEntry) -> Footprint:
    async with ModelManager(Settings()) as manager:
        await manager.load_entry(model)
        # Only the numbers: a reference to the model would keep its weights in the memory that is measured next.
        return await mlx_thread(manager).call(lambda core: core.main.traits.footprint)


@pytest.mark.usefixtures("alone")
async def test_when_memory_is_short_it_goes_first(tiny: ModelEntry, tiny_home: Path) -> None:
    # What the weights leave holds one request of 300 tokens with the transient of its prompt, and not much else.
    needed = (await footprint(tiny)).running_bytes([300], chunk=512)
    async with ModelManager(Settings(memory_limit_bytes=needed + 60_000, prefix_cache_bytes=200_000)) as manager:
        await manager.load_entry(tiny)
        await run(manager, prompt=FIRST)
        kept = manager.snapshot.prefix_cache_bytes
        await run(manager, prompt=numbers(250, start=9000), max_tokens=50)
        assert kept > 50_000
        assert (await run(manager, prompt=FIRST))[1].cached_tokens == 0


@pytest.mark.usefixtures("alone")
async def test_requests_wait_for_memory_rather_than_exceed_it(tiny: ModelEntry) -> None:
    two = (await footprint(tiny)).running_bytes([200, 200], chunk=512)
    async with ModelManager(Settings(memory_limit_bytes=two + 1000, prefix_cache_bytes=0)) as manager:
        await manager.load_entry(tiny)
        most = 0
        prompts = [numbers(100, start=1000 * at) for at in range(1, 6)]
        streams = [await manager.submit(request(prompt=prompt, max_tokens=100)) for prompt in prompts]

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, manager.snapshot.active_requests)
                await asyncio.sleep(0)

        watcher = asyncio.ensure_future(watch())
        reports = [report for _, report in await asyncio.gather(*map(finish, streams))]
        watcher.cancel()
        assert most == 2
        assert [report.output_tokens for report in reports] == [100] * 5


@pytest.mark.usefixtures("alone")
async def test_a_context_that_memory_does_not_hold_is_said_with_both_numbers(tiny: ModelEntry) -> None:
    limit = (await footprint(tiny)).running_bytes([256], chunk=256)
    async with ModelManager(Settings(memory_limit_bytes=limit)) as manager:
        await manager.load_entry(tiny)
        assert manager.snapshot.context_length == 256
        with pytest.raises(Exception, match=r"400 tokens.*holds 256 in all \(of its 512: memory holds no more\)"):
            await run(manager, prompt=numbers(400))
        _, report = await run(manager, prompt=numbers(246), max_tokens=100)
        assert report.output_tokens == 10


async def test_more_in_use_than_allowed_drops_what_is_kept_and_then_the_model(
    own_manager: ModelManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmx_lab.engine.mlx import memory
    from lmx_lab.errors import OutOfMemoryError

    await run(own_manager, prompt=FIRST)
    await mlx_thread(own_manager).call(lambda core: setattr(core.generating, "_limit_bytes", 1_000_000))
    with pytest.raises(OutOfMemoryError, match="unloaded"):
        await run(own_manager, prompt=replace(FIRST, tokens=FIRST.tokens[::-1]))
    assert own_manager.snapshot.state == "empty"
    assert (own_manager.snapshot.unloaded_model, own_manager.snapshot.unload_cause) == ("tiny", "memory")
    assert memory.used_bytes() < 6_000_000
    with pytest.raises(OutOfMemoryError, match="tiny was unloaded"):
        await run(own_manager)


async def test_an_engine_step_leaves_no_work_on_other_threads(manager: ModelManager) -> None:
    """The cache's arrays live on the engine thread; a hit from another event loop works all the same."""
    await run(manager, prompt=FIRST)

    def other_loop() -> int:
        return asyncio.run(run(manager, prompt=FIRST))[1].cached_tokens

    assert await asyncio.to_thread(other_loop) == 99
    assert isinstance(mlx_thread(manager).core, MlxCore)


@pytest.mark.usefixtures("alone")
async def test_one_that_waits_for_memory_takes_nothing_from_the_others_meanwhile(tiny: ModelEntry) -> None:
    sizes = await footprint(tiny)
    two, one = sizes.running_bytes([500, 500], chunk=512), sizes.running_bytes([500], chunk=512)
    assert two - one > 300_000
    async with ModelManager(Settings(memory_limit_bytes=two - 20_000, prefix_cache_bytes=200_000)) as manager:
        await manager.load_entry(tiny)
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


async def test_where_nothing_is_kept_nobody_waits_for_it(tiny: ModelEntry) -> None:
    async with ModelManager(Settings(prefix_cache_bytes=0)) as manager:
        await manager.load_entry(tiny)
        first = await manager.submit(request(prompt=numbers(400), max_tokens=50))
        second = await manager.submit(request(prompt=numbers(400), max_tokens=50))
        await anext(first)
        assert second.progress is not None
        await finish(first)
        await finish(second)
