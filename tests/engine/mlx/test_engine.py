"""The MLX engine with a tiny model: every accepted request ends once, whatever happens."""

import asyncio
import json
import shutil
from dataclasses import replace

import mlx.core as mx
import pytest

from lmx_lab.engine import ChatPrompt, Sampling
from lmx_lab.engine.mlx.engine import MlxEngine
from lmx_lab.engine.mlx.thread import MlxThread
from lmx_lab.engine.model import EngineHost
from lmx_lab.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    GenerationTimeoutError,
    OutOfMemoryError,
    QueueFullError,
    UnusableModelError,
)
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec
from lmx_lab.values.outputs import GenerationReport
from lmx_lab.weights.fingerprint import with_marks
from tests.support.engines import (
    TWO_SLOTS,
    engine_paused,
    entry_of,
    fail_next_step,
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
from tests.support.models import write_tiny_llama
from tests.support.programs import run_script

pytestmark = pytest.mark.anyio


@pytest.mark.skipif(
    mx.default_device() != mx.cpu or shutil.which("g++") is None, reason="MLX compiles functions for a CPU with g++"
)
@pytest.mark.usefixtures("manager")
async def test_on_a_cpu_functions_are_not_compiled():
    traced = []

    @mx.compile
    def add_one(x):
        traced.append(x)
        return x + 1

    for _ in range(3):
        mx.eval(add_one(mx.array([1.0])))
    assert len(traced) == 3


async def test_sampling_differs_between_engines(tiny):
    texts = set()
    for _ in range(3):
        async with manager_with(tiny) as manager:
            texts.add((await run(manager, sampling=Sampling(temperature=1.0)))[0])
    assert len(texts) > 1, "every new engine thread starts with the same random state"


async def test_the_queue_limit_counts_prompts_that_are_still_tokenized(manager):
    long = ChatPrompt(messages=({"role": "user", "content": "word " * 100_000},))
    tasks = [asyncio.create_task(run(manager, prompt=long)) for _ in range(8)]
    refused = [type(result) for result in await asyncio.gather(*tasks, return_exceptions=True)]
    assert refused.count(QueueFullError) == 4
    assert refused.count(ContextLengthError) == 4
    assert (await run(manager))[1].output_tokens == 8


@pytest.mark.long
async def test_a_model_without_a_tokenizer_is_refused_before_the_loaded_one_is_unloaded(own_manager, tiny, tmp_path):
    shutil.copytree(tiny.path, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").unlink()
    with pytest.raises(UnusableModelError, match="its tokenizer cannot be used") as refused:
        await load_entry(own_manager, replace(tiny, id="broken", path=tmp_path / "broken"))
    assert "loaded again" not in refused.value.message
    assert (await run(own_manager))[1].model == "tiny"


async def test_running_out_of_memory_unloads_the_model(own_manager, tiny):
    await fail_next_step(own_manager, RuntimeError("[malloc] Unable to allocate 1 bytes."))
    with pytest.raises(OutOfMemoryError, match="unloaded"):
        await run(own_manager)
    assert own_manager.snapshot.state == "empty"
    assert (own_manager.snapshot.unloaded_model, own_manager.snapshot.unload_cause) == ("tiny", "memory")
    assert own_manager.snapshot.memory_used_bytes < 1_000_000, "the weights are still in memory"
    with pytest.raises(OutOfMemoryError, match="tiny was unloaded"):
        await run(own_manager)
    await load_entry(own_manager, tiny)
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


async def test_a_short_prompt_overtakes_long_ones(tiny, delivered_items):
    async with manager_with(tiny, Settings(slots=8)) as manager:
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
    async with manager_with(tiny, Settings(slots=1)) as manager:
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


@pytest.mark.long
def test_a_script_that_generated_exits_with_0(tiny_home):
    script = f"""
import asyncio
from lmx_lab.engine import GenerationRequest, ModelManager, TokenPrompt
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec
from lmx_lab.weights.catalog import Catalog
manager = ModelManager(Settings())
manager.start()
async def main():
    await manager.load(LoadSpec(model="tiny"), Catalog(Settings.read(home={str(tiny_home)!r})).resolve("tiny"))
    stream = await manager.submit(GenerationRequest(prompt=TokenPrompt(tokens=(5, 6)), max_tokens=5))
    print(len([delta async for delta in stream]))
asyncio.run(main())
raise SystemExit(0)
"""
    assert int(run_script(script)) > 0


async def test_a_full_queue_is_refused_with_the_time_until_a_running_request_may_end(tiny):
    async with (
        manager_with(tiny, Settings(slots=1, queue_limit=0)) as manager,
        await manager.submit(request(max_tokens=400, ignore_eos=True)) as stream,
    ):
        for _ in range(20):
            await anext(stream)
        thread = mlx_thread(manager)
        await thread.call(lambda it: setattr(generating(it).batch._pace, "estimate_s", lambda **_: 500.0))
        await anext(stream)
        await anext(stream)
        with pytest.raises(QueueFullError) as refused:
            await run(manager)
    assert refused.value.retry_after_s > 100


async def test_an_error_in_the_text_of_one_answer_does_not_end_others(manager):
    def break_text(thread):
        (generation,) = (each for each in generating(thread).answers.scheduler.running if len(each.prompt) == 5)
        generation.splitter.add = None

    async with engine_paused(manager):
        good = await submit_while_paused(manager, manager.submit(request(max_tokens=60, ignore_eos=True)))
        bad = await submit_while_paused(
            manager, manager.submit(request(prompt=numbers(5), max_tokens=60, ignore_eos=True))
        )
        mlx_thread(manager).post(MlxThread.step)
        broken = mlx_thread(manager).post(break_text)
    with pytest.raises(EngineError, match="the generation failed"):
        await finish(await bad)
    broken.result()
    assert (await finish(await good))[1].output_tokens == 60


async def test_commands_behind_a_cancelled_one_end_when_the_thread_dies(own_manager, tiny):
    def die(thread):
        raise SystemExit("killed")

    async with engine_paused(own_manager):
        mlx_thread(own_manager).post(die)
        left, waits = mlx_thread(own_manager).post(lambda _: None), mlx_thread(own_manager).post(lambda _: None)
        left.cancel()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(asyncio.wrap_future(waits), 60)
    await load_entry(own_manager, tiny)
    assert (await run(own_manager))[1].output_tokens == 8


async def test_a_request_ends_at_its_deadline_while_its_template_is_rendered(smollm2, tmp_path):
    write_tiny_llama(tmp_path / "m", smollm2.path, seed=0)
    config = tmp_path / "m" / "tokenizer_config.json"
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'loop' %}" + endless + "{% endif %}{{ messages[0].content }}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    async with manager_with(entry_of(tmp_path / "m"), TWO_SLOTS) as manager:
        loop = ChatPrompt(messages=({"role": "user", "content": "loop"},))
        with pytest.raises(GenerationTimeoutError):
            await manager.submit(request(prompt=loop, timeout_s=0.2))


async def test_of_two_chat_models_the_one_with_the_least_time_gets_the_next_step(no_shared_model, smollm2, tmp_path):
    engine, models = MlxEngine(TWO_SLOTS, EngineHost()), []
    for seed in range(2):
        write_tiny_llama(tmp_path / str(seed), smollm2.path, seed=seed, context=8192)
        entry = with_marks(entry_of(tmp_path / str(seed), str(seed)))
        models.append(await engine.load(entry, LoadSpec(model=entry.id, prompt_lookup=False), room_bytes=2**30))
    loops = [model.generating for model in models]

    async def start(model, tokens):
        changed = request(max_tokens=tokens, ignore_eos=True)
        (stream,) = await model.generate(changed, model.admission.admit(1), asyncio.get_running_loop())
        return stream

    def compute(thread):
        """Compute 40 steps; return which model had the least time before each, and which generated a token in it."""
        expected, computed = [], []
        for at in range(40):
            if at == 20:
                loops[0].used_s += 600
            before = [loop.answers.scheduler.running[0].output_tokens for loop in loops]
            expected.append(int(loops[1].used_s < loops[0].used_s))
            thread.step()
            after = [loop.answers.scheduler.running[0].output_tokens for loop in loops]
            computed += [model for model in range(2) if after[model] > before[model]]
        return expected, computed

    alone = [(await finish(await start(model, 60)))[0] for model in models]
    streams = [await start(model, 8000) for model in models]
    beside = [(await anext(stream)).text for stream in streams]
    expected, computed = await mlx_thread(engine).call(compute)
    assert computed == expected
    assert set(computed[:20]) == {0, 1}
    assert computed[20:] == [1] * 20
    # The first model continues when the second one is idle.
    for at in (1, 0):
        while len(beside[at]) < len(alone[at]):
            beside[at] += (await anext(streams[at])).text
        await streams[at].aclose()
        # The last characters may be part of a character that was incomplete.
        assert beside[at].startswith(alone[at][:-3])
    # A model that was idle has no advantage over the one that has computed meanwhile.
    await finish(await start(models[0], 5))
    assert loops[1].used_s >= 600
    await asyncio.to_thread(engine.stop)


@pytest.mark.parametrize("limits", [(512, 1024), (2500, 4096)])
def test_loading_mlx_changes_no_limit_of_open_files(tiny_home, limits):
    """mlx-lm would set the soft and the hard limit to 2,048 and 4,096, and could not be imported below them."""
    script = f"""
import asyncio, pathlib, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, {limits})
from lmx_lab.engine import ModelManager
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec

async def main():
    async with ModelManager(Settings(home=pathlib.Path(sys.argv[1]))) as manager:
        await manager.load(LoadSpec(model="tiny"))
    print(resource.getrlimit(resource.RLIMIT_NOFILE), "mlx_lm" in sys.modules)

asyncio.run(main())
"""
    assert run_script(script, str(tiny_home)).splitlines() == [f"{limits} True"]
