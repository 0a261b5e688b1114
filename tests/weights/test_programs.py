"""Tests of the models that Ollama, LM Studio and llama.cpp keep on this disk."""

import json
import os
from pathlib import Path

import httpx2
import pytest

from lmx_lab.errors import ModelNotFoundError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.support.labs import manager_of, serving

LAYER = "application/vnd.ollama.image."


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Return the home folder of a user who has no settings of these programs."""
    home = tmp_path / "user"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path / "home", other_programs=True)


def write_ollama(folder, name, model=None, *, digest="0", **layers):
    """Write the manifest ``HOST/NAMESPACE/MODEL/TAG`` of a model, and its file if ``model`` has its content."""
    digests = {"model": f"sha256:{digest * 64}"} | layers
    manifest = {"layers": [{"mediaType": f"{LAYER}{kind}", "digest": value} for kind, value in digests.items()]}
    path = folder / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest))
    (folder / "blobs").mkdir(exist_ok=True)
    if model is not None:
        (folder / "blobs" / f"sha256-{digest * 64}").write_bytes(model)


def listed(settings):
    return {entry.id: (entry.source, entry.aliases) for entry in Catalog(settings).scan()}


def files_below(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*")}


def test_models_of_ollama_have_the_names_that_ollama_shows(user, settings, tiny_gguf):
    folder = user / ".ollama/models"
    content = tiny_gguf.read_bytes()
    write_ollama(folder, "registry.ollama.ai/library/tiny/latest", content)
    write_ollama(folder, "registry.ollama.ai/library/tiny/q4", content, digest="1")
    write_ollama(
        folder, "registry.ollama.ai/me/mine/v1", content, digest="2", template="sha256:1", projector="sha256:2"
    )
    write_ollama(folder, "hf.co/org/name/Q4_K_M", content, digest="3")
    before = files_below(folder)
    assert listed(settings) == {
        "hf.co/org/name:Q4_K_M": ("ollama", ()),
        "me/mine:v1": ("ollama", ()),
        "tiny:latest": ("ollama", ("tiny",)),
        "tiny:q4": ("ollama", ()),
    }
    assert Catalog(settings).resolve("tiny").id == "tiny:latest"
    assert files_below(folder) == before
    assert listed(Settings(home=settings.home, other_programs=False)) == {}


def test_a_folder_that_the_programs_settings_name_is_used(user, settings, tmp_path, monkeypatch, tiny_gguf):
    write_ollama(tmp_path / "a", "registry.ollama.ai/library/tiny/latest", tiny_gguf.read_bytes())
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/org_name_model.gguf").symlink_to(tiny_gguf)
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "b"))
    (user / ".lmstudio-home-pointer").write_text(str(tmp_path / "studio"))
    (tmp_path / "studio").mkdir()
    (tmp_path / "studio/settings.json").write_text(json.dumps({"downloadsFolder": str(tmp_path / "c")}))
    (tmp_path / "c/org/name").mkdir(parents=True)
    (tmp_path / "c/org/name/model.gguf").symlink_to(tiny_gguf)
    assert listed(settings) == {
        "org/name": ("lm-studio", ("model", "model.gguf")),
        "org_name_model.gguf": ("llama.cpp", ("org_name_model",)),
        "tiny:latest": ("ollama", ("tiny",)),
    }


def test_the_default_folders_are_used(user, settings, tiny_gguf):
    studio, llama = user / ".lmstudio/models/org/name", user / ".cache/llama.cpp"
    for folder in (studio, llama):
        folder.mkdir(parents=True)
    # A projector beside a model is not a model.
    for path in (studio / "a-Q4_0.gguf", studio / "mmproj-a.gguf", llama / "b.gguf"):
        path.symlink_to(tiny_gguf)
    names = {"b.gguf": ("llama.cpp", ("b",)), "org/name": ("lm-studio", ("a-Q4_0", "a-Q4_0.gguf"))}
    assert listed(settings) == names


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"layers": 1}', '{"layers": [1, {}]}', "[" * 100_000, '{"layers": [{"mediaType": "x"}]}'],
)
def test_a_file_that_is_no_manifest_is_left_out(user, settings, tiny_gguf, text):
    folder = user / ".ollama/models"
    write_ollama(folder, "registry.ollama.ai/library/good/latest", tiny_gguf.read_bytes())
    (folder / "manifests/registry.ollama.ai/library/good/bad").write_text(text)
    assert set(listed(settings)) == {"good:latest"}


def test_special_files_and_foreign_digests_are_left_out(user, settings, tiny_gguf):
    folder = user / ".ollama/models"
    write_ollama(folder, "registry.ollama.ai/library/good/latest", tiny_gguf.read_bytes())
    (folder / "manifests/registry.ollama.ai/library/outside").mkdir()
    outside = {"layers": [{"mediaType": f"{LAYER}model", "digest": "sha256:../../../../etc/passwd"}]}
    (folder / "manifests/registry.ollama.ai/library/outside/latest").write_text(json.dumps(outside))
    write_ollama(folder, "registry.ollama.ai/library/adapted/latest", adapter=f"sha256:{'0' * 64}")
    write_ollama(folder, "registry.ollama.ai/library/odd\nname/latest")
    os.mkfifo(folder / "manifests/registry.ollama.ai/library/good/fifo")
    assert set(listed(settings)) == {"good:latest"}


def test_a_manifest_whose_file_is_missing_or_is_no_model_is_an_error_that_says_so(user, settings):
    folder = user / ".ollama/models"
    write_ollama(folder, "registry.ollama.ai/library/gone/latest")
    write_ollama(folder, "registry.ollama.ai/library/text/latest", b"text", digest="1")
    assert listed(settings) == {}
    with pytest.raises(UnusableModelError, match="is missing, although a manifest of Ollama names it; fetch"):
        Catalog(settings).resolve("gone:latest")
    with pytest.raises(UnusableModelError, match="not a GGUF file"):
        Catalog(settings).resolve("text")
    with pytest.raises(ModelNotFoundError, match="there is no model 'absent:latest'"):
        Catalog(settings).resolve("absent:latest")


@pytest.mark.slow
def test_a_model_of_ollama_answers_from_its_own_file(user, settings, tiny_gguf):
    folder = user / ".ollama/models"
    # Several names may mean the same file, as after "ollama cp".
    for name in ("tiny/latest", "mine/latest", "mine/v1"):
        write_ollama(folder, f"registry.ollama.ai/library/{name}", tiny_gguf.read_bytes())
    names = ("mine:latest", "mine", "mine:v1", "tiny", "tiny:latest")
    before = files_below(folder)
    with serving(Path(settings.home), "tiny", other_programs=True, downloads=False) as lab:
        assert manager_of(lab).snapshot.model == "mine:latest"
        for name in (*names, "default"):
            body = {"model": name, "prompt": "one", "max_tokens": 2}
            assert httpx2.post(f"{lab.url}/v1/completions", json=body).json()["model"] == "mine:latest"
        for name in names:
            assert httpx2.get(f"{lab.url}/v1/models/{name}").json()["id"] == "mine:latest"
        (tag,) = httpx2.get(f"{lab.url}/api/tags").json()["models"]
        assert tag["name"] == "mine:latest"
        assert lab.load("tiny").load_s == 0
        unload = {"model": "tiny:latest"}
        assert httpx2.post(f"{lab.url}/admin/models/unload", json=unload).status_code == 200
        assert manager_of(lab).snapshot.model is None
    assert files_below(folder) == before
