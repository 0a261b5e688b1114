"""Tests of ``--swap``: a request loads the model that it names if the model is on disk."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.support.asking import chat_body, refused
from tests.support.labs import manager_of, serving

PATH = "/v1/chat/completions"


@pytest.fixture
def swapping(tiny_home):
    with serving(tiny_home, "tiny", swap=True) as lab:
        yield lab


@pytest.fixture
def client(swapping):
    with httpx2.Client(base_url=swapping.url, timeout=60) as client:
        yield client


def ask(client, model):
    return client.post(PATH, json=chat_body(model=model))


def test_a_request_loads_its_model(swapping, client):
    assert ask(client, "tiny-two").json()["model"] == "tiny-two"
    assert manager_of(swapping).snapshot.model == "tiny-two"
    completed = client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert completed.json()["model"] == ask(client, "default").json()["model"] == "tiny"


def test_simultaneous_requests_for_two_models_are_answered_by_their_models(client):
    names = ["tiny", "tiny-two"] * 3
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(lambda name: ask(client, name), names))
    assert [answer.json()["model"] for answer in answers] == names


def test_default_does_not_load_a_model_that_an_administrator_unloaded(swapping, client):
    swapping.unload()
    refused(ask(client, "default"), 503, "no-model-loaded")
    assert ask(client, "tiny").status_code == 200


def test_default_loads_nothing_if_no_model_was_loaded_before(echo_home):
    with serving(echo_home, None, swap=True) as lab, httpx2.Client(base_url=lab.url, timeout=60) as client:
        refused(ask(client, "default"), 503, "no-model-loaded")
        assert ask(client, "echo").status_code == 200


def test_only_ids_of_models_on_disk_are_loaded(swapping, client, tiny_home, tmp_path):
    shutil.copytree(tiny_home / "models" / "tiny", tmp_path / "elsewhere")
    for name in (str(tmp_path / "elsewhere"), "unheard-of", "nobody/nothing", "qwen3-0.6b"):
        refused(ask(client, name), 404, "model-not-found")
    assert manager_of(swapping).snapshot.model == "tiny"
