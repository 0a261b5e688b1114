"""The shapes of /v1/embeddings, and how its numbers become text."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lmx_lab.engine import EmbeddingRequest, Embeddings
from lmx_lab.errors import EngineError, InvalidRequestError, NotLoadedError, OtherModelLoadedError
from lmx_lab.server.embeddings import embedding_list
from lmx_lab.values.engine import EngineSnapshot, PinnedModel
from lmx_lab.wire.admin import RequestEvent
from lmx_lab.wire.embeddings import INPUT_LIMIT, EmbeddingList
from tests.server.conftest import ENTRY
from tests.server.encoder import EMBEDDER, REPORT, FakeEncoder, Shelf, client_of, post, refused, server_of

pytestmark = pytest.mark.anyio
PATH = "/v1/embeddings"


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "minilm", "input": ["a", "bcd"], **changes}


async def test_the_answer_has_the_formats_shape() -> None:
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


async def test_base64_is_of_little_endian_float32() -> None:
    response = await post(FakeEncoder(), PATH, body(encoding_format="base64"))
    (first, _) = response.json()["data"]
    assert base64.b64decode(first["embedding"]) == np.array([1.0, 0.5], dtype="<f4").tobytes()


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("text", ("text",)),
        ("", ("",)),
        (["a", ""], ("a", "")),
        ([5, 6], ((5, 6),)),
        ([[5, 6], [0]], ((5, 6), (0,))),
        (["ü🙂\u0000\n"], ("ü🙂\u0000\n",)),
    ],
)
async def test_every_shape_of_input_is_understood(given: Any, inputs: tuple[Any, ...]) -> None:
    engine = FakeEncoder()
    assert (await post(engine, PATH, body(input=given))).status_code == 200
    assert engine.asked == [EmbeddingRequest(inputs=inputs, model="minilm")]


async def test_what_is_asked_for_reaches_the_engine() -> None:
    engine = FakeEncoder()
    wishes = {"model": "default", "dimensions": 64.0, "truncate": True, "input_type": "search_query", "user": "me"}
    await post(engine, PATH, body(**wishes))
    await post(engine, PATH, body(input_type="document"))
    asked = EmbeddingRequest(inputs=("a", "bcd"), dimensions=64, truncate=True, input_type="query")
    assert engine.asked == [asked, EmbeddingRequest(inputs=("a", "bcd"), model="minilm", input_type="document")]


async def test_null_means_the_default() -> None:
    engine = FakeEncoder()
    names = ("encoding_format", "dimensions", "truncate", "input_type", "user")
    assert (await post(engine, PATH, body(**dict.fromkeys(names)))).status_code == 200
    assert engine.asked == [EmbeddingRequest(inputs=("a", "bcd"), model="minilm")]


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
async def test_a_wrong_field_is_named_before_the_engine_is_asked(changes: dict[str, Any], param: str) -> None:
    engine = FakeEncoder()
    error = await refused(engine, PATH, body(**changes))
    assert (error["code"], error["param"]) == ("invalid-request", param)
    assert engine.asked == []


async def test_too_many_inputs_are_refused_with_the_limit() -> None:
    assert (await post(FakeEncoder(), PATH, body(input=["a"] * INPUT_LIMIT))).status_code == 200
    error = await refused(FakeEncoder(), PATH, body(input=["a"] * (INPUT_LIMIT + 1)))
    assert f"{INPUT_LIMIT + 1} items" in error["message"]
    assert str(INPUT_LIMIT) in error["message"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
async def test_what_is_no_number_is_an_error_and_not_json(wrong: float) -> None:
    error = await refused(FakeEncoder(vectors=[[1.0, wrong]]), PATH, body(), 500)
    assert "minilm" in error["message"]


@pytest.mark.parametrize(
    ("failure", "status"),
    [(InvalidRequestError("too large", param="dimensions"), 400), (EngineError("broken"), 500), (KeyError("bug"), 500)],
)
async def test_the_engines_refusal_is_handed_on(failure: Exception, status: int) -> None:
    error = await refused(FakeEncoder(failure=failure), PATH, body(), status)
    assert ("bug" in error["message"]) is False


# Models that are not there


async def test_an_unknown_name_is_404_with_what_is_loaded() -> None:
    engine = FakeEncoder(failure=OtherModelLoadedError("x is not loaded", param="model"))
    error = await refused(engine, PATH, body(model="x"), 404)
    assert (error["code"], error["param"]) == ("model-not-found", "model")
    assert "minilm is loaded" in error["message"]


async def test_what_is_on_disk_only_is_503() -> None:
    engine = FakeEncoder(failure=OtherModelLoadedError("other is not loaded, minilm is"))
    shelf = Shelf((EMBEDDER, replace(EMBEDDER, id="other")))
    error = await refused(engine, PATH, body(model="other"), 503, shelf)
    assert error["code"] == "no-model-loaded"
    assert "--swap" in error["message"]


async def test_a_chat_model_on_disk_is_the_wrong_kind() -> None:
    error = await refused(FakeEncoder(failure=OtherModelLoadedError("no")), PATH, body(model=ENTRY.id))
    assert (error["code"], error["param"]) == ("invalid-request", "model")
    assert "chat model" in error["message"]


@pytest.mark.parametrize(("shelf", "remedy"), [(Shelf(), "minilm"), (Shelf(()), "lmx-lab pull minilm-l6")])
async def test_with_no_such_model_in_memory_it_is_said_what_to_load(shelf: Shelf, remedy: str) -> None:
    engine = FakeEncoder(failure=NotLoadedError("none"), snapshot=EngineSnapshot(state="ready", entry=ENTRY))
    error = await refused(engine, PATH, body(model="default"), 503, shelf)
    assert error["code"] == "no-model-loaded"
    assert remedy in error["message"]


async def test_programs_here_may_name_a_pinned_model_by_its_path() -> None:
    pinned = replace(EMBEDDER, path=ENTRY.path / "pinned")
    snapshot = EngineSnapshot(state="ready", entry=ENTRY, pinned=(PinnedModel(entry=pinned, memory_bytes=1),))
    engine = FakeEncoder(snapshot=snapshot)
    await post(engine, PATH, body(model=str(pinned.path)))
    assert engine.asked[0].model == "minilm"


# Ends


@pytest.mark.parametrize(
    ("failure", "outcome", "code"),
    [(None, "stop", None), (NotLoadedError("no"), "error", "no-model-loaded"), (KeyError(), "error", "internal-error")],
)
async def test_each_end_is_told_once(failure: Exception | None, outcome: str, code: str | None) -> None:
    engine = FakeEncoder(failure=failure)
    server = server_of(engine)
    with server.feed.subscribe() as events:
        asked = asyncio.ensure_future(server.encoding.embed(EmbeddingRequest(inputs=("a",)), "req_1"))
        await asyncio.wait([asked])
        server.feed.close()
        told = [event async for event in events]
    assert (asked.exception() is None) is (failure is None)
    good = failure is None
    assert told == [
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


async def test_ends_are_counted_by_kind() -> None:
    async with client_of(FakeEncoder()) as client:
        await client.post(PATH, json=body())
        await client.post("/rerank", json={"query": "q", "texts": ["a"]})
        await client.post(PATH, json=body(input=[]))
        figures = (await client.get("/metrics")).text.splitlines()
    for kind in ("embedding", "rerank"):
        assert f'lmx_lab_requests_total{{code="",kind="{kind}",outcome="stop"}} 1.0' in figures
        assert f'lmx_lab_encode_seconds_sum{{kind="{kind}"}} 0.75' in figures


async def test_leaving_gives_the_work_up() -> None:
    engine = FakeEncoder(endless=True)
    server = server_of(engine)
    content = json.dumps(body()).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await engine.begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
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
        assert engine.given_up.is_set()
        assert (await anext(events)).finish_reason == "cancelled"


# Text of numbers


def parsed(vectors: Any) -> Any:
    answer = json.loads(embedding_list(Embeddings(vectors=vectors, report=REPORT)))
    return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32).reshape(vectors.shape)


@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 8)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_every_float32_survives_its_text(vectors: Any) -> None:
    assert np.array_equal(parsed(vectors), vectors)


def test_the_text_is_about_as_short_as_a_float32_needs() -> None:
    vectors = np.random.default_rng(0).standard_normal((700, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.array_equal(parsed(vectors), vectors)
    assert len(embedding_list(Embeddings(vectors=vectors, report=REPORT))) < 14 * vectors.size


def test_a_models_name_is_json_too() -> None:
    odd = Embeddings(vectors=np.zeros((1, 1), dtype=np.float32), report=replace(REPORT, model='odd "name"\n'))
    assert json.loads(embedding_list(odd))["model"] == 'odd "name"\n'


async def test_many_numbers_become_text_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    to_thread = asyncio.to_thread

    async def noted(work: Any, *args: Any, **kwargs: Any) -> Any:
        moved.append(work)
        return await to_thread(work, *args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    few, many = FakeEncoder(vectors=np.zeros((2, 384))), FakeEncoder(vectors=np.zeros((100, 384)))
    for engine in (few, many):
        assert (await post(engine, PATH, body())).status_code == 200
    assert moved == [embedding_list]
