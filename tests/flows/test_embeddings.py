"""Tests of /v1/embeddings with openai-python, all forms of input, texts that are too long, and other models.

Tests that depend on the meaning of texts or on tokens use the real MiniLM.
"""

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
from openai import OpenAI
from tokenizers import Tokenizer

from lmx_lab.errors import InvalidRequestError
from lmx_lab.server.embeddings import NUMBERS_PER_STEP
from lmx_lab.wire.embeddings import INPUT_LIMIT
from tests.support.asking import chat_body, error_of, refused
from tests.support.gguf import ALIGNMENT, read_gguf
from tests.support.labs import manager_of, scrape, serving, wait_until_idle, watching
from tests.support.models import write_tiny_bert
from tests.support.waiting import until

PATH = "/v1/embeddings"
MODEL = "echo"
MINILM = "minilm-l6"
SEA, OCEAN, BREAD = "The sea is salty.", "Oceans contain salt water.", "Bread is baked in an oven."
LONG = "word " * 200_000


@pytest.fixture(scope="module")
def http(quick_lab):
    with httpx2.Client(base_url=quick_lab.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def real_http(encoding_lab):
    with httpx2.Client(base_url=encoding_lab.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def client(quick_lab):
    with OpenAI(**quick_lab.openai, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(minilm):
    tokenizer = Tokenizer.from_file(str(minilm.path / "tokenizer.json"))
    tokenizer.no_padding()
    return tokenizer


def body(**changes):
    return {"model": MODEL, "input": SEA, **changes}


def embed(http, **changes):
    response = http.post(PATH, json=body(**changes))
    assert response.status_code == 200, response.text
    return response.json()


def vectors(http, **changes):
    return np.array([item["embedding"] for item in embed(http, **changes)["data"]], dtype=np.float32)


def test_the_answer_has_the_shape_of_the_format(http):
    answer = embed(http, input=[SEA, BREAD])
    assert set(answer) == {"object", "data", "model", "usage"}
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    assert [(item["object"], item["index"], len(item["embedding"])) for item in answer["data"]] == [
        ("embedding", 0, 384),
        ("embedding", 1, 384),
    ]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


def test_texts_with_similar_meanings_have_similar_vectors(real_http):
    sea, ocean, bread = vectors(real_http, model=MINILM, input=[SEA, OCEAN, BREAD])
    assert sea @ ocean > 0.5
    assert sea @ bread < 0.2
    assert np.linalg.norm(sea) == pytest.approx(1, abs=1e-5)


def test_openai_python_reads_base64(client, http):
    answer = client.embeddings.create(model=MODEL, input=[SEA, BREAD])
    as_floats = client.embeddings.create(model="default", input=[SEA, BREAD], encoding_format="float")
    for first, second in zip(answer.data, as_floats.data, strict=True):
        assert np.array_equal(np.array(first.embedding, np.float32), np.array(second.embedding, np.float32))
    text = embed(http, encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").shape == (384,)
    assert answer.usage.total_tokens == as_floats.usage.total_tokens


def test_token_ids_have_the_vector_of_their_text(real_http, tokenizer):
    ids = tokenizer.encode(SEA).ids
    plain = vectors(real_http, model=MINILM)
    assert np.allclose(vectors(real_http, model=MINILM, input=ids), plain, atol=1e-5)
    assert np.allclose(vectors(real_http, model=MINILM, input=[ids, ids]), np.vstack([plain, plain]), atol=1e-5)


def test_fewer_dimensions_are_the_first_ones_of_length_one(http, client):
    whole, cut = vectors(http)[0], vectors(http, dimensions=64)[0]
    assert np.allclose(cut, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-5)
    assert len(client.embeddings.create(model=MODEL, input=SEA, dimensions=1).data[0].embedding) == 1


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "🙂🙃", "ünïcödé", "日本語のテキスト", "\u0000", "\u202eabc", "a" * 300]
)
def test_every_text_has_a_vector(real_http, text):
    (vector,) = vectors(real_http, model=MINILM, input=[text])
    assert np.isfinite(vector).all()
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-4)


def test_a_vector_does_not_depend_on_the_other_texts(real_http):
    alone = vectors(real_http, model=MINILM)[0]
    crowd = vectors(real_http, model=MINILM, input=["a", BREAD * 20, SEA, "", OCEAN * 5])
    assert np.allclose(crowd[2], alone, atol=1e-5)


@pytest.mark.long
def test_ten_thousand_texts_are_one_request(encoding_lab):
    # Equal texts are computed only once.
    texts = [f"Document {number % 1000}." for number in range(9_999)] + [SEA]
    with OpenAI(**encoding_lab.openai, max_retries=0, timeout=300) as client:
        data = client.embeddings.create(model=MINILM, input=texts).data
    assert [item.index for item in data] == list(range(10_000))
    for at in (0, 5_432, 9_999):
        assert np.allclose(np.array(data[at].embedding, np.float32), encoding_lab.embed(texts[at]), atol=1e-5)


def test_a_text_of_a_megabyte_is_refused_or_truncated(real_http):
    error = error_of(real_http.post(PATH, json=body(model=MINILM, input=[SEA, LONG])), 400, "context-length-exceeded")
    assert "256" in error["message"] or "512" in error["message"]
    cut, short = vectors(real_http, model=MINILM, input=[LONG, "word " * 2000], truncate=True)
    assert np.allclose(cut, short, atol=1e-5)


def test_more_dimensions_than_the_model_has_are_400(http):
    assert error_of(http.post(PATH, json=body(dimensions=385)), 400, "invalid-request")["param"] == "dimensions"


def test_a_token_outside_the_vocabulary_is_400(real_http):
    error_of(real_http.post(PATH, json=body(model=MINILM, input=[10**6])), 400, "invalid-request")


def test_each_reason_to_refuse_a_model_has_its_error(real_http):
    error_of(real_http.post(PATH, json=body(model="unheard-of")), 404, "model-not-found")
    assert (
        "chat model"
        in error_of(real_http.post(PATH, json=body(model="smollm2-135m")), 400, "invalid-request")["message"]
    )
    error_of(real_http.post("/v1/chat/completions", json=chat_body(model=MINILM)), 400, "invalid-request")
    error_of(real_http.post("/v1/chat/completions", json=chat_body(model="default")), 503, "no-model-loaded")


def test_a_chat_model_does_not_embed(tiny_lab):
    with httpx2.Client(base_url=tiny_lab.url, timeout=60) as http:
        named = error_of(http.post(PATH, json=body(model="tiny")), 400, "invalid-request")
        error_of(http.post(PATH, json=body(model="default")), 503, "no-model-loaded")
    assert "chat model" in named["message"]


def test_openai_python_raises_its_own_exceptions(client):
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=MODEL, input=[])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="unheard-of", input=SEA)


def test_a_client_that_disconnects_cancels_the_computation(minilm, starter_home):
    with serving(starter_home, minilm.id) as lab, watching(lab) as seen:
        content = json.dumps(body(model=MINILM, input=[f"{SEA} {number}" for number in range(10_000)])).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost:{lab.server.port}\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", lab.server.port)) as leaving:
            leaving.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            until(lambda: manager_of(lab).snapshot.active_requests > 0)
        until(lambda: len(seen) == 1)
        wait_until_idle(lab)
        assert lab.embed(SEA).shape == (384,)
        until(lambda: len(seen) == 2)
    assert [(event["kind"], event["finish_reason"]) for event in seen] == [
        ("embedding", "cancelled"),
        ("embedding", "stop"),
    ]
    assert seen[1]["model"] == MINILM
    assert seen[1]["prompt_tokens"] > 0
    assert seen[1]["completion_tokens"] == 0
    assert seen[1]["tokens_per_second"] > 0
    assert seen[1]["ttft_ms"] > 0


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


@pytest.mark.slow
def test_the_method_of_the_lab_returns_an_array(quick_lab):
    both = quick_lab.embed([SEA, BREAD])
    assert (both.shape, both.dtype) == ((2, 384), np.float32)
    assert np.allclose(quick_lab.embed(SEA), both[0], atol=1e-5)
    assert np.allclose(quick_lab.embed(np.array([SEA, BREAD])), both, atol=1e-5)
    assert quick_lab.embed((text for text in (SEA,)), dimensions=8).shape == (1, 8)
    assert quick_lab.embed(LONG, truncate=True).shape == (384,)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [1.5]}, "input.0"),
        ({"input": [True]}, "input.0"),
        ({"input": ["a", 1]}, "input.1"),
        ({"input": [1, "a"]}, "input.1"),
        ({"input": [1, -1]}, "input.1"),
        ({"input": [[1], []]}, "input.1"),
        ({"input": [[1], [-1]]}, "input.1.0"),
        ({"input": [[[1]]]}, "input.0.0"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -1}, "dimensions"),
        ({"dimensions": "64"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"input_type": "classification"}, "input_type"),
        ({"truncate": 1}, "truncate"),
        ({"normalize": True}, "normalize"),
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
        ranked = {"model": MODEL, "query": SEA, "documents": [SEA] * count}
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
    ranked = {"model": "default", "query": SEA, "documents": [BREAD, OCEAN]}
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


@pytest.mark.parametrize("wrong", [[], None, [None], 5, b"text", [SEA, 1]])
def test_the_method_of_the_lab_has_the_errors_of_the_route(quick_lab, wrong):
    with pytest.raises(InvalidRequestError):
        quick_lab.embed(wrong)


@pytest.mark.anyio
async def test_the_method_of_the_lab_can_be_awaited(quick_lab):
    assert (await quick_lab.aembed([SEA])).shape == (1, 384)
    assert (await quick_lab.aembed(SEA, model=MODEL, dimensions=3)).shape == (3,)


def test_with_swap_a_request_loads_its_model(three_home):
    chat, embedder = "tiny", "tiny-embedder"
    with serving(three_home, chat, swap=True) as lab, httpx2.Client(base_url=lab.url, timeout=120) as http:
        refused = error_of(http.post(PATH, json=body(model=chat)), 400, "invalid-request")
        assert manager_of(lab).snapshot.model == chat
        assert embed(http, model=embedder)["model"] == embedder
        assert manager_of(lab).snapshot.model == embedder
        error_of(http.post(PATH, json=body(model=chat)), 400, "invalid-request")
        error_of(http.post("/v1/chat/completions", json=chat_body(model=embedder)), 400, "invalid-request")
        assert manager_of(lab).snapshot.model == embedder
        answer = http.post("/v1/chat/completions", json=chat_body(model=chat))
    assert answer.status_code == 200
    assert "chat model" in refused["message"]
