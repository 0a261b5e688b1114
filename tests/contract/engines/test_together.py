"""Loads replace models of all engines, fail in the same way, and leave embedding models beside chat models."""

from dataclasses import replace

import numpy as np
import pytest

from lmx_lab.engine import EmbeddingRequest, ModelManager
from lmx_lab.engine.memory import Budget
from lmx_lab.errors import OutOfMemoryError, UnusableModelError
from lmx_lab.values.models import LoadSpec
from tests.contract.engines.entries import FEW, SETTINGS
from tests.support.engines import entry_of, load_entry, manager_with, pin, run
from tests.support.gguf import unknown_architecture
from tests.support.models import write_huge_llama, write_tiny_bert

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FORMATS = ("mlx", "gguf")
"""The formats of model files."""
FINGERPRINTS = {"mlx": "mlx-", "gguf": "llama.cpp-", "echo": "echo-"}


@pytest.fixture(scope="session")
def broken(tmp_path_factory, chat_models):
    """Models that fail only when their weights are read."""
    folder = tmp_path_factory.mktemp("broken")
    nan = {"embeddings.LayerNorm.weight": np.full(32, np.nan, np.float32)}
    return {
        "mlx": replace(write_tiny_bert(folder / "mlx", change=nan), id="broken"),
        "gguf": entry_of(unknown_architecture(chat_models["gguf"].path, folder), "broken"),
    }


@pytest.mark.parametrize(("before", "after"), [("mlx", "gguf"), ("gguf", "echo"), ("echo", "mlx")])
async def test_a_load_replaces_the_model(chat_models, long_models, before, after):
    async with manager_with(chat_models[before], FEW) as manager:
        report = await load_entry(manager, long_models[after])
        assert (report.model, manager.snapshot.model, manager.snapshot.state) == ("long", "long", "ready")
        assert report.load_s > 0
        # llama.cpp is measured again at regular intervals.
        assert report.memory_bytes == pytest.approx(manager.snapshot.model_memory_bytes, rel=0.1)
        assert report.memory_bytes > 0
        assert manager.fingerprint.startswith(FINGERPRINTS[after])
        assert (await run(manager))[1].model == "long"
        assert await manager.unload() > 0
        assert manager.snapshot.entry is None


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_failed_load_leaves_nothing_in_memory(
    chat_models, long_models, embedders, broken, *, format_, tmp_path
):
    async with ModelManager(FEW) as manager:
        with pytest.raises(UnusableModelError, match=r"; no model is loaded$") as failed:
            await load_entry(manager, broken[format_])
        assert str(broken[format_].path) in failed.value.message
        assert manager.snapshot.state == "empty"
        await load_entry(manager, chat_models[format_])
        used = manager.snapshot.memory_used_bytes
        for _ in range(2):
            with pytest.raises(UnusableModelError, match=r"; the previous model tiny is loaded again$"):
                await load_entry(manager, broken[format_])
        assert manager.snapshot.memory_used_bytes < used * 1.5
        # A model that is too large is refused before the other one is unloaded.
        huge = replace(long_models["gguf"], id="huge", size_bytes=60 * 10**9)
        if format_ == "mlx":
            huge = write_huge_llama(tmp_path / "huge", chat_models["mlx"].path)
        with pytest.raises(OutOfMemoryError, match=r"huge needs 6\d\.\d\d GB.*, and 1\.0\d GB are allowed"):
            await load_entry(manager, huge)
        # So is one without files, also as a model beside it.
        with pytest.raises(UnusableModelError):
            await pin(manager, replace(embedders[format_], id="gone", path=broken[format_].path.parent / "gone.gguf"))
        assert [model.entry.id for model in manager.models] == ["tiny"]
        assert (await run(manager))[1].model == "tiny"


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_load_that_is_refused_because_of_other_programs_names_them(embedders, format_, tmp_path):
    pressure = tmp_path / "pressure"
    budget = Budget(2**30, cgroups=tmp_path, membership=tmp_path / "none", machine=pressure)
    async with ModelManager(FEW, budget=budget) as manager:
        pressure.write_text("some avg10=34.00 avg60=0.00 avg300=0.00 total=1")
        budget.update()
        message = (
            r"minilm-l6 cannot be loaded while memory is short: programs on this machine waited for memory during 34 % "
            r"of the last 10 s, so models may use 0\.07 GB instead of 1\.07 GB; end other programs and load it again"
        )
        with pytest.raises(OutOfMemoryError, match=message):
            await pin(manager, embedders[format_])
        planned = await manager.plan(LoadSpec(model=str(embedders[format_].path)))
        assert ("memory is short", budget.pressure) in planned.rows()
        # The usual limit is named for a model that is also too large for that.
        with pytest.raises(OutOfMemoryError, match=r"huge needs 6\d\.\d\d GB.*, and 1\.0\d GB are allowed"):
            await load_entry(manager, replace(embedders["gguf"], id="huge", size_bytes=60 * 10**9))
        pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1")
        budget.update()
        await pin(manager, embedders[format_])


async def vectors(manager, text):
    return (await manager.embed(EmbeddingRequest(inputs=(text,)))).vectors


@pytest.mark.parametrize("pinned", FORMATS)
async def test_an_embedding_model_stays_beside_a_chat_model(chat_models, long_models, embedders, model_format, pinned):
    other = "mlx" if model_format == "gguf" else "gguf"
    async with ModelManager(SETTINGS) as manager:
        report = await pin(manager, embedders[pinned])
        assert report.memory_bytes > 10_000_000
        await load_entry(manager, chat_models[model_format])
        (pinned_model,) = manager.snapshot.pinned
        assert (pinned_model.entry.id, manager.snapshot.model) == ("minilm-l6", "tiny")
        one = await vectors(manager, "the sea is salty")
        assert (await run(manager))[1].model == "tiny"
        # It stays while chat models are loaded and unloaded.
        await load_entry(manager, long_models[other])
        await manager.unload()
        assert np.allclose(await vectors(manager, "the sea is salty"), one, atol=1e-5)
