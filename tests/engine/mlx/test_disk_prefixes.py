"""A server continues from the states that an earlier one has written to a folder."""

import asyncio
import shutil

import mlx.core as mx
import pytest

from lmx_lab.engine import TokenPrompt
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.support.engines import finish, generating, manager_with, mlx_thread, numbers, request, run, until_written

pytestmark = pytest.mark.anyio
FIRST = numbers(100)
SECOND = TokenPrompt(tokens=(*FIRST.tokens, *range(500, 560)))
THIRD = TokenPrompt(tokens=(*SECOND.tokens, *range(700, 760)))


def server(folder, entry, **settings):
    """Start a manager with a cache of its own in memory, and the folder on disk."""
    return manager_with(entry, Settings(prefix_cache_dir=folder, **settings))


def files(folder):
    return sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


async def write(folder, entry, *prompts, **settings):
    """Answer the prompts, each after the state of the previous one was written, and return the answers."""
    texts = []
    async with server(folder, entry, **settings) as manager:
        for prompt in prompts:
            async with until_written(manager):
                texts.append((await run(manager, prompt=prompt))[0])
    return texts


async def test_a_file_has_the_tokens_of_one_turn_and_serves_prompts_that_share_a_part_of_it(tmp_path, tiny):
    texts = await write(tmp_path, tiny, FIRST, SECOND, THIRD)
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert sum(sizes) < 1.5 * 228 * 512 + 3 * 4000
    async with server(tmp_path, tiny) as manager:
        # The second time, it is in memory.
        for disk_tokens in (219, 0):
            text, report = await run(manager, prompt=THIRD)
            assert (text, report.cached_tokens, report.disk_cached_tokens) == (texts[2], 219, disk_tokens)
    async with server(tmp_path, tiny) as manager:
        turn = TokenPrompt(tokens=(*SECOND.tokens[:140], *range(900, 910)))
        text, report = await run(manager, prompt=turn)
        assert report.disk_cached_tokens == 140
    async with manager_with(tiny) as manager:
        assert (await run(manager, prompt=turn))[0] == text


async def test_a_file_is_read_once_for_all_requests_that_wait_for_it(tmp_path, tiny):
    (text,) = await write(tmp_path, tiny, FIRST)
    async with server(tmp_path, tiny) as manager:
        streams = [await manager.submit(request(prompt=FIRST)) for _ in range(4)]
        answers = await asyncio.gather(*map(finish, streams))
        assert [(again, report.cached_tokens) for again, report in answers] == [(text, 99)] * 4


async def test_answers_run_while_states_are_written_and_read(tmp_path, tiny):
    prompts = [numbers(60, start=1000 * number) for number in range(6)]

    async def answers(manager):
        # Each step copies a small part of a state.
        await mlx_thread(manager).call(lambda thread: setattr(generating(thread).disk, "piece_bytes", 100))
        streams = [await manager.submit(request(prompt=prompt, max_tokens=40)) for prompt in prompts]
        return [text for text, _ in await asyncio.gather(*map(finish, streams))]

    async with server(tmp_path, tiny, slots=2) as manager, until_written(manager, files=6):
        texts = await answers(manager)
    async with server(tmp_path, tiny, slots=2) as manager:
        assert await answers(manager) == texts
        assert manager.snapshot.totals.disk_cached_tokens == 6 * 59


async def test_the_files_of_changed_weights_are_not_used(tmp_path, tiny):
    """The same name with other weights is another model."""
    cache, models = tmp_path / "cache", tmp_path / "models"
    shutil.copytree(tiny.path, models / "own")
    texts = await write(cache, Catalog(Settings(home=tmp_path)).resolve("own"), FIRST)
    await asyncio.to_thread(negate_weights, models / "own")
    async with server(cache, Catalog(Settings(home=tmp_path)).resolve("own")) as manager:
        text, report = await run(manager, prompt=FIRST)
        assert (text != texts[0], report.cached_tokens) == (True, 0)


def negate_weights(folder):
    (path,) = folder.glob("*.safetensors")
    weights = mx.load(str(path))
    mx.eval(weights)
    mx.save_safetensors(str(path), {name: -value for name, value in weights.items()}, metadata={"format": "mlx"})
    mx.synchronize()
    mx.clear_streams()


async def test_a_folder_that_cannot_be_used_turns_off_only_the_cache_on_disk(tmp_path, tiny, caplog):
    folder = tmp_path / "cache"
    folder.write_text("a file")
    async with server(folder, tiny) as manager:
        text, _ = await run(manager, prompt=FIRST)
        again, report = await run(manager, prompt=FIRST)
        assert (again, report.cached_tokens, report.disk_cached_tokens) == (text, 99, 0)
    assert len([record for record in caplog.records if str(folder) in record.message]) == 1


async def test_two_servers_use_one_folder(tmp_path, tiny):
    limit = 200_000
    async with (
        server(tmp_path, tiny, prefix_cache_disk_bytes=limit) as one,
        server(tmp_path, tiny, prefix_cache_disk_bytes=limit) as two,
    ):
        prompts = [numbers(100, start=300 * number) for number in range(8)]
        answers = await asyncio.gather(*(run(each, prompt=prompt) for each in (one, two) for prompt in prompts))
        texts = [text for text, _ in answers]
        assert texts[:8] == texts[8:]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= limit * 1.5
    async with server(tmp_path, tiny) as manager:
        found = await asyncio.gather(*(run(manager, prompt=prompt) for prompt in prompts))
        assert [text for text, _ in found] == texts[:8]
        assert manager.snapshot.totals.disk_cached_tokens > 0
