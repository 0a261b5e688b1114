"""Provide the same models in both formats, and entries of the echo engine with the same names and sizes.

Each test in this folder runs on all engines, on models that the engines have loaded without a manager.
"""

import pytest

from tests.contract.engines.entries import CONTEXT, FEW, SETTINGS
from tests.support.engines import count_ends, echo_entry, entry_of, loaded, until_idle
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
def with_names(tmp_path_factory, smollm2, tiny_gguf):
    """Return a function that makes tiny models with other names of tokens, and another template of the GGUF file."""

    def make(id_, change, tokens, template):
        folder = tmp_path_factory.mktemp(id_)
        write_tiny_llama(folder / "mlx", smollm2.path, seed=0)
        change(folder / "mlx")
        files = {"mlx": folder / "mlx", "gguf": with_tokens(tiny_gguf, tokens, folder / f"{id_}.gguf", template)}
        return {**{format_: entry_of(path, id_) for format_, path in files.items()}, "echo": echo_entry(id_)}

    return make


@pytest.fixture(scope="session")
def thinkers(with_names):
    """The same with tokens for markers of reasoning and tool calls, and a template that contains both."""
    return with_names("thinker", teach_thinking, MARKERS, THINKER_TEMPLATE)


@pytest.fixture(scope="session")
def embedders(minilm, minilm_gguf):
    echo = echo_entry(minilm.id, kind="embedding")
    return {"mlx": minilm, "gguf": entry_of(minilm_gguf, minilm.id), "echo": echo}


@pytest.fixture(scope="module", params=["mlx", "gguf", "echo"])
def model_format(request):
    """The engine under test, by the format of its models."""
    return request.param


@pytest.fixture
def ends(monkeypatch):
    """Number of ends that each stream has received, by the id of its ``steps``."""
    return count_ends(monkeypatch)


@pytest.fixture(scope="module")
async def _tiny_model(chat_models, model_format):
    async with loaded(chat_models[model_format], SETTINGS) as model:
        yield model


@pytest.fixture
async def model(_tiny_model):
    """``tiny`` in memory, shared by the tests of a module, which must not close it."""
    yield _tiny_model
    await until_idle(_tiny_model)


@pytest.fixture(scope="module")
async def _long_model(long_models, model_format):
    async with loaded(long_models[model_format], FEW) as model:
        yield model


@pytest.fixture
async def busy(_long_model):
    """A model with two slots and a long context, shared like ``model``."""
    yield _long_model
    await until_idle(_long_model)


@pytest.fixture
async def own(long_models, model_format):
    """The same model for one test, which may close it."""
    async with loaded(long_models[model_format], FEW) as model:
        yield model
