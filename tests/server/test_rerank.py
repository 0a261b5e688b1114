"""Tests of the request and response bodies of Jina, Cohere and Text Embeddings Inference."""

import asyncio

import pytest

from lmx_lab.engine import RerankRequest
from lmx_lab.server.rerank import PATHS
from lmx_lab.wire.embeddings import INPUT_LIMIT
from lmx_lab.wire.rerank import RerankResults
from tests.server.encoder import FakeEncoder, post, refused

pytestmark = pytest.mark.anyio
PATH = "/v1/rerank"
DOCUMENTS = ["bb", "a", "dddd"]


def body(**changes):
    return {"model": "minilm", "query": "q", "documents": DOCUMENTS, **changes}


def texts_body(**changes):
    return {"query": "q", "texts": DOCUMENTS, **changes}


async def order(manager, **changes):
    response = await post(manager, PATH, body(**changes))
    assert response.status_code == 200, response.text
    return [result["index"] for result in response.json()["results"]]


@pytest.mark.parametrize("path", PATHS)
async def test_results_are_ordered_and_contain_their_documents(path):
    answer = (await post(FakeEncoder(), path, body())).json()
    assert answer.pop("id").startswith("rerank-")
    assert answer == {
        "object": "list",
        "model": "minilm",
        "method": "cosine",
        "results": [
            {"index": 2, "relevance_score": 4.0, "document": "dddd"},
            {"index": 0, "relevance_score": 2.0, "document": "bb"},
            {"index": 1, "relevance_score": 1.0, "document": "a"},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    RerankResults.model_validate({"id": "", **answer})


async def test_equal_scores_keep_the_order_of_documents():
    assert await order(FakeEncoder(scores=[0.5, 0.7, 0.5])) == [1, 0, 2]


@pytest.mark.parametrize(
    ("top_n", "expected"), [(1, [2]), (2.0, [2, 0]), (3, [2, 0, 1]), (99, [2, 0, 1]), (None, [2, 0, 1])]
)
async def test_top_n_limits_the_results(top_n, expected):
    assert await order(FakeEncoder(), top_n=top_n) == expected


async def test_documents_can_be_left_out():
    results = (await post(FakeEncoder(), PATH, body(return_documents=False))).json()["results"]
    assert [set(result) for result in results] == [{"index", "relevance_score"}] * 3


@pytest.mark.parametrize("foreign", [{"priority": False}, {"return_embeddings": 0}])
async def test_zero_and_false_are_distinguished(foreign):
    refused = await post(FakeEncoder(), PATH, body(**foreign))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(foreign)))
    for neutral in ({"priority": 0}, {"return_embeddings": False}):
        assert (await post(FakeEncoder(), PATH, body(**neutral))).status_code == 200


async def test_a_document_may_be_empty():
    results = (await post(FakeEncoder(), PATH, body(documents=["", "ü🙂"]))).json()["results"]
    assert [result["document"] for result in results] == ["ü🙂", ""]


async def test_the_text_of_a_document_object_is_ranked_and_returned():
    manager = FakeEncoder()
    documents = ["a", {"text": "bb", "title": "ignored", "image": None}]
    results = (await post(manager, PATH, body(documents=documents))).json()["results"]
    assert manager.requests == [RerankRequest(query="q", documents=("a", "bb"), model="minilm")]
    assert results[0]["document"] == "bb"


async def test_all_fields_reach_the_manager():
    manager = FakeEncoder()
    await post(manager, PATH, body(model="default", truncate=True, raw_scores=True, user="me", rank_fields=["text"]))
    await post(manager, PATH, texts_body(truncate=True, raw_scores=True, truncation_direction="Right"))
    expected = RerankRequest(query="q", documents=tuple(DOCUMENTS), truncate=True, raw_scores=True)
    assert manager.requests == [expected, expected]


async def test_null_means_the_default():
    names = ("top_n", "return_documents", "truncate", "raw_scores", "max_tokens_per_doc", "max_chunks_per_doc")
    response = await post(FakeEncoder(), PATH, body(**dict.fromkeys(names)))
    assert response.json()["results"][0]["document"] == "dddd"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": ""}, "model"),
        ({"query": ""}, "query"),
        ({"query": " \n"}, "query"),
        ({"query": None}, "query"),
        ({"query": ["q"]}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": ["a", 1]}, "documents.1"),
        ({"documents": ["a", {"title": "t"}]}, "documents.1.text"),
        ({"documents": [{"text": "a", "image": "http://x"}]}, "documents.0.image"),
        ({"documents": [{"text": 1}]}, "documents.0.text"),
        ({"top_n": 0}, "top_n"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": 1.5}, "top_n"),
        ({"max_tokens_per_doc": 100}, "max_tokens_per_doc"),
        ({"max_chunks_per_doc": 2}, "max_chunks_per_doc"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"top_k": 3}, "top_k"),
    ],
)
async def test_an_invalid_field_is_named_before_the_request_is_submitted(changes, param):
    manager = FakeEncoder()
    error = await refused(manager, PATH, body(**changes))
    assert (error["code"], error["param"]) == ("invalid-request", param)
    assert manager.requests == []


async def test_the_first_missing_field_is_named():
    assert (await refused(FakeEncoder(), PATH, {}))["param"] == "model"
    assert (await refused(FakeEncoder(), PATH, {"model": "x", "query": "q"}))["param"] == "documents"


async def test_too_many_documents_are_refused_with_the_limit():
    error = await refused(FakeEncoder(), PATH, body(documents=["a"] * (INPUT_LIMIT + 1)))
    assert str(INPUT_LIMIT) in error["message"]


# Text Embeddings Inference


@pytest.mark.parametrize("path", PATHS)
async def test_texts_are_answered_with_a_bare_array(path):
    answer = (await post(FakeEncoder(), path, texts_body())).json()
    assert answer == [{"index": 2, "score": 4.0}, {"index": 0, "score": 2.0}, {"index": 1, "score": 1.0}]


async def test_texts_are_returned_on_request():
    answer = (await post(FakeEncoder(), "/rerank", texts_body(return_text=True))).json()
    assert [row["text"] for row in answer] == ["dddd", "bb", "a"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"query": ""}, "query"),
        ({"texts": []}, "texts"),
        ({"texts": [1]}, "texts.0"),
        ({"texts": [{"text": "a"}]}, "texts.0"),
        ({"documents": ["a"]}, "documents"),
        ({"truncation_direction": "left"}, "truncation_direction"),
        ({"top_n": 1}, "top_n"),
    ],
)
async def test_an_invalid_field_of_a_request_with_texts_is_named(changes, param):
    manager = FakeEncoder()
    assert (await refused(manager, "/rerank", texts_body(**changes)))["param"] == param
    assert manager.requests == []


# Scores


async def test_scores_are_written_with_as_few_digits_as_a_float32_needs():
    response = await post(FakeEncoder(scores=[0.1]), PATH, body(documents=["a"]))
    assert '"relevance_score":0.1,' in response.text


@pytest.mark.parametrize("make", [body, texts_body])
@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
async def test_values_that_are_not_finite_are_an_error(make, wrong):
    error = await refused(FakeEncoder(scores=[1, wrong, 2]), PATH, make(), 500)
    assert "minilm" in error["message"]


@pytest.mark.slow
async def test_many_results_are_written_in_another_thread(monkeypatch):
    moved = []
    to_thread = asyncio.to_thread

    async def noted(work, *args, **kwargs):
        moved.append(work)
        return await to_thread(work, *args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    for count in (256, 257):
        assert (await post(FakeEncoder(), PATH, body(documents=["a"] * count))).status_code == 200
    assert len(moved) == 1
