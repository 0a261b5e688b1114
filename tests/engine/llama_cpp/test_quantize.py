"""Tests of quantized copies: made by llama.cpp's own functions, measured, chosen, and never half made."""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as quantize_values

from lmx_lab.engine import ModelManager
from lmx_lab.engine.llama_cpp import quantize as quantize_module
from lmx_lab.engine.llama_cpp.quantize import copy_bytes, quantize, refuse_unsupported
from lmx_lab.engine.llama_cpp.quantize_worker import type_after
from lmx_lab.engine.memory import usable_cores
from lmx_lab.errors import StorageFullError, UnusableModelError
from lmx_lab.values.models import LoadSpec
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.gguf.header import GgufHeader, GgufTensor, read_header
from tests.support.engines import LLAMA_SETTINGS
from tests.support.gguf import EXACT
from tests.support.models import TINY_ENTRY

pytestmark = pytest.mark.anyio
Q8_0 = GGMLQuantizationType.Q8_0
NAME = "tiny.gguf"


def settings_of(home, original, **changes):
    """Return settings with a folder of models that contains a copy of the file, with the id ``NAME``."""
    folder = home / "files"
    folder.mkdir(parents=True)
    shutil.copy(original, folder / NAME)
    return replace(LLAMA_SETTINGS, home=home, model_folders=(folder,), **changes)


def listed(settings):
    return [(entry.id, entry.copy.type if entry.copy else "") for entry in Catalog(settings).scan()]


def left_files(settings):
    """Return the files of unfinished copies."""
    return list((settings.quantized_folder / ".tmp").glob("*"))


@pytest.fixture(scope="module")
def with_copy(tmp_path_factory, tiny_gguf):
    settings = settings_of(tmp_path_factory.mktemp("home"), tiny_gguf)
    return settings, quantize(settings, NAME, "Q8_0")


def values_of(path, tensor):
    data = np.fromfile(path, np.uint8, tensor.size_bytes, offset=read_header(path).data_offset + tensor.offset)
    kind = GGMLQuantizationType[tensor.type]
    blocks = data.view(np.float32) if tensor.type == "F32" else data
    return dequantize(blocks.reshape(*tensor.shape[:0:-1], -1), kind)


@pytest.mark.long
def test_a_copy_has_the_values_of_llama_cpp_and_is_measured_against_the_original(with_copy):
    settings, entry = with_copy
    original = settings.model_folders[0] / NAME
    before, after = (read_header(path, arrays=True) for path in (original, entry.path))
    assert after.metadata == before.metadata
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        values = values_of(original, old)
        if len(old.shape) > 1:
            assert new.type == "Q8_0"
            # Both round, but a value in the middle may be rounded to either side.
            assert np.allclose(values_of(entry.path, new), dequantize(quantize_values(values, Q8_0), Q8_0), atol=0.01)
        else:
            assert np.array_equal(values_of(entry.path, new), values)
    copy = entry.copy
    assert (copy.original, copy.type, entry.quantization, entry.id) == ("F32", "Q8_0", "Q8_0", NAME)
    assert 0 < copy.mean_kl < 0.1
    assert copy.tokens > 300
    assert copy.perplexity == pytest.approx(copy.original_perplexity, rel=0.1)
    assert min(copy.prefill_speed, copy.batch_speed, copy.decode_speed) > 0


@pytest.fixture
def fast_worker(with_copy, monkeypatch):
    """Replace the process that makes copies by one that takes the copy of ``with_copy``; return the files it wrote."""
    made = []

    def run(parameters, *_):
        made.append(parameters["target"])
        shutil.copy(with_copy[1].path, parameters["target"])
        return EXACT

    monkeypatch.setattr(quantize_module, "_run_worker", run)
    return made


def test_a_copy_is_made_once_by_two_threads_and_listed_with_its_original(fast_worker, tmp_path, tiny_gguf):
    settings = settings_of(tmp_path, tiny_gguf)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: quantize(settings, NAME, "Q8_0"), range(2))
    assert quantize(settings, f"{NAME}:Q8_0", "Q8_0").path == first.path == second.path
    assert len(fast_worker) == 1
    assert sorted(listed(settings)) == [(NAME, ""), (NAME, "Q8_0")]


async def test_the_load_names_the_copy_and_a_path_loads_the_original(with_copy):
    settings, entry = with_copy
    assert entry.copy is not None
    async with ModelManager(settings) as manager:
        report = await manager.load(LoadSpec(model=f"{NAME}:Q8_0"))
        assert str(entry.copy) in report.engine_reason
        assert manager.fingerprint.endswith("-q8_0-copy-batch-dependent")
        await manager.load(LoadSpec(model=str(settings.model_folders[0] / NAME), engine="llama.cpp"))
        assert "copy" not in manager.fingerprint


def test_a_copy_of_a_changed_original_is_not_used_and_the_next_one_replaces_it(with_copy, fast_worker, tmp_path):
    settings = settings_of(tmp_path, with_copy[0].model_folders[0] / NAME)
    folder = settings.quantized_folder / "old"
    shutil.copytree(with_copy[1].path.parent, folder)
    # The record names another original and another folder.
    assert listed(settings) == [(NAME, "")]
    entry = quantize(settings, NAME, "Q8_0")
    assert not folder.exists()
    os.utime(settings.model_folders[0] / NAME, ns=(1, 1))
    assert listed(settings) == [(NAME, "")]
    (settings.model_folders[0] / NAME).unlink()
    assert listed(settings) == []
    assert entry.path.exists()
    assert len(fast_worker) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bind threads to cores")
def test_the_threads_that_convert_may_use_all_cores(tmp_path, tiny_gguf):
    cores = set()

    def observe(progress):
        for child in psutil.Process().children():
            if progress.stage == "convert" and any("quantize_worker" in part for part in child.cmdline()):
                cores.update(frozenset(os.sched_getaffinity(thread.id)) for thread in child.threads())
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(settings_of(tmp_path, tiny_gguf, threads=usable_cores()), NAME, "Q8_0", observe)
    assert cores == {frozenset(os.sched_getaffinity(0))}


def test_an_interrupted_copy_leaves_no_file_and_no_process(tmp_path, tiny_gguf):
    settings = settings_of(tmp_path, tiny_gguf)

    def interrupt(progress):
        if progress.stage == "convert":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(settings, NAME, "Q8_0", interrupt)
    assert listed(settings) == [(NAME, "")]
    assert left_files(settings) == []
    names = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert not any("quantize_worker" in name for name in names)


def test_a_disk_that_is_full_or_cannot_be_written_to_is_named(tmp_path, tiny_gguf):
    settings = settings_of(tmp_path, tiny_gguf, disk_reserve_bytes=2**60)
    with pytest.raises(StorageFullError, match="in addition to a reserve"):
        quantize(settings, NAME, "Q8_0")
    shutil.rmtree(settings.quantized_folder)
    settings.quantized_folder.write_text("")
    with pytest.raises(StorageFullError, match="cannot write to"):
        quantize(settings, NAME, "Q8_0")


def test_a_model_without_gguf_file_and_one_that_llama_cpp_cannot_load_are_refused(tmp_path, tiny, tiny_gguf):
    with pytest.raises(UnusableModelError, match="has no GGUF file"):
        quantize(replace(LLAMA_SETTINGS, home=tmp_path), str(tiny.path), "Q8_0")
    settings = settings_of(tmp_path, tiny_gguf)
    path = settings.model_folders[0] / NAME
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_norm", b"blk.1.attn_form"))
    with pytest.raises(UnusableModelError, match="cannot be loaded by llama"):
        quantize(settings, NAME, "Q8_0")
    assert left_files(settings) == []


CHAT = replace(TINY_ENTRY, id="m", format="gguf")


def tensor(name, type_name, *shape):
    return GgufTensor(name=f"{name}.weight", shape=shape, type=type_name, offset=0, size_bytes=0)


def header(*tensors, name="m.gguf"):
    return GgufHeader(path=Path(name), size_bytes=1, metadata={}, tensors=tensors)


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        (tensor("blk.0.attn_q", "Q4_1", 64, 8), "Q8_0", "Q8_0"),
        (tensor("blk.31.ffn_down_exps", "F16", 64, 8, 4), "Q4_0", "Q4_0"),
        (tensor("output", "F32", 64, 8), "Q4_0", "Q8_0"),
        (tensor("token_embd", "Q6_K", 256, 8), "Q8_0", "Q6_K"),
        (tensor("token_embd", "Q8_0", 64, 8), "Q4_0", "Q8_0"),
        (tensor("blk.0.attn_norm", "F32", 64), "Q8_0", "F32"),
        (tensor("blk.0.ffn_gate_inp", "F32", 64, 8), "Q8_0", "F32"),
        (tensor("blk.0.ssm_conv1d", "F32", 64, 8), "Q8_0", "F32"),
        (tensor("blk.0.attn_k", "F16", 48, 8), "Q8_0", "F16"),
        (tensor("blk.0.attn_v", "I32", 64, 8), "Q8_0", "I32"),
    ],
)
def test_matrices_of_layers_change_and_the_vocabulary_keeps_eight_bits(found, wanted, expected):
    assert type_after(found, wanted) == expected


def test_a_model_that_would_not_change_or_cannot_be_measured_is_refused_with_the_reason():
    matrix = tensor("blk.0.attn_q", "Q4_1", 64, 8)
    refuse_unsupported(CHAT, header(matrix), "Q8_0")
    with pytest.raises(UnusableModelError, match="no matrices that could become Q8_0: they are Q8_0"):
        refuse_unsupported(CHAT, header(replace(matrix, type="Q8_0")), "Q8_0")
    with pytest.raises(UnusableModelError, match="not a chat model"):
        refuse_unsupported(replace(CHAT, kind="embedding"), header(matrix), "Q8_0")
    with pytest.raises(UnusableModelError, match="split into parts"):
        refuse_unsupported(CHAT, header(matrix, name="m-00001-of-00002.gguf"), "Q8_0")


def test_the_size_of_the_copy_is_that_of_its_types():
    assert copy_bytes(header(tensor("blk.0.attn_q", "F32", 64, 8)), "Q8_0") == 64 * 8 // 32 * 34 + 64
