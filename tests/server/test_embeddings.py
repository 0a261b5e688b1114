"""Tests of the bodies of /v1/embeddings, and of the format of its numbers."""

import asyncio
import base64
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lmx_lab.engine import Caller, EmbeddingRequest, Embeddings
from lmx_lab.errors import EngineError, InvalidRequestError, NotLoadedError
from lmx_lab.server.embeddings import embedding_list
from lmx_lab.wire.admin import RequestEvent
from lmx_lab.wire.embeddings import INPUT_LIMIT, EmbeddingList
from tests.server.encoder import REPORT, FakeEncoder, client_of, post, refused, server_of

pytestmark = pytest.mark.anyio
PATH = "/v1/embeddings"


def body(**changes):
    return {"model": "minilm", "input": ["a", "bcd"], **changes}


async def test_the_answer_has_the_shape_of_the_format():
    response = await post(FakeEncoder(), PATH, body())
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [3.0, 0.5]},
        ],
        "model": "minilm",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    EmbeddingList.model_validate(response.json())


async def test_base64_is_of_little_endian_float32():
    response = await post(FakeEncoder(), PATH, body(encoding_format="base64"))
    (first, _) = response.json()["data"]
    assert base64.b64decode(first["embedding"]) == np.array([1.0, 0.5], dtype="<f4").tobytes()


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
async def test_all_shapes_of_input_are_accepted(given, inputs):
    manager = FakeEncoder()
    assert (await post(manager, PATH, body(input=given))).status_code == 200
    assert manager.requests == [EmbeddingRequest(inputs=inputs, model="minilm")]


async def test_all_fields_reach_the_manager():
    manager = FakeEncoder()
    fields = {"model": "default", "dimensions": 64.0, "truncate": True, "input_type": "search_query", "user": "me"}
    await post(manager, PATH, body(**fields))
    await post(manager, PATH, body(input_type="document"))
    expected = EmbeddingRequest(inputs=("a", "bcd"), dimensions=64, truncate=True, input_type="query")
    assert manager.requests == [expected, EmbeddingRequest(inputs=("a", "bcd"), model="minilm", input_type="document")]


async def test_null_means_the_default():
    manager = FakeEncoder()
    names = ("encoding_format", "dimensions", "truncate", "input_type", "user")
    assert (await post(manager, PATH, body(**dict.fromkeys(names)))).status_code == 200
    assert manager.requests == [EmbeddingRequest(inputs=("a", "bcd"), model="minilm")]


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
async def test_an_invalid_field_is_named_before_the_request_is_submitted(changes, param):
    manager = FakeEncoder()
    error = await refused(manager, PATH, body(**changes))
    assert (error["code"], error["param"]) == ("invalid-request", param)
    assert manager.requests == []


@pytest.mark.parametrize("wrong", [5, None, {"text": "a"}])
async def test_an_input_of_another_type_is_refused_with_the_accepted_forms(wrong):
    message = (await refused(FakeEncoder(), PATH, body(input=wrong)))["message"]
    assert message.startswith("input: must be a text, a list of texts, the token ids")
    assert message.endswith("(given: 5)") == (wrong == 5)


async def test_too_many_inputs_are_refused_with_the_limit():
    assert (await post(FakeEncoder(), PATH, body(input=["a"] * INPUT_LIMIT))).status_code == 200
    error = await refused(FakeEncoder(), PATH, body(input=["a"] * (INPUT_LIMIT + 1)))
    assert f"{INPUT_LIMIT + 1} items" in error["message"]
    assert str(INPUT_LIMIT) in error["message"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
async def test_values_that_are_not_finite_are_an_error(wrong):
    error = await refused(FakeEncoder(vectors=[[1.0, wrong]]), PATH, body(), 500)
    assert "minilm" in error["message"]


@pytest.mark.parametrize(
    ("failure", "status"),
    [(InvalidRequestError("too large", param="dimensions"), 400), (EngineError("broken"), 500), (KeyError("bug"), 500)],
)
async def test_the_error_of_the_manager_is_returned(failure, status):
    error = await refused(FakeEncoder(failure=failure), PATH, body(), status)
    assert ("bug" in error["message"]) is False


async def test_the_manager_learns_whether_the_caller_is_on_this_machine():
    manager = FakeEncoder()
    await post(manager, PATH, body())
    assert [caller.local for caller in manager.callers] == [True]


# Ends


@pytest.mark.parametrize(
    ("failure", "outcome", "code"),
    [(None, "stop", None), (NotLoadedError("no"), "error", "no-model-loaded"), (KeyError(), "error", "internal-error")],
)
async def test_each_end_is_reported_once(failure, outcome, code):
    manager = FakeEncoder(failure=failure)
    server = server_of(manager)
    with server.feed.subscribe() as events:
        wanted = EmbeddingRequest(inputs=("a",), caller=Caller(request_id="req_1"))
        request = asyncio.ensure_future(server.inference.embed(wanted))
        await asyncio.wait([request])
        server.feed.close()
        found = [event async for event in events]
    assert (request.exception() is None) is (failure is None)
    good = failure is None
    assert found == [
        RequestEvent(
            request_id="req_1",
            kind="embedding",
            model="minilm",
            finish_reason=outcome,
            code=code,
            prompt_tokens=REPORT.tokens if good else 0,
            completion_tokens=0,
            tokens_per_second=14.0 if good else 0,
            ttft_ms=750.0 if good else 0,
        )
    ]


async def test_ends_are_counted_by_kind():
    async with client_of(FakeEncoder()) as client:
        await client.post(PATH, json=body())
        await client.post("/rerank", json={"query": "q", "texts": ["a"]})
        await client.post(PATH, json=body(input=[]))
        figures = (await client.get("/metrics")).text.splitlines()
    for kind in ("embedding", "rerank"):
        assert f'lmx_lab_requests_total{{code="",kind="{kind}",outcome="stop"}} 1.0' in figures
        assert f'lmx_lab_encode_seconds_sum{{kind="{kind}"}} 0.75' in figures


async def test_a_client_that_disconnects_cancels_the_computation():
    manager = FakeEncoder(endless=True)
    server = server_of(manager)
    content = json.dumps(body()).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await manager.started.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        assert message.get("status", 499) == 499

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "client": ("127.0.0.1", 1),
        "headers": [(b"host", b"lab"), (b"content-type", b"application/json")],
    }
    with server.feed.subscribe() as events:
        await server.asgi(scope, receive, send)
        assert manager.ended.is_set()
        assert (await anext(events)).finish_reason == "cancelled"


# Numbers as text


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


def test_the_name_of_the_model_is_escaped():
    odd = Embeddings(vectors=np.zeros((1, 1), dtype=np.float32), report=replace(REPORT, model='odd "name"\n'))
    assert json.loads(embedding_list(odd))["model"] == 'odd "name"\n'


async def test_many_numbers_are_written_in_another_thread(monkeypatch):
    moved = []
    to_thread = asyncio.to_thread

    async def noted(work, *args, **kwargs):
        moved.append(work)
        return await to_thread(work, *args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    few, many = FakeEncoder(vectors=np.zeros((2, 384))), FakeEncoder(vectors=np.zeros((100, 384)))
    for manager in (few, many):
        assert (await post(manager, PATH, body())).status_code == 200
    assert moved == [embedding_list]
