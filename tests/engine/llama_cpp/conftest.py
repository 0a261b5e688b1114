"""Provide the llama.cpp engine with small models, and access to its process."""

import pytest

from tests.support.engines import LLAMA_SETTINGS, entry_of, manager_with


@pytest.fixture
async def manager(long_gguf):
    async with manager_with(entry_of(long_gguf), LLAMA_SETTINGS) as manager:
        yield manager
