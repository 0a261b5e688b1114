"""Tests of ``--swap``: a request loads the model that it names if the model is on disk."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.support.asking import chat_body, refused
from tests.support.labs import manager_of, serving

PATH = "/v1/chat/completions"


@pytest.fixture
def lab(tiny_home):
    with serving(tiny_home, "tiny", swap=True) as lab:
        yield lab


def ask(http, model):
    return http.post(PATH, json=chat_body(model=model))


def test_a_request_loads_its_model(lab, http):
    assert ask(http, "tiny-two").json()["model"] == "tiny-two"
    assert manager_of(lab).snapshot.model == "tiny-two"
    completed = http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert completed.json()["model"] == ask(http, "default").json()["model"] == "tiny"


def test_simultaneous_requests_for_two_models_are_answered_by_their_models(http):
    names = ["tiny", "tiny-two"] * 3
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(lambda name: ask(http, name), names))
    assert [answer.json()["model"] for answer in answers] == names


def test_default_does_not_load_a_model_that_an_administrator_unloaded(lab, http):
    lab.unload()
    refused(ask(http, "default"), 503, "no-model-loaded")
    assert ask(http, "tiny").status_code == 200


def test_default_loads_nothing_if_no_model_was_loaded_before(echo_home):
    with serving(echo_home, None, swap=True) as lab, httpx2.Client(base_url=lab.url, timeout=60) as http:
        refused(ask(http, "default"), 503, "no-model-loaded")
        assert ask(http, "echo").status_code == 200


def test_only_ids_of_models_on_disk_are_loaded(lab, http, tiny_home, tmp_path):
    shutil.copytree(tiny_home / "models" / "tiny", tmp_path / "elsewhere")
    for name in (str(tmp_path / "elsewhere"), "unheard-of", "nobody/nothing", "qwen3-0.6b"):
        refused(ask(http, name), 404, "model-not-found")
    assert manager_of(lab).snapshot.model == "tiny"
