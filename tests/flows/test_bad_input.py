"""Tests that invalid requests get a clear error, and that the next valid request is answered."""

import gc
import logging
import socket
from urllib.parse import urlsplit

import pytest

from tests.support.asking import HELLO, echo_body, error_of

PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(autouse=True)
def _next_good_request_works(http):
    yield
    assert http.post(PATH, json=echo_body(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b'{"model": "x", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100 + b"]" * 100,
        b"[" * 40_000,
        b'{"a":' * 65 + b"1" + b"}" * 65,
        b"null",
        b"[]",
        b'"text"',
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(http, body):
    error_of(http.post(PATH, content=body, headers=JSON), 400, "invalid-request")


@pytest.mark.parametrize("path", [PATH, "/v1/embeddings", "/admin/models/load", "/admin/trace"])
@pytest.mark.parametrize("body", [b"[]", b"null", b'"text"'])
def test_the_error_of_a_body_of_another_type_has_no_name_of_a_class(http, path, body):
    error = error_of(http.post(path, content=body, headers=JSON), 400, "invalid-request")
    assert error["message"].startswith("body: must be a JSON object")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"content": "hello"}]}, "messages.0.role"),
        ({"messages": [{"role": "king", "content": "hello"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"n_predict": 0}, "n_predict"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"json_schema": "string"}, "json_schema"),
        ({"grammar": "root ::= leaf"}, "grammar"),
        ({"grammar": "a" * 16_385}, "grammar"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stop": ""}, "stop"),
        ({"stop": "a" * 1001}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"messages": [{"role": "u", "content": 5}] * 40_000}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": ""}] * 4097}, "messages"),
        ({"messages": [{"role": "user", "content": [{}] * 4097}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{}] * 4000}]}, "messages.0.content.0.type"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "max"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}, "messages.0.refusal"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "see"}}}, "tool_choice"),
        ({"messages": [*HELLO, {"role": "tool", "content": "", "tool_call_id": "c"}]}, "messages.1.tool_call_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"metadata": {"a": [1] * 20_000}}, "metadata"),
        ({"chat_template_kwargs": {f"a{number}": 1 for number in range(300)}}, "chat_template_kwargs"),
        ({"seed": 1.5}, "seed"),
        ({"colour": "blue"}, "colour"),
        ({"colour[red]": "blue"}, "colour[red]"),
    ],
)
def test_an_invalid_field_is_400_and_named(http, changes, param):
    error = error_of(http.post(PATH, json=echo_body(**changes)), 400, "invalid-request")
    assert error["param"] == param
    assert param.partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "missing"),
    [
        (PATH, {"model": "echo"}, "messages"),
        ("/v1/completions", {"model": "echo"}, "prompt"),
        ("/v1/embeddings", {"input": "sea"}, "model"),
        ("/v1/rerank", {"query": "sea", "documents": ["sea"]}, "model"),
        ("/admin/models/load", {}, "model"),
    ],
)
def test_a_missing_field_is_400_and_named(http, path, body, missing):
    assert error_of(http.post(path, json=body), 400, "invalid-request")["param"] == missing


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"max_tokens": 5, "n_predict": 6}, ("max_tokens", "n_predict")),
        ({"max_completion_tokens": 5, "n_predict": -1}, ("max_completion_tokens", "n_predict")),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, ("repetition_penalty", "repeat_penalty")),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, ("json_schema", "grammar")),
        ({"response_format": {"type": "json_object"}, "json_schema": {}}, ("response_format", "json_schema")),
        ({"min_tokens": 9, "max_tokens": 8}, ("min_tokens", "max_tokens")),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, ("repeat_last_n", "-1")),
    ],
)
def test_fields_that_contradict_each_other_are_400_and_both_named(http, changes, names):
    body = {**echo_body(), **changes}
    if "max_tokens" not in changes:
        del body["max_tokens"]
    message = error_of(http.post(PATH, json=body), 400, "invalid-request")["message"]
    assert all(name in message for name in names), message


def test_the_message_names_value_and_limit(http):
    message = error_of(http.post(PATH, json=echo_body(temperature=2.1)), 400, "invalid-request")["message"]
    assert "2.1" in message
    assert "2" in message.replace("2.1", "")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_the_content_type_must_be_json(http, content_type):
    headers = {"content-type": content_type} if content_type else {}
    request = http.build_request("POST", PATH, content=b'{"model": "echo"}', headers=headers)
    error = error_of(http.send(request), 400, "invalid-request")
    assert "application/json" in error["message"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stop": ["a"] * 17}, ["17", "16"]),
        ({"messages": HELLO * 5000}, ["5000", "4096"]),
        ({"logit_bias": {str(token): 1 for token in range(3000)}}, ["3000", "1024"]),
        ({"messages": []}, ["0 items", "at least 1"]),
        ({f"a{number}": 1 for number in range(300)}, ["members", "256"]),
        ({"messages": [{"role": "user", "content": [{}] * 5000}]}, ["5,000 content parts", "4,096"]),
        ({"metadata": {"a": [1] * 20_000}}, ["10,000 values"]),
        ({"max_tokens": -2}, ["-2", "no limit", "-1"]),
        ({"max_completion_tokens": -2}, ["-2", "no limit", "-1"]),
        ({"typical_p": 0.5}, ["are not supported", "leave the field out"]),
        ({"grammar": 'root ::= "a"\nleaf = "b"'}, ["line 2", "::="]),
        ({"functions": [{"name": "f"}]}, ["tools", "are not supported", "leave the field out"]),
        ({"tools": [TOOL] * 200}, ["200", "128"]),
    ],
)
def test_an_error_message_has_the_value_the_limit_and_the_next_step(http, changes, expected):
    message = error_of(http.post(PATH, json=echo_body(**changes)), 400, "invalid-request")["message"]
    assert [part for part in expected if part not in message] == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model": "\\ud800"}', "lone surrogate"),
        (b'{"model": "\\udc00 "}', "lone surrogate"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "400 digits"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
    ],
)
def test_the_error_of_invalid_json_names_the_mistake(http, body, expected):
    assert expected in error_of(http.post(PATH, content=body, headers=JSON), 400, "invalid-request")["message"]


def test_the_error_of_a_compressed_body_names_the_encoding(http):
    headers = {**JSON, "content-encoding": "gzip"}
    error = error_of(http.post(PATH, content=b"\x1f\x8b", headers=headers), 400, "invalid-request")
    assert "gzip" in error["message"]


def test_a_long_name_is_shortened_in_the_error(http):
    error = error_of(http.post(PATH, json=echo_body(model="x" * 200_000)), 404, "model-not-found")
    assert len(error["message"]) < 1000


def test_a_long_field_name_is_shortened_in_the_error(http):
    error = error_of(http.post(PATH, json=echo_body(**{"x" * 200_000: 1})), 400, "invalid-request")
    assert len(error["message"]) < 1000


@pytest.mark.slow
def test_a_body_of_20_mb_is_413_and_the_answer_arrives(http):
    body = echo_body(messages=[{"role": "user", "content": "a" * 20_000_000}])
    error_of(http.post(PATH, json=body), 413, "body-too-large")


@pytest.mark.slow
def test_a_body_without_a_length_is_limited_too(http):
    pieces = (b"a" * 100_000 for _ in range(100))
    error_of(http.post(PATH, content=pieces, headers=JSON), 413, "body-too-large")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "limit"),
    [
        (b"[" + b"{}," * 100_000 + b"{}]", "50,000 lists and objects"),
        (b"{" + b'"a":1,' * 100_000 + b'"a":1}', "100,000 members"),
        (b"[" + b"1," * 500_000 + b"1]", "400,000 items"),
        (b'"' * 2_000_000, "550,000 texts"),
    ],
)
def test_a_body_with_too_many_values_is_413_and_the_limit_is_named(http, content, limit):
    for path in (PATH, "/v1/embeddings", "/v1/rerank", "/v1/completions", "/admin/models/load"):
        assert limit in error_of(http.post(path, content=content, headers=JSON), 413, "body-too-large")["message"]


def test_a_prompt_longer_than_the_context_is_400_with_both_numbers(http):
    body = echo_body(messages=[{"role": "user", "content": "word " * 40_000}])
    message = error_of(http.post(PATH, json=body), 400, "context-length-exceeded")["message"]
    assert "32768" in message


def test_a_model_that_is_on_disk_but_not_loaded_is_503_naming_both(http):
    response = http.post(PATH, json=echo_body(model="other"))
    message = error_of(response, 503, "no-model-loaded")["message"]
    assert "other" in message
    assert "echo is" in message
    assert "--swap" in message
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", PATH, 405),
        ("POST", "/healthz", 405),
        ("GET", "/v1/models/unheard-of", 404),
        ("POST", f"{PATH}/", 404),
        ("POST", "/v1/completions/", 404),
    ],
)
def test_a_wrong_address_has_the_same_error_body(http, method, path, status):
    response = http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/nothing", PATH])
def test_an_invalid_chunked_body_is_answered_once(lab, caplog, path):
    """Also on a path that the application answers without reading the body."""
    head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(lab.url).netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", lab.server.port), timeout=30) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n{{}}".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_refused_body_leaves_memory_without_a_garbage_collection(http):
    def marked():
        return sum(type(item) is list and item[:1] == ["refused"] for item in gc.get_objects())

    body = {"model": "default", "messages": HELLO, "metadata": [["refused"]] * 10_001}
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert http.post("/v1/chat/completions", json=body).status_code == 400
        # The last body may still be in use by the thread that validated it.
        assert marked() <= 2 * 10_001
    finally:
        gc.enable()
