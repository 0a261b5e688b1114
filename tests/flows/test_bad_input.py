"""Tests that invalid requests get a clear error, and that the next valid request is answered."""

import gc
import logging
import socket

import pytest

from tests.support.asking import HELLO, each_value, echo_body, error_of

PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def _next_good_request_works(http):
    yield
    assert http.post(PATH, json=echo_body(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"model": NaN}', b"[" * 40_000])
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
        *each_value(model=[5], temperature=[2.1, -0.1, "hot"], top_p=[1.1], max_tokens=[0, -2, 1.5, True, "5"]),
        *each_value(n_predict=[0], min_tokens=[-1], repeat_penalty=[0], typical_p=[0.5], mirostat=[1], stream=["yes"]),
        *each_value(json_schema=["string"], grammar=["root ::= leaf", "a" * 16_385], stop=["a" * 1001]),
        *each_value(modalities=[["text", "audio"]], logit_bias=[{"49152": 1}], metadata=[{"a": [1] * 20_000}]),
        *each_value(chat_template_kwargs=[{f"a{number}": 1 for number in range(300)}], **{"TopP": [0.5]}),
        *each_value(temperatur=[0.5], messages=[[], "hello", [{"role": "user", "content": ""}] * 4097]),
        ({"messages": [{"role": "user", "content": [{}] * 4097}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"content": "hello"}]}, "messages.0.role"),
        ({"messages": [{"role": "king", "content": "hello"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "u", "content": 5}] * 40_000}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{}] * 4000}]}, "messages.0.content.0.type"),
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
    ],
)
def test_fields_that_contradict_each_other_are_400_and_both_named(http, changes, names):
    body = {**echo_body(), **changes}
    if "max_tokens" not in changes:
        del body["max_tokens"]
    message = error_of(http.post(PATH, json=body), 400, "invalid-request")["message"]
    assert all(name in message for name in names), message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature": 2.1}, ["2.1", "less than or equal to 2"]),
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
    ],
)
def test_an_error_message_has_the_value_the_limit_and_the_next_step(http, changes, expected):
    message = error_of(http.post(PATH, json=echo_body(**changes)), 400, "invalid-request")["message"]
    assert [part for part in expected if part not in message] == []


def test_the_error_of_a_compressed_body_names_the_encoding(http):
    headers = {**JSON, "content-encoding": "gzip"}
    error = error_of(http.post(PATH, content=b"\x1f\x8b", headers=headers), 400, "invalid-request")
    assert "gzip" in error["message"]


def test_a_long_name_is_shortened_in_the_error(http):
    answer = http.post(PATH, json=echo_body(model="x" * 200_000))
    assert len(error_of(answer, 404, "model-not-found")["message"]) < 1000


def test_names_that_a_header_cannot_contain_are_ignored(http):
    answer = http.post(PATH, json=echo_body(**{"x" * 200_000: 1, "colour[red]": 1, "colour": 1}))
    assert (answer.status_code, answer.headers["x-lmx-ignored"]) == (200, "colour")


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


@pytest.mark.parametrize("path", ["/nothing", PATH])
def test_an_invalid_chunked_body_is_answered_once(lab, caplog, path):
    """Also on a path that the application answers without reading the body."""
    address = ("127.0.0.1", lab.server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(address, timeout=30) as connection:
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
