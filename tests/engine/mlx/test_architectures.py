"""Models with other caches than keys and values have the same answers alone, in a batch and with a cached prefix."""

import asyncio
from dataclasses import replace

import pytest

from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.support.engines import finish, generating, manager_with, mlx_thread, numbers, request, run, until_written
from tests.support.models import write_mlx_model

pytestmark = pytest.mark.anyio
SHARED = {"vocab_size": 49152, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 1024}
CONFIGS = {
    "mamba": {
        "model_type": "mamba",
        "intermediate_size": 64,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "cohere2": {
        "model_type": "cohere2",
        "head_dim": 16,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "attention_bias": False,
        "layer_norm_bias": False,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
    },
}


LONG = numbers(90)
OTHER_TURN = replace(LONG, tokens=(*LONG.tokens[:60], *range(5000, 5040)))
"""A prompt that shares only the first tokens, for which most of these caches cannot be used."""


@pytest.fixture(params=list(CONFIGS))
async def other(request, tmp_path, tiny):
    config = {**SHARED, **CONFIGS[request.param]}
    # On a thread of its own, whose MLX stream ends with it.
    await asyncio.to_thread(write_mlx_model, tmp_path / "models" / request.param, config, tiny.path)
    async with manager_with(Catalog(Settings(home=tmp_path)).resolve(request.param), Settings(slots=4)) as manager:
        yield manager


async def test_prompts_of_different_lengths_have_the_same_answers_together_as_alone(other):
    await mlx_thread(other).call(lambda thread: generating(thread).batch.prefixes.__init__(0))
    prompts = [numbers(length, start=300 * length) for length in (120, 7, 55, 100)]
    alone = [(await run(other, prompt=prompt, max_tokens=12))[0] for prompt in prompts]
    streams = [await other.submit(request(prompt=prompt, max_tokens=12)) for prompt in prompts]
    assert [text for text, _ in await asyncio.gather(*map(finish, streams))] == alone


async def test_a_cached_prefix_does_not_change_the_answer(other):
    first = numbers(90)
    text, _ = await run(other, prompt=first, max_tokens=12)
    again, report = await run(other, prompt=first, max_tokens=12)
    assert (again, report.cached_tokens) == (text, 89)
    turn = replace(first, tokens=(*first.tokens, *range(5000, 5010)))
    kept, report = await run(other, prompt=turn, max_tokens=12)
    assert report.cached_tokens > 0
    await mlx_thread(other).call(lambda thread: generating(thread).batch.prefixes.shrink(0))
    assert (await run(other, prompt=turn, max_tokens=12))[0] == kept


async def test_a_state_on_disk_continues_in_another_process(other, tmp_path):
    entry, settings = other.snapshot.entry, Settings(slots=4, prefix_cache_dir=tmp_path / "cache")
    assert entry is not None
    plain = [await run(other, prompt=prompt, max_tokens=12) for prompt in (LONG, OTHER_TURN)]
    await other.unload()
    async with manager_with(entry, settings) as manager, until_written(manager):
        await run(manager, prompt=LONG, max_tokens=12)
    async with manager_with(entry, settings) as manager:
        kept = [await run(manager, prompt=prompt, max_tokens=12) for prompt in (LONG, OTHER_TURN)]
        assert [text for text, _ in kept] == [text for text, _ in plain]
        assert kept[0][1].disk_cached_tokens == 89


async def test_the_choices_of_a_request_share_its_prompt(other):
    streams = await other.generate(request(prompt=numbers(90)), choices=3)
    reports = [report for _, report in await asyncio.gather(*map(finish, streams))]
    assert [report.cached_tokens for report in reports] == [0, 89, 89]
