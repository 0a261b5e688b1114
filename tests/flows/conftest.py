"""A running server on a loopback socket: real uvicorn, real engine, a tiny model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lmx_lab.lab import Lab
from lmx_lab.settings import Settings

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
