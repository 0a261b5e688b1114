"""On both engines, a server continues from the states that an earlier one has written to a folder."""

import asyncio
import logging
from dataclasses import replace

import pytest

from lmx_lab.engine import TokenPrompt
from tests.support.engines import LLAMA_SETTINGS, entry_of, finish, manager_with, numbers, request, run, until_written

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FIRST = numbers(200)
TURN = TokenPrompt(tokens=(*FIRST.tokens, *range(700, 760)))


@pytest.fixture(params=["mlx", "gguf"])
def server(request, tmp_path, tiny, long_gguf):
    """A function that starts a server with a cache of its own in memory, and the folder of the test on disk."""
    entry = tiny if request.param == "mlx" else entry_of(long_gguf)
    return lambda: manager_with(entry, replace(LLAMA_SETTINGS, prefix_cache_dir=tmp_path))


async def test_a_new_server_computes_only_what_no_file_has(server):
    async with server() as manager:
        async with until_written(manager):
            await run(manager, prompt=FIRST)
        text, report = await run(manager, prompt=TURN)
        assert (report.cached_tokens, report.disk_cached_tokens) == (200, 0), "it is in memory"
    async with server() as manager:
        again, report = await run(manager, prompt=TURN)
        # More than 200 if the state of the turn was written as well before the first server ended.
        assert (again, report.disk_cached_tokens) == (text, report.cached_tokens)
        assert manager.snapshot.totals.disk_cached_tokens == report.cached_tokens >= 200


async def test_a_damaged_file_is_reported_and_not_used(server, tmp_path, caplog):
    async with server() as manager, until_written(manager):
        text, _ = await run(manager, prompt=FIRST)
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "lmx_lab.engine.prefix_files"):
        async with server() as manager:
            again, report = await run(manager, prompt=FIRST)
            assert (again, report.cached_tokens) == (text, 0)
    assert [path.name in record.message for record in caplog.records] == [True]


async def test_states_of_simultaneous_answers_are_written_and_read(server):
    prompts = [numbers(150, start=1000 * number) for number in range(1, 4)]

    async def answers(manager):
        streams = [await manager.submit(request(prompt=prompt)) for prompt in prompts]
        return await asyncio.gather(*map(finish, streams))

    async with server() as manager, until_written(manager, files=3):
        texts = [text for text, _ in await answers(manager)]
    async with server() as manager:
        again = await answers(manager)
        assert [text for text, _ in again] == texts
        assert sum(report.disk_cached_tokens for _, report in again) > 0
