"""Tests of /v1/embeddings on the echo engine: forms of input and of numbers, errors, limits and other models."""

import asyncio
import base64
import json
import socket
import struct
from dataclasses import replace

import httpx2
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from openai import OpenAI

from lmx_lab.engine import Caller, EmbeddingRequest, Embeddings
from lmx_lab.server.embeddings import NUMBERS_PER_STEP, embedding_list, embedding_request
from lmx_lab.values.outputs import EncodeReport
from lmx_lab.wire.embeddings import INPUT_LIMIT, EmbeddingsBody
from tests.support.asking import each_value, error_of, refused
from tests.support.gguf import ALIGNMENT, read_gguf
from tests.support.labs import PACE, manager_of, scrape, serving, wait_until_idle, watching
from tests.support.models import write_tiny_bert
from tests.support.waiting import until

PATH = "/v1/embeddings"
SEA, BREAD = "The sea is salty.", "Bread is baked in an oven."
REPORT = EncodeReport(model='odd "name"\n', texts=2, tokens=7, queue_s=0.25, compute_s=0.5, peak_memory_bytes=1)


@pytest.fixture(scope="module")
def lab(quick_lab):
    return quick_lab


def body(**changes):
    return {"model": "echo", "input": SEA, **changes}


def embed(http, **changes):
    response = http.post(PATH, json=body(**changes))
    assert response.status_code == 200, response.text
    return response.json()


# The engine's request, and the body of the answer


@pytest.mark.parametrize(
    ("fields", "request_"),
    [
        (
            {"model": "default", "dimensions": 64.0, "truncate": True, "input_type": "search_query", "user": "me"},
            EmbeddingRequest(inputs=(SEA,), dimensions=64, truncate=True, input_type="query"),
        ),
        ({"input_type": "document"}, EmbeddingRequest(inputs=(SEA,), model="echo", input_type="document")),
        (
            dict.fromkeys(("encoding_format", "dimensions", "truncate", "input_type", "user")),
            EmbeddingRequest(inputs=(SEA,), model="echo"),
        ),
    ],
)
def test_all_fields_reach_the_engine_and_null_means_the_default(fields, request_):
    assert embedding_request(EmbeddingsBody.model_validate(body(**fields)), Caller()) == request_


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("text", ("text",)),
        ("", ("",)),
        (["a", ""], ("a", "")),
        ([5, 6], ([5, 6],)),
        ([[5, 6], [0]], ([5, 6], [0])),
        (["ü🙂\u0000\n"], ("ü🙂\u0000\n",)),
    ],
)
def test_all_shapes_of_input_are_accepted(given, inputs):
    assert embedding_request(EmbeddingsBody.model_validate(body(input=given)), Caller()).inputs == inputs


def parsed(vectors):
    """Return the answer with these vectors, and the vectors in it."""
    answer = json.loads(embedding_list(Embeddings(vectors=vectors, report=REPORT)))
    return answer, np.array([item["embedding"] for item in answer["data"]], np.float32).reshape(vectors.shape)


def test_the_answer_has_the_shape_of_the_format():
    assert parsed(np.array([[1, 0.5], [3, 0.5]], dtype=np.float32))[0] == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [3.0, 0.5]},
        ],
        "model": 'odd "name"\n',
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


@pytest.mark.slow
@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 8)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_every_float32_is_unchanged_by_its_decimal_form(vectors):
    assert np.array_equal(parsed(vectors)[1], vectors)


def test_numbers_are_written_with_as_few_digits_as_a_float32_needs():
    vectors = np.random.default_rng(0).standard_normal((700, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.array_equal(parsed(vectors)[1], vectors)
    assert len(embedding_list(Embeddings(vectors=vectors, report=REPORT))) < 14 * vectors.size


# Requests


def test_openai_python_reads_base64_and_raises_its_own_exceptions(quick_lab, http):
    with OpenAI(**quick_lab.openai, max_retries=0) as client:
        answer = client.embeddings.create(model="echo", input=[SEA, BREAD])
        as_floats = client.embeddings.create(model="default", input=[SEA, BREAD], encoding_format="float")
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="echo", input=[])
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="unheard-of", input=SEA)
    for first, second in zip(answer.data, as_floats.data, strict=True):
        assert np.array_equal(np.array(first.embedding, np.float32), np.array(second.embedding, np.float32))
    text = embed(http, encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").shape == (384,)
    assert answer.usage == as_floats.usage
    assert answer.usage.total_tokens > 0


def test_a_chat_model_does_not_embed(tiny_http):
    named = error_of(tiny_http.post(PATH, json=body(model="tiny")), 400, "invalid-request")
    error_of(tiny_http.post(PATH, json=body(model="default")), 503, "no-model-loaded")
    error_of(tiny_http.post(PATH, json=body(model="unheard-of")), 404, "model-not-found")
    assert "chat model" in named["message"]


def test_a_client_that_disconnects_cancels_the_computation(echo_home):
    with serving(echo_home, "echo", echo_tokens_per_s=PACE) as lab, watching(lab) as seen:
        content = json.dumps(body(input=[f"{SEA} {number}" for number in range(10_000)])).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost:{lab.server.port}\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", lab.server.port)) as leaving:
            leaving.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            until(lambda: manager_of(lab).snapshot.active_requests > 0)
        until(lambda: len(seen) == 1)
        wait_until_idle(lab)
        assert lab.embed(SEA).shape == (384,)
        until(lambda: len(seen) == 2)
    cancelled, ended = seen
    assert (cancelled["kind"], cancelled["finish_reason"]) == ("embedding", "cancelled")
    expected = {"kind": "embedding", "finish_reason": "stop", "model": "echo", "completion_tokens": 0}
    assert {name: ended[name] for name in expected} == expected
    assert min(ended[name] for name in ("prompt_tokens", "tokens_per_second", "ttft_ms")) > 0


def test_requests_are_counted_in_the_metrics(http):
    embed(http)
    before = scrape(http)
    tokens = embed(http)["usage"]["total_tokens"]
    after = scrape(http)
    for name, grows in (
        ("requests_total{code=,kind=embedding,outcome=stop}", 1),
        ("encode_seconds_count{kind=embedding}", 1),
        ("encoded_tokens_total", tokens),
    ):
        assert after[name] - before[name] == grows


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *each_value(model=["", None], input=[[]], dimensions=[0, -1, "64", 385], encoding_format=["int8"]),
        *each_value(
            input_type=["classification"],
            truncate=[1],
            normalize=[False],
            encoding_fromat=["float"],
            output_dimension=[3],
        ),
        *(({"input": value}, "input.0") for value in ([1.5], [True])),
        *(({"input": value}, "input.1") for value in (["a", 1], [1, "a"], [1, -1], [[1], []])),
        ({"input": [[1], [-1]]}, "input.1.0"),
        ({"input": [[[1]]]}, "input.0.0"),
    ],
)
def test_an_invalid_field_is_named(http, changes, param):
    assert error_of(http.post(PATH, json=body(**changes)), 400, "invalid-request")["param"] == param


@pytest.mark.parametrize("wrong", [5, None, {"text": "a"}])
def test_an_input_of_another_type_is_refused_with_the_accepted_forms(http, wrong):
    message = error_of(http.post(PATH, json=body(input=wrong)), 400, "invalid-request")["message"]
    assert message.startswith("input: must be a text, a list of texts, the token ids")
    assert message.endswith("(given: 5)") == (wrong == 5)


def test_too_many_inputs_are_refused_with_the_limit(http):
    assert len(embed(http, input=["a"] * INPUT_LIMIT, dimensions=1)["data"]) == INPUT_LIMIT
    message = error_of(http.post(PATH, json=body(input=["a"] * (INPUT_LIMIT + 1))), 400, "invalid-request")["message"]
    assert f"{INPUT_LIMIT + 1} items" in message
    assert str(INPUT_LIMIT) in message


def test_many_numbers_and_scores_are_written_in_another_thread(http, monkeypatch):
    moved = []
    to_thread = asyncio.to_thread

    async def noted(work, *args, **kwargs):
        moved.append(work.__name__)
        return await to_thread(work, *args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    for count in (256, 257):
        ranked = {"model": "echo", "query": SEA, "documents": [SEA] * count}
        assert len(http.post("/v1/rerank", json=ranked).json()["results"]) == count
        assert "_encode" in moved if count > 256 else moved == []
    few, many = NUMBERS_PER_STEP // 384, NUMBERS_PER_STEP // 384 + 1
    for count in (few, many):
        assert len(embed(http, input=[SEA] * count)["data"]) == count
        assert ("embedding_list" in moved) is (count == many)


def test_values_that_are_not_finite_are_an_error_that_is_reported_once(tmp_path, reranker_gguf):
    # Weights of this size are finite, but their products are not.
    huge = {"encoder.layer.1.output.LayerNorm.weight": np.full(32, 3e38, np.float32)}
    write_tiny_bert(tmp_path / "models" / "damaged", change=huge)
    whole = read_gguf(reranker_gguf)
    bias = replace(whole.tensors["cls.output.bias"], data=struct.pack("<f", np.nan).ljust(ALIGNMENT, b"\0"))
    changed = replace(whole, tensors={**whole.tensors, "cls.output.bias": bias})
    changed.written(tmp_path / "models" / "damaged-gguf" / "model.gguf")
    ranked = {"model": "default", "query": SEA, "documents": [BREAD, SEA]}
    with serving(tmp_path, None) as lab, watching(lab) as seen, httpx2.Client(base_url=lab.url) as http:
        for name, path, fields in (
            ("damaged", PATH, body(model="default")),
            ("damaged", PATH, body(model="default", encoding_format="base64")),
            ("damaged", "/v1/rerank", ranked),
            ("damaged-gguf", "/v1/rerank", ranked),
            ("damaged-gguf", "/rerank", {"query": SEA, "texts": [BREAD]}),
        ):
            lab.load(name)
            error = refused(http.post(path, json=fields), 500, "internal-error")
            assert error["message"].startswith(f"{name} computed")
            assert "not finite" in error["message"]
        until(lambda: len(seen) == 5)
    assert [(event["kind"], event["finish_reason"], event["code"]) for event in seen] == [
        (kind, "error", "internal-error") for kind in ("embedding", "embedding", "rerank", "rerank", "rerank")
    ]


def test_the_method_of_the_lab_returns_a_vector_or_a_row_for_each_text(quick_lab):
    both = quick_lab.embed([SEA, BREAD])
    assert (both.shape, both.dtype) == ((2, 384), np.float32)
    assert np.allclose(quick_lab.embed(SEA), both[0], atol=1e-5)
    assert quick_lab.embed([SEA], dimensions=8).shape == (1, 8)
    assert quick_lab.embed("word " * 200_000, truncate=True).shape == (384,)


@pytest.mark.slow
def test_many_texts_keep_their_order(three_home):
    """On MLX, 256 texts are tokenized at a time."""
    with serving(three_home, "tiny-embedder") as lab:
        many, alone = lab.embed([*(f"Document {number}." for number in range(300)), SEA]), lab.embed(SEA)
    assert many.shape == (301, 32)
    assert np.allclose(many[-1], alone, atol=1e-5)


# In the form of Cohere


def cohere(http, **changes):
    return http.post("/v2/embed", json={"model": "echo", "texts": [SEA, BREAD], **changes})


def test_the_vectors_of_cohere_have_the_requested_types(http):
    rows = np.array([embed(http, input=text)["data"][0]["embedding"] for text in (SEA, BREAD)])
    answer = cohere(http, input_type="classification").json()
    assert answer["embeddings"] == {"float": rows.tolist()}
    assert (answer["texts"], answer["response_type"]) == ([SEA, BREAD], "embeddings_by_type")
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    found = cohere(http, embedding_types=["base64", "binary", "ubinary"]).json()["embeddings"]
    bits = np.packbits(rows > 0, axis=1)
    assert found["ubinary"] == bits.tolist()
    assert found["binary"] == (bits.astype(int) - 128).tolist()
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in found["base64"]]
    np.testing.assert_allclose(decoded, rows, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"embedding_types": ["int8"]}, "embedding_types.0"),
        ({"truncate": "START"}, "truncate"),
        ({"images": ["data:image/png;base64,aaaa"]}, "images"),
        ({"output_dimension": 10**6}, "output_dimension"),
        ({"texts": []}, "texts"),
    ],
)
def test_errors_of_cohere_name_its_fields(http, fields, param):
    assert error_of(cohere(http, **fields), 400, "invalid-request")["param"] == param


def test_a_text_of_cohere_that_is_too_long_is_truncated_or_refused(http):
    texts = ["a", "b" * 100_000]
    assert len(cohere(http, texts=texts).json()["embeddings"]["float"]) == 2
    error = error_of(cohere(http, texts=texts, truncate="NONE"), 400, "context_length_exceeded")
    assert error["param"] == "texts.1"


# In the forms of other servers


@pytest.mark.parametrize("given", [SEA, [SEA, BREAD], [5, 6, 7], [[5, 6], [7, 8]]])
def test_llama_cpp_and_tei_return_the_same_vectors_in_their_forms(http, given):
    expected = [item["embedding"] for item in embed(http, input=given)["data"]]
    llama = http.post("/embedding", json={"content": given, "image_data": []})
    assert llama.json() == [{"index": at, "embedding": [pytest.approx(row)]} for at, row in enumerate(expected)]
    assert llama.headers["x-lmx-ignored"] == "image_data"
    tei = http.post("/embed", json={"inputs": given, "normalize": True})
    assert tei.json() == [pytest.approx(row) for row in expected]
    assert http.post("/embed", json={"inputs": given, "normalize": False}).json() == expected
    assert http.post("/embedding", json={"content": given, "embd_normalize": -1}).status_code == 200


def test_vectors_in_the_form_of_tei_may_be_shortened(http):
    [row] = http.post("/embed", json={"model": "echo", "inputs": SEA, "dimensions": 32, "prompt_name": "query"}).json()
    assert (len(row), np.linalg.norm(row)) == (32, pytest.approx(1))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/embedding", {}, "content"),
        ("/embedding", {"content": SEA, "embd_normalize": 1}, "embd_normalize"),
        ("/embedding", {"content": [[10**6]]}, "content.0"),
        ("/embed", {"input": SEA}, "inputs"),
        ("/embed", {"inputs": SEA, "truncation_direction": "left"}, "truncation_direction"),
        ("/embed", {"inputs": SEA, "dimensions": 10**6}, "dimensions"),
    ],
)
def test_errors_name_the_fields_of_the_form(http, path, fields, param):
    assert error_of(http.post(path, json=fields), 400, "invalid-request")["param"] == param
