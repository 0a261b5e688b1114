"""Tests of reranking at three paths on the echo engine, by cosine similarity: bodies, answers, errors and limits."""

import json

import numpy as np
import pytest
from pydantic import TypeAdapter

from lmx_lab.engine import Caller, Ranking, RerankRequest
from lmx_lab.errors import NotLoadedError
from lmx_lab.server.rerank import ANSWERS, rerank_request, rerank_results, text_ranks
from lmx_lab.values.outputs import EncodeReport
from lmx_lab.wire.embeddings import INPUT_LIMIT
from lmx_lab.wire.rerank import AnyRerankBody, RerankResults
from tests.support.asking import each_value, error_of

PATH = "/v1/rerank"
MODEL = "echo"
QUERY = "Is sea water salty?"
DOCUMENTS = ["Bread is baked in an oven.", "The sea contains a lot of salt.", "Water boils at 100 degrees."]
SHORT = ("bb", "a", "dddd")
REPORT = EncodeReport(model="minilm", texts=4, tokens=7, queue_s=0.25, compute_s=0.5, peak_memory_bytes=1)


@pytest.fixture(scope="module")
def lab(quick_lab):
    return quick_lab


def body(**changes):
    return {"model": MODEL, "query": QUERY, "documents": DOCUMENTS, **changes}


def rerank(http, **changes):
    response = http.post(PATH, json=body(**changes))
    assert response.status_code == 200, response.text
    return response.json()


# The engine's request, and the body of the answer

NAMES = ("top_n", "return_documents", "truncate", "raw_scores", "max_tokens_per_doc", "max_chunks_per_doc")
FLAGS = {"truncate": True, "raw_scores": True}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"model": "default", "documents": SHORT, "user": "me", "rank_fields": ["text"], **FLAGS},
            RerankRequest(query="q", documents=SHORT, **FLAGS),
        ),
        (
            {"model": "minilm", "documents": SHORT, "max_tokens_per_doc": 4096, "truncation_side": "right"},
            RerankRequest(query="q", documents=SHORT, model="minilm", max_document_tokens=4096),
        ),
        (
            # vLLM's defaults.
            {"model": "minilm", "documents": SHORT, "max_tokens_per_doc": 0, "max_tokens_per_query": 0, "priority": 0},
            RerankRequest(query="q", documents=SHORT, model="minilm"),
        ),
        (
            {"texts": SHORT, "truncation_direction": "Right", **FLAGS},
            RerankRequest(query="q", documents=SHORT, **FLAGS),
        ),
        (
            {"model": "minilm", "documents": SHORT, **dict.fromkeys(NAMES)},
            RerankRequest(query="q", documents=SHORT, model="minilm"),
        ),
        (
            {"model": "minilm", "documents": ["a", {"text": "bb", "title": "ignored", "image": None}]},
            RerankRequest(query="q", documents=("a", "bb"), model="minilm"),
        ),
    ],
)
def test_all_fields_reach_the_engine_and_null_means_the_default(fields, expected):
    given = TypeAdapter(AnyRerankBody).validate_json(json.dumps({"query": "q", **fields}))
    assert rerank_request(given, Caller()) == expected


def ranking(*scores):
    return Ranking(scores=np.array(scores, dtype=np.float32), method="cosine", report=REPORT)


def test_results_are_ordered_and_contain_their_documents():
    answer = json.loads(rerank_results(ranking(2, 1, 4), SHORT))
    RerankResults.model_validate(answer)
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


@pytest.mark.parametrize(("top_n", "expected"), [(1, [1]), (2, [1, 0]), (99, [1, 0, 2]), (None, [1, 0, 2])])
def test_top_n_limits_the_results_and_equal_scores_keep_the_order_of_documents(top_n, expected):
    results = json.loads(rerank_results(ranking(0.5, 0.7, 0.5), None, top_n=top_n))["results"]
    assert [result["index"] for result in results] == expected
    assert all(set(result) == {"index", "relevance_score"} for result in results)


def test_the_answer_of_cohere_counts_a_search_unit_for_each_hundred_documents():
    answers = [json.loads(rerank_results(ranking(*range(1, n + 1)), None, path="/v2/rerank")) for n in (3, 100, 101)]
    assert [answer["meta"]["billed_units"]["search_units"] for answer in answers] == [1, 1, 2]
    assert set(answers[0]) == {"id", "results", "meta"}
    assert answers[0]["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": 7},
    }


def test_texts_are_answered_with_a_bare_array():
    assert json.loads(text_ranks(ranking(2, 1, 4), None)) == [
        {"index": 2, "score": 4.0},
        {"index": 0, "score": 2.0},
        {"index": 1, "score": 1.0},
    ]
    assert [row["text"] for row in json.loads(text_ranks(ranking(2, 1, 4), SHORT))] == ["dddd", "bb", "a"]
    assert json.loads(text_ranks(ranking(2, 1, 4), None, top_n=1)) == [{"index": 2, "score": 4.0}]


def test_scores_are_written_with_as_few_digits_as_a_float32_needs():
    assert b'"relevance_score":0.1,' in rerank_results(ranking(0.1), ["a"])


# Requests


def test_the_bodies_of_all_servers_are_accepted(quick_lab, http):
    query, *documents = quick_lab.embed([QUERY, *DOCUMENTS])
    results = rerank(http)["results"]
    assert [result["index"] for result in results] == sorted(range(3), key=lambda at: -(query @ documents[at]))
    for result in results:
        assert result["relevance_score"] == pytest.approx(float(query @ documents[result["index"]]), abs=1e-4)
        assert result["document"] == DOCUMENTS[result["index"]]
    bare = http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "return_text": True}).json()
    assert [(row["index"], row["text"]) for row in bare] == [(row["index"], row["document"]) for row in results]


@pytest.mark.parametrize(
    ("path", "return_documents", "document"),
    [
        ("/v1/rerank", None, DOCUMENTS[1]),
        ("/v1/rerank", False, None),
        ("/rerank", None, {"text": DOCUMENTS[1]}),
        ("/rerank", True, {"text": DOCUMENTS[1]}),
        ("/rerank", False, None),
        ("/v2/rerank", None, None),
        ("/v2/rerank", True, {"text": DOCUMENTS[1]}),
    ],
)
def test_each_path_returns_documents_as_its_clients_read_them(http, path, return_documents, document):
    answer = http.post(path, json=body(top_n=1, return_documents=return_documents)).json()
    ANSWERS[path].model_validate(answer)
    (result,) = answer["results"]
    assert result.pop("document", None) == document
    assert result == {"index": 1, "relevance_score": result["relevance_score"]}
    objects = [{"text": text} for text in DOCUMENTS]
    same = http.post(path, json=body(top_n=1, return_documents=return_documents, documents=objects)).json()["results"]
    assert same[0].get("document") == document


@pytest.mark.slow
def test_ten_thousand_documents_are_one_request(http):
    # Equal documents are computed only once.
    documents = [f"Document {number % 1000}." for number in range(10_000)]
    documents[7654] = DOCUMENTS[1]
    results = rerank(http, documents=documents, top_n=2)["results"]
    assert (len(results), results[0]["index"]) == (2, 7654)


@pytest.mark.parametrize("foreign", [{"priority": False}, {"return_embeddings": 0}])
def test_zero_and_false_are_distinguished(http, foreign):
    error = error_of(http.post(PATH, json=body(**foreign)), 400, "invalid-request")
    assert error["param"] == next(iter(foreign))
    assert rerank(http, priority=0, return_embeddings=False)["model"] == MODEL


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *each_value(model=[""], query=["", " \n", None, ["q"]], documents=[[], "a", None], top_n=[0, -1, 1.5]),
        *each_value(max_tokens_per_doc=[-1], instruction=["Find salt."], truncation_side=["left"], top_k=[3]),
        *each_value(max_chunks_per_doc=[2], rank_fields=[["title"]]),
        ({"documents": ["a", 1]}, "documents.1"),
        ({"documents": ["a", {"title": "t"}]}, "documents.1.text"),
        ({"documents": [{"text": "a", "image": "http://x"}]}, "documents.0.image"),
        ({"documents": [{"text": 1}]}, "documents.0.text"),
    ],
)
def test_an_invalid_field_is_named(http, changes, param):
    assert error_of(http.post(PATH, json=body(**changes)), 400, "invalid-request")["param"] == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *each_value(query=[""], texts=[[]], documents=[["a"]], truncation_direction=["left"], top_n=[0]),
        ({"texts": [1]}, "texts.0"),
        ({"texts": [{"text": "a"}]}, "texts.0"),
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


def test_a_chat_model_does_not_rank(tiny_lab, tiny_http):
    error_of(tiny_http.post(PATH, json=body(model="tiny")), 400, "invalid-request")
    error_of(tiny_http.post(PATH, json=body(model="unheard-of")), 404, "model-not-found")
    error_of(tiny_http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS}), 503, "no-model-loaded")
    with pytest.raises(NotLoadedError):
        tiny_lab.rerank(QUERY, DOCUMENTS)


# Scores


def scores(http, path="/v1/score", **fields):
    response = http.post(path, json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_pairs_are_scored_as_documents_are(http):
    answer = scores(http, text_1=QUERY, text_2=DOCUMENTS)
    ranked = {item["index"]: item["relevance_score"] for item in rerank(http)["results"]}
    assert answer["data"] == [{"index": at, "object": "score", "score": ranked[at]} for at in range(3)]
    assert answer["model"] == MODEL
    assert answer["object"] == "list"
    assert answer["usage"]["total_tokens"] == rerank(http)["usage"]["total_tokens"]
    assert scores(http, "/score", queries=[QUERY], documents=DOCUMENTS)["data"] == answer["data"]
    assert scores(http, text_1=QUERY, text_2=DOCUMENTS[1])["data"] == [{**answer["data"][1], "index": 0}]


def test_lists_of_equal_length_are_pairs_in_their_order(http):
    first = [QUERY, "bread", QUERY]
    answer = scores(http, text_1=first, text_2=DOCUMENTS)
    alone = [
        scores(http, text_1=one, text_2=two)["data"][0]["score"] for one, two in zip(first, DOCUMENTS, strict=True)
    ]
    assert [item["score"] for item in answer["data"]] == pytest.approx(alone)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts, and text_2 1; send one text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": " ", "text_2": "b"}, "is blank"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": 5}, "text_2"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_invalid_pairs_are_refused(http, fields, problem):
    response = http.post("/v1/score", json={"model": MODEL, **fields})
    assert problem in error_of(response, 400, "invalid-request")["message"]


def test_pairs_for_an_unknown_model_are_refused(http):
    response = http.post("/v1/score", json={"text_1": "a", "text_2": "b", "model": "nope"})
    assert "nope" in error_of(response, 404, "model-not-found")["message"]


LONG = "salt " * 40_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": LONG, "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": LONG}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", LONG]}, "text_2.1"),
        ("/v1/score", {"text_1": ["a", "q", "a"], "text_2": ["b", "b", LONG]}, "text_2.2"),
        ("/v1/score", {"text_1": ["a", LONG], "text_2": ["b", "b"]}, "text_1.1"),
        ("/rerank", {"query": "a", "texts": ["b", LONG]}, "texts.1"),
        ("/rerank", {"query": "a", "documents": ["b", LONG]}, "documents.1"),
    ],
)
def test_a_text_that_is_too_long_is_named_as_in_the_request(http, path, fields, param):
    error = error_of(http.post(path, json={"model": MODEL, **fields}), 400, "context_length_exceeded")
    assert error["param"] == param
    assert error["message"].startswith(param)
