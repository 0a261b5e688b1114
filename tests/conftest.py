"""Define fixtures for all tests: homes with the starter models, and tiny models that take milliseconds per token."""

from __future__ import annotations

import asyncio
import copy
import copyreg
import functools
import gc
import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import httpcore2
import httpx2
import pytest
from hypothesis import HealthCheck, settings

from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog

# Before their import, so that failed assertions in these modules show their values, as those in tests do.
pytest.register_assert_rewrite("tests.support", "tests.browser", "tests.docs", "tests.engine", "tests.http")
from tests.support.models import LLAMA, safetensors_bytes, teach_thinking, write_tiny_llama  # noqa: E402

# The process that distributes the tests loads this file too, before it starts the others. Packages that are slow to
# import are therefore imported by the fixtures that need them.
ROOT = Path(__file__).parent.parent
ORDER = "browser notebooks docs kernel contract flows security daemon llama_cpp engine mlx http"
LONGEST = {folder: at for at, folder in enumerate(ORDER.split())}
"""Position of each folder in the order of tests: those with the longest tests run first."""
SLOW_FIXTURES = frozenset({"browser", "fresh_notebook", "starter_home"})
NOT_FAST = frozenset(
    {
        *("browser", "cpu_blas", "doctor", "encoders", "faults", "kernel", "larger_models", "llama_cpp", "mlx"),
        *("notebooks", "other_clients", "package", "parity", "soak"),
    }
)
"""Folders whose tests start browsers, kernels or other programs, or are slow to import."""
WHOLLY_SLOW = re.compile(r"^pytestmark = .*mark\.(slow|long)\b", re.MULTILINE)
"""The line that marks all tests of a file."""
LONG_FOLDERS = frozenset({"browser", "faults", "package"})
"""Folders whose tests only ``make test-all`` runs."""
# With this package, jsonschema spends a second on compiling 38 grammars for formats that no schema here has.
sys.modules["rfc3987_syntax"] = None
# On a busy machine an example may take any time, so there is no deadline. In CI, hypothesis' own profile, to which
# these settings are added, draws the same examples in every run.
settings.register_profile("lab", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("lab"), max_examples=20)
settings.load_profile("lab")


def pytest_configure(config):
    """Draw fewer examples in ``make test-fast`` and ``make test``. Tests state their number as a multiple of the
    profile's.

    The garbage collector is off while tests are collected, because it would take a quarter of that time.
    """
    gc.disable()
    if "not long" in config.option.markexpr:
        settings.load_profile("fast")


def pytest_collection_finish():
    # Otherwise the first collection of garbage would take half a second.
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path, config):
    """Skip the import of the folders and files that ``make test-fast`` leaves out."""
    if "not slow" not in config.option.markexpr:
        return None
    if collection_path.is_dir():
        return collection_path.name in NOT_FAST or None
    return WHOLLY_SLOW.search(collection_path.read_text(encoding="utf-8")) is not None or None


def pytest_collection_modifyitems(items):
    """Mark the tests that ``make test-fast`` and ``make test`` leave out. Run the longest first, so that all workers
    end together.
    """
    for item in items:
        # All test models use the tokenizer or the weights of a starter model, so they depend on starter_home.
        if not (NOT_FAST.isdisjoint(item.path.parts) and SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))):
            item.add_marker("slow")
        if not LONG_FOLDERS.isdisjoint(item.path.parts):
            item.add_marker("long")
    items.sort(key=lambda item: min(LONGEST.get(part, len(LONGEST)) for part in item.path.parts))


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def _no_foreign_settings():
    for name in [name for name in os.environ if name.startswith("LMX_LAB_") and name != "LMX_LAB_TEST_HOME"]:
        del os.environ[name]
    # The models of the user who runs the tests would appear in lists.
    os.environ["LMX_LAB_OTHER_PROGRAMS"] = "0"


@pytest.fixture(autouse=True, scope="module")
def _exclude_old_objects_from_garbage_collection():
    """Freeze the existing objects before each file of tests.

    Each load and unload collects garbage, which takes 0.4 s with the objects of all tests, and longer with those that
    earlier tests have left. Reference cycles that live from one file to the next are therefore never collected.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _share_certificates():
    """Read the certificates of authorities only once. It takes 20 ms for each HTTP client, and no test uses them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(httpcore2, "default_ssl_context", functools.cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def _share_validators():
    """Build the validator of each type of FastAPI's fields only once, because every lab and daemon defines its routes.

    Otherwise this takes half of the time for starting a lab with the echo engine.
    """
    import fastapi._compat.v2

    create, validators = fastapi._compat.v2.TypeAdapter, dict[tuple[Any, str], Any]()

    def shared(annotated: Any, *, config: Any) -> Any:
        # Metadata cannot be hashed, so its text is the key. It contains the addresses of functions, which a stored
        # validator keeps alive.
        annotation, *metadata = get_args(annotated)
        key = annotation, repr((metadata, config))
        if key not in validators:
            validators[key] = create(annotated, config=config)
        return validators[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fastapi._compat.v2, "TypeAdapter", shared)
        yield


@pytest.fixture(autouse=True, scope="session")
def _wait_longer_for_responses():
    """Replace the default timeout of HTTP clients (5 s), because a response may take longer on a busy machine.

    The default is one instance, which is the default value of many functions.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name in ("connect", "read", "write", "pool"):
            patched.setattr(httpx2._config.DEFAULT_TIMEOUT_CONFIG, name, 60.0)
        yield


@pytest.fixture(scope="session")
def _cache_tokenizers():
    """Read each tokenizer once, because that takes 90 % of the time for loading a tiny model.

    Each load gets a copy, which shares the tokens and their byte table, because no test changes them. All test models
    have tokens of a starter model, so ``starter_home`` depends on this fixture, and other tests do not import mlx-lm.
    """
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
    from tokenizers import Tokenizer

    from lmx_lab.engine.mlx import load

    read, lock = load.load_tokenizer, threading.Lock()

    @functools.lru_cache(maxsize=4)
    def cached(path: Path, _files: object, options: tuple[tuple[str, Any], ...]) -> Any:
        return read(path, **dict(options))

    def load_copy(path: Path, eos_token_ids: Any = None) -> Any:
        files = tuple(sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir()))
        ends = tuple(eos_token_ids) if isinstance(eos_token_ids, list) else eos_token_ids
        with lock:
            return copy.deepcopy(cached(path, files, (("eos_token_ids", ends),)))

    with pytest.MonkeyPatch.context() as patched:
        # deepcopy does not copy an object whose reduction is a string.
        patched.setitem(copyreg.dispatch_table, Tokenizer, lambda tokenizer: "shared")
        patched.setattr(BPEStreamingDetokenizer, "__deepcopy__", lambda self, memo: copy.copy(self), raising=False)
        patched.setattr(load, "load_tokenizer", load_copy)
        yield


@pytest.fixture(autouse=True)
def _asyncio_is_not_patched():
    """Fail tests that nest loops: this patches asyncio for the whole process, and ``asyncio.run`` then leaks loops."""
    yield
    assert not hasattr(asyncio, "_nest_patched"), "this test has nested event loops; run its code in a separate process"


@pytest.fixture(scope="session")
def starter_home(_cache_tokenizers):
    """A lab's home with ``smollm2-135m`` in MLX's format, which is downloaded once and kept between runs."""
    home = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
    Catalog(Settings(home=home)).convert("smollm2-135m")
    # Without the file that was converted, tests that load the model by its name test MLX.
    shutil.rmtree(home / "models" / "smollm2-135m-gguf", ignore_errors=True)
    return home


@pytest.fixture(scope="session")
def smollm2(starter_home):
    formats = Catalog(Settings(home=starter_home)).find_formats("smollm2-135m")
    return next(entry for entry in formats if entry.format == "mlx")


@pytest.fixture(scope="session")
def minilm(starter_home):
    """The real all-MiniLM-L6-v2, which is downloaded once and kept between runs."""
    return Catalog(Settings(home=starter_home)).fetch("minilm-l6")


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory, smollm2):
    """A lab's home with ``tiny`` and ``tiny-two``: two-layer llamas with random weights and SmolLM2's tokenizer."""
    home = tmp_path_factory.mktemp("tiny-home")
    for seed, name in enumerate(("tiny", "tiny-two")):
        write_tiny_llama(home / "models" / name, smollm2.path, seed=seed)
    return home


@pytest.fixture(scope="session")
def tiny(tiny_home):
    return Catalog(Settings(home=tiny_home)).resolve("tiny")


@pytest.fixture(scope="session")
def thinker_home(tmp_path_factory, smollm2):
    """A lab's home with ``thinker``: like ``tiny``, with tokens and a template for reasoning and tool calls."""
    home = tmp_path_factory.mktemp("thinker-home")
    write_tiny_llama(home / "models" / "thinker", smollm2.path, seed=2)
    teach_thinking(home / "models" / "thinker")
    return home


@pytest.fixture(scope="session")
def thinker(thinker_home):
    return Catalog(Settings(home=thinker_home)).resolve("thinker")


@pytest.fixture(scope="session")
def smollm2_gguf(starter_home):
    """The real SmolLM2 as a GGUF file, which is downloaded once and kept between runs."""
    from tests.support.gguf import starter_gguf

    return starter_gguf(starter_home)


@pytest.fixture(scope="session")
def tiny_gguf(starter_home, smollm2, smollm2_gguf):
    """The weights of ``tiny`` as a GGUF file, with the tokenizer and chat template of SmolLM2."""
    from tests.support.gguf import kept, write_tiny_gguf

    return kept(starter_home, "tiny", lambda target: write_tiny_gguf(target, smollm2_gguf, smollm2.path))


@pytest.fixture(scope="session")
def minilm_gguf(starter_home, minilm):
    """The real all-MiniLM-L6-v2 as a GGUF file."""
    from tests.support.gguf import kept, write_minilm_gguf

    return kept(starter_home, "minilm", lambda target: write_minilm_gguf(target, minilm.path))


@pytest.fixture(scope="session")
def reranker_gguf(starter_home, minilm):
    """A cross-encoder with random weights and a context of 64 tokens, as a GGUF file; it is fast and deterministic."""
    from tests.support.gguf import kept, write_reranker_gguf

    return kept(starter_home, "reranker", lambda target: write_reranker_gguf(target, minilm.path))


@pytest.fixture(scope="session")
def echo_home(tmp_path_factory):
    """Create a home with the model ``other``, which is listed but cannot be loaded: its weights are one tensor."""
    home = tmp_path_factory.mktemp("echo-home")
    other = home / "models" / "other"
    other.mkdir(parents=True)
    (other / "config.json").write_text(json.dumps(LLAMA))
    (other / "tokenizer.json").write_text("{}")
    (other / "model.safetensors").write_bytes(safetensors_bytes())
    return home


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A lab with the echo engine. Files and folders whose tests need another one define it by the same name."""
    from tests.support.labs import serving

    with serving(tmp_path_factory.mktemp("home"), "echo", slots=4) as lab:
        yield lab


@pytest.fixture
def http(lab):
    """A client of the lab's server."""
    with httpx2.Client(base_url=lab.url) as client:
        yield client


@pytest.fixture(scope="session")
def long_gguf(tmp_path_factory, tiny_gguf):
    """``tiny`` with a context of 8,192 tokens, so that a request runs as long as a test needs."""
    from tests.support.gguf import with_context

    return with_context(tiny_gguf, 8192, tmp_path_factory.mktemp("long-gguf"))
