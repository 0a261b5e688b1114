"""Fixtures of every layer: a home with the starters, and a tiny model for milliseconds a token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog, ModelEntry
from tests.tiny import teach_thinking, write_tiny_llama

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def _no_foreign_settings() -> None:
    for name in [name for name in os.environ if name.startswith("LMX_LAB_") and name != "LMX_LAB_TEST_HOME"]:
        del os.environ[name]


@pytest.fixture(scope="session")
def starter_home() -> Path:
    """A lab's home with ``smollm2-135m``, fetched once and kept between runs."""
    home = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
    Catalog(Settings(home=home)).fetch("smollm2-135m")
    return home


@pytest.fixture(scope="session")
def smollm2(starter_home: Path) -> ModelEntry:
    return Catalog(Settings(home=starter_home)).resolve("smollm2-135m")


@pytest.fixture(scope="session")
def minilm(starter_home: Path) -> ModelEntry:
    """The real all-MiniLM-L6-v2, fetched once and kept between runs."""
    return Catalog(Settings(home=starter_home)).fetch("minilm-l6")


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Path:
    """A lab's home with ``tiny`` and ``tiny-two``: two-layer llamas of random weights with SmolLM2's tokenizer."""
    home = tmp_path_factory.mktemp("tiny-home")
    for seed, name in enumerate(("tiny", "tiny-two")):
        write_tiny_llama(home / "models" / name, smollm2.path, seed=seed)
    return home


@pytest.fixture(scope="session")
def tiny(tiny_home: Path) -> ModelEntry:
    return Catalog(Settings(home=tiny_home)).resolve("tiny")


@pytest.fixture(scope="session")
def thinker_home(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Path:
    """A lab's home with ``thinker``: as ``tiny``, with markers of thoughts and tool calls, and a template for them."""
    home = tmp_path_factory.mktemp("thinker-home")
    write_tiny_llama(home / "models" / "thinker", smollm2.path, seed=2)
    teach_thinking(home / "models" / "thinker")
    return home


@pytest.fixture(scope="session")
def thinker(thinker_home: Path) -> ModelEntry:
    return Catalog(Settings(home=thinker_home)).resolve("thinker")
