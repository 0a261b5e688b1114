"""The engine on llama.cpp with small models, and a look at its process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lmx_lab.engine import Engine
from lmx_lab.engine.llama_cpp.process import LlamaProcess
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights import Catalog
from tests.gguf_files import with_context

SETTINGS = Settings(slots=2, queue_limit=4, threads=1, memory_limit_bytes=2**30)


def entry_of(path: Path, id_: str = "tiny") -> ModelEntry:
    return replace(Catalog(Settings()).resolve(str(path)), id=id_)


def process_of(engine: Engine) -> LlamaProcess:
    """Of the main model."""
    core = engine._gguf._core
    assert core is not None
    assert core._main is not None
    return core._main.hosted.process


def system_process_of(engine: Engine) -> psutil.Process:
    return psutil.Process(process_of(engine)._process.pid)


@pytest.fixture(scope="session")
def long_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path) -> Path:
    """``tiny`` for 8,192 tokens: it is busy for as long as a test needs."""
    return with_context(tiny_gguf, 8192, tmp_path_factory.mktemp("long-gguf"))


@pytest.fixture
async def engine(long_gguf: Path) -> AsyncIterator[Engine]:
    async with Engine(SETTINGS) as engine:
        await engine.load(entry_of(long_gguf))
        yield engine
