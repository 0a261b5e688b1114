"""The same models in both formats, and the echo engine's entries of the same names and sizes.

Each test here describes all engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lmx_lab.engine import ModelManager
from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO, Format, Kind, ModelEntry
from lmx_lab.weights import Catalog
from tests.engine.conftest import until_idle
from tests.gguf_files import with_context, with_tokens
from tests.tiny import MARKERS, THINKER_TEMPLATE, teach_thinking, write_tiny_llama

CONTEXT = 8192
SETTINGS = Settings(slots=8, queue_limit=8, threads=1, memory_limit_bytes=2**30, echo_tokens_per_s=20_000)
FEW = replace(SETTINGS, slots=2, queue_limit=2, echo_tokens_per_s=2000)
Entries = Mapping[Format, ModelEntry]


def entry_of(path: Path, id_: str) -> ModelEntry:
    """The model at this path, with an id that both formats share."""
    return replace(Catalog(Settings()).resolve(str(path)), id=id_)


def echo_entry(id_: str, *, context: int = 512, kind: Kind = "chat") -> ModelEntry:
    """An entry of the echo engine with the id of a model."""
    return replace(ECHO, id=id_, path=Path("echo") / id_, context_length=context, kind=kind, more_kinds=())


@pytest.fixture(scope="session")
def chats(tiny: ModelEntry, tiny_gguf: Path) -> Entries:
    """``tiny``: the same weights, a context of 512."""
    return {"mlx": tiny, "gguf": entry_of(tiny_gguf, "tiny"), "echo": echo_entry("tiny")}


@pytest.fixture(scope="session")
def longs(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry, tiny_gguf: Path) -> Entries:
    """The same with a context of 8,192, so that a request runs for as long as a test needs."""
    folder = tmp_path_factory.mktemp("long")
    write_tiny_llama(folder / "mlx", smollm2.path, seed=0, context=CONTEXT)
    files: dict[Format, Path] = {"mlx": folder / "mlx", "gguf": with_context(tiny_gguf, CONTEXT, folder)}
    echo = echo_entry("long", context=CONTEXT)
    return {**{format_: entry_of(path, "long") for format_, path in files.items()}, "echo": echo}


@pytest.fixture(scope="session")
def thinkers(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry, tiny_gguf: Path) -> Entries:
    """The same with markers of thoughts and calls as tokens, and a template that writes tools and thoughts."""
    folder = tmp_path_factory.mktemp("thinkers")
    write_tiny_llama(folder / "mlx", smollm2.path, seed=0)
    teach_thinking(folder / "mlx")
    files: dict[Format, Path] = {
        "mlx": folder / "mlx",
        "gguf": with_tokens(tiny_gguf, MARKERS, folder / "thinker.gguf", THINKER_TEMPLATE),
    }
    return {**{format_: entry_of(path, "thinker") for format_, path in files.items()}, "echo": echo_entry("thinker")}


@pytest.fixture(scope="session")
def embedders(minilm: ModelEntry, minilm_gguf: Path) -> Entries:
    echo = echo_entry(minilm.id, kind="embedding")
    return {"mlx": minilm, "gguf": entry_of(minilm_gguf, minilm.id), "echo": echo}


@pytest.fixture(scope="module", params=["mlx", "gguf", "echo"])
def made_for(request: pytest.FixtureRequest) -> Format:
    """The engine under test, by the format of its models."""
    format_: Format = request.param
    return format_


@pytest.fixture(scope="module")
async def _with_tiny(chats: Entries, made_for: Format) -> AsyncIterator[ModelManager]:
    async with ModelManager(SETTINGS) as manager:
        await manager.load_entry(chats[made_for])
        yield manager


@pytest.fixture
async def manager(_with_tiny: ModelManager) -> AsyncIterator[ModelManager]:
    """With ``tiny``; shared by the tests of a module, which must not load or unload models."""
    yield _with_tiny
    await until_idle(_with_tiny)


@pytest.fixture(scope="module")
async def _with_long(longs: Entries, made_for: Format) -> AsyncIterator[ModelManager]:
    async with ModelManager(FEW) as manager:
        await manager.load_entry(longs[made_for])
        yield manager


@pytest.fixture
async def busy(_with_long: ModelManager) -> AsyncIterator[ModelManager]:
    """Two slots, and a model whose answers can be long; shared like ``manager``."""
    yield _with_long
    await until_idle(_with_long)


@pytest.fixture
async def own(longs: Entries, made_for: Format) -> AsyncIterator[ModelManager]:
    """The same for one test, which may load and unload models."""
    async with ModelManager(FEW) as manager:
        await manager.load_entry(longs[made_for])
        yield manager
