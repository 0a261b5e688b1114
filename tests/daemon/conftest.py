"""What tests of the daemon share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmx_lab.daemon.storage.store import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "daemon.db")
    yield store
    await store.close()
