"""Tests that FIFOs, sockets, devices and endless files in place of model files are rejected without blocking."""

import asyncio
import os
import shutil
import socket
from pathlib import Path

import httpx2
import psutil
import pytest

from lmx_lab.engine import ModelManager
from lmx_lab.errors import UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.files import MIB, check_files, open_regular, read_regular
from tests.support.asking import CHAT, CHAT_WAIT_S, chat_body, refused
from tests.support.engines import load_entry, run
from tests.support.labs import serving
from tests.support.models import write_tiny_llama

MUCH = 2**29
"""Upper limit of the memory that a rejection may use, in bytes."""
AT_ONCE = 40
"""Number of requests, more than the threads of a thread pool."""
READ = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json", "modules.json"),
    *("hf_quant_config.json", "vocab.bpe", "1_Pooling/config.json", "2_Dense/model.safetensors"),
    "additional_chat_templates/tools.jinja",
)
"""Files that the lab, mlx-lm or transformers read."""


def _socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        folder = os.getcwd()
        os.chdir(path.parent)  # paths of sockets are limited to about 100 characters
        try:
            bound.bind(path.name)
        finally:
            os.chdir(folder)


def _large(path):
    with path.open("wb") as file:
        file.truncate(200 * MIB)


SPECIAL = {
    "a FIFO": os.mkfifo,
    "a socket": _socket,
    "a folder": Path.mkdir,
    "a character device behind a link": lambda path: path.symlink_to("/dev/zero"),
    "the limit for files": _large,
}
"""Functions that create special files, by their description in error messages."""


def put(folder, name, make):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    return path


@pytest.fixture
def models(tmp_path, smollm2, monkeypatch):
    """Create models ``good`` and ``bad``, which is still valid."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("good", "bad"):
        write_tiny_llama(tmp_path / "home" / "models" / name, smollm2.path, seed=0)
    return tmp_path / "home" / "models"


@pytest.fixture
def catalog(models):
    return Catalog(Settings(home=models.parent))


@pytest.fixture
def lab(models):
    with serving(models.parent, "good", threads=1) as lab:
        yield lab


@pytest.mark.parametrize("name", READ)
def test_a_fifo_in_place_of_any_file_is_rejected_by_name(catalog, models, name):
    put(models / "bad", name, os.mkfifo)
    with pytest.raises(UnusableModelError, match=f"{name} is a FIFO .*must be regular files"):
        catalog.resolve("bad")
    assert [entry.id for entry in catalog.scan()] == ["good"]


@pytest.mark.parametrize("description", SPECIAL)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_special_and_oversized_files_are_rejected_without_reading_them(catalog, models, *, name, description):
    put(models / "bad", name, SPECIAL[description])
    before = psutil.Process().memory_info().rss
    with pytest.raises(UnusableModelError, match=f"{name} .*{description}"):
        catalog.resolve("bad")
    assert psutil.Process().memory_info().rss - before < MUCH
    assert [entry.id for entry in catalog.scan()] == ["good"]


@pytest.mark.parametrize(
    "description", [description for description in SPECIAL if description != "the limit for files"]
)
def test_special_files_as_gguf_files_and_hub_references_are_rejected(catalog, models, *, tmp_path, description):
    path = put(models, "bad.gguf", SPECIAL[description])
    with pytest.raises(UnusableModelError):
        catalog.resolve(str(path))
    repo = tmp_path / "hub" / "models--org--name"
    shutil.copytree(models / "good", repo / "snapshots" / "0123456789")
    put(repo, "refs/main", SPECIAL[description])
    assert [entry.id for entry in catalog.scan()] == ["bad", "good", "org/name"]


def test_links_to_regular_files_are_read_as_in_the_hub_cache(catalog, models):
    for path in sorted((models / "good").iterdir()):
        (models / "bad" / path.name).unlink()
        (models / "bad" / path.name).symlink_to(path)
    (models / "bad" / "gone.json").symlink_to("nowhere")
    assert [entry.id for entry in catalog.scan()] == ["bad", "good"]


def test_a_file_that_is_replaced_by_a_fifo_after_the_check_does_not_block(models, monkeypatch):
    known = os.stat(models / "good" / "config.json")
    path = put(models / "bad", "config.json", os.mkfifo)
    with monkeypatch.context() as early:
        early.setattr("lmx_lab.weights.files.os.stat", lambda path, **_: known)
        failure = None
        try:
            open_regular(path)
        except UnusableModelError as exc:
            failure = exc
    assert "is a FIFO" in str(failure)


def test_a_file_that_grows_while_it_is_read_is_read_only_to_its_limit(tmp_path, monkeypatch):
    path, size_of = put(tmp_path, "modules.json", Path.touch), os.fstat

    def grow(descriptor):
        known = size_of(descriptor)
        path.write_bytes(bytes(2 * MIB))
        return known

    monkeypatch.setattr(os, "fstat", grow)
    with pytest.raises(UnusableModelError, match=f"the limit for files of this name is {MIB}"):
        read_regular(path)


def test_files_that_are_not_read_can_be_large_but_not_special(models):
    put(models / "bad", "pytorch_model.bin", _large)
    check_files(models / "bad")
    put(models / "bad", "notes", os.mkfifo)
    with pytest.raises(UnusableModelError, match="notes is a FIFO"):
        check_files(models / "bad")


@pytest.mark.anyio
@pytest.mark.parametrize("loaded", ["mlx", "gguf"])
async def test_the_engine_rejects_a_special_file_before_it_unloads_a_model(catalog, models, tiny_gguf, *, loaded):
    """Also if the file was replaced after the catalog checked it."""
    good, bad = catalog.resolve("good" if loaded == "mlx" else str(tiny_gguf)), catalog.resolve("bad")
    put(models / "bad", "tokenizer.json", os.mkfifo)
    async with ModelManager(Settings(slots=2, threads=1)) as manager:
        await load_entry(manager, good)
        with pytest.raises(UnusableModelError, match=r"tokenizer\.json is a FIFO"):
            await asyncio.wait_for(load_entry(manager, bad), CHAT_WAIT_S)
        assert manager.snapshot.entry == good
        assert manager.snapshot.state == "ready"
        assert (await run(manager))[1].output_tokens == 8


def test_a_server_with_special_files_lists_rejects_and_serves_without_delay(lab, models):
    for name in ("config.json", "model.safetensors"):
        shutil.copytree(models / "good", models / f"bad-{name}")
        put(models / f"bad-{name}", name, os.mkfifo)
    put(models / "bad", "tokenizer.json", lambda path: path.symlink_to("/dev/zero"))

    async def ask():
        limits = httpx2.Limits(max_connections=3 * AT_ONCE)
        async with httpx2.AsyncClient(base_url=lab.url, timeout=CHAT_WAIT_S, limits=limits) as http:
            routes = ["/v1/models", "/admin/models", "/v1/models/good"]
            for answer in await asyncio.gather(*(http.get(route) for route in routes * AT_ONCE)):
                assert answer.status_code == 200
                assert "bad" not in answer.text
            for name in ("bad", "bad-config.json", "bad-model.safetensors"):
                answer = await http.post("/admin/models/load", json={"model": name})
                assert "must be regular files" in refused(answer, 400, "invalid-request")["message"]
            assert (await http.post(CHAT, json=chat_body(model="good"))).status_code == 200

    before = psutil.Process().memory_info().rss
    asyncio.run(ask())
    assert psutil.Process().memory_info().rss - before < MUCH
