"""Tests that requests with the field names of other servers are answered, and that ignored fields are named."""

import json
import re

import httpx2
import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings
from lmx_lab.wire.generation import Hints
from tests.support.asking import echo_body, error_of
from tests.support.docs import DOCS, table_rows
from tests.support.labs import manager_of, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HINTS = {name: {"some": ["value", 1]} for name in Hints.model_fields}
LLAMA_CPP_PAGE = {
    **{"cache_prompt": True, "return_progress": True, "timings_per_token": True, "reasoning_format": "auto"},
    **{"dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1},
    **{"xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": 64, "repeat_penalty": 1, "dry_multiplier": 0},
    **{"dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "presence_penalty": 0, "max_tokens": -1},
}
"""The settings that the web page of llama.cpp's server sends."""


def body_for(path, **changes):
    """Return a request without ``max_tokens`` for this route."""
    body = echo_body(**changes)
    if path == COMPLETIONS:
        body["prompt"] = body.pop("messages")[0]["content"]
    if "max_tokens" not in changes:
        del body["max_tokens"]
    return body


def answer_of(http, path, **changes):
    response = http.post(path, json=body_for(path, **changes))
    assert response.status_code == 200, response.text
    return response.json()


def text_of(http, path, **changes):
    (choice,) = answer_of(http, path, **changes)["choices"]
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_parameters_have_the_names_of_other_servers(http, path):
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert answer_of(http, path, **{name: 3})["usage"]["completion_tokens"] == 3
    assert answer_of(http, path, max_tokens=3, max_completion_tokens=3, n_predict=None)["usage"]["total_tokens"]
    whole = text_of(http, path, max_tokens=-1)
    assert whole == text_of(http, path, n_predict=-1) != text_of(http, path, n_predict=5)
    penalized = text_of(http, path, repetition_penalty=2, n_predict=60)
    assert penalized == text_of(http, path, repeat_penalty=2, n_predict=60)
    long = answer_of(http, path, min_tokens=80, n_predict=100)
    assert long["usage"]["completion_tokens"] > 80


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_format_has_the_names_of_llama_cpp(http, path):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    for fields in ({"json_schema": schema}, {"response_format": {"type": "json_schema", "schema": schema}}):
        assert json.loads(text_of(http, path, **fields, max_tokens=50)) == {"a": 1}
    grammar = 'root ::= animal " " [0-9]{2}\nanimal ::= "cat" | "dog"'
    text = text_of(http, path, grammar=grammar, response_format={"type": "text"}, max_tokens=50)
    assert text[:4] in ("cat ", "dog ")
    assert text[4:].isdigit()


ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
CHOICES = ["no (not yet)", '50% & more #1\nor "less"', "größer: ja"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("form", "valid"),
    [
        pytest.param({"json": ONE}, r'\{\s*"a":\s*1\s*\}', id="json"),
        pytest.param({"json": json.dumps(ONE)}, r'\{\s*"a":\s*1\s*\}', id="json as text"),
        pytest.param({"regex": "[ab]{4}"}, "[ab]{4}", id="regex"),
        pytest.param({"choice": CHOICES}, "|".join(map(re.escape, CHOICES)), id="choice"),
        pytest.param({"grammar": 'root ::= "cat" | "dog"'}, "cat|dog", id="grammar in GBNF"),
        pytest.param({"grammar": 'start: "cat" | "dog"'}, "cat|dog", id="grammar in Lark"),
    ],
)
def test_a_format_has_the_names_of_vllm(http, path, form, valid):
    old = {f"guided_{kind}": value for kind, value in form.items()} | {"guided_decoding_backend": "auto"}
    for fields in ({"structured_outputs": form}, old):
        text = text_of(http, path, **fields, max_tokens=60)
        assert re.fullmatch(valid, text), text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_field_of_another_server_may_be_null(http, path):
    assert text_of(http, path, kv_transfer_params=None, stream_options={"other": None}) == text_of(http, path)


def test_any_object_can_be_required_with_vllms_name(http):
    text = text_of(http, CHAT, structured_outputs={"json_object": True}, max_tokens=200)
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"structured_outputs": {}}, "has no form; send exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "has regex and choice; send exactly one"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice are two names"),
        ({"guided_json": "{"}, "guided_json: is a text that is not JSON"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "<a>", "regex": "a"}}, "structural tags are not supported"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "are two names of one parameter"),
    ],
)
def test_a_format_under_vllms_names_is_checked(http, fields, problem):
    response = http.post(CHAT, json=echo_body(**fields))
    assert problem in error_of(response, 400, "invalid-request")["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_all_hints_are_ignored_and_named(http, path):
    response = http.post(path, json={**body_for(path, max_tokens=2), **HINTS})
    assert response.status_code == 200, response.text
    assert response.headers["x-lmx-ignored"].split(", ") == list(HINTS)


def test_the_settings_of_llama_cpps_page_are_accepted(http):
    response = http.post(CHAT, json=body_for(CHAT, **LLAMA_CPP_PAGE))
    assert response.status_code == 200, response.text
    assert response.headers["x-lmx-ignored"].startswith("cache_prompt, return_progress")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_parameters_of_dry_and_xtc_are_checked_and_have_no_effect_while_they_are_off(http, path):
    off = {"dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": ["\n"], "xtc_probability": 0}
    assert text_of(http, path, **off, xtc_threshold=0.1) == text_of(http, path)
    for field in ({"dry_multiplier": -1}, {"dry_penalty_last_n": -2}, {"xtc_probability": 1.5}, {"dry_base": "2"}):
        assert error_of(http.post(path, json=body_for(path, **field)), 400, "invalid-request")["param"] in field
    refused = error_of(http.post(path, json=body_for(path, dry_multiplier=0.8)), 400, "invalid-request")
    assert refused["param"] == "dry_multiplier"
    assert "the echo engine does not support dry_multiplier" in refused["message"]


def test_the_page_lists_all_hints():
    rows = table_rows(DOCS / "server.md", "sent by")
    assert {name.strip("` ") for row in rows for name in row["ignored fields"].split(",")} == {
        *HINTS,
        *("verbosity", "stream_options.continuous_usage_stats"),
    }


@pytest.fixture(scope="module")
def naming(tmp_path_factory):
    """A client of a server with an alias that answers requests for any model."""
    home = tmp_path_factory.mktemp("naming")
    settings = {"model_aliases": ["gpt-4o=echo", "small=missing"], "any_model": True}
    with serving(home, "echo", **settings) as lab, httpx2.Client(base_url=lab.url) as client:
        yield client


def test_other_names_of_models_are_answered_if_the_settings_say_so(naming, http):
    for name in ("gpt-4o", "small", "claude-opus", "/etc/passwd"):
        assert naming.post(CHAT, json=echo_body(model=name)).json()["model"] == "echo"
        assert naming.post("/v1/embeddings", json={"model": name, "input": "sea"}).json()["model"] == "echo"
        assert naming.post("/api/show", json={"model": f"{name}:latest"}).json()["modelfile"] == "FROM echo:latest\n"
        assert naming.post("/api/generate", json={"model": name}).json()["done_reason"] == "load"
    message = error_of(http.post(CHAT, json=echo_body(model="gpt-4o")), 404, "model-not-found")["message"]
    assert "--model-alias" in message
    assert "--any-model" in message


@pytest.mark.parametrize("name", ["Echo", "echo:latest", "ECHO:latest"])
def test_the_case_of_a_name_and_the_tag_latest_do_not_matter(http, name):
    assert http.post(CHAT, json=echo_body(model=name)).json()["model"] == "echo"
    assert http.post("/v1/messages", json=echo_body(model=name, max_tokens=5)).json()["type"] == "message"
    assert http.post("/v1/embeddings", json={"model": name, "input": "sea"}).json()["model"] == "echo"
    assert http.post("/api/chat", json=echo_body(model=name, stream=False)).json()["done"]
    assert http.get(f"/v1/models/{name}").json()["id"] == "echo"
    assert error_of(http.post(CHAT, json=echo_body(model="echo:7b")), 404, "model-not-found")


def test_aliases_are_listed_with_the_id_of_their_model(naming):
    cards = {card["id"]: card for card in naming.get("/v1/models").json()["data"]}
    assert "small" not in cards, "its model is not on disk"
    assert cards["echo"]["root"] is None
    assert cards["gpt-4o"] == {**cards["echo"], "id": "gpt-4o", "root": "echo"}
    assert naming.get("/v1/models/gpt-4o").json() == cards["gpt-4o"]


def test_an_alias_alone_leaves_other_names_unknown(tmp_path):
    with serving(tmp_path, "echo", model_aliases=["gpt-4o=echo"]) as lab, httpx2.Client(base_url=lab.url) as http:
        assert http.post(CHAT, json=echo_body(model="gpt-4o")).json()["model"] == "echo"
        assert http.post("/api/generate", json={"model": "gpt-4o", "keep_alive": 0}).json()["done_reason"] == "unload"
        assert manager_of(lab).snapshot.model is None
        assert http.post("/api/generate", json={"model": "gpt-4o"}).json()["done_reason"] == "load"
        assert manager_of(lab).snapshot.model == "echo"
        error_of(http.post(CHAT, json=echo_body(model="gpt-5")), 404, "model-not-found")


@pytest.mark.parametrize("alias", ["", "gpt-4o", "=echo", "gpt-4o="])
def test_an_alias_needs_both_names(alias):
    with pytest.raises(InvalidRequestError, match="name=id"):
        Settings(model_aliases=(alias,))


def test_an_alias_with_two_ids_is_refused():
    with pytest.raises(InvalidRequestError, match="a name with two ids"):
        Settings(model_aliases=("gpt-4o=echo", "gpt-4o=other"))
