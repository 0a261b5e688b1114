"""Fixtures of the daemon's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lmx_lab.daemon.storage.store import Store
from tests.support.daemons import TurnHarness, check_invariants, daemon
from tests.support.model_server import Scripted


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "daemon.db")
    yield store
    await store.close()


@pytest.fixture
def upstream() -> Iterator[Scripted]:
    with Scripted() as upstream:
        yield upstream


@pytest.fixture
async def here(tmp_path: Path, upstream: Scripted) -> AsyncIterator[TurnHarness]:
    """Turns that use this upstream. At the end, the invariants of the log are checked."""
    async with daemon(tmp_path, upstream) as here:
        yield here
        check_invariants(await here.events())
