"""Tests of the conversion of requests to rerank, and of the bodies of Jina, Cohere and Text Embeddings Inference."""

import json

import numpy as np
import pytest
from pydantic import TypeAdapter

from lmx_lab.engine import Caller, Ranking, RerankRequest
from lmx_lab.server.rerank import rerank_request, rerank_results, text_ranks
from lmx_lab.values.outputs import EncodeReport
from lmx_lab.wire.rerank import AnyRerankBody, RerankResults

DOCUMENTS = ("bb", "a", "dddd")
REPORT = EncodeReport(model="minilm", texts=4, tokens=7, queue_s=0.25, compute_s=0.5, peak_memory_bytes=1)


def requested(**fields):
    return rerank_request(TypeAdapter(AnyRerankBody).validate_json(json.dumps({"query": "q", **fields})), Caller())


def ranking(*scores):
    return Ranking(scores=np.array(scores, dtype=np.float32), method="cosine", report=REPORT)


def test_all_fields_reach_the_engine():
    fields = {"truncate": True, "raw_scores": True}
    wanted = RerankRequest(query="q", documents=DOCUMENTS, truncate=True, raw_scores=True)
    assert requested(model="default", documents=DOCUMENTS, user="me", rank_fields=["text"], **fields) == wanted
    assert requested(texts=DOCUMENTS, truncation_direction="Right", **fields) == wanted


def test_null_means_the_default():
    names = ("top_n", "return_documents", "truncate", "raw_scores", "max_tokens_per_doc", "max_chunks_per_doc")
    found = requested(model="minilm", documents=DOCUMENTS, **dict.fromkeys(names))
    assert found == RerankRequest(query="q", documents=DOCUMENTS, model="minilm")


def test_a_document_may_be_an_object_with_a_text():
    documents = ["a", {"text": "bb", "title": "ignored", "image": None}]
    assert requested(model="minilm", documents=documents).documents == ("a", "bb")


def test_results_are_ordered_and_contain_their_documents():
    answer = json.loads(rerank_results(ranking(2, 1, 4), DOCUMENTS))
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


def test_texts_are_answered_with_a_bare_array():
    assert json.loads(text_ranks(ranking(2, 1, 4), None)) == [
        {"index": 2, "score": 4.0},
        {"index": 0, "score": 2.0},
        {"index": 1, "score": 1.0},
    ]
    assert [row["text"] for row in json.loads(text_ranks(ranking(2, 1, 4), DOCUMENTS))] == ["dddd", "bb", "a"]


def test_scores_are_written_with_as_few_digits_as_a_float32_needs():
    assert b'"relevance_score":0.1,' in rerank_results(ranking(0.1), ["a"])
