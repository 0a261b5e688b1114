"""Tests of downloads that clients of Ollama's API start: they are shared, limited, and survive their clients."""

import asyncio
import json
import threading

import pytest

from lmx_lab.errors import DownloadError, ModelNotFoundError, QueueFullError
from lmx_lab.server.ollama_models import Downloads
from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.store import Progress

pytestmark = pytest.mark.anyio


class WaitingCatalog(Catalog):
    """A catalog whose downloads report half of their bytes, and end when ``go`` is set."""

    def __init__(self):
        super().__init__(Settings())
        self.go = threading.Event()
        self.fetched = []

    def can_fetch(self, name):
        return name.startswith("org/")

    def fetch(self, name, progress=None, **_):
        self.fetched.append(name)
        progress(Progress(stage="download", done_bytes=50, total_bytes=100))
        self.go.wait(30)
        if name == "org/broken":
            raise DownloadError("the hub has failed")
        return ECHO


async def test_clients_share_a_download_and_see_its_progress():
    catalog = WaitingCatalog()
    downloads = Downloads(catalog, may_download=True)
    download = await downloads.join("org/model", local=True)
    assert await downloads.join("org/model", local=True) is download
    with download.changes.subscribe(limit=1) as changes:
        while "completed" not in (line := json.loads(download.line())):
            await anext(changes)
    assert (line["status"], line["completed"], line["total"]) == ("downloading org/model", 50, 100)
    assert line["digest"].startswith("sha256:")
    client = asyncio.create_task(download.wait())
    await asyncio.sleep(0)
    client.cancel()
    await asyncio.wait([client])
    catalog.go.set()
    await download.wait()
    assert catalog.fetched == ["org/model"]
    await (await downloads.join("org/model", local=True)).wait()
    assert catalog.fetched == ["org/model"] * 2


async def test_a_failed_download_fails_for_each_client():
    catalog = WaitingCatalog()
    catalog.go.set()
    downloads = Downloads(catalog, may_download=True)
    download = await downloads.join("org/broken", local=True)
    for _ in range(2):
        with pytest.raises(DownloadError, match="the hub has failed"):
            await download.wait()


async def test_only_local_callers_download_and_only_a_few_models_at_once():
    catalog = WaitingCatalog()
    downloads = Downloads(catalog, may_download=True, limit=2)
    running = [await downloads.join(f"org/model-{number}", local=True) for number in range(2)]
    with pytest.raises(QueueFullError, match="2 models are being downloaded"):
        await downloads.join("org/one-more", local=True)
    with pytest.raises(ModelNotFoundError):
        await downloads.join("org/model-0", local=False)
    with pytest.raises(ModelNotFoundError):
        await Downloads(catalog, may_download=False).join("org/model-0", local=True)
    catalog.go.set()
    for download in running:
        await download.wait()
    # A model that is on the disk needs no download.
    await (await downloads.join("echo", local=False)).wait()
    assert len(catalog.fetched) == 2
