"""Tests of LM Studio's lists of models, which agents and editors read."""

import httpx2
import pytest

from tests.support.asking import echo_body
from tests.support.labs import serving


@pytest.fixture(scope="module")
def lab(echo_home):
    with serving(echo_home, "echo", model_aliases=["gpt-4o=echo"]) as lab:
        yield lab


@pytest.fixture(scope="module")
def http(lab):
    with httpx2.Client(base_url=lab.url) as http:
        yield http


def test_version_0_lists_the_state_and_the_context_length_of_each_model(http):
    listed = http.get("/api/v0/models").json()
    assert listed["object"] == "list"
    [model] = [each for each in listed["data"] if each["id"] == "echo"]
    length = http.get("/v1/models/echo").json()["context_length"]
    expected = {
        "object": "model",
        "type": "llm",
        "state": "loaded",
        "capabilities": ["tool_use"],
        "publisher": "lmx-lab",
    }
    assert model.items() >= {**expected, "loaded_context_length": length}.items()
    assert model["compatibility_type"] in ("gguf", "mlx"), "Zed reads no other values"
    assert http.get("/api/v0/models/echo").json() == model
    missing = http.get("/api/v0/models/none")
    assert (missing.status_code, missing.json()["code"]) == (404, "model-not-found")


def test_version_1_lists_the_loaded_instances_and_the_models_in_the_chat_format(http):
    listed = http.get("/api/v1/models").json()
    assert listed["data"] == http.get("/v1/models").json()["data"]
    assert "gpt-4o" in [card["id"] for card in listed["data"]]
    [model] = [each for each in listed["models"] if each["key"] == "echo"]
    length = http.get("/v1/models/echo").json()["context_length"]
    assert model["loaded_instances"] == [{"id": "echo", "config": {"context_length": length}}]
    assert (model["type"], model["capabilities"]["trained_for_tool_use"]) == ("llm", True)


def test_a_model_that_is_not_loaded_has_no_instance(http):
    [model] = [each for each in http.get("/api/v1/models").json()["models"] if each["key"] == "other"]
    assert (model["loaded_instances"], model["format"]) == ([], "mlx")
    assert model["max_context_length"] > 0
    [model] = [each for each in http.get("/api/v0/models").json()["data"] if each["id"] == "other"]
    assert (model["state"], "loaded_context_length" in model) == ("not-loaded", False)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "embeddings"])
def test_requests_below_version_0_are_answered(http, path):
    texts = {"chat/completions": echo_body(), "completions": {"prompt": "hi"}, "embeddings": {"input": "hi"}}
    body = {"model": "echo", **texts[path]}
    answer, expected = (http.post(f"{prefix}/{path}", json=body).json() for prefix in ("/api/v0", "/v1"))
    assert answer.keys() == expected.keys()
    assert answer["object"] == expected["object"]
