"""Fixtures of every layer: a home with the starters, and a tiny model for milliseconds a token."""

from __future__ import annotations

import asyncio
import copy
import copyreg
import functools
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from tokenizers import Tokenizer

from lmx_lab.engine.mlx import model
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights import Catalog
from tests.gguf_models import kept, starter_gguf, write_minilm_gguf, write_reranker_gguf, write_tiny_gguf
from tests.tiny import teach_thinking, write_tiny_llama

ROOT = Path(__file__).parent.parent
LONGEST = {
    folder: at
    for at, folder in enumerate(
        (
            "browser",
            "notebooks",
            "docs",
            "kernel",
            "contract",
            "flows",
            "security",
            "daemon",
            "llama_cpp",
            "engine",
            "mlx",
        )
    )
}
"""The folders whose tests take longest."""
SLOW_FIXTURES = frozenset({"browser", "fresh_notebook", "starter_home"})
NOT_FAST = frozenset(
    {
        *("browser", "contract", "cpu_blas", "doctor", "faults", "kernel", "llama_cpp"),
        *("notebooks", "other_clients", "package", "parity", "soak"),
    }
)
"""The folders whose tests start browsers, kernels or other programs, or need long to be imported."""
# Beside other processes an example may take any time, and no test is about that. In CI hypothesis' own profile, which
# this adds to, draws the same examples in every run.
settings.register_profile("lab", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lab")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what ``make test-fast`` leaves out."""
    skipped = "not slow" in config.option.markexpr and collection_path.name in NOT_FAST and collection_path.is_dir()
    return True if skipped else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``make test-fast`` leaves out, and run the longest tests first, so that two workers end together."""
    for item in items:
        # Every model of the tests has the tokenizer or the weights of a starter model, which is read from starter_home.
        if not (NOT_FAST.isdisjoint(item.path.parts) and SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))):
            item.add_marker("slow")
    items.sort(key=lambda item: min(LONGEST.get(part, len(LONGEST)) for part in item.path.parts))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def _no_foreign_settings() -> None:
    for name in [name for name in os.environ if name.startswith("LMX_LAB_") and name != "LMX_LAB_TEST_HOME"]:
        del os.environ[name]


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_looked_for_in_what_is_new() -> None:
    """Each load and unload looks for it: 0.4 s long among all tests, and longer with what those before have left.

    The price: what lives from one file to the next and then becomes garbage, in a cycle, is not collected any more.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _tokenizers_are_read_once() -> Iterator[None]:
    """Reading and copying a tokenizer would be nine tenths of the time that it takes to load a tiny model.

    Each load gets a copy of its own that shares what no test changes: the tokens and the table of their bytes.
    """
    read, lock = model.load_tokenizer, threading.Lock()

    @functools.lru_cache(maxsize=4)
    def known(path: Path, _files: object, options: tuple[tuple[str, Any], ...]) -> Any:
        return read(path, **dict(options))

    def copied(path: Path, eos_token_ids: Any = None) -> Any:
        files = tuple(sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir()))
        ends = tuple(eos_token_ids) if isinstance(eos_token_ids, list) else eos_token_ids
        with lock:
            return copy.deepcopy(known(path, files, (("eos_token_ids", ends),)))

    with pytest.MonkeyPatch.context() as patched:
        # deepcopy keeps an object whose reduction is a string.
        patched.setitem(copyreg.dispatch_table, Tokenizer, lambda tokenizer: "shared")
        patched.setattr(BPEStreamingDetokenizer, "__deepcopy__", lambda self, memo: copy.copy(self), raising=False)
        patched.setattr(model, "load_tokenizer", copied)
        yield


@pytest.fixture(autouse=True)
def _asyncio_stays_as_it_is() -> Iterator[None]:
    """``run_nested`` patches asyncio for the whole process, and ``asyncio.run`` then leaves its loops open."""
    yield
    assert not hasattr(asyncio, "_nest_patched"), "this test nested loops; let it do so in a process of its own"


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


@pytest.fixture(scope="session")
def smollm2_gguf(starter_home: Path) -> Path:
    """The real SmolLM2 as llama.cpp reads it, fetched once and kept between runs."""
    return starter_gguf(starter_home)


@pytest.fixture(scope="session")
def tiny_gguf(starter_home: Path, smollm2: ModelEntry, smollm2_gguf: Path) -> Path:
    """``tiny``, the same weights, as a GGUF file with the tokenizer and chat template of SmolLM2's."""
    return kept(starter_home, "tiny", lambda target: write_tiny_gguf(target, smollm2_gguf, smollm2.path))


@pytest.fixture(scope="session")
def minilm_gguf(starter_home: Path, minilm: ModelEntry) -> Path:
    """The real all-MiniLM-L6-v2 as a GGUF file."""
    return kept(starter_home, "minilm", lambda target: write_minilm_gguf(target, minilm.path))


@pytest.fixture(scope="session")
def reranker_gguf(starter_home: Path, minilm: ModelEntry) -> Path:
    """A cross-encoder of random weights as a GGUF file, for 64 tokens: it scores fast, and always the same."""
    return kept(starter_home, "reranker", lambda target: write_reranker_gguf(target, minilm.path))
