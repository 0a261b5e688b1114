"""A server keeps models of two engines and an encoder in memory, and shows them on all surfaces."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmx_lab.client import LabClient
from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook.lab import attach
from tests.support.asking import chat_body
from tests.support.labs import manager_of, serving
from tests.support.models import write_tiny_bert, write_tiny_llama

pytestmark = pytest.mark.slow
NAMES = ["on-mlx", "on-llama-cpp.gguf", "encoder"]


@pytest.fixture(scope="module")
def home(tmp_path_factory, smollm2, tiny_gguf):
    home = tmp_path_factory.mktemp("resident-home")
    write_tiny_llama(home / "models" / "on-mlx", smollm2.path, seed=0)
    write_tiny_bert(home / "models" / "encoder")
    (home / "models" / "on-llama-cpp.gguf").symlink_to(tiny_gguf)
    return home


@pytest.fixture
def lab(home):
    with serving(home, None, resident=3, slots=2, model_folders=(home / "models",)) as lab:
        for name in NAMES:
            lab.load(name)
        yield lab


def ask(http, name):
    """Send a request; return the name of the model that answered."""
    if name == "encoder":
        answer = http.post("/v1/embeddings", json={"model": name, "input": "a cat"})
    else:
        answer = http.post("/v1/chat/completions", json=chat_body(model=name, max_tokens=3))
    assert answer.status_code == 200, answer.text
    return answer.json()["model"]


def test_requests_in_random_order_are_answered_without_a_load(lab, http):
    models, events = manager_of(lab).models, []
    manager_of(lab).add_observer(events.append)
    names = random.Random(1).choices(NAMES, k=100)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda name: ask(http, name), names)) == names
    assert events == []
    assert manager_of(lab).models == models


def test_every_surface_shows_all_models(lab, http):
    assert lab.keep("on-mlx", pin=True).pinned
    lab.keep("on-llama-cpp.gguf", ttl_s=600)
    records = {record["id"]: record for record in http.get("/admin/models").json()["models"]}
    assert [records[name]["loaded"] for name in NAMES] == [True] * 3
    assert [records[name]["main"] for name in NAMES] == [False, False, True]
    assert [records[name]["pinned"] for name in NAMES] == [True, False, False]
    assert [records[name]["ttl_s"] for name in NAMES] == [None, 600, None]
    assert [records[name]["slots"] for name in NAMES] == [2, 2, None]
    ready = http.get("/readyz").json()
    assert (ready["model"], sorted(ready["resident"])) == ("encoder", sorted(NAMES))
    running = {model["name"]: model["expires_at"] for model in http.get("/api/ps").json()["models"]}
    assert sorted(running) == sorted(f"{name}:latest" for name in NAMES)
    assert running["on-mlx:latest"].startswith("9999")
    assert not running["on-llama-cpp.gguf:latest"].startswith("9999")
    metrics = http.get("/metrics").text
    assert all(f'lmx_lab_resident_memory_bytes{{model="{name}"}}' in metrics for name in NAMES)
    card = http.get("/v1/models/on-llama-cpp.gguf").json()
    assert (card["slots"], card["context_length"]) == (2, records["on-llama-cpp.gguf"]["loaded_context_length"])
    about = http.get("/about").text
    assert "encoder is loaded. Also loaded: " in about
    assert "also loaded: on-llama-cpp.gguf (" in repr(lab)
    assert [model.main for model in lab.models() if model.loaded and model.id == "encoder"] == [True]
    assert "main" in repr(lab.models())
    attached = attach(lab.url)
    assert [model.id for model in attached.models() if model.main] == ["encoder"]
    assert attached.backend.state().model == "encoder"
    assert sorted(attached.backend.state().others) == ["on-llama-cpp.gguf", "on-mlx"]
    attached.stop()


def test_clients_keep_release_and_unload_each_model(lab):
    with LabClient(lab.url) as client:
        assert repr(client.keep("on-mlx", pin=True)) == "on-mlx stays in memory until it is unloaded by request"
        with pytest.raises(InvalidRequestError, match="on-mlx is pinned"):
            client.unload("on-mlx")
        with pytest.raises(InvalidRequestError, match='ttl_s: must be a number of seconds, or "never"'):
            client.keep("on-mlx", ttl_s="soon")
        with pytest.raises(InvalidRequestError, match="tiny is not loaded"):
            client.keep("tiny", pin=True)
        assert repr(client.keep("on-mlx", pin=False)) == "on-mlx stays in memory until the room is needed"
        assert repr(client.keep("encoder", ttl_s=600)) == "encoder is unloaded after 600 s without requests"
        assert client.unload("on-mlx").freed_vram_gb > 0
        assert client.unload().freed_vram_gb > 0
        # The newest of the others is the main model.
        assert [(it.id, it.main) for it in client.models().models if it.loaded] == [("on-llama-cpp.gguf", True)]


def test_ollamas_keep_alive_is_the_time_to_live(http):
    for given, ttl_s in (("5m", 300), (-1, None), (20, 20), ("100000000h", None)):
        loaded = http.post("/api/generate", json={"model": "on-mlx", "keep_alive": given})
        assert (loaded.status_code, "x-lmx-ignored" in loaded.headers) == (200, False)
        records = http.get("/admin/models").json()["models"]
        assert [record["ttl_s"] for record in records if record["id"] == "on-mlx"] == [ttl_s]
    assert http.post("/api/generate", json={"model": "on-mlx", "keep_alive": 0}).json()["done_reason"] == "unload"
    assert sorted(model["name"] for model in http.get("/api/ps").json()["models"]) == [
        "encoder:latest",
        "on-llama-cpp.gguf:latest",
    ]


def test_models_are_compared_without_loading_them_again(lab):
    models = manager_of(lab).models
    settings = [{"model": "on-mlx", "max_tokens": 3}, {"model": "on-llama-cpp.gguf", "max_tokens": 3}]
    compared = lab.compare(["Say hello."], settings, all_scores=True)
    assert len(compared.df) == 2
    assert set(manager_of(lab).models) == set(models)
