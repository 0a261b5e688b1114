"""Tests of the conversion of requests to /v1/embeddings, and of the format of its numbers."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lmx_lab.engine import Caller, EmbeddingRequest, Embeddings
from lmx_lab.server.embeddings import embedding_list, embedding_request
from lmx_lab.values.outputs import EncodeReport
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody

REPORT = EncodeReport(model="minilm", texts=2, tokens=7, queue_s=0.25, compute_s=0.5, peak_memory_bytes=1)


def requested(**changes):
    body = EmbeddingsBody.model_validate({"model": "minilm", "input": ["a", "bcd"], **changes})
    return embedding_request(body, Caller())


def test_all_fields_reach_the_engine():
    fields = {"model": "default", "dimensions": 64.0, "truncate": True, "input_type": "search_query", "user": "me"}
    wanted = EmbeddingRequest(inputs=("a", "bcd"), dimensions=64, truncate=True, input_type="query")
    assert requested(**fields) == wanted
    assert requested(input_type="document").input_type == "document"


def test_null_means_the_default():
    names = ("encoding_format", "dimensions", "truncate", "input_type", "user")
    assert requested(**dict.fromkeys(names)) == EmbeddingRequest(inputs=("a", "bcd"), model="minilm")


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
    assert requested(input=given).inputs == inputs


def test_the_answer_has_the_shape_of_the_format():
    vectors = np.array([[1, 0.5], [3, 0.5]], dtype=np.float32)
    answer = json.loads(embedding_list(Embeddings(vectors=vectors, report=replace(REPORT, model='odd "name"\n'))))
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [3.0, 0.5]},
        ],
        "model": 'odd "name"\n',
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    EmbeddingList.model_validate(answer)


def parsed(vectors):
    answer = json.loads(embedding_list(Embeddings(vectors=vectors, report=REPORT)))
    return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32).reshape(vectors.shape)


@pytest.mark.slow
@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 8)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_every_float32_is_unchanged_by_its_decimal_form(vectors):
    assert np.array_equal(parsed(vectors), vectors)


def test_numbers_are_written_with_as_few_digits_as_a_float32_needs():
    vectors = np.random.default_rng(0).standard_normal((700, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.array_equal(parsed(vectors), vectors)
    assert len(embedding_list(Embeddings(vectors=vectors, report=REPORT))) < 14 * vectors.size
