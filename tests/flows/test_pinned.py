"""Tests of encoders that are kept in memory alongside the loaded model."""

import re

import httpx2
import pytest

import lmx_lab
from lmx_lab.errors import ModelNotFoundError, UnusableModelError
from lmx_lab.notebook.lab import Lab
from lmx_lab.settings import Settings
from tests.support.asking import chat_body
from tests.support.labs import events_of, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab(three_home):
    with serving(three_home, "tiny", embedder="tiny-embedder", reranker="tiny-reranker") as lab:
        yield lab


def models_by_id(http):
    return {model["id"]: model for model in http.get("/admin/models").json()["models"]}


def test_pinned_models_answer_beside_the_chat_model(http):
    assert http.post("/v1/chat/completions", json=chat_body(max_tokens=2)).status_code == 200
    embedded = http.post("/v1/embeddings", json={"model": "default", "input": "a cat"})
    ranked = http.post("/v1/rerank", json={"model": "default", "query": "a cat", "documents": ["a dog", "a cat"]})
    assert (embedded.json()["model"], len(embedded.json()["data"][0]["embedding"])) == ("tiny-embedder", 32)
    assert (ranked.json()["model"], ranked.json()["method"]) == ("tiny-reranker", "cross-encoder")


def test_pinned_models_are_listed_and_readiness_is_that_of_the_main_model(lab, http):
    models = models_by_id(http)
    assert {name: (model["kind"], model["pinned"], model["loaded"]) for name, model in models.items()} == {
        "tiny": ("chat", False, True),
        "tiny-embedder": ("embedding", True, True),
        "tiny-reranker": ("rerank", True, True),
    }
    assert models["tiny-embedder"]["vram_gb"] > 0
    assert http.get("/readyz").json()["model"] == "tiny"
    assert re.search(r"also loaded: tiny-embedder \(\d+ [kM]B\), tiny-reranker \(\d+ [kM]B\)", repr(lab))


def test_a_failed_request_is_reported_with_the_model_that_should_answer(lab, http):
    with events_of(lab, "requests") as events:
        assert http.post("/v1/embeddings", json={"model": "default", "input": "a cat " * 500}).status_code == 400
        seen = next(event for event in events if event["type"] == "request")
    assert (seen["kind"], seen["model"], seen["code"]) == ("embedding", "tiny-embedder", "context_length_exceeded")


def test_the_blas_library_is_reported(http):
    compute = http.get("/admin/models").json()["compute"]
    assert set(compute) == {"blas", "detail", "threads", "gflops"}
    assert compute["blas"] in {"openblas", "reference", "system", "unused"}
    assert compute["gflops"] is None or compute["gflops"] > 0


def test_an_unload_leaves_pinned_models(three_home):
    with serving(three_home, "tiny", embedder="tiny-embedder") as lab, httpx2.Client(base_url=lab.url) as http:
        refused = http.post("/admin/models/unload", json={"model": "tiny-embedder"})
        assert (refused.status_code, "is pinned" in refused.json()["error"]["message"]) == (400, True)
        assert http.post("/admin/models/unload", json={"model": "tiny"}).json()["freed_vram_gb"] > 0
        assert http.get("/readyz").status_code == 503
        assert models_by_id(http)["tiny-embedder"]["loaded"]
        assert http.post("/v1/embeddings", json={"model": "tiny-embedder", "input": "a cat"}).status_code == 200


def test_launch_pins_models_and_running_the_cell_again_changes_nothing(three_home):
    with lmx_lab.launch(home=three_home, port=0, embedder="tiny-embedder") as lab:
        assert lab.embed("a cat").shape == (32,)
        assert lmx_lab.launch(home=three_home, port=0, embedder="tiny-embedder") is lab
        assert [model.id for model in lab.models() if model.pinned] == ["tiny-embedder"]


@pytest.mark.parametrize(
    ("settings", "error", "part"),
    [
        (
            {"embedder": "tiny"},
            UnusableModelError,
            "tiny is a chat model; an embedding model is needed here: load it as the main model",
        ),
        ({"embedder": "tiny-reranker"}, UnusableModelError, "is a reranker"),
        (
            {"reranker": "tiny-embedder"},
            UnusableModelError,
            "is an embedding model; a reranker is needed here: load it as the main model",
        ),
        ({"reranker": "nothing"}, ModelNotFoundError, "there is no model 'nothing'"),
    ],
)
def test_pinning_a_model_of_the_wrong_kind_is_an_error_at_the_start(three_home, settings, error, part):
    lab = Lab(Settings(home=three_home, port=0, **settings), loop="thread")
    with pytest.raises(error, match=part), lab:
        pass
    assert not lab.running


def test_a_launch_that_cannot_pin_a_model_fails_each_time(three_home):
    for _ in range(2):
        with pytest.raises(UnusableModelError):
            lmx_lab.launch(home=three_home, port=0, embedder="tiny")
    running = lmx_lab.current()
    running.stop()
