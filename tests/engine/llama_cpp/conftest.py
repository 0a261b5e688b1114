"""Provide the llama.cpp engine with small models, and access to its process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lmx_lab.engine import ModelManager
from lmx_lab.engine.llama_cpp.engine import LlamaCppCore, LlamaCppEngine
from lmx_lab.engine.llama_cpp.process import LlamaProcess
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights import Catalog
from tests.gguf_files import with_context

SETTINGS = Settings(slots=2, queue_limit=4, threads=1, memory_limit_bytes=2**30)


def entry_of(path: Path, id_: str = "tiny") -> ModelEntry:
    return replace(Catalog(Settings()).resolve(str(path)), id=id_)


def llama_core(manager: ModelManager) -> LlamaCppCore:
    engine = manager.engine("llama.cpp")
    assert isinstance(engine, LlamaCppEngine)
    assert engine._core is not None
    return engine._core


def process_of(manager: ModelManager) -> LlamaProcess:
    """Return the process of the main model."""
    core = llama_core(manager)
    assert core._main is not None
    return core._main.hosted.process


def system_process_of(manager: ModelManager) -> psutil.Process:
    return psutil.Process(process_of(manager)._process.pid)


@pytest.fixture(scope="session")
def long_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path) -> Path:
    """``tiny`` with a context of 8,192 tokens, so that a request runs as long as a test needs."""
    return with_context(tiny_gguf, 8192, tmp_path_factory.mktemp("long-gguf"))


@pytest.fixture
async def manager(long_gguf: Path) -> AsyncIterator[ModelManager]:
    async with ModelManager(SETTINGS) as manager:
        await manager.load_entry(entry_of(long_gguf))
        yield manager
