"""The MLX engine with a tiny model: every accepted request ends once, whatever happens."""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from lmx_lab.engine import ChatPrompt, ModelManager, Sampling
from lmx_lab.engine.mlx.state import MlxCore
from lmx_lab.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    GenerationTimeoutError,
    NotLoadedError,
    OutOfMemoryError,
    QueueFullError,
    UnusableModelError,
)
from lmx_lab.settings import Settings
from lmx_lab.values.outputs import GenerationReport
from lmx_lab.weights import Catalog
from tests.support.engines import (
    TWO_SLOTS,
    engine_paused,
    entry_of,
    fail_next_step,
    finish,
    mlx_thread,
    numbers,
    request,
    run,
    submit_while_paused,
    unload_when_idle_for,
    until_idle,
)
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.anyio


async def test_different_samplings_share_a_batch(manager):
    hot = Sampling(temperature=1.5, top_p=0.9)
    (greedy, _), (_, report) = await asyncio.gather(run(manager), run(manager, sampling=hot))
    assert greedy == (await run(manager))[0]
    assert report.output_tokens == 8


async def test_sampling_differs_between_engines(tiny):
    texts = set()
    for _ in range(3):
        async with ModelManager(Settings()) as manager:
            await manager.load_entry(tiny)
            texts.add((await run(manager, sampling=Sampling(temperature=1.0)))[0])
    assert len(texts) > 1, "every new engine thread starts with the same random state"


async def test_a_slow_reader_gets_everything_merged(manager):
    whole, _ = await run(manager, max_tokens=50)
    stream = await manager.submit(request(max_tokens=50))
    await until_idle(manager)
    deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == whole
    assert sum(delta.tokens for delta in deltas) == 50
    # The last token may arrive after the engine is idle.
    assert len(deltas) <= 2


async def test_without_a_model_the_error_says_what_to_do(tiny):
    async with ModelManager(Settings()) as manager:
        with pytest.raises(NotLoadedError, match="/admin/models/load"):
            await run(manager)


async def test_an_ended_stream_does_not_keep_the_weights_in_memory(own_manager):
    loaded = own_manager.snapshot.model_memory_bytes
    kept = await own_manager.submit(request())
    await finish(kept)
    freed = await own_manager.unload()
    assert freed >= loaded * 0.95
    assert own_manager.snapshot.memory_used_bytes < loaded * 0.05
    assert await own_manager.unload() == 0


async def test_queued_requests_are_refused_when_another_model_is_loaded(own_manager, tiny_home):
    other = Catalog(Settings(home=tiny_home)).resolve("tiny-two")
    first, second, queued = [await own_manager.submit(request(max_tokens=400, ignore_eos=True)) for _ in range(3)]
    await anext(first)
    async with engine_paused(own_manager):
        loading = await submit_while_paused(own_manager, own_manager.load_entry(other))
    with pytest.raises(NotLoadedError, match="the model was replaced by tiny-two before this request started"):
        await finish(queued)
    assert [(await finish(stream))[1].output_tokens for stream in (first, second)] == [400] * 2
    assert (await loading).model == "tiny-two"


@pytest.mark.usefixtures("no_shared_model")
async def test_a_swap_waits_no_longer_than_the_drain_allows(tiny, tiny_home):
    other = Catalog(Settings(home=tiny_home)).resolve("tiny-two")
    async with ModelManager(Settings(drain_s=0.0)) as manager:
        await manager.load_entry(tiny)
        stream = await manager.submit(request(max_tokens=450))
        await anext(stream)
        freed = await manager.unload()
        assert freed > 6_000_000, "the request that was cut short still held the weights"
        await manager.load_entry(other)
        with pytest.raises(NotLoadedError):
            await finish(stream)


async def test_loads_and_unloads_happen_in_order_even_if_their_callers_leave(own_manager, tiny_home):
    other = Catalog(Settings(home=tiny_home)).resolve("tiny-two")
    stream = await own_manager.submit(request(max_tokens=100))
    await anext(stream)
    unloading = asyncio.create_task(own_manager.unload())
    while own_manager.snapshot.change is None:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    unloading.cancel()
    loading = asyncio.create_task(own_manager.load_entry(other, if_busy="wait"))
    control = own_manager._control
    assert control is not None
    while not control._current._lock._waiters:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert (await loading).model == "tiny-two"
    assert await own_manager.unload() > 0
    assert (await finish(stream))[1].output_tokens == 100
    assert own_manager.snapshot.state == "empty"


async def test_the_queue_limit_counts_prompts_that_are_still_tokenized(manager):
    long = ChatPrompt(messages=({"role": "user", "content": "word " * 100_000},))
    tasks = [asyncio.create_task(run(manager, prompt=long)) for _ in range(8)]
    refused = [type(result) for result in await asyncio.gather(*tasks, return_exceptions=True)]
    assert refused.count(QueueFullError) == 4
    assert refused.count(ContextLengthError) == 4
    assert (await run(manager))[1].output_tokens == 8


async def test_a_failed_load_leaves_nothing_in_memory(own_manager, tiny, tmp_path):
    before = own_manager.snapshot.memory_used_bytes
    shutil.copytree(tiny.path, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text(
        json.dumps({**json.loads((tiny.path / "config.json").read_text()), "num_hidden_layers": 3})
    )
    failures = []
    for _ in range(2):
        with pytest.raises(UnusableModelError) as failed:
            await own_manager.load_entry(replace(tiny, id="broken", path=tmp_path / "broken"))
        failures.append(failed)
    assert own_manager.snapshot.memory_used_bytes < before * 1.5


@pytest.mark.long
async def test_a_model_without_a_tokenizer_is_refused_before_the_loaded_one_is_unloaded(own_manager, tiny, tmp_path):
    shutil.copytree(tiny.path, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").unlink()
    with pytest.raises(UnusableModelError, match="its tokenizer cannot be used") as refused:
        await own_manager.load_entry(replace(tiny, id="broken", path=tmp_path / "broken"))
    assert "loaded again" not in refused.value.message
    assert (await run(own_manager))[1].model == "tiny"


async def test_a_failing_step_ends_its_requests_and_keeps_the_engine(own_manager):
    await fail_next_step(own_manager, ValueError("a kernel went wrong"))
    with pytest.raises(EngineError, match="a kernel went wrong"):
        await run(own_manager)
    assert (await run(own_manager))[1].output_tokens == 8


async def test_running_out_of_memory_unloads_the_model(own_manager, tiny):
    await fail_next_step(own_manager, RuntimeError("[malloc] Unable to allocate 1 bytes."))
    with pytest.raises(OutOfMemoryError, match="unloaded"):
        await run(own_manager)
    assert own_manager.snapshot.state == "empty"
    assert (own_manager.snapshot.unloaded_model, own_manager.snapshot.unload_cause) == ("tiny", "memory")
    assert own_manager.snapshot.memory_used_bytes < 1_000_000, "the weights are still in memory"
    with pytest.raises(OutOfMemoryError, match="tiny was unloaded"):
        await run(own_manager)
    await own_manager.load_entry(tiny)
    assert (await run(own_manager))[1].output_tokens == 8
    assert own_manager.snapshot.unload_cause is None


async def test_queued_requests_end_when_memory_runs_out(own_manager):
    async with engine_paused(own_manager):
        submits = [
            await submit_while_paused(own_manager, own_manager.submit(request(max_tokens=300))) for _ in range(4)
        ]
        await submit_while_paused(own_manager, fail_next_step(own_manager, MemoryError("none left")))
    for submit in submits:
        with pytest.raises(OutOfMemoryError):
            await finish(await submit)


async def test_a_running_request_keeps_its_model_in_memory_longer_than_idle_unload_s(own_manager, tiny):
    stream = await own_manager.submit(request(max_tokens=300, ignore_eos=True))
    await anext(stream)
    await unload_when_idle_for(own_manager, 0.001)
    assert (await finish(stream))[1].output_tokens == 300
    while own_manager.snapshot.state == "ready":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert (own_manager.snapshot.unloaded_model, own_manager.snapshot.unload_cause) == ("tiny", "idle")
    with pytest.raises(NotLoadedError):
        await run(own_manager)
    await unload_when_idle_for(own_manager, None)
    await own_manager.load_entry(tiny, if_busy="wait")
    assert (await run(own_manager))[1].output_tokens == 8


async def test_a_load_that_waits_for_queued_requests_waits_no_longer_than_drain_s(tiny, tiny_home):
    async with ModelManager(Settings(slots=1, drain_s=0.05)) as manager:
        await manager.load_entry(tiny)
        streams = [await manager.submit(request(max_tokens=400, ignore_eos=True)) for _ in range(3)]
        await manager.load_entry(Catalog(Settings(home=tiny_home)).resolve("tiny-two"), finish_queued=True)
        with pytest.raises(NotLoadedError):
            await finish(streams[2])


async def test_a_short_prompt_overtakes_long_ones(tiny, delivered_items):
    async with ModelManager(Settings(slots=8)) as manager:
        await manager.load_entry(tiny)
        long = [request(prompt=numbers(500, start=500 * at), max_tokens=10) for at in range(4)]
        async with engine_paused(manager):
            submits = [
                await submit_while_paused(manager, manager.submit(each)) for each in (*long, request(max_tokens=1))
            ]
        streams = [await submit for submit in submits]
        for stream in streams:
            await finish(stream)
        ended = [steps for steps, item in delivered_items if isinstance(item, GenerationReport)]
        assert ended.index(streams[-1].steps) <= 2


async def test_a_queued_request_reports_the_progress_of_its_prompt_after_it_has_started(tiny, delivered_items):
    async with ModelManager(Settings(slots=1)) as manager:
        await manager.load_entry(tiny)
        async with engine_paused(manager):
            submits = [
                await submit_while_paused(manager, manager.submit(request(prompt=numbers(400), max_tokens=10))),
                await submit_while_paused(manager, manager.submit(request(prompt=numbers(300, start=5000)))),
            ]
        first, waits = [await submit for submit in submits]
        _, report = await finish(first)
        await finish(waits)
        assert (waits.progress.done, waits.progress.total) == (300, 300)
        receivers = [steps for steps, _ in delivered_items]
        assert receivers.index(waits.steps) > delivered_items.index((first.steps, report))


async def test_a_dead_thread_ends_every_request_and_a_load_restarts_it(own_manager, tiny):
    await fail_next_step(own_manager, SystemExit("killed"))
    with pytest.raises(EngineDeadError):
        await run(own_manager)
    with pytest.raises(EngineDeadError):
        await run(own_manager)
    assert own_manager.snapshot.state == "dead"
    await own_manager.load_entry(tiny)
    assert (await run(own_manager))[1].output_tokens == 8


@pytest.mark.long
def test_a_script_that_generated_exits_with_0(tiny_home):
    script = f"""
import asyncio
from lmx_lab.engine import GenerationRequest, ModelManager, TokenPrompt
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog
manager = ModelManager(Settings())
manager.start()
async def main():
    await manager.load_entry(Catalog(Settings.read(home={str(tiny_home)!r})).resolve("tiny"))
    stream = await manager.submit(GenerationRequest(prompt=TokenPrompt(tokens=(5, 6)), max_tokens=5))
    print(len([delta async for delta in stream]))
asyncio.run(main())
raise SystemExit(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, int(done.stdout) > 0) == (0, True), done.stderr


async def test_a_full_queue_is_refused_with_the_time_until_a_running_request_may_end(tiny):
    async with ModelManager(Settings(slots=1, queue_limit=0)) as manager:
        await manager.load_entry(tiny)
        async with await manager.submit(request(max_tokens=400, ignore_eos=True)) as stream:
            for _ in range(20):
                await anext(stream)
            thread = mlx_thread(manager)
            await thread.call(lambda core: setattr(core.generating.batch._pace, "estimate_s", lambda **_: 500.0))
            await anext(stream)
            await anext(stream)
            with pytest.raises(QueueFullError) as refused:
                await run(manager)
    assert refused.value.retry_after_s > 100


async def test_an_error_in_the_text_of_one_answer_does_not_end_others(manager):
    def break_text(core):
        (generation,) = (each for each in core.generating.answers.scheduler.running if len(each.prompt) == 5)
        generation.splitter.add = None

    async with engine_paused(manager):
        good = await submit_while_paused(manager, manager.submit(request(max_tokens=60, ignore_eos=True)))
        bad = await submit_while_paused(
            manager, manager.submit(request(prompt=numbers(5), max_tokens=60, ignore_eos=True))
        )
        mlx_thread(manager).post(MlxCore.step)
        broken = mlx_thread(manager).post(break_text)
    with pytest.raises(EngineError, match="the generation failed"):
        await finish(await bad)
    broken.result()
    assert (await finish(await good))[1].output_tokens == 60


async def test_commands_behind_a_cancelled_one_end_when_the_thread_dies(own_manager, tiny):
    def die(core):
        raise SystemExit("killed")

    async with engine_paused(own_manager):
        mlx_thread(own_manager).post(die)
        left, waits = mlx_thread(own_manager).post(lambda core: None), mlx_thread(own_manager).post(lambda core: None)
        left.cancel()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(asyncio.wrap_future(waits), 60)
    await own_manager.load_entry(tiny)
    assert (await run(own_manager))[1].output_tokens == 8


async def test_a_request_ends_at_its_deadline_while_its_template_is_rendered(smollm2, tmp_path):
    write_tiny_llama(tmp_path / "m", smollm2.path, seed=0)
    config = tmp_path / "m" / "tokenizer_config.json"
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'loop' %}" + endless + "{% endif %}{{ messages[0].content }}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    async with ModelManager(TWO_SLOTS) as manager:
        await manager.load_entry(entry_of(tmp_path / "m"))
        loop = ChatPrompt(messages=({"role": "user", "content": "loop"},))
        with pytest.raises(GenerationTimeoutError):
            await manager.submit(request(prompt=loop, timeout_s=0.2))
