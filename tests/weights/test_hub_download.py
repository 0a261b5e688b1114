"""Tests of downloads from the hub, which a local server simulates."""

import errno
import json
import shutil
from types import SimpleNamespace

import pytest

from lmx_lab.errors import DownloadError, ModelNotFoundError, StorageFullError, UnusableModelError
from lmx_lab.server.ollama import requested_model
from lmx_lab.server.ollama_models import Downloads
from lmx_lab.weights import hub_download
from lmx_lab.weights.hub import mark_unverified, mark_verified
from tests.support.gguf import gguf_bytes
from tests.support.hub import failing, hub_with, use_hub


@pytest.fixture
def server(tmp_path, make_model):
    with hub_with(make_model(tmp_path / "original")) as server:
        server.files |= {"code.py": b"x", "pytorch_model.bin": b"x", "original/consolidated.safetensors": b"x"}
        yield server


@pytest.fixture
def catalog(catalog, server, monkeypatch):
    """Return the catalog with the local server as the hub."""
    use_hub(server, monkeypatch)
    return catalog


def test_a_model_is_downloaded_to_the_hub_cache_without_code_and_pickles(catalog, server):
    seen = []
    entry = catalog.fetch("org/tiny", seen.append)
    assert (entry.id, entry.source, entry.kind) == ("org/tiny", "hub", "chat")
    assert sorted(server.sent) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert {progress.total_bytes for progress in seen} == {sum(len(server.files[name]) for name in server.sent)}
    assert catalog.resolve("org/tiny") == entry


@pytest.mark.anyio
async def test_ollama_s_clients_download_from_the_hub_and_see_the_progress(catalog, server):
    download = await Downloads(catalog, may_download=True).join(requested_model("hf.co/org/tiny") or "", local=True)
    await download.wait()
    assert catalog.resolve("org/tiny").source == "hub"
    line = json.loads(download.line())
    assert line["status"].endswith(" org/tiny")
    assert line["completed"] == line["total"] == sum(len(server.files[name]) for name in server.sent)


def test_only_missing_files_are_downloaded_again(catalog, server):
    entry = catalog.fetch("org/tiny")
    server.requests.clear()
    assert catalog.fetch("org/tiny") == entry
    assert server.sent == []
    (entry.path / "tokenizer.json").resolve().unlink()
    (entry.path / "tokenizer.json").unlink()
    assert catalog.fetch("org/tiny") == entry
    assert server.sent == ["tokenizer.json"]


@pytest.mark.parametrize("name", ["org/absent", "org/.."])
def test_a_model_that_is_not_on_the_hub_is_not_found(catalog, name):
    with pytest.raises(ModelNotFoundError, match="the hub has no model"):
        catalog.fetch(name)


@pytest.mark.parametrize(
    ("name", "files", "reason"),
    [
        (
            "org/tiny",
            {"config.json": b"{}", "pytorch_model.bin": b"x"},
            r"no model\*\.safetensors and no \.gguf.*\.bin",
        ),
        ("org/tiny:Q4_K_M", {}, r"no \.gguf model, only .*\.safetensors"),
    ],
)
def test_a_model_without_usable_weights_is_rejected_before_the_download(catalog, server, name, files, reason):
    server.files = files or server.files
    with pytest.raises(UnusableModelError, match=f"org/tiny has {reason}"):
        catalog.fetch(name)
    assert server.sent == []


def test_a_disk_that_becomes_full_leaves_no_partial_files(catalog, tmp_path, monkeypatch):
    half = tmp_path / "hub/models--org--tiny/blobs/abc.incomplete"
    half.parent.mkdir(parents=True)
    half.touch()

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_download, "snapshot_download", full)
    with pytest.raises(StorageFullError, match="became full"):
        catalog.fetch("org/tiny")
    assert not half.exists()


def test_an_unreachable_hub_is_a_download_error_with_the_next_step(tmp_path):
    seen = []
    with pytest.raises(DownloadError, match=r"org/tiny .* Check the network"):
        hub_download.download("org/tiny", tmp_path / "hub", 0, seen.append, endpoint="http://127.0.0.1:9")
    assert seen == []


def test_the_error_in_offline_mode_names_the_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        hub_download.download("org/tiny", tmp_path / "hub", 0, lambda progress: None)


@pytest.fixture
def ggufs(server, tiny_llama, write_split, tmp_path):
    """Add a repository of GGUF files to the hub: two quantizations, one of them split, and accompanying files."""
    parts = write_split(tmp_path / "parts/Tiny-Q8_0", 2)
    server.files = {
        "README.md": b"Tiny",
        "config.json": b"{}",
        "Tiny-Q4_K_M.gguf": tiny_llama(),
        "mmproj-F16.gguf": b"x",
        "imatrix.gguf": b"x",
        ".hidden/Tiny-Q2_K.gguf": b"x",
        "../Tiny-Q3_K.gguf": b"x",
        "a/b/Tiny-Q5_K.gguf": b"x",
        "torn/Tiny-Q6_K-00001-of-00002.gguf": b"x",
        "setup.py": b"x",
        **{f"Q8_0/{part.name}": part.read_bytes() for part in parts},
    }
    return server


@pytest.mark.parametrize(
    ("name", "id_", "files"),
    [
        ("org/tiny:Q4_K_M", "org/tiny:Q4_K_M", ["Tiny-Q4_K_M.gguf"]),
        pytest.param("org/tiny", "org/tiny:Q4_K_M", ["Tiny-Q4_K_M.gguf"], id="the preferred one"),
        pytest.param(
            "org/tiny:q8_0",
            "org/tiny:Q8_0",
            ["Q8_0/Tiny-Q8_0-00001-of-00002.gguf", "Q8_0/Tiny-Q8_0-00002-of-00002.gguf"],
            id="split, in a folder",
        ),
    ],
)
def test_only_the_requested_quantization_is_downloaded(catalog, ggufs, name, id_, files):
    seen = []
    entry = catalog.fetch(name, seen.append)
    assert (entry.id, entry.format, entry.source) == (id_, "gguf", "hub")
    assert entry.path.name == files[0].rpartition("/")[2]
    assert entry.size_bytes == sum(len(ggufs.files[file]) for file in files)
    assert sorted(ggufs.sent) == sorted([*files, "README.md"])
    assert {progress.total_bytes for progress in seen} == {entry.size_bytes + len(ggufs.files["README.md"])}
    ggufs.requests.clear()
    assert catalog.scan() == [entry] == [catalog.fetch(name)]
    assert ggufs.sent == []


@pytest.mark.slow
def test_the_name_of_a_repository_refers_to_its_only_stored_quantization(catalog, ggufs):
    entry = catalog.fetch("org/tiny:Q8_0")
    for name in ("org/tiny", "org/tiny:q8_0", "org/tiny:Tiny-Q8_0-00001-of-00002.gguf", "org/tiny:Q8_0"):
        assert catalog.resolve(name, local=False) == entry
    catalog.fetch("org/tiny:Q4_K_M")
    assert [found.id for found in catalog.scan()] == ["org/tiny:Q4_K_M", "org/tiny:Q8_0"]
    assert catalog.fetch("org/tiny").id == "org/tiny:Q4_K_M"
    ggufs.faults["api"] = failing
    for look in (catalog.resolve, catalog.fetch):
        with pytest.raises(ModelNotFoundError, match=r"name one: org/tiny:Q8_0, org/tiny:Q4_K_M"):
            look("org/tiny")


@pytest.mark.parametrize("choice", ["Q5_K_M", "mmproj-F16", "Q6_K", "Q2_K", "../Tiny-Q3_K"])
def test_the_error_for_a_missing_quantization_names_the_available_ones(catalog, ggufs, choice):
    with pytest.raises(
        ModelNotFoundError, match=r"available are: Q8_0, Q4_K_M\. .*lmx-lab pull org/tiny:Q4_K_M"
    ) as raised:
        catalog.fetch(f"org/tiny:{choice}")
    assert choice in raised.value.message
    assert ggufs.sent == []


def test_safetensors_of_a_repository_precede_its_gguf_files_unless_a_quantization_is_given(catalog, server, tiny_llama):
    server.files["Tiny-Q4_0.gguf"] = tiny_llama()
    plain = catalog.fetch("org/tiny")
    assert (plain.id, plain.format) == ("org/tiny", "mlx")
    assert "Tiny-Q4_0.gguf" not in server.sent
    quantized = catalog.fetch("org/tiny:Q4_0")
    assert (quantized.id, quantized.format) == ("org/tiny:Q4_0", "gguf")
    assert catalog.scan() == [plain, quantized]
    assert catalog.resolve("org/tiny") == plain


def test_a_disk_without_space_for_the_quantization_is_an_error_before_the_download(catalog, ggufs, monkeypatch):
    needed = len(ggufs.files["Tiny-Q4_K_M.gguf"]) + len(ggufs.files["README.md"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(StorageFullError, match=f"org/tiny needs {needed} bytes.*{needed - 1} are free"):
        catalog.fetch("org/tiny")
    assert ggufs.sent == []


@pytest.mark.slow
def test_missing_parts_and_truncated_files_are_downloaded_again(catalog, ggufs):
    entry = catalog.fetch("org/tiny:Q8_0")
    second = entry.path.with_name("Tiny-Q8_0-00002-of-00002.gguf")
    for damage in (second.unlink, second.resolve().unlink, lambda: second.write_bytes(b"GGUF")):
        damage()
        assert catalog.scan() == []
        with pytest.raises(UnusableModelError, match=r"00002-of-00002\.gguf"):
            catalog.resolve("org/tiny:Q8_0")
        assert catalog.fetch("org/tiny:Q8_0") == entry
    assert ggufs.sent.count("Q8_0/Tiny-Q8_0-00002-of-00002.gguf") >= 3
    assert ggufs.sent.count("Q8_0/Tiny-Q8_0-00001-of-00002.gguf") == 1


def test_the_id_in_the_list_refers_to_the_listed_model(catalog, ggufs, make_model, tmp_path):
    make_model(tmp_path / "extra/org/tiny")
    catalog.fetch("org/tiny:Q4_K_M")
    assert {entry.id: catalog.resolve(entry.id) for entry in catalog.scan()} == {e.id: e for e in catalog.scan()}
    assert catalog.resolve("org/tiny").source == "folder"


def test_a_damaged_quantization_without_access_to_the_hub_is_a_download_error(catalog, ggufs):
    catalog.fetch("org/tiny").path.write_bytes(b"GGUF")
    ggufs.faults["api"] = failing
    for name in ("org/tiny", "org/tiny:Q4_K_M"):
        with pytest.raises(DownloadError, match="org/tiny could not be downloaded"):
            catalog.fetch(name)


def test_a_downloaded_file_that_is_not_a_valid_model_is_rejected(catalog, ggufs):
    ggufs.files["Tiny-Q4_K_M.gguf"] = gguf_bytes({"general.type": "adapter"}, {})
    with pytest.raises(UnusableModelError, match=r"Tiny-Q4_K_M\.gguf is an adapter"):
        catalog.fetch("org/tiny:Q4_K_M")


def test_files_without_a_quantization_in_their_names_are_labeled_by_their_names(catalog, server, tiny_llama):
    server.files = {"ggml-model.gguf": tiny_llama()}
    entry = catalog.fetch("org/tiny")
    assert entry.id == "org/tiny:ggml-model"
    assert catalog.fetch("org/tiny:GGML-Model") == entry


def test_an_older_quantization_is_used_until_a_newer_one_is_verified(catalog, ggufs, tmp_path):
    older = catalog.fetch("org/tiny:Q4_K_M")
    repo = tmp_path / "hub/models--org--tiny"
    newer = repo / "snapshots" / ("f" * 40) / "Tiny-Q4_K_M.gguf"
    newer.parent.mkdir()
    newer.write_bytes(ggufs.files["Tiny-Q4_K_M.gguf"])
    mark_unverified([newer])
    (repo / "refs/main").write_text(newer.parent.name)
    assert catalog.scan() == [older] == [catalog.resolve("org/tiny:Q4_K_M")]
    mark_verified(newer)
    assert [entry.path for entry in catalog.scan()] == [newer]


def test_a_quantization_of_an_older_commit_is_kept(catalog, ggufs, tmp_path):
    catalog.fetch("org/tiny:Q8_0")
    repo = tmp_path / "hub/models--org--tiny"
    newer = "f" * 40
    (repo / "snapshots" / newer).mkdir()
    (repo / "snapshots" / newer / "Tiny-Q4_0.gguf").write_bytes(ggufs.files["Tiny-Q4_K_M.gguf"])
    (repo / "refs/main").write_text(newer)
    assert [(entry.id, entry.path.parts[-2]) for entry in catalog.scan()] == [
        ("org/tiny:Q4_0", newer),
        ("org/tiny:Q8_0", "Q8_0"),
    ]
