"""Tests of ``--swap``: a request loads the model that it names if the model is on disk."""

import shutil

import pytest

from tests.support.asking import CHAT, chat_body, refused
from tests.support.labs import manager_of, serving


@pytest.fixture
def lab(three_home):
    with serving(three_home, "tiny", swap=True) as lab:
        yield lab


def chat(http, model):
    return http.post(CHAT, json=chat_body(model=model))


def embed(http, model):
    return http.post("/v1/embeddings", json={"model": model, "input": "The sea is salty."})


def test_a_request_loads_its_model_if_that_can_answer_it(lab, http):
    assert "chat model" in refused(embed(http, "tiny"), 400, "invalid-request")["message"]
    assert manager_of(lab).snapshot.model == "tiny"
    assert embed(http, "tiny-embedder").json()["model"] == "tiny-embedder"
    assert manager_of(lab).snapshot.model == "tiny-embedder"
    refused(embed(http, "tiny"), 400, "invalid-request")
    refused(chat(http, "tiny-embedder"), 400, "invalid-request")
    assert manager_of(lab).snapshot.model == "tiny-embedder"
    for model in ("tiny", "default"):
        assert chat(http, model).json()["model"] == "tiny"


def test_default_does_not_load_a_model_that_an_administrator_unloaded(lab, http):
    lab.unload()
    refused(chat(http, "default"), 503, "no-model-loaded")
    assert chat(http, "tiny").status_code == 200


def test_only_ids_of_models_on_disk_are_loaded(lab, http, three_home, tmp_path):
    shutil.copytree(three_home / "models" / "tiny", tmp_path / "elsewhere")
    for name in (str(tmp_path / "elsewhere"), "unheard-of", "nobody/nothing", "qwen3-0.6b"):
        refused(chat(http, name), 404, "model-not-found")
    assert manager_of(lab).snapshot.model == "tiny"
