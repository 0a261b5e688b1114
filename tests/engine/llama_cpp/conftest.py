"""Provide the llama.cpp engine with small models, and access to its process."""

import pytest

from lmx_lab.engine import ModelManager
from tests.support.engines import LLAMA_SETTINGS, entry_of, load_entry


@pytest.fixture
async def manager(long_gguf):
    async with ModelManager(LLAMA_SETTINGS) as manager:
        await load_entry(manager, entry_of(long_gguf))
        yield manager
