"""Tests with a real full file system of a few megabytes: errors with numbers, no partial files, and recovery."""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess

import httpx2
import numpy as np
import pytest
from huggingface_hub import constants

from lmx_lab.daemon.storage.store import Store
from lmx_lab.engine.llama_cpp.quantize import quantize
from lmx_lab.engine.prefix_files import PrefixFiles, StoredPrefix, TensorSpec
from lmx_lab.errors import StorageFullError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.fingerprint import with_marks
from lmx_lab.wire.events import ToolOutput
from tests.support.asking import CHAT, CHAT_WAIT_S, chat_body, refused
from tests.support.daemons import Program
from tests.support.hub import REPO, git_id, hub_with, use_hub, whole
from tests.support.labs import serving

NUMBERS = re.compile(r"\d+ bytes are free")
MIB = 2**20


class Disk:
    """A file system in memory that can be filled to its last byte and freed again."""

    def __init__(self, folder):
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self):
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            for size in (MIB, 4096, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    def free(self):
        self._filler.unlink()

    @property
    def full(self):
        return shutil.disk_usage(self.folder).free == 0


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={48 * MIB},mode=0700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small disk, and not in every container")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def files_of(folder):
    """Return the files with content, except the one that fills the disk."""
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != "filler" and path.stat().st_size}


def test_a_download_that_fills_the_disk_is_507_and_succeeds_when_space_is_free(disk, tiny, tiny_home, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(disk.folder / "hub"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)

    def half_then_full(handler, data):
        if handler.command == "HEAD":
            whole(handler, data)
            return
        handler.begin(len(data), 200, {"ETag": f'"{git_id(data)}"'})
        handler.wfile.write(data[: len(data) // 2])
        disk.fill()
        handler.wfile.write(data[len(data) // 2 :])

    with hub_with(tiny.path) as server, serving(tiny_home, None, disk_reserve_bytes=0) as lab:
        use_hub(server, monkeypatch)
        server.faults["model.safetensors"] = half_then_full
        answer = httpx2.post(f"{lab.url}/admin/models/load", json={"model": REPO}, timeout=CHAT_WAIT_S)
        message = refused(answer, 507, "storage-full")["message"]
        assert re.search(r"\d+ bytes are needed, \d+ bytes are free", message)
        assert list(disk.folder.rglob("*.incomplete")) == []
        assert "model.safetensors" not in files_of(disk.folder)
        disk.free()
        server.faults.clear()
        assert httpx2.post(f"{lab.url}/admin/models/load", json={"model": REPO}, timeout=CHAT_WAIT_S).status_code == 200
        assert httpx2.post(lab.url + CHAT, json=chat_body(model=REPO), timeout=CHAT_WAIT_S).status_code == 200


def test_a_conversion_that_fills_the_disk_leaves_no_files_and_succeeds_when_space_is_free(disk, tiny_gguf, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(disk.folder / "hub"))
    catalog = Catalog(Settings(home=disk.folder / "home", disk_reserve_bytes=0))

    def fill_when_it_begins(progress):
        if progress.stage == "convert":
            disk.fill()

    with pytest.raises(StorageFullError, match=NUMBERS):
        catalog.convert(str(tiny_gguf), fill_when_it_begins)
    assert files_of(disk.folder) == set()
    assert catalog.scan() == []
    disk.free()
    entry = catalog.convert(str(tiny_gguf))
    assert entry.format == "mlx"
    assert catalog.resolve(entry.id) == entry


def test_a_prefix_cache_on_a_disk_that_is_full_or_read_only_keeps_its_files_and_recovers(disk, tiny, caplog):
    def prefix(first):
        tokens = np.arange(first, first + 10, dtype=np.int32)
        tensors = (TensorSpec("x", "U8", (2 * MIB,)),)
        return StoredPrefix(tokens=tokens, start=0, parent=None, can_be_trimmed=True, layout="{}", tensors=tensors)

    def fill_within_the_file():
        yield bytes(MIB)
        disk.fill()
        yield bytes(MIB)

    files = PrefixFiles(disk.folder / "cache", limit_bytes=64 * MIB, reserve_bytes=0)
    files.open(with_marks(tiny), [])
    assert files.write(prefix(0), [bytes(2 * MIB)])
    stored = files_of(disk.folder)
    assert not files.write(prefix(100), fill_within_the_file())
    assert "No space left on device; the KV cache is in memory only" in caplog.text
    assert files_of(disk.folder) == stored, "no part of a file is left"
    disk.free()
    subprocess.run(["mount", "-o", "remount,ro", str(disk.folder)], check=True)
    assert not files.write(prefix(100), [bytes(2 * MIB)])
    assert "Read-only file system; the KV cache is in memory only" in caplog.text
    # A server that starts now.
    later = PrefixFiles(disk.folder / "cache", limit_bytes=64 * MIB, reserve_bytes=0)
    later.open(with_marks(tiny), [])
    found, tokens = later.best(np.arange(20, dtype=np.int32))
    assert (tokens, len(later.read(found)["x"])) == (10, 2 * MIB)
    subprocess.run(["mount", "-o", "remount,rw", str(disk.folder)], check=True)
    assert files.write(prefix(100), [bytes(2 * MIB)])


def long_event(transaction):
    return transaction.append("tool.output", ToolOutput(call_id="c", text="x" * 100_000))


async def write_until_full(store, written):
    while True:
        written.append(await store.write(long_event))


def test_a_quantized_copy_that_fills_the_disk_is_not_kept_and_succeeds_when_space_is_free(disk, tiny_gguf):
    settings = Settings(home=disk.folder, threads=1, disk_reserve_bytes=0)

    def fill(progress):
        if progress.stage == "convert":
            disk.fill()

    with pytest.raises(StorageFullError, match=NUMBERS):
        quantize(settings, str(tiny_gguf), "Q8_0", fill)
    assert files_of(disk.folder) == set()
    disk.free()
    entry = quantize(settings, str(tiny_gguf), "Q8_0")
    assert entry.copy is not None
    assert entry.path.is_relative_to(disk.folder)


@pytest.mark.anyio
async def test_events_on_a_full_disk_are_complete_or_missing_and_turns_can_still_end(disk):
    store = await Store.open(disk.folder / "daemon.db")
    written = [await store.write(long_event)]
    await asyncio.to_thread(disk.fill)
    assert disk.full
    with pytest.raises(StorageFullError, match=NUMBERS):
        await write_until_full(store, written)
    rows = await store.read(lambda reading: reading.fetch_all("SELECT seq FROM events ORDER BY seq"))
    assert [row["seq"] for row in rows] == written
    ended = await store.write(lambda tx: tx.append("tool.output", ToolOutput(call_id="c", text="end")), ending=True)
    assert ended > written[-1]
    with pytest.raises(StorageFullError):
        await store.write(long_event)
    disk.free()
    assert await store.write(long_event) > ended
    assert store.path.with_suffix(".reserve").exists()
    check = await store.read(lambda reading: reading.fetch_one("PRAGMA integrity_check"))
    assert tuple(check) == ("ok",)
    await store.close()


@pytest.mark.anyio
async def test_a_daemon_on_a_full_disk_responds_with_507_and_recovers_when_space_is_free(disk):
    program = Program(disk.folder, "http://127.0.0.1:9").start()
    try:
        async with program.client() as client:
            body = {"system_prompt": "x" * 50_000}
            # The daemon has started when it responds. Its start needs space too, so the disk is filled afterwards.
            assert (await client.post("/sessions", json=body)).status_code == 201
            disk.fill()
            answer = await client.post("/sessions", json=body)
            while answer.status_code == 201:
                answer = await client.post("/sessions", json=body)
            assert NUMBERS.search(refused(answer, 507, "storage-full")["message"])
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/sessions")).status_code == 200
            disk.free()
            assert (await client.post("/sessions", json=body)).status_code == 201
        assert program.stop() == 0, (disk.folder / "out.txt").read_text()
    finally:
        program.kill()
