"""Provide a manager with two slots and the tiny model, and helpers for its requests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from lmx_lab.engine import ModelManager
from lmx_lab.engine.stream import Item, Mailbox
from lmx_lab.errors import LabError
from lmx_lab.values.outputs import GenerationReport
from tests.support.engines import TWO_SLOTS, Gate, Shared

# Imported by the functions that need it, because it imports mlx-lm, and fast tests import this file.
if TYPE_CHECKING:
    from lmx_lab.engine.mlx.encoding import EncodingLoop


@pytest.fixture(scope="module")
def shared():
    shared = Shared()
    yield shared
    shared.stop()


@pytest.fixture
def no_shared_model(shared):
    """Unload the shared models, for tests that measure or limit memory."""
    shared.stop()


@pytest.fixture
def manager(shared, tiny):
    """A shared manager, for tests that do not load or unload models."""
    with shared.use(TWO_SLOTS, tiny) as manager:
        yield manager


@pytest.fixture
async def own_manager(no_shared_model, tiny):
    """A manager for one test, which may unload or break its model, or end its thread."""
    async with ModelManager(TWO_SLOTS) as manager:
        await manager.load_entry(tiny)
        yield manager


@pytest.fixture
def delivered_items(monkeypatch):
    """All items of streams in the order in which the engine delivers them, each with the ``steps`` of its stream."""
    items = []
    deliver = Mailbox.deliver

    def note(self: Mailbox, item: Item) -> None:
        items.append((self.steps, item))
        deliver(self, item)

    monkeypatch.setattr(Mailbox, "deliver", note)
    return items


@pytest.fixture
def gate(monkeypatch):
    """An open gate. Each step of the engine computes one layer of texts."""
    from lmx_lab.engine.mlx.encoding import EncodingLoop

    gate, advance = Gate(), EncodingLoop._advance

    def wait_and_advance(encoding: EncodingLoop, batch: Any) -> None:
        gate.wait()
        advance(encoding, batch)

    monkeypatch.setattr(EncodingLoop, "_advance", wait_and_advance)
    monkeypatch.setattr("lmx_lab.engine.mlx.state.ENCODE_S", 0)
    yield gate
    gate.open()


@pytest.fixture
def ends(monkeypatch):
    """Number of ends that each stream has received, by the id of its ``steps``."""
    counted = Counter()
    deliver = Mailbox.deliver

    def count(self: Mailbox, item: Item) -> None:
        counted[id(self.steps)] += isinstance(item, GenerationReport | LabError)
        deliver(self, item)

    monkeypatch.setattr(Mailbox, "deliver", count)
    return counted
