"""Tests of the routes about tokens in the forms of llama.cpp's server and of vLLM, on the echo engine."""

import httpx2
import pytest

from lmx_lab.engine.echo.model import BEGIN, echo_vocabulary
from tests.support.asking import HELLO, error_of
from tests.support.labs import serving

TEXT = "sea é"
TOKENS = echo_vocabulary().encode(TEXT)
RENDERED = "<|begin|><|message|>user\nhello<|end|><|message|>assistant\n"


def answer(http, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("body", [{"content": TEXT}, {"prompt": TEXT, "model": "echo", "add_special_tokens": False}])
def test_a_text_is_tokenized_and_detokenized(http, body):
    assert answer(http, "/tokenize", body) == {"tokens": TOKENS, "count": len(TOKENS), "max_model_len": 32768}
    assert answer(http, "/detokenize", {"tokens": TOKENS}) == {"content": TEXT, "prompt": TEXT}
    assert answer(http, "/detokenize", {"tokens": [], "model": "echo"})["content"] == ""
    pieces = answer(http, "/tokenize", {**body, "with_pieces": True})["tokens"]
    # The bytes of a token that is a part of a character are a list of numbers, as in llama.cpp.
    assert [piece["piece"] for piece in pieces] == ["sea", " ", [0xC3], [0xA9]]
    assert [piece["id"] for piece in pieces] == TOKENS
    strings = answer(http, "/tokenize", {**body, "return_token_strs": True})["token_strs"]
    assert strings == ["sea", " ", "bytes:\\xc3", "bytes:\\xa9"]


def test_a_chat_is_tokenized_as_its_template_writes_it(http):
    assert answer(http, "/apply-template", {"messages": HELLO}) == {"prompt": RENDERED}
    body = {"model": "echo", "messages": HELLO, "add_generation_prompt": True, "max_tokens": 3}
    tokens = answer(http, "/tokenize", body)["tokens"]
    assert tokens[0] == BEGIN
    assert answer(http, "/detokenize", {"tokens": tokens})["content"] == RENDERED
    counted = answer(http, "/v1/messages/count_tokens", {"messages": HELLO})
    assert counted == {"input_tokens": len(tokens)}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"content": "a", "parse_special": False}, 400, "parse_special"),
        ("/tokenize", {"content": "a", "model": "none"}, 404, "model"),
        ("/tokenize", {"messages": HELLO, "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {"tokens": [1, 10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": "1"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "none"}, 404, "model"),
    ],
)
def test_invalid_requests_are_refused(http, path, body, status, param):
    error = error_of(http.post(path, json=body), status, "invalid-request" if status == 400 else "model-not-found")
    assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"content": "a", "prompt": "b", "messages": HELLO}, "has content and prompt and messages; send only one"),
        ({}, "has neither content nor prompt nor messages; send one of them"),
    ],
)
def test_one_input_is_tokenized(http, body, problem):
    error = error_of(http.post("/tokenize", json=body), 400, "invalid-request")
    assert (error["param"], problem in error["message"]) == (None, True)


def test_prompts_that_exceed_the_context_length_are_counted(http):
    words = "sea " * 40_000
    chat = [{"role": "user", "content": words}]
    tokens = answer(http, "/tokenize", {"messages": chat})
    assert tokens["count"] > tokens["max_model_len"]
    assert answer(http, "/tokenize", {"content": words})["count"] == 40_001
    for path, body in (
        ("/v1/messages/count_tokens", {"messages": chat}),
        ("/v1/responses/input_tokens", {"input": words}),
    ):
        assert answer(http, path, body)["input_tokens"] == tokens["count"]


def test_a_text_that_is_far_too_long_is_refused(http):
    response = http.post("/tokenize", json={"content": "é" * 1_000_000})
    assert "200000 maximum; count its parts" in error_of(response, 400, "context_length_exceeded")["message"]


def test_unknown_fields_are_ignored_and_named(http):
    for path, fields in (("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": [65]})):
        response = http.post(path, json={**fields, "unknown": 1, "other": None})
        assert response.headers["x-lmx-ignored"] == "unknown"


def test_the_loaded_model_is_described(http):
    props = http.get("/props").json()
    assert (props["model_alias"], props["total_slots"]) == ("echo", 2)
    assert props["default_generation_settings"]["n_ctx"] == 32768
    assert props["modalities"] == {"vision": False, "audio": False}
    assert http.get("/health").json() == {"status": "ok"}


def test_the_tokenizer_of_a_model_without_files_is_described(http):
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["model_max_length"]) == (None, 32768)


def test_health_needs_no_key_and_says_that_no_model_is_loaded(echo_home):
    with serving(echo_home, None, api_key="secret") as lab, httpx2.Client(base_url=lab.url) as http:
        error_of(http.get("/health"), 503, "no-model-loaded")
        assert http.get("/props").status_code == 401
        keyed = {"authorization": "Bearer secret"}
        error_of(http.get("/props", headers=keyed), 503, "no-model-loaded")
        error_of(http.get("/tokenizer_info", headers=keyed), 503, "no-model-loaded")


@pytest.mark.slow
def test_the_tokens_of_a_real_tokenizer_are_those_of_a_chat(tiny_http):
    text = answer(tiny_http, "/apply-template", {"messages": HELLO})["prompt"]
    tokens = answer(tiny_http, "/tokenize", {"messages": HELLO})["tokens"]
    assert text.startswith("<|im_start|>")
    assert answer(tiny_http, "/tokenize", {"content": text})["tokens"] == tokens
    assert answer(tiny_http, "/detokenize", {"tokens": tokens})["content"] == text
    assert tiny_http.get("/props").json()["chat_template"]
    described = tiny_http.get("/tokenizer_info").json()
    assert described["chat_template"] == tiny_http.get("/props").json()["chat_template"]
    end = {"prompt": described["eos_token"], "add_special_tokens": False}
    assert len(answer(tiny_http, "/tokenize", end)["tokens"]) == 1
    info = tiny_http.post("/api/show", json={"model": "tiny"}).json()
    assert "insert" not in info["capabilities"]
    refused = tiny_http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "suffix": "b"})
    assert error_of(refused, 400, "invalid-request")["param"] == "suffix"
