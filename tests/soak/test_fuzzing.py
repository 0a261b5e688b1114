"""Test what the fuzz part sends, and that it detects wrong answers."""

import asyncio
import json
import re

import numpy as np
import pytest
from safetensors.numpy import save

from lmx_lab.engine import ModelManager
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.server import create_server
from lmx_lab.settings import Settings
from soak.fuzzing import corpus
from soak.fuzzing.checks import answer_problems, socket_problems
from soak.fuzzing.exchange import Endpoint, HttpClient, Outcome
from soak.fuzzing.families import families
from soak.fuzzing.frames import BINARY, TEXT, SocketCase, frame
from soak.fuzzing.requests import Case
from soak.fuzzing.values import Raw, changed_body, draw_cases, json_paths, replace_at, to_json
from tests.support.sockets import answering

pytestmark = pytest.mark.long

WHOLE = Case(wire=b"POST / HTTP/1.1\r\nhost: HOST\r\ncontent-length: 2\r\n\r\n{}", method="POST")
NOT_LOADED = frozenset({(503, "no-model-loaded")})


def test_requests_to_all_routes_of_the_inference_server_are_generated():
    policy = GuardPolicy(hosts=frozenset())
    api = create_server(manager=ModelManager(Settings()), policy=lambda: policy).api
    requests = [
        *(corpus.CHAT + corpus.COMPLETIONS + corpus.OLLAMA + corpus.TOKENS + corpus.RESPONSES + corpus.MESSAGES),
        *(corpus.EMBEDDINGS + corpus.RERANK + corpus.ADMIN + corpus.PAGES + corpus.SERVER_EVENTS),
    ]
    missing = [
        f"{method} {path}"
        for path, operations in api.openapi()["paths"].items()
        for method in operations
        if path != "/v1/chat/stream"
        and not any(
            each.method == method.upper() and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), each.path.split("?")[0])
            for each in requests
        )
    ]
    assert missing == []


def envelope(code="invalid-request", **changes):
    error = {"code": code, "message": "no", "type": "t", "param": None, "retryable": False, "request_id": "req_1"}
    return json.dumps({"error": error | changes}).encode()


def answered(status, body, kind="application/json"):
    return f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def exchanged(answer, case=WHOLE, limit_s=5):
    """Send a case to a server that answers so; return the outcome and its problems."""

    async def exchange(port):
        client = HttpClient(Endpoint("127.0.0.1", port, limit_s=limit_s))
        try:
            return await client.exchange(case)
        finally:
            await client.close()

    with answering(answer) as server:
        outcome = asyncio.run(exchange(int(server.url.rpartition(":")[2])))
    return outcome, list(answer_problems(case, outcome, NOT_LOADED))


@pytest.mark.parametrize(
    "answer",
    [
        answered(200, b'{"id": 1}'),
        answered(400, envelope()),
        answered(503, envelope("no-model-loaded")),
        answered(400, b"Invalid HTTP request received.", "text/plain"),
        answered(200, b'data: {"a": 1}\n\n: still there\n\ndata: [DONE]\n\n', "text/event-stream"),
        answered(200, b'{"a": 1, "done": false}\n{"done": true}\n', "application/x-ndjson"),
        answered(200, save({"logits": np.zeros(2)}), "application/x-safetensors"),
        answered(404, b'{"error": "none", "code": "model-not-found", "request_id": "r"}'),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answered(200, b"{}"),
    ],
)
def test_valid_answers_and_declared_refusals_have_no_problems(answer):
    outcome, wrong = exchanged(answer)
    assert outcome.ended == "answered"
    assert wrong == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (answered(500, envelope("internal-error")), "500"),
        (answered(503, envelope("queue-full")), "503"),
        (answered(422, b'{"detail": []}'), "fields of an error"),
        (answered(500, b"Internal Server Error", "text/plain"), "fields of an error"),
        (answered(400, envelope(message="")), "no code or message"),
        (answered(400, envelope(more=1)), "fields"),
        (answered(400, b'{"type": "error", "error": {"type": "t", "message": "m"}}'), "fields"),
        (answered(400, envelope(message="x" * 20_000)), "bytes"),
        (answered(200, b'{"a": NaN}'), "not JSON"),
        (answered(200, b'{"a": "\\ud800"}'), "not JSON"),
        (answered(200, b'data: {"a": 1}\n\n', "text/event-stream"), "ends with"),
        (answered(200, b'data: {"a": 1}\n\ndata: [DO', "text/event-stream"), "in the middle"),
        (answered(200, b'{"done": false}\n', "application/x-ndjson"), "ends with"),
        (answered(200, b'{"done": true}', "application/x-ndjson"), "in the middle"),
        (answered(200, save({"logits": np.zeros(2)})[:-1], "application/x-safetensors"), "safetensors"),
        (answered(500, b'{"error": "a bug", "code": "internal-error"}'), "500"),
        (answered(200, b"x", "image/png"), "image/png"),
        (answered(200, b"{}")[:-1], "in the middle"),
        (b"", "without an answer"),
        (b"nonsense\r\n\r\n", "not HTTP"),
    ],
)
def test_each_problem_of_an_answer_is_named(answer, problem):
    _, problems = exchanged(answer)
    assert any(problem in each for each in problems), problems


def test_a_missing_answer_counts_as_hung():
    async def exchange():
        connected = asyncio.Event()
        silent = await asyncio.start_server(lambda reader, writer: connected.set(), "127.0.0.1", 0)
        async with silent:
            return await HttpClient(Endpoint(*silent.sockets[0].getsockname()[:2], limit_s=0.2)).exchange(WHOLE)

    outcome = asyncio.run(exchange())
    assert outcome.ended == "hung"
    assert list(answer_problems(WHOLE, outcome, NOT_LOADED)) != []


SOCKET = SocketCase(handshake=b"", frames=b"", valid=True, answered=True, end="close")


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        ({"messages": []}, "no answer"),
        ({"messages": [{"done": True}, {"done": True}]}, "2 ends"),
        ({"messages": [{"token": "a"}], "close_code": 1011}, "1011"),
        ({"messages": [{"error": json.loads(envelope("internal-error"))["error"]}]}, "internal"),
        ({"messages": [{"done": True}], "close_code": 77}, "77"),
        ({"status": 500, "body": b"oh"}, "refused with 500"),
        ({"ended": "hung"}, "no end within"),
        ({"ended": "broken", "detail": "a masked frame"}, "masked"),
    ],
)
def test_each_problem_of_a_socket_is_named(outcome, problem):
    given = {"ended": "answered", "status": 101, **outcome}
    assert any(problem in each for each in socket_problems(SOCKET, Outcome(**given), NOT_LOADED))


@pytest.mark.parametrize("messages", [[{"token": "a"}, {"done": True}], [json.loads(envelope())]])
def test_a_valid_socket_has_no_problems(messages):
    outcome = Outcome(ended="answered", status=101, messages=messages, close_code=1000)
    assert list(socket_problems(SOCKET, outcome, NOT_LOADED)) == []


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_the_same_seed_draws_the_same_requests_and_another_seed_draws_others(family):
    first = draw_cases(family.draw, "0/0", 30)
    assert len(first) == 30
    assert draw_cases(family.draw, "0/0", 30) == first
    assert draw_cases(family.draw, "1/0", 30) != first


def test_most_bodies_are_changed_and_some_are_not_json():
    good = corpus.CHAT_BODIES[0]
    bodies = draw_cases(lambda chance: changed_body(chance, good, corpus.CHAT_BODIES), "bodies", 200)
    texts = [to_json(body) for body in bodies]
    assert sum(text != to_json(good) for text in texts) > 180

    def is_json(text):
        try:
            json.loads(text, parse_constant=lambda name: 1 / 0)
        except (ValueError, RecursionError, ZeroDivisionError):
            return False
        return True

    assert 0 < sum(map(is_json, texts)) < 200


def test_a_change_does_not_modify_the_original():
    good = {"a": [1, {"b": 2}]}
    assert replace_at(good, ("a", 1, "b"), lambda _: Raw("1e400")) == {"a": [1, {"b": Raw("1e400")}]}
    assert good == {"a": [1, {"b": 2}]}
    assert json_paths(good) == [(), ("a",), ("a", 0), ("a", 1), ("a", 1, "b")]
    assert to_json({"a": [Raw("1e400"), "\ud800", True, None, 2**70]}) == f'{{"a":[1e400,"\\ud800",true,null,{2**70}]}}'


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536])
def test_the_websockets_library_can_read_the_frames(size):
    from websockets.frames import Frame
    from websockets.streams import StreamReader

    payload = bytes(number % 251 for number in range(size))
    reader = StreamReader()
    reader.feed_data(frame(BINARY, payload) + frame(TEXT, b"{}", fin=False))
    read = []
    for _ in range(2):
        # The generator stops with the frame, because all data is there.
        with pytest.raises(StopIteration) as parsed:
            next(Frame.parse(reader.read_exact, mask=True))
        read.append(parsed.value.value)
    assert [(each.opcode, bytes(each.data), each.fin) for each in read] == [(2, payload, True), (1, b"{}", False)]
