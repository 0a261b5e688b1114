"""Run labs on loopback sockets, and read their state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmx_lab.batch.cache import AnswerCache
from lmx_lab.instrument.store import RecordStore
from lmx_lab.notebook.lab import Lab
from lmx_lab.settings import Settings
from tests.support.asking import ENDLESS
from tests.support.waiting import until

if TYPE_CHECKING:
    from lmx_lab.backend import Backend, FinishedAnswer
    from lmx_lab.engine import ModelManager
    from lmx_lab.wire.chat import ChatRequest

KEY = "a-key-that-nobody-is-shown"
FRIEND = "http://friend.example:3000"
PACE = 1000.0
"""Tokens per second of the echo engine, so that an answer can be cancelled while it is generated."""


@contextlib.contextmanager
def serving(home: Path, model: str | os.PathLike[str] | None, **settings: Any) -> Iterator[Lab]:
    with Lab(Settings(home=home, port=0, **settings), loop="thread") as lab:
        lab.start()
        if model is not None:
            lab.load(model)
        yield lab


def manager_of(lab: Lab) -> ModelManager:
    """Return the engine of a lab in this process."""
    return lab.server.engine


async def read_answer(backend: Backend, request: ChatRequest) -> FinishedAnswer:
    """Return the complete answer of a backend, as panels generate it."""
    return await (await backend.generate(request)).read()


@contextmanager
def running_answer(lab: Lab, **parameters: Any) -> Iterator[Iterator[str]]:
    """Yield the rest of a running answer. By default, the answer does not end before the block."""
    with contextlib.closing(lab.chat("hello", stream=True, **(parameters or ENDLESS))) as stream:
        # Iterated once, because the end of an iteration ends the answer.
        pieces = iter(stream)
        next(pieces)
        yield pieces


def forbid_waits_on_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recordings and caches fail where a running event loop would wait for the disk."""

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            assert asyncio._get_running_loop() is None, f"{method.__qualname__} makes an event loop wait for the disk"
            return method(*arguments, **options)

        return call

    for kind, names in (
        (RecordStore, ("__init__", "__len__", "at", "get", "find", "page", "rows", "delete", "close")),
        (AnswerCache, ("__init__", "close")),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, guarded(getattr(kind, name)))


def is_idle(lab: Lab) -> bool:
    """Return whether no request is running or queued."""
    return manager_of(lab).snapshot.active_requests + manager_of(lab).snapshot.queued_requests == 0


def wait_until_idle(lab: Lab) -> None:
    until(lambda: is_idle(lab))


@contextmanager
def events_of(lab: Lab, *include: str, headers: Mapping[str, str] | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the events from now on, after the first one."""
    query = {"include": ",".join(include)} if include else None
    with httpx2.stream("GET", f"{lab.url}/admin/events", params=query, headers=headers, timeout=60) as response:
        events = (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line)
        next(events)
        yield events


@contextmanager
def watching(lab: Lab) -> Iterator[list[dict[str, Any]]]:
    """Yield a list to which the request events from now on are appended."""
    seen: list[dict[str, Any]] = []
    with events_of(lab, "requests") as events:

        def read() -> None:
            seen.extend(event for event in events if event["type"] == "request")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        yield seen
        lab.stop()
        reader.join()


def scrape(http: httpx2.Client) -> dict[str, float]:
    """Return the samples by name; the name of a sample with labels is ``name{a=b}``."""
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("lmx_lab_") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found
