"""A server continues from the states that an earlier one has written to a folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmx_lab.engine import ModelManager, TokenPrompt
from lmx_lab.settings import Settings
from lmx_lab.values.generation import GenerationReport
from lmx_lab.values.models import ModelEntry
from tests.engine.conftest import numbers, run

pytestmark = pytest.mark.anyio
FIRST = numbers(100)
SECOND = TokenPrompt(tokens=(*FIRST.tokens, *range(500, 560)))
THIRD = TokenPrompt(tokens=(*SECOND.tokens, *range(700, 760)))
WAIT_S = 30.0


@asynccontextmanager
async def server(folder: Path, entry: ModelEntry, **settings: Any) -> AsyncIterator[ModelManager]:
    """A manager with a cache of its own in memory, and the folder on disk."""
    async with ModelManager(Settings(prefix_cache_dir=folder, **settings)) as manager:
        await manager.load_entry(entry)
        yield manager


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def write(folder: Path, entry: ModelEntry, *prompts: TokenPrompt, **settings: Any) -> list[str]:
    """Answer the prompts, each after the state of the previous one was written, and return the answers."""
    texts = []
    async with server(folder, entry, **settings) as manager:
        for prompt in prompts:
            before = manager.snapshot.prefix_disk_written_bytes
            texts.append((await run(manager, prompt=prompt))[0])
            await until(lambda before=before: manager.snapshot.prefix_disk_written_bytes > before)  # type: ignore[misc]
    return texts


async def answer(folder: Path, entry: ModelEntry, prompt: TokenPrompt) -> tuple[str, GenerationReport]:
    async with server(folder, entry) as manager:
        return await run(manager, prompt=prompt)


async def test_a_new_server_computes_only_what_no_file_has(tmp_path: Path, tiny: ModelEntry) -> None:
    texts = await write(tmp_path, tiny, FIRST, SECOND)
    first, second = sorted(path.stat().st_size for path in files(tmp_path))
    assert second - first > 0
    async with server(tmp_path, tiny) as manager:
        text, report = await run(manager, prompt=SECOND)
        assert (text, report.cached_tokens, report.disk_cached_tokens) == (texts[1], 159, 159)
        assert manager.snapshot.disk_cached_tokens == 159
        # It is in memory now.
        again, report = await run(manager, prompt=SECOND)
        assert (again, report.cached_tokens, report.disk_cached_tokens) == (texts[1], 159, 0)
