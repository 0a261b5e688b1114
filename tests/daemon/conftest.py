"""Fixtures of the daemon's tests."""

import pytest

from lmx_lab.daemon.storage.store import Store
from tests.support.daemons import check_log, daemon
from tests.support.mcp import open_harness
from tests.support.model_server import Scripted


@pytest.fixture
async def store(tmp_path):
    store = await Store.open(tmp_path / "daemon.db")
    yield store
    await store.close()


@pytest.fixture
def upstream():
    with Scripted() as upstream:
        yield upstream


@pytest.fixture
async def harness(tmp_path):
    """MCP servers on a store."""
    async with open_harness(tmp_path) as harness:
        yield harness


@pytest.fixture
async def here(tmp_path, upstream):
    """Turns that use this upstream. At the end, the invariants of the log are checked."""
    async with daemon(tmp_path, upstream) as here:
        yield here
        check_log(await here.events())
