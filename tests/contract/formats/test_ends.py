"""Tests of requests whose answers do not end normally, in every format: errors, and clients that disconnect."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from http.client import HTTPResponse

import httpx2
import pytest

from lmx_lab.engine import Answer
from tests.support.asking import ENDLESS_TEXT
from tests.support.formats import FORMATS, Chat, Request, Socket, each_format
from tests.support.labs import PACE, manager_of, serving, wait_until_idle
from tests.support.waiting import until

ENDLESS = Request(messages=[{"role": "user", "content": ENDLESS_TEXT}], max_tokens=30_000)
"""A request whose answer of ten seconds no test reads to its end."""
HTTP_FORMATS = [form for form in FORMATS if "http" in form.can]


# Errors


@dataclass(frozen=True)
class Refusal:
    """An invalid request, and its error."""

    request: Request
    status: int
    code: str
    message: str


REFUSALS = {
    "unknown model": Refusal(Request(model="unheard-of"), 404, "model-not-found", "unheard-of"),
    "model not loaded": Refusal(Request(model="other"), 503, "no-model-loaded", "other is not loaded"),
    "prompt too long": Refusal(
        Request(messages=[{"role": "user", "content": "a " * 40_000}]),
        400,
        "context_length_exceeded",
        "maximum context length is",
    ),
    "field": Refusal(Request(max_tokens="many"), 400, "invalid-request", "should be a valid integer"),
}


@pytest.mark.parametrize("case", REFUSALS)
@each_format()
def test_a_refused_request_gets_its_error_before_the_first_byte(form, http, case):
    expected = REFUSALS[case]
    status, problem = form.refusal(http, expected.request)
    assert status == (expected.status if "http" in form.can else None)
    assert (problem.code, problem.kind) == (expected.code, form.kinds.get(expected.status))
    assert expected.message in problem.message


# The words and the code with which agents recognize that they have to shorten their conversation.
TOO_LONG = {
    "LiteLLM": r"(?i)this model's maximum context length is",
    "pi and opencode": r"(?i)maximum context length is \d+ tokens",
    "Claude Code": r"prompt is too long[^0-9]*(\d+) tokens > (\d+)",
}


@pytest.mark.parametrize("agent", TOO_LONG)
@each_format("http")
def test_agents_recognize_a_prompt_that_is_too_long_streamed_or_not(form, http, agent):
    request = REFUSALS["prompt too long"].request
    _, refused = form.refusal(http, request)
    response = http.post(form.path, json=form.body(request, stream=True))
    streamed = form.frames(response.text)[-1] if response.is_success else response.json()
    assert re.search(TOO_LONG[agent], refused.message)
    assert (form.problem(streamed).code, form.problem(streamed).message) == (refused.code, refused.message)


@each_format()
def test_a_failing_answer_ends_with_its_error_after_its_text(form, tmp_path):
    failing = {"text": "one two", "error": "broken", "code": "internal-error"}
    script = tmp_path / "script.jsonl"
    script.write_text(f"{json.dumps(failing)}\n" * 2)
    with serving(tmp_path, "echo", echo_script=script) as lab, httpx2.Client(base_url=lab.url) as http:
        *frames, last = form.frames(form.streamed(http, Request()))
        whole = form.post(http, Request())
        wait_until_idle(lab)
    assert form.partial_text(frames) == "one two"
    streamed = form.problem(last)
    assert streamed.code == form.stream_codes.get("internal-error", "internal-error")
    assert streamed.kind in (None, form.kinds.get(500))
    assert "broken" in streamed.message
    problem = form.problem(whole.json())
    assert (whole.status_code, problem.code, problem.kind) == (500, "internal-error", form.kinds.get(500))
    assert "broken" in problem.message


@each_format()
def test_a_request_that_is_stopped_ends_with_its_error(form, lab, http):
    def stop():
        until(lambda: any(each.completion_tokens for each in lab.clients()))
        (request,) = lab.clients()
        assert (request.client, request.kind, request.model, request.state) == ("127.0.0.1", "chat", "echo", "running")
        assert request.prompt_tokens > 10_000
        return lab.stop_request(request.id) == request.id

    with ThreadPoolExecutor() as threads:
        stopping = threads.submit(stop)
        whole = form.post(http, ENDLESS)
        assert stopping.result()
        stopping = threads.submit(stop)
        *frames, last = form.frames(form.streamed(http, ENDLESS))
        assert stopping.result()
    assert form.partial_text(frames).startswith("a")
    code, problem = form.stream_codes.get("request-stopped", "request-stopped"), form.problem(last)
    assert (problem.code, "stopped on the server" in problem.message) == (code, True)
    assert (whole.status_code, form.problem(whole.json()).code) == (410, "request-stopped")
    wait_until_idle(lab)
    assert lab.clients() == []


@each_format()
def test_an_unexpected_exception_ends_an_answer_with_an_error_after_its_text(form, lab, http, monkeypatch):
    # No input causes an exception of this kind, which is a fault of the server itself.
    next_delta = Answer.__anext__

    async def fail_after_text(answer):
        if getattr(answer, "was_read", False):
            raise RuntimeError("a bug")
        answer.was_read = True
        return await next_delta(answer)

    monkeypatch.setattr(Answer, "__anext__", fail_after_text)
    *frames, last = form.frames(form.streamed(http, Request()))
    wait_until_idle(lab)
    assert form.partial_text(frames)
    problem = form.problem(last)
    assert problem.code == form.stream_codes.get("internal-error", "internal-error")
    assert problem.kind in (None, form.kinds.get(500))
    assert "bug" not in problem.message
    assert re.search(r"the log contains the details for req_\w+", problem.message)


@each_format()
def test_a_full_queue_refuses_a_request_with_the_time_to_wait(form, lab, http):
    with ExitStack() as running:
        for _ in range(4):
            running.enter_context(Chat().stream(http, ENDLESS))
        status, problem = form.refusal(http, Request())
        response = form.post(http, Request())
    assert (problem.code, problem.kind) == ("queue-full", form.kinds.get(429))
    assert problem.retryable in (None, True)
    assert (status, response.status_code) == (429 if "http" in form.can else None, 429)
    assert int(response.headers["retry-after"]) >= 1
    wait_until_idle(lab)


@pytest.fixture(scope="module")
def hurried_lab(echo_home):
    """Run a server whose answers may take 0.2 s."""
    with serving(echo_home, "echo", request_timeout_s=0.2, echo_tokens_per_s=PACE) as lab:
        yield lab


@each_format()
def test_an_answer_at_its_deadline_ends_with_an_error(form, hurried_lab):
    with httpx2.Client(base_url=hurried_lab.url, timeout=60) as http:
        *frames, last = form.frames(form.streamed(http, ENDLESS))
        whole = form.post(http, ENDLESS)
    assert form.partial_text(frames)
    streamed, problem = form.problem(last), form.problem(whole.json())
    assert streamed.code == form.stream_codes.get("lmx-timeout", "lmx-timeout")
    assert streamed.kind in (None, form.kinds.get(504))
    assert (whole.status_code, problem.code, problem.kind) == (504, "lmx-timeout", form.kinds.get(504))
    assert problem.retryable in (None, False)
    assert whole.headers["x-should-retry"] == "false"


@pytest.mark.slow
def test_a_server_that_stops_ends_all_answers_with_an_error(echo_home):
    # All formats share one server, because running answers have 2.5 s to end.
    answers = len(FORMATS) + len(HTTP_FORMATS)
    with (
        serving(echo_home, "echo", slots=answers, echo_tokens_per_s=100) as lab,
        httpx2.Client(base_url=lab.url, timeout=60) as http,
        ThreadPoolExecutor(answers) as pool,
    ):
        streams = {form: pool.submit(form.streamed, http, ENDLESS) for form in FORMATS}
        wholes = {form: pool.submit(form.post, http, ENDLESS) for form in HTTP_FORMATS}
        until(lambda: manager_of(lab).snapshot.active_requests == answers)
        lab.stop()
        for form, stream in streams.items():
            *frames, last = form.frames(stream.result(60))
            assert form.partial_text(frames), form.name
            problem = form.problem(last)
            assert problem.code == form.stream_codes.get("no-model-loaded", "no-model-loaded"), form.name
            assert "stop" in problem.message, form.name
        for form, whole in wholes.items():
            response = whole.result(60)
            problem = form.problem(response.json())
            expected = (503, "no-model-loaded", form.kinds.get(503))
            assert (response.status_code, problem.code, problem.kind) == expected, form.name


# Clients that disconnect, wait or do not read


@pytest.mark.parametrize("phase", ["queued", "running"])
@pytest.mark.parametrize(
    ("form", "stream"),
    [
        pytest.param(form, stream, id=f"{form.name}-{'stream' if stream else 'whole'}")
        for form in FORMATS
        for stream in ((True, False) if "http" in form.can else (True,))
    ],
)
def test_a_request_ends_when_its_client_disconnects(lab, http, form, stream, phase):
    before = manager_of(lab).snapshot.totals
    with ExitStack() as others:
        if phase == "queued":
            for _ in range(2):
                others.enter_context(Chat().stream(http, ENDLESS))
            until(lambda: manager_of(lab).snapshot.active_requests == 2)
        with form.unread(lab.server.port, ENDLESS, stream=stream):
            if phase == "queued":
                until(lambda: manager_of(lab).snapshot.queued_requests == 1)
            else:
                until(lambda: manager_of(lab).snapshot.totals.output_tokens > before.output_tokens)
        until(lambda: manager_of(lab).snapshot.queued_requests == 0)
    wait_until_idle(lab)
    assert manager_of(lab).snapshot.totals.output_tokens - before.output_tokens < 10_000
    assert form.answer(form.post(http, Request()).json()).text == "hello"


@pytest.mark.parametrize("stream", [True, False])
@each_format("http")
def test_a_client_that_ends_only_its_own_side_gets_its_answer(lab, http, form, stream):
    with ExitStack() as others:
        for _ in range(2):
            others.enter_context(Chat().stream(http, ENDLESS))
        with form.unread(lab.server.port, Request(), stream=stream) as connection:
            until(lambda: manager_of(lab).snapshot.queued_requests == 1)
            connection.shutdown(socket.SHUT_WR)
            # The server sends something that is not part of the answer, to see whether the client is there.
            begun = connection.recv(12, socket.MSG_PEEK)
            others.close()
            response = HTTPResponse(connection)
            response.begin()
            text = response.read().decode()
            assert connection.recv(1) == b"", "the connection is closed"
    assert begun.startswith(b"HTTP/1.1 ")
    body = form.assemble(form.frames(text)) if stream else json.loads(text)
    assert form.answer(body).text == "hello"
    wait_until_idle(lab)


@each_format("http")
def test_the_stream_to_a_client_with_http_1_0_has_no_chunks(lab, form):
    request = json.dumps(form.body(Request(), stream=True)).encode()
    head = f"POST {form.path} HTTP/1.0\r\nhost: localhost:{lab.server.port}\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", lab.server.port), timeout=60) as connection:
        connection.sendall(f"{head}content-length: {len(request)}\r\n\r\n".encode() + request)
        response = HTTPResponse(connection)
        response.begin()
        text = response.read().decode()
    assert response.headers["transfer-encoding"] is None
    assert form.answer(form.assemble(form.frames(text))).text == "hello"


@pytest.mark.parametrize("stream", [True, False])
@each_format("http")
def test_a_request_ends_when_its_client_leaves_after_it_has_ended_its_own_side(lab, form, stream):
    before = manager_of(lab).snapshot.totals
    with form.unread(lab.server.port, ENDLESS, stream=stream) as connection:
        connection.shutdown(socket.SHUT_WR)
        until(lambda: manager_of(lab).snapshot.totals.output_tokens > before.output_tokens)
    wait_until_idle(lab)
    assert manager_of(lab).snapshot.totals.output_tokens - before.output_tokens < 25_000


@pytest.mark.slow
def test_a_stream_that_waits_keeps_its_connection_alive(echo_home):
    # All formats wait for the same slot, because the server sends something after 5 s of silence. The connection of a
    # WebSocket is kept alive by the pings of its protocol.
    with (
        serving(echo_home, "echo", slots=1, queue_limit=len(FORMATS), echo_tokens_per_s=100) as lab,
        httpx2.Client(base_url=lab.url, timeout=60) as http,
        ExitStack() as waiting,
    ):
        with Chat().stream(http, ENDLESS):
            streams = {form: waiting.enter_context(form.stream(http, Request())) for form in HTTP_FORMATS}
            begun = dict.fromkeys(streams, "")
            for form, pieces in streams.items():
                while not form.keeps_alive(begun[form]):
                    begun[form] += next(pieces)
            # Benchmarks take the first chunk for the first token.
            assert [form.name for form in streams if "data: " not in begun[form]][:2] == ["chat", "completions"]
        for form, pieces in streams.items():
            body = form.assemble(form.frames(begun[form] + "".join(pieces)))
            assert form.answer(body).text == "hello", form.name


NOTICED = "the client has accepted no data"


def unread_stream(lab, form, request=ENDLESS):
    """Request a stream and read nothing of it. In the chat format, its answer is large."""
    large = {"logprobs": True, "top_logprobs": 20} if form.name in (Chat.name, Socket.name) else {}
    return form.unread(lab.server.port, replace(request, extra=large), buffer_bytes=4096)


def read_until(connection, end=None):
    """Read until the data contains ``end``, or the server closes the connection."""
    data = b""
    with suppress(ConnectionError):
        while (end is None or end not in data) and (piece := connection.recv(65536)):
            data += piece
    return data


# Clients of a WebSocket that read nothing answer no pings either, and are then disconnected for this reason.
@pytest.mark.slow
def test_a_client_that_accepts_no_data_is_disconnected_and_its_generation_cancelled(echo_home, caplog):
    with serving(echo_home, "echo", echo_tokens_per_s=PACE, slow_client_s=1) as lab:
        with ExitStack() as unread:
            connections = [unread.enter_context(unread_stream(lab, form)) for form in HTTP_FORMATS]
            until(lambda: caplog.text.count(NOTICED) == len(HTTP_FORMATS))
            for form, connection in zip(HTTP_FORMATS, connections, strict=True):
                assert form.end.encode() not in read_until(connection), form.name
        wait_until_idle(lab)
        metrics = httpx2.get(f"{lab.url}/metrics").text
        assert 0 < manager_of(lab).snapshot.totals.output_tokens < len(HTTP_FORMATS) * 10_000
    assert "Traceback" not in caplog.text
    cancelled = re.findall(r"lmx_lab_requests_total.*cancelled.* ([0-9.]+)", metrics)
    assert sum(map(float, cancelled)) == len(HTTP_FORMATS)


@pytest.mark.slow
def test_slots_for_which_others_wait_are_free_earlier(echo_home, caplog):
    limits = {"slots": len(FORMATS), "queue_limit": len(FORMATS), "slow_client_s": 3600, "echo_tokens_per_s": PACE}
    with (
        serving(echo_home, "echo", **limits) as lab,
        httpx2.Client(base_url=lab.url, timeout=60) as http,
        ExitStack() as open_streams,
    ):
        connections = {form: open_streams.enter_context(unread_stream(lab, form)) for form in FORMATS}
        until(lambda: manager_of(lab).snapshot.active_requests == len(FORMATS))
        for _ in FORMATS:
            open_streams.enter_context(Chat().stream(http, ENDLESS))
        until(lambda: caplog.text.count(NOTICED) == len(FORMATS))
        until(lambda: manager_of(lab).snapshot.queued_requests == 0)
        assert manager_of(lab).snapshot.active_requests == len(FORMATS)
        for form, connection in connections.items():
            assert form.end.encode() not in read_until(connection), form.name


@pytest.mark.slow
def test_a_close_code_follows_the_tokens_of_a_websocket_that_accepts_no_data(echo_home, caplog):
    with (
        serving(echo_home, "echo", slots=1, echo_tokens_per_s=PACE, slow_client_s=3600) as lab,
        httpx2.Client(base_url=lab.url, timeout=60) as http,
        unread_stream(lab, Socket()) as connection,
    ):
        until(lambda: manager_of(lab).snapshot.active_requests == 1)
        with Chat().stream(http, ENDLESS):
            until(lambda: NOTICED in caplog.text)
            assert (1008).to_bytes(2) + NOTICED.encode() in read_until(connection)


@pytest.mark.slow
def test_a_client_may_pause_after_its_answer_has_ended(echo_home, caplog):
    form = Chat()
    request = Request(messages=[{"role": "user", "content": "a " * 300}], max_tokens=400)
    with (
        serving(echo_home, "echo", echo_tokens_per_s=PACE, slow_client_s=3) as lab,
        unread_stream(lab, form, request) as paused,
    ):
        until(lambda: manager_of(lab).snapshot.totals.output_tokens >= 300)
        wait_until_idle(lab)
        # The server disconnects a client that pauses during its answer. The other has paused for longer.
        with unread_stream(lab, form) as late:
            until(lambda: NOTICED in caplog.text)
            in_buffers = len(read_until(late))
        data = read_until(paused, form.end.encode())
    assert form.end.encode() in data
    assert len(data) > 2 * in_buffers
    assert caplog.text.count(NOTICED) == 1
