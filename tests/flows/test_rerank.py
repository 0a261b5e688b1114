"""Tests of reranking by cosine similarity. Tests that depend on the meaning of texts use the real MiniLM."""

import httpx2
import numpy as np
import pytest

from lmx_lab.errors import InvalidRequestError, NotLoadedError
from lmx_lab.wire.embeddings import INPUT_LIMIT
from tests.support.asking import error_of

PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
PATH = PATHS[0]
MODEL = "echo"
MINILM = "minilm-l6"
QUERY = "Is sea water salty?"
DOCUMENTS = ["Bread is baked in an oven.", "The sea contains a lot of salt.", "Water boils at 100 degrees."]
LONG = "word " * 200_000


@pytest.fixture(scope="module")
def http(quick_lab):
    with httpx2.Client(base_url=quick_lab.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def real_http(encoding_lab):
    with httpx2.Client(base_url=encoding_lab.url, timeout=300) as client:
        yield client


def body(**changes):
    return {"model": MODEL, "query": QUERY, "documents": DOCUMENTS, **changes}


def rerank(http, **changes):
    response = http.post(PATH, json=body(**changes))
    assert response.status_code == 200, response.text
    return response.json()


def order(http, **changes):
    return [result["index"] for result in rerank(http, **changes)["results"]]


@pytest.mark.parametrize("path", PATHS)
def test_the_most_relevant_document_is_first(real_http, path):
    answer = real_http.post(path, json=body(model=MINILM)).json()
    assert (answer["model"], answer["method"]) == (MINILM, "cosine")
    assert answer["results"][0]["document"] == DOCUMENTS[1]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["usage"]["total_tokens"] > 0


def test_scores_are_the_cosines_of_the_vectors(encoding_lab, real_http):
    query, *documents = encoding_lab.embed([QUERY, *DOCUMENTS])
    for result in rerank(real_http, model=MINILM)["results"]:
        assert result["relevance_score"] == pytest.approx(float(query @ documents[result["index"]]), abs=1e-4)


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (2.0, 2), (1000, 3), (None, 3)])
def test_top_n_limits_the_results(http, top_n, count):
    assert order(http, top_n=top_n) == order(http)[:count]


def test_documents_may_be_objects_empty_and_of_any_script(real_http):
    documents = ["", {"text": DOCUMENTS[1], "id": 7}, "海は塩辛い", "🙂", " "]
    results = rerank(real_http, model=MINILM, documents=documents)["results"]
    assert results[0] == {"index": 1, "relevance_score": results[0]["relevance_score"], "document": DOCUMENTS[1]}
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3, 4]


def test_the_bodies_of_other_servers_are_accepted(http):
    bare = http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "return_text": True}).json()
    assert (bare[0]["index"], bare[0]["text"]) == (1, DOCUMENTS[1])
    cohere = http.post("/v2/rerank", json=body(model="default", top_n=1, return_documents=False)).json()
    assert [set(result) for result in cohere["results"]] == [{"index", "relevance_score"}]


@pytest.mark.slow
def test_ten_thousand_documents_are_one_request(http):
    # Equal documents are computed only once.
    documents = [f"Document {number % 1000}." for number in range(10_000)]
    documents[7654] = DOCUMENTS[1]
    results = rerank(http, documents=documents, top_n=2)["results"]
    assert (len(results), results[0]["index"]) == (2, 7654)


def test_a_document_of_a_megabyte_is_refused_or_truncated(real_http):
    documents = [LONG, DOCUMENTS[1]]
    error = error_of(real_http.post(PATH, json=body(model=MINILM, documents=documents)), 400, "context-length-exceeded")
    assert any(number in error["message"] for number in ("256", "512"))
    assert order(real_http, model=MINILM, documents=documents, truncate=True) == [1, 0]


@pytest.mark.parametrize("foreign", [{"priority": False}, {"return_embeddings": 0}])
def test_zero_and_false_are_distinguished(http, foreign):
    error = error_of(http.post(PATH, json=body(**foreign)), 400, "invalid-request")
    assert error["param"] == next(iter(foreign))
    assert rerank(http, priority=0, return_embeddings=False)["model"] == MODEL


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
def test_an_invalid_field_is_named(http, changes, param):
    assert error_of(http.post(PATH, json=body(**changes)), 400, "invalid-request")["param"] == param


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
def test_an_invalid_field_of_a_request_with_texts_is_named(http, changes, param):
    fields = {"query": QUERY, "texts": DOCUMENTS, **changes}
    assert error_of(http.post("/rerank", json=fields), 400, "invalid-request")["param"] == param


def test_the_first_missing_field_is_named(http):
    for fields, param in (({}, "model"), ({"model": "x", "query": "q"}, "documents")):
        assert error_of(http.post(PATH, json=fields), 400, "invalid-request")["param"] == param


def test_too_many_documents_are_refused_with_the_limit(http):
    error = error_of(http.post(PATH, json=body(documents=["a"] * (INPUT_LIMIT + 1))), 400, "invalid-request")
    assert str(INPUT_LIMIT) in error["message"]


def test_each_reason_to_refuse_a_model_has_its_error(real_http):
    error_of(real_http.post(PATH, json=body(model="unheard-of")), 404, "model-not-found")
    error_of(real_http.post(PATH, json=body(model="smollm2-135m")), 400, "invalid-request")


def test_a_chat_model_does_not_rank(tiny_lab):
    with httpx2.Client(base_url=tiny_lab.url, timeout=60) as http:
        error_of(http.post(PATH, json=body(model="tiny")), 400, "invalid-request")
        error_of(http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS}), 503, "no-model-loaded")
    with pytest.raises(NotLoadedError):
        tiny_lab.rerank(QUERY, DOCUMENTS)


def test_the_method_of_the_lab_returns_rows_and_a_data_frame(quick_lab):
    ranked = quick_lab.rerank(QUERY, DOCUMENTS, top_n=2)
    assert (len(ranked), ranked[0].rank, ranked[0].index) == (2, 1, 1)
    assert (ranked.method, ranked.model) == ("cosine", MODEL)
    assert list(ranked.df["document"]) == [row.document for row in ranked]
    assert DOCUMENTS[1] in repr(ranked)
    from_column = quick_lab.rerank(QUERY, ranked.df["document"])
    assert [row.document for row in from_column] == [row.document for row in ranked]
    assert quick_lab.rerank(QUERY, np.array(DOCUMENTS))[0].index == 1


@pytest.mark.anyio
async def test_the_method_of_the_lab_can_be_awaited(quick_lab):
    assert (await quick_lab.arerank(QUERY, [{"text": DOCUMENTS[1]}]))[0].document == DOCUMENTS[1]


@pytest.mark.parametrize(
    ("query", "documents", "top_n"),
    [("", DOCUMENTS, None), (QUERY, [], None), (QUERY, "one", None), (QUERY, None, None), (QUERY, DOCUMENTS, 0)],
)
def test_the_method_of_the_lab_has_the_errors_of_the_route(quick_lab, query, documents, top_n):
    with pytest.raises(InvalidRequestError):
        quick_lab.rerank(query, documents, top_n=top_n)
