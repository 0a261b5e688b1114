"""A running server on a loopback socket: real uvicorn, real engine, a tiny model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lmx_lab.lab import Lab
from lmx_lab.settings import Settings
from lmx_lab.weights import ModelEntry
from tests.tiny import write_tiny_llama

HELLO = [{"role": "user", "content": "hello"}]


@contextlib.contextmanager
def serving(home: Path, model: str | None, **settings: Any) -> Iterator[Lab]:
    with Lab(Settings(home=home, port=0, **settings), loop="thread") as lab:
        lab.start()
        if model is not None:
            lab.load(model)
        yield lab


@pytest.fixture(scope="module")
def lab(tiny_home: Path) -> Iterator[Lab]:
    """One server with ``tiny`` loaded; tests that unload use ``fresh_lab``."""
    with serving(tiny_home, "tiny", slots=2, queue_limit=2) as lab:
        yield lab


@pytest.fixture
def fresh_lab(tiny_home: Path) -> Iterator[Lab]:
    with serving(tiny_home, "tiny") as lab:
        yield lab


@pytest.fixture(scope="session")
def long_home(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Path:
    """A lab's home with ``tiny-long``: 8192 tokens of context, for prompts that take a while."""
    home = tmp_path_factory.mktemp("long-home")
    write_tiny_llama(home / "models" / "tiny-long", smollm2.path, seed=0, context=8192)
    return home


@pytest.fixture(scope="module")
def encoding_lab(starter_home: Path, minilm: ModelEntry) -> Iterator[Lab]:
    """One server with the real MiniLM loaded."""
    with serving(starter_home, minilm.id) as lab:
        yield lab


@pytest.fixture
def http(lab: Lab) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=lab.url, timeout=60) as client:
        yield client


@pytest.fixture
def fresh_http(fresh_lab: Lab) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=fresh_lab.url, timeout=60) as client:
        yield client


def chat_body(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 8, **changes}


def events(text: str) -> list[str]:
    """The data of server-sent events, in order; comments are left out."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


def wait_until_idle(lab: Lab) -> None:
    wait_until(lambda: lab.engine.snapshot.active_requests + lab.engine.snapshot.queued_requests == 0)


def wait_until(true: Callable[[], bool]) -> None:
    """The test's own time limit is the limit."""
    pause = threading.Event()
    while not true():
        pause.wait(0.005)
