"""Tests of the WebSocket /v1/chat/stream with the ``websockets`` client: specification sections 4.1 and 2.4."""

import json
import logging
import socket as stream
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from lmx_lab.http.uvicorn_server import bind
from lmx_lab.notebook.lab import Lab
from lmx_lab.settings import Settings
from tests.support.asking import ENDLESS, echo_body
from tests.support.labs import manager_of, wait_until_idle
from tests.support.waiting import until


@pytest.fixture
def socket(lab):
    with connect(address(lab)) as socket:
        yield socket
    wait_until_idle(lab)


def address(lab):
    return lab.url.replace("http", "ws") + "/v1/chat/stream"


def ask(socket, **changes):
    socket.send(json.dumps(echo_body(**changes)))


def receive(socket):
    return json.loads(socket.recv(timeout=30))


def receive_all(socket):
    messages = [receive(socket)]
    while "done" not in messages[-1] and "error" not in messages[-1]:
        messages.append(receive(socket))
    return messages


def test_tokens_are_followed_by_statistics(socket):
    ask(socket)
    stats = receive_all(socket)[-1]["stats"]
    assert stats["tokens_per_second"] > 0
    assert (stats["completion_tokens"], stats["finish_reason"]) == (8, "length")
    assert 0 < stats["ttft_ms"] <= stats["total_ms"]


@pytest.mark.parametrize(
    ("message", "code", "part"),
    [
        ("{", "invalid-request", "not valid JSON"),
        ("[]", "invalid-request", "must be a JSON object"),
        ('{"model": NaN}', "invalid-request", "not valid JSON"),
        (json.dumps({"model": "echo"}), "invalid-request", "messages: Field required"),
        (b"\x00\x01", "invalid-request", "is a binary message"),
        pytest.param('{"n": [' + "{}," * 300_000 + "{}]}", "body-too-large", "50,000 lists and objects", id="large"),
        (json.dumps(echo_body(n=2)), "invalid-request", "n is 2, but a WebSocket carries one answer"),
    ],
)
def test_an_invalid_message_is_answered_and_the_connection_closed(socket, message, code, part, caplog):
    socket.send(message)
    error = receive(socket)["error"]
    assert (error["code"], part in error["message"]) == (code, True), error
    with pytest.raises(ConnectionClosed):
        socket.recv(timeout=30)
    assert socket.close_code == (1009 if code == "body-too-large" else 1008)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_request_without_a_loaded_model_may_succeed_later(tmp_path, caplog):
    with Lab(Settings(home=tmp_path, port=0), loop="thread") as empty, connect(address(empty)) as socket:
        ask(socket)
        assert receive(socket)["error"]["code"] == "no-model-loaded"
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=30)
        assert socket.close_code == 1013
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the WebSocket request failed: " in warning.getMessage()


def test_logprobs_are_sent_with_their_tokens_on_request(socket):
    ask(socket, logprobs=True, top_logprobs=1)
    *tokens, _ = receive_all(socket)
    content = [logprob for message in tokens for logprob in message["logprobs"]]
    assert len(content) == 8
    assert all(len(logprob["top_logprobs"]) == 1 for logprob in content)


def test_a_second_message_is_refused_and_the_first_answer_continues(socket):
    ask(socket, max_tokens=60, ignore_eos=True)
    first = receive(socket)
    ask(socket)
    messages = [first]
    while "done" not in messages[-1]:
        messages.append(receive(socket))
    errors = [message["error"]["code"] for message in messages if "error" in message]
    assert errors == ["invalid-request"]
    assert messages[-1]["stats"]["completion_tokens"] == 60


@pytest.mark.long
def test_a_client_that_closes_with_a_servers_code_leaves_the_queue(lab):
    with connect(address(lab)) as first, connect(address(lab)) as second, connect(address(lab)) as third:
        for running in (first, second):
            ask(running, **ENDLESS)
            receive(running)
        ask(third, **ENDLESS)
        until(lambda: manager_of(lab).snapshot.queued_requests == 1)
        read = read_tokens(lab)
        third.close(1012)
        until(lambda: manager_of(lab).snapshot.queued_requests == 0)
    wait_until_idle(lab)
    assert read_tokens(lab) == read, "it was begun, for nobody"


def read_tokens(lab):
    return manager_of(lab).snapshot.totals.prompt_tokens + manager_of(lab).snapshot.totals.cached_tokens


@pytest.mark.long
@pytest.mark.slow
def test_a_slow_client_receives_the_error_of_a_server_that_stops(echo_home):
    listening, client = bind("127.0.0.1", 0, explicit=True), stream.socket()
    listening.setsockopt(stream.SOL_SOCKET, stream.SO_SNDBUF, 2**12)
    client.setsockopt(stream.SOL_SOCKET, stream.SO_RCVBUF, 2**12)
    lab = Lab(Settings(home=echo_home, port=0), loop="thread")
    lab.start(listening)
    with lab, ThreadPoolExecutor() as aside:
        lab.load("echo")
        client.connect(("127.0.0.1", lab.server.port))
        with connect(address(lab), sock=client, max_queue=1, max_size=None) as socket:
            ask(socket, max_tokens=1500, ignore_eos=True, logprobs=True, top_logprobs=20)
            receive(socket)
            until(lambda: manager_of(lab).snapshot.totals.output_tokens > 600)
            stopping = aside.submit(lab.stop)
            wait_until_idle(lab)
            # The server closes next. Less than a tenth of the answer of more than a megabyte is in transit.
            time.sleep(0.5)
            *tokens, last = receive_all(socket)
            # If the 1500 tokens take less than the 3 s that a stop allows, the answer has no error.
            assert last.get("done") or last["error"]["code"] == "no-model-loaded"
            assert len(json.dumps(tokens)) > 2**20
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=30)
            stopping.result(60)


@pytest.mark.parametrize("more", [b"", b"\x88\x80\0\0\0\0"], ids=["alone", "with the client's close behind it"])
def test_a_message_that_is_not_utf_8_closes_the_connection(socket, caplog, more):
    with caplog.at_level(logging.ERROR):
        socket.socket.sendall(b"\x81\x81\0\0\0\0\xff" + more)
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=30)
    assert socket.close_code == (1005 if more else 1007)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
