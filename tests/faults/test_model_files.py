"""Tests of model files that are truncated, replaced, overwritten or removed while they are read or loaded."""

import itertools
import os
import shutil
from pathlib import Path

import httpx2
import mlx.core as mx
import pytest

from lmx_lab.engine import ModelManager
from lmx_lab.engine.llama_cpp.process import LlamaProcess
from lmx_lab.errors import EngineDeadError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.fingerprint import is_overwritten
from tests.support.asking import CHAT, CHAT_WAIT_S, chat_body, refused
from tests.support.engines import load_entry, process_of, run
from tests.support.gguf import with_context
from tests.support.labs import serving
from tests.support.models import write_tiny_llama
from tests.support.waiting import auntil, until

pytestmark = pytest.mark.anyio
SETTINGS = Settings(slots=2, threads=1, memory_limit_bytes=2**30)
FORMATS = ("mlx", "gguf")


def entry_of(path):
    return Catalog(Settings()).resolve(str(path))


def weights_of(path):
    return path / "model.safetensors" if path.is_dir() else path


@pytest.fixture
def copy(tmp_path, tiny, tiny_gguf):
    """Return a function that copies ``tiny`` to a folder that the test can change."""

    def create(format_):
        if format_ == "mlx":
            return Path(shutil.copytree(tiny.path, tmp_path / "copy"))
        return Path(shutil.copy(tiny_gguf, tmp_path / "copy.gguf"))

    return create


@pytest.fixture
def other(tmp_path, smollm2, tiny_gguf):
    """Return a function that writes a model with other weights or another context length than ``tiny``."""

    def create(format_):
        if format_ == "gguf":
            return with_context(tiny_gguf, 256, tmp_path / "other")
        write_tiny_llama(tmp_path / "other", smollm2.path, seed=9, context=256)
        return tmp_path / "other"

    return create


@pytest.fixture
async def manager():
    async with ModelManager(SETTINGS) as manager:
        yield manager


# After the load


@pytest.mark.parametrize("damage", ["cut", "overwritten", "removed"])
async def test_a_model_loaded_by_mlx_does_not_depend_on_its_files(manager, copy, damage):
    path = copy("mlx")
    await load_entry(manager, entry_of(path))
    good = (await run(manager))[0]
    weights = weights_of(path)
    if damage == "cut":
        os.truncate(weights, 4096)
    elif damage == "overwritten":
        weights.write_bytes(bytes(weights.stat().st_size))
    else:
        shutil.rmtree(path)
    assert (await run(manager))[0] == good


async def test_the_process_of_an_overwritten_gguf_file_is_stopped_because_it_would_compute_with_the_new_content(
    manager, copy, tiny_gguf
):
    path = copy("gguf")
    await load_entry(manager, entry_of(path))
    assert (await run(manager))[1].output_tokens == 8
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\1" * 4096)
    await auntil(lambda: manager.snapshot.state == "dead")
    with pytest.raises(EngineDeadError, match="its file was changed or cut short while it was loaded"):
        await run(manager)
    await load_entry(manager, entry_of(tiny_gguf))
    assert (await run(manager))[1].output_tokens == 8


async def test_a_replaced_or_removed_gguf_file_does_not_change_the_loaded_model(manager, copy, other):
    path = copy("gguf")
    await load_entry(manager, entry_of(path))
    good = (await run(manager))[0]
    other("gguf").replace(path)
    assert not is_overwritten(manager.main.entry)
    path.unlink()
    assert not is_overwritten(manager.main.entry)
    assert (await run(manager))[0] == good
    assert not process_of(manager).died.is_set()


# The next load


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_load_after_the_files_were_replaced_reads_the_new_ones(manager, copy, other, format_):
    path = copy(format_)
    await load_entry(manager, entry_of(path))
    assert (await load_entry(manager, entry_of(path))).load_s == 0
    assert manager.snapshot.context_length == 512
    new = other(format_)
    if new.is_dir():
        for file in new.iterdir():
            file.replace(path / file.name)
    else:
        new.replace(path)
    assert (await load_entry(manager, entry_of(path))).load_s > 0
    assert manager.snapshot.context_length == 256
    assert (await load_entry(manager, entry_of(path))).load_s == 0


@pytest.mark.parametrize("damage", ["cut", "removed"])
@pytest.mark.parametrize("format_", FORMATS)
def test_a_server_reports_damaged_files_of_a_loaded_model(tiny_home, copy, format_, damage):
    path = copy(format_)
    with serving(tiny_home, str(path), threads=1) as lab, httpx2.Client(base_url=lab.url, timeout=CHAT_WAIT_S) as http:
        if damage == "removed":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            os.truncate(weights_of(path), weights_of(path).stat().st_size - 1)
        again = http.post("/admin/models/load", json={"model": str(path)})
        if damage == "removed":
            refused(again, 404, "model-not-found")
        else:
            assert "truncated" in refused(again, 400, "invalid-request")["message"]
        if (format_, damage) == ("gguf", "cut"):
            # The file is memory-mapped, so its process is stopped soon.
            until(lambda: http.get("/readyz").status_code == 503)
        else:
            (record,) = [it for it in http.get("/admin/models").json()["models"] if it["path"] == str(path)]
            assert record["loaded"]
            assert http.post(CHAT, json=chat_body(model="default")).status_code == 200
        assert http.get("/v1/models").status_code == 200
        assert http.post("/admin/models/load", json={"model": "tiny"}).status_code == 200
        assert http.post(CHAT, json=chat_body()).status_code == 200
        assert str(path) not in [it["path"] for it in http.get("/admin/models").json()["models"]]


# During a load


def _after_the_header(monkeypatch, damage):
    """Call a function once, when the next load has read the header of its file but not the rest."""
    read, start = mx.load, LlamaProcess.start
    reads = itertools.count()

    def damage_and_continue(*args, **options):
        found = read(*args, **options)
        # The check before the load reads the header too.
        if next(reads) == 1:
            monkeypatch.undo()
            damage()
        return found

    async def damage_and_start(*args, **options):
        monkeypatch.undo()
        damage()
        return await start(*args, **options)

    monkeypatch.setattr(mx, "load", damage_and_continue)
    monkeypatch.setattr(LlamaProcess, "start", damage_and_start)


async def test_an_mlx_file_that_is_truncated_while_it_is_read_is_refused_and_the_previous_model_is_loaded_again(
    manager, tiny, copy, monkeypatch
):
    path = copy("mlx")
    await load_entry(manager, tiny)
    good = (await run(manager))[0]
    size = weights_of(path).stat().st_size
    _after_the_header(monkeypatch, lambda: os.truncate(weights_of(path), size // 2))
    message = r"copy was changed while it was loaded; load it again; the previous model tiny is loaded again$"
    with pytest.raises(UnusableModelError, match=message):
        await load_entry(manager, entry_of(path))
    assert (await run(manager))[0] == good


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_load_whose_files_are_removed_names_one_of_them(manager, tiny, *, copy, monkeypatch, format_):
    path = copy(format_)
    await load_entry(manager, tiny)

    _after_the_header(monkeypatch, lambda: shutil.rmtree(path) if path.is_dir() else path.unlink())
    message = rf"^{path}\S* was removed while \S+ was loaded; fetch the model again; the previous model tiny is loaded"
    with pytest.raises(UnusableModelError, match=message):
        await load_entry(manager, entry_of(path))
    assert (await run(manager))[1].output_tokens > 0


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_model_whose_files_change_while_they_are_read_is_not_used(
    manager, tiny, *, copy, other, monkeypatch, format_
):
    path, new = copy(format_), weights_of(other(format_))
    await load_entry(manager, tiny)

    _after_the_header(monkeypatch, lambda: new.replace(weights_of(path)))
    with pytest.raises(UnusableModelError, match=r"was changed while it was loaded; load it again; the previous model"):
        await load_entry(manager, entry_of(path))
    assert manager.snapshot.model == "tiny"
    await load_entry(manager, entry_of(path))
    assert manager.snapshot.entry.path == path
