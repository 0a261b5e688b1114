"""Fixtures that run servers on loopback sockets.

``lab`` and ``http`` use the echo engine, other fixtures a tiny model. Tests that do not load or unload models share one
server for the session.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lmx_lab.notebook import Lab
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from tests.engine.encoders.models import write_tiny_bert
from tests.tiny import write_tiny_llama
from tests.weights.conftest import LLAMA, safetensors_bytes

HELLO = [{"role": "user", "content": "hello"}]
SEA = [{"role": "user", "content": "The sea is wide and deep, and what it says it says again and again."}]
"""A message with more tokens than ``echo_body`` requests, so that the echo engine always has enough to repeat."""
ENDLESS: dict[str, Any] = {"max_tokens": 30_000, "ignore_eos": True}
"""An answer of half a minute at ``PACE``, which the tests cancel."""
ENDLESS_TEXT = "a " * 10_000
"""A message whose repetition takes ten seconds at ``PACE``, for formats without ``ignore_eos``."""
PACE = 1000.0
"""Tokens per second of the echo engine, so that an answer can be cancelled while it is generated."""


@contextlib.contextmanager
def serving(home: Path, model: str | None, **settings: Any) -> Iterator[Lab]:
    with Lab(Settings(home=home, port=0, **settings), loop="thread") as lab:
        lab.start()
        if model is not None:
            lab.load(model)
        yield lab


@pytest.fixture(scope="session")
def echo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a home with the model ``other``, which is listed but cannot be loaded: its weights are one tensor."""
    home = tmp_path_factory.mktemp("echo-home")
    other = home / "models" / "other"
    other.mkdir(parents=True)
    (other / "config.json").write_text(json.dumps(LLAMA))
    (other / "tokenizer.json").write_text("{}")
    (other / "model.safetensors").write_bytes(safetensors_bytes())
    return home


@pytest.fixture(scope="session")
def lab(echo_home: Path) -> Iterator[Lab]:
    """Run a server with ``echo`` loaded. Tests that unload it use ``fresh_lab``."""
    with serving(echo_home, "echo", slots=2, queue_limit=2, echo_tokens_per_s=PACE) as lab:
        yield lab


@pytest.fixture(scope="session")
def quick_lab(echo_home: Path) -> Iterator[Lab]:
    """Run a server with ``echo`` at full speed. ``PACE`` would apply to embeddings too."""
    with serving(echo_home, "echo") as lab:
        yield lab


@pytest.fixture
def fresh_lab(echo_home: Path) -> Iterator[Lab]:
    with serving(echo_home, "echo", echo_tokens_per_s=PACE) as lab:
        yield lab


# For one module only: in a session, later tests would measure the memory of its model as that of this process.
@pytest.fixture(scope="module")
def tiny_lab(tiny_home: Path) -> Iterator[Lab]:
    """Run a server with ``tiny`` loaded. Tests that unload it use ``fresh_tiny_lab``."""
    with serving(tiny_home, "tiny", slots=2, queue_limit=2) as lab:
        yield lab


@pytest.fixture
def fresh_tiny_lab(tiny_home: Path) -> Iterator[Lab]:
    with serving(tiny_home, "tiny") as lab:
        yield lab


@pytest.fixture(scope="session")
def long_home(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Path:
    """Create a home with ``tiny-long``, which has a context of 8192 tokens, for long prompts."""
    home = tmp_path_factory.mktemp("long-home")
    write_tiny_llama(home / "models" / "tiny-long", smollm2.path, seed=0, context=8192)
    return home


@pytest.fixture(scope="session")
def three_home(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Path:
    """Create a home with a tiny chat model, a tiny embedding model and a tiny reranker."""
    home = tmp_path_factory.mktemp("three-home")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0)
    write_tiny_bert(home / "models" / "tiny-embedder")
    write_tiny_bert(home / "models" / "tiny-reranker", labels=1)
    return home


@pytest.fixture(scope="module")
def encoding_lab(starter_home: Path, minilm: ModelEntry) -> Iterator[Lab]:
    """Run a server with the real MiniLM loaded."""
    with serving(starter_home, minilm.id) as lab:
        yield lab


@pytest.fixture(scope="session")
def http(lab: Lab) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=lab.url, timeout=60) as client:
        yield client


@pytest.fixture
def fresh_http(fresh_lab: Lab) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=fresh_lab.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tiny_http(tiny_lab: Lab) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=tiny_lab.url, timeout=60) as client:
        yield client


@pytest.fixture
def fresh_tiny_http(fresh_tiny_lab: Lab) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=fresh_tiny_lab.url, timeout=60) as client:
        yield client


def echo_body(**changes: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": SEA, "temperature": 0, "max_tokens": 8, **changes}


def chat_body(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 8, **changes}


def events(text: str) -> list[str]:
    """Return the data of server-sent events, in order and without comments."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


def wait_until_idle(lab: Lab) -> None:
    wait_until(lambda: lab.engine.snapshot.active_requests + lab.engine.snapshot.queued_requests == 0)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true. The time limit is that of the test."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)
