"""A llama.cpp process continues from the slots that an earlier one has saved."""

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from lmx_lab.engine import TokenPrompt
from tests.support.engines import (
    LLAMA_SETTINGS,
    entry_of,
    finish,
    manager_with,
    numbers,
    request,
    run,
    system_process_of,
    until_written,
)

pytestmark = pytest.mark.anyio
FIRST = numbers(200)
TURN = TokenPrompt(tokens=(*FIRST.tokens, *range(700, 760)))


@asynccontextmanager
async def server(folder, path):
    async with manager_with(entry_of(path), replace(LLAMA_SETTINGS, prefix_cache_dir=folder)) as manager:
        yield manager


async def test_a_new_process_computes_only_what_was_not_saved(tmp_path, long_gguf):
    async with server(tmp_path, long_gguf) as manager:
        async with until_written(manager):
            await run(manager, prompt=FIRST)
        text, report = await run(manager, prompt=TURN)
        assert (report.cached_tokens, report.disk_cached_tokens) == (200, 0), "llama.cpp has it in memory"
    async with server(tmp_path, long_gguf) as manager:
        again, report = await run(manager, prompt=TURN)
        # More than 200 if the slot of the turn was saved as well before the process ended.
        assert (again, report.disk_cached_tokens) == (text, report.cached_tokens)
        assert manager.snapshot.totals.disk_cached_tokens == report.cached_tokens >= 200


async def test_a_damaged_file_does_not_reach_the_process(tmp_path, long_gguf, caplog):
    async with server(tmp_path, long_gguf) as manager, until_written(manager):
        text, _ = await run(manager, prompt=FIRST)
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "lmx_lab.engine.prefix_files"):
        async with server(tmp_path, long_gguf) as manager:
            process = system_process_of(manager)
            again, report = await run(manager, prompt=FIRST)
            assert (again, report.cached_tokens) == (text, 0)
            assert process.is_running()
    assert len(caplog.records) == 1
    assert path.name in caplog.text


async def test_simultaneous_answers_are_saved_and_restored(tmp_path, long_gguf):
    prompts = [numbers(150, start=1000 * number) for number in range(1, 4)]

    async def answers(manager):
        streams = [await manager.submit(request(prompt=prompt)) for prompt in prompts]
        return await asyncio.gather(*map(finish, streams))

    async with server(tmp_path, long_gguf) as manager, until_written(manager, files=3):
        texts = [text for text, _ in await answers(manager)]
    async with server(tmp_path, long_gguf) as manager:
        again = await answers(manager)
        assert [text for text, _ in again] == texts
        assert sum(report.disk_cached_tokens for _, report in again) > 0
