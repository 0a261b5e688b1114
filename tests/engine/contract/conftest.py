"""Provide the same models in both formats, and entries of the echo engine with the same names and sizes.

Each test in this folder runs on all engines.
"""

import pytest

from tests.engine.contract.entries import CONTEXT, FEW, SETTINGS, echo_entry
from tests.support.engines import entry_of, manager_with, until_idle
from tests.support.gguf import with_context, with_tokens
from tests.support.models import MARKERS, THINKER_TEMPLATE, teach_thinking, write_tiny_llama


@pytest.fixture(scope="session")
def chat_models(tiny, tiny_gguf):
    """``tiny`` with the same weights in both formats, and a context of 512 tokens."""
    return {"mlx": tiny, "gguf": entry_of(tiny_gguf, "tiny"), "echo": echo_entry("tiny")}


@pytest.fixture(scope="session")
def long_models(tmp_path_factory, smollm2, tiny_gguf):
    """The same with a context of 8,192 tokens, so that a request runs as long as a test needs."""
    folder = tmp_path_factory.mktemp("long")
    write_tiny_llama(folder / "mlx", smollm2.path, seed=0, context=CONTEXT)
    files = {"mlx": folder / "mlx", "gguf": with_context(tiny_gguf, CONTEXT, folder)}
    echo = echo_entry("long", context=CONTEXT)
    return {**{format_: entry_of(path, "long") for format_, path in files.items()}, "echo": echo}


@pytest.fixture(scope="session")
def thinkers(tmp_path_factory, smollm2, tiny_gguf):
    """The same with tokens for markers of reasoning and tool calls, and a template that contains both."""
    folder = tmp_path_factory.mktemp("thinkers")
    write_tiny_llama(folder / "mlx", smollm2.path, seed=0)
    teach_thinking(folder / "mlx")
    files = {
        "mlx": folder / "mlx",
        "gguf": with_tokens(tiny_gguf, MARKERS, folder / "thinker.gguf", THINKER_TEMPLATE),
    }
    return {**{format_: entry_of(path, "thinker") for format_, path in files.items()}, "echo": echo_entry("thinker")}


@pytest.fixture(scope="session")
def embedders(minilm, minilm_gguf):
    echo = echo_entry(minilm.id, kind="embedding")
    return {"mlx": minilm, "gguf": entry_of(minilm_gguf, minilm.id), "echo": echo}


@pytest.fixture(scope="module", params=["mlx", "gguf", "echo"])
def model_format(request):
    """The engine under test, by the format of its models."""
    return request.param


@pytest.fixture(scope="module")
async def _tiny_manager(chat_models, model_format):
    async with manager_with(chat_models[model_format], SETTINGS) as manager:
        yield manager


@pytest.fixture
async def manager(_tiny_manager):
    """A manager with ``tiny``, shared by the tests of a module, which must not load or unload models."""
    yield _tiny_manager
    await until_idle(_tiny_manager)


@pytest.fixture(scope="module")
async def _long_manager(long_models, model_format):
    async with manager_with(long_models[model_format], FEW) as manager:
        yield manager


@pytest.fixture
async def busy(_long_manager):
    """A manager with two slots and a model with a long context, shared like ``manager``."""
    yield _long_manager
    await until_idle(_long_manager)


@pytest.fixture
async def own(long_models, model_format):
    """The same manager for one test, which may load and unload models."""
    async with manager_with(long_models[model_format], FEW) as manager:
        yield manager
